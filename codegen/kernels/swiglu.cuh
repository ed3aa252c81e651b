// silu(gate) * up in fp32, to the same bits on a device and on a host: sums, products and fused
// multiply-adds that round to nearest, and one reciprocal that does.
//
//   silu(g) = g / (1 + 2^t), t = -g log2(e) = n + f with an integer n and |f| <= 1/2
//
// 2^f is a polynomial, within 1.4 units of the last place. log2(e) comes in two parts, so that f has
// no error worth mentioning. Where silu(g) is below 1e-36 (g < -87) it is 0.
#pragma once

#include "kernel_args.cuh"

#ifndef __CUDACC__
#include <bit>
#include <cmath>
#endif

namespace f8::kernels {

#ifdef __CUDACC__
F8_BOTH float fused_multiply_add(float a, float b, float c) {
  return __fmaf_rn(a, b, c);
}
F8_BOTH float reciprocal(float x) {
  return __frcp_rn(x);
}
F8_BOTH u32 bits_of(float x) {
  return __float_as_uint(x);
}
F8_BOTH float float_of(u32 bits) {
  return __uint_as_float(bits);
}
#else
F8_BOTH float fused_multiply_add(float a, float b, float c) {
  return std::fma(a, b, c);
}
F8_BOTH float reciprocal(float x) {
  return 1.0F / x;
}
F8_BOTH u32 bits_of(float x) {
  return std::bit_cast<u32>(x);
}
F8_BOTH float float_of(u32 bits) {
  return std::bit_cast<float>(bits);
}
#endif

F8_BOTH float swiglu(float gate, float up) {
  constexpr float kMost = 87;
  constexpr float kLog2e = 0x1.715476p+0F;
  constexpr float kLog2eRest = 0x1.4ae0cp-26F;
  constexpr float kRound = 0x1.8p+23F;  // a sum with it is rounded to an integer, its last bits
  // A NaN becomes a bound here, and comes back with the product by gate.
  const float least = gate > -kMost ? gate : -kMost;
  const float g = least < kMost ? least : kMost;
  const float rounded = fused_multiply_add(g, -kLog2e, kRound);
  const float n = rounded - kRound;
  float f = fused_multiply_add(g, -kLog2e, -n);
  f = fused_multiply_add(g, -kLog2eRest, f);
  float power = 0x1.4258d8p-13F;
  power = fused_multiply_add(power, f, 0x1.5f44dcp-10F);
  power = fused_multiply_add(power, f, 0x1.3b2cc4p-7F);
  power = fused_multiply_add(power, f, 0x1.c6aed6p-5F);
  power = fused_multiply_add(power, f, 0x1.ebfbdcp-3F);
  power = fused_multiply_add(power, f, 0x1.62e43p-1F);
  power = fused_multiply_add(power, f, 1.0F);
  power = float_of(bits_of(power) + (bits_of(rounded) << 23));
  const float sigmoid = gate < -kMost ? 0.0F : reciprocal(1.0F + power);
  return gate * sigmoid * up;
}

}  // namespace f8::kernels
