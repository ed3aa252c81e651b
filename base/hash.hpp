// hash_hex is XXH3-128 as 32 hex digits. It identifies things (cache keys, database keys) and finds
// accidents; it is no signature.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace f8 {

[[nodiscard]] std::string hash_hex(std::string_view bytes);
[[nodiscard]] std::string hash_hex(std::span<const std::byte> bytes);

}  // namespace f8
