// XXH3-128 of bytes, as 32 hex digits. Used for identity (cache keys, database keys), not for
// security.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace f8 {

[[nodiscard]] std::string hash_hex(std::string_view bytes);
[[nodiscard]] std::string hash_hex(std::span<const std::byte> bytes);

}  // namespace f8
