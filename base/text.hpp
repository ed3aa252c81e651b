// Helpers for text that comes from outside: splitting it, and quoting it so that a message that
// contains it stays one readable line.
#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace f8 {

// Returns the text in single quotes. A byte that is not printable ASCII becomes \xNN, and "..." stands
// for all beyond `longest` bytes.
[[nodiscard]] std::string quote(std::string_view text, size_t longest = 100);

// Removes the text up to and including `separator` (all of it where there is none) from the front of
// `rest` and returns it without the separator.
std::string_view take_until(std::string_view& rest, char separator);

}  // namespace f8
