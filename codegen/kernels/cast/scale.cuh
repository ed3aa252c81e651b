// Scale arithmetic on the device: the same as recipes/scales/scale.hpp, bit for bit.
#pragma once

#include "codegen/kernels/ptx.cuh"

namespace f8::kernels {

enum class Fp8 { kE4m3, kE5m2 };

// fp32( FMAX / max(fp64(amax), 1e-12) ); NaN stays NaN. Both operands are fp32, so a quotient
// rounded to fp64 (53 bits, at least 2 x 24 + 2) and then to fp32 is the one rounded to fp32 at
// once: no fp64 division is needed, whose code is long and cold in a small launch.
F8_DEVICE float scale_from_amax(u32 amax_bits, float fmax) {
  constexpr double kLeast = 1e-12;
  constexpr float kBelow = 0x1.197998p-40F;  // the largest fp32 below it
  static_assert(kBelow < kLeast && kBelow + 0x1p-63F > kLeast);
  const float amax = __uint_as_float(amax_bits);
  if (amax <= kBelow) return static_cast<float>(fmax / kLeast);
  return __fdiv_rn(fmax, amax);
}
// The largest power of two that is not larger than `scale`; NaN stays NaN.
F8_DEVICE float power_of_two(float scale) {
  return scale == scale ? __uint_as_float(__float_as_uint(scale) & 0xFF800000U) : scale;
}
template <Fp8 kFormat, bool kPow2>
F8_DEVICE float scale_from_amax(u32 amax_bits) {
  const float scale = scale_from_amax(amax_bits, kFormat == Fp8::kE4m3 ? 448.0F : 57344.0F);
  return kPow2 ? power_of_two(scale) : scale;
}
F8_DEVICE float inverse(float scale) {
  return __fdiv_rn(1.0F, scale);
}

}  // namespace f8::kernels
