// hash_hex is XXH3-128 as 32 hex digits, hash64 is XXH3-64. They identify things (cache keys,
// database keys) and find accidents; they are no signatures.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace f8 {

[[nodiscard]] std::string hash_hex(std::string_view bytes);
[[nodiscard]] std::string hash_hex(std::span<const std::byte> bytes);
[[nodiscard]] uint64_t hash64(std::string_view bytes);

}  // namespace f8
