// bf16 on the host: the upper half of a float.
#pragma once

#include <bit>
#include <cstdint>

namespace train {

// Rounds to nearest even; a NaN becomes 0x7fff, as on the device.
[[nodiscard]] inline uint16_t encode_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7fffffff) > 0x7f800000) return 0x7fff;
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

[[nodiscard]] inline float decode_bf16(uint16_t bits) {
  return std::bit_cast<float>(uint32_t{bits} << 16);
}

}  // namespace train
