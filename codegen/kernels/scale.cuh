// Scale arithmetic on the device: recipes/scale.hpp, bit for bit.
#pragma once

#include "ptx.cuh"

namespace f8::kernels {

enum class Fp8 { kE4m3, kE5m2 };

// fp32( FMAX / max(fp64(amax), 1e-12) ): one division, one rounding; NaN stays NaN.
F8_DEVICE float scale_from_amax(u32 amax_bits, double fmax) {
  const float amax = __uint_as_float(amax_bits);
  const double floored = amax < 1e-12 ? 1e-12 : static_cast<double>(amax);
  return static_cast<float>(fmax / floored);
}
// The largest power of two that is not larger; NaN stays NaN.
F8_DEVICE float power_of_two(float scale) {
  return scale == scale ? __uint_as_float(__float_as_uint(scale) & 0xFF800000U) : scale;
}
template <Fp8 kFormat, bool kPow2>
F8_DEVICE float scale_from_amax(u32 amax_bits) {
  const float scale = scale_from_amax(amax_bits, kFormat == Fp8::kE4m3 ? 448.0 : 57344.0);
  return kPow2 ? power_of_two(scale) : scale;
}
F8_DEVICE float inverse(float scale) {
  return __fdiv_rn(1.0F, scale);
}

}  // namespace f8::kernels
