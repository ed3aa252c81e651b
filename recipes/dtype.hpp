// Element types and their bit-exact conversions: the CPU side of the numeric contract.
//
//   e4m3 (e4m3fn)  max finite 448,   no inf, NaN 0x7f / 0xff
//   e5m2           max finite 57344, inf and NaN
//
// Encoding rounds to nearest even and saturates: finite values beyond max and +-inf become +-max;
// NaN stays NaN (0x7f for both formats, as the device's cvt.satfinite gives it).
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/error.hpp"

namespace f8 {

enum class Dtype : uint8_t { kE4m3, kE5m2, kBf16, kF16, kF32 };

[[nodiscard]] constexpr size_t size_bytes(Dtype t) {
  return t == Dtype::kF32 ? 4 : (t == Dtype::kBf16 || t == Dtype::kF16) ? 2 : 1;
}
[[nodiscard]] constexpr bool is_fp8(Dtype t) {
  return t == Dtype::kE4m3 || t == Dtype::kE5m2;
}
[[nodiscard]] constexpr float max_finite(Dtype t) {
  switch (t) {
    case Dtype::kE4m3:
      return 448.0F;
    case Dtype::kE5m2:
      return 57344.0F;
    case Dtype::kF16:
      return 65504.0F;
    case Dtype::kBf16:
      return 3.38953139e38F;
    case Dtype::kF32:
      return 3.40282347e38F;
  }
  return 0.0F;
}

[[nodiscard]] std::string_view to_string(Dtype t);  // "e4m3", "e5m2", "bf16", "f16", "f32"
[[nodiscard]] Result<Dtype> parse_dtype(std::string_view text);

[[nodiscard]] uint8_t encode_fp8(float value, Dtype format);
[[nodiscard]] float decode_fp8(uint8_t bits, Dtype format);
[[nodiscard]] uint16_t encode_bf16(float value);  // nearest even; NaN to 0x7fff as the device does
[[nodiscard]] float decode_bf16(uint16_t bits);
[[nodiscard]] uint16_t encode_f16(float value);
[[nodiscard]] float decode_f16(uint16_t bits);

// Reads and writes element `i` of an array of this type, rounded to nearest even.
[[nodiscard]] float load_element(const void* base, int64_t i, Dtype type);
void store_element(void* base, int64_t i, float value, Dtype type);
// The value that such an element has.
[[nodiscard]] float round_element(float value, Dtype type);

}  // namespace f8
