#include "base/hash.hpp"

#include "base/format.hpp"

#define XXH_INLINE_ALL
#include <xxhash.h>

namespace f8 {

std::string hash_hex(std::string_view bytes) {
  const XXH128_hash_t h = XXH3_128bits(bytes.data(), bytes.size());
  return f8::format("{:016x}{:016x}", h.high64, h.low64);
}

std::string hash_hex(std::span<const std::byte> bytes) {
  return hash_hex(std::string_view(reinterpret_cast<const char*>(bytes.data()), bytes.size()));
}

uint64_t hash64(std::string_view bytes) {
  return XXH3_64bits(bytes.data(), bytes.size());
}

}  // namespace f8
