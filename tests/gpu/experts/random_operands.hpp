// Random operands of grouped GEMMs.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

namespace f8::runtime::gpu {

// fp8 of either format, none of them infinite or NaN.
inline std::vector<uint8_t> random_fp8(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::vector<uint8_t> bytes(count + 8);
  for (size_t at = 0; at < count; at += 8) {
    const uint64_t eight = random() & 0xbfbfbfbfbfbfbfbfULL;
    std::memcpy(bytes.data() + at, &eight, sizeof eight);
  }
  bytes.resize(count);
  return bytes;
}

inline std::vector<float> random_scales(size_t count, uint64_t seed) {
  std::mt19937_64 random(seed);
  std::uniform_real_distribution<float> scale(0.5F, 2);
  std::vector<float> values(count);
  for (float& value : values) value = scale(random);
  return values;
}

}  // namespace f8::runtime::gpu
