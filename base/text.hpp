// Text from outside: taken apart, and quoted so that whatever it holds, a message that names it
// stays one readable line.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace f8 {

// 'text' in single quotes: bytes that are not printable ASCII as \xNN, past `longest` bytes "...".
[[nodiscard]] std::string quote(std::string_view text, size_t longest = 100);

// Takes the text up to `separator` off the front, and the separator; without one, all of it.
std::string_view take_until(std::string_view& rest, char separator);

}  // namespace f8
