// silu(gate) * up in fp32, to the same bits on a device and on a host: sums, products and fused
// multiply-adds that round to nearest, and one reciprocal that does.
//
//   silu(g) = g / (1 + 2^t), t = -g log2(e) = n + f with an integer n and |f| <= 1/2
//
// 2^f is a polynomial, within 1.4 units of the last place. log2(e) comes in two parts, so that f has
// no error worth mentioning. Where silu(g) is below 1e-36 (g < -87) it is 0.
#pragma once

#include "kernel_args.cuh"

namespace f8::kernels {

// Math has what the two sides name apart: fma, reciprocal, and a float's bits.
template <class Math>
F8_BOTH float swiglu(float gate, float up) {
  constexpr float kMost = 87;
  constexpr float kLog2e = 0x1.715476p+0F;
  constexpr float kLog2eRest = 0x1.4ae0cp-26F;
  constexpr float kRound = 0x1.8p+23F;  // a sum with it is rounded to an integer, its last bits
  // A NaN becomes a bound here, and comes back with the product by gate.
  const float least = gate > -kMost ? gate : -kMost;
  const float g = least < kMost ? least : kMost;
  const float rounded = Math::fma(g, -kLog2e, kRound);
  const float n = rounded - kRound;
  float f = Math::fma(g, -kLog2e, -n);
  f = Math::fma(g, -kLog2eRest, f);
  float power = 0x1.4258d8p-13F;
  power = Math::fma(power, f, 0x1.5f44dcp-10F);
  power = Math::fma(power, f, 0x1.3b2cc4p-7F);
  power = Math::fma(power, f, 0x1.c6aed6p-5F);
  power = Math::fma(power, f, 0x1.ebfbdcp-3F);
  power = Math::fma(power, f, 0x1.62e43p-1F);
  power = Math::fma(power, f, 1.0F);
  power = Math::value(Math::bits(power) + (Math::bits(rounded) << 23));
  const float sigmoid = gate < -kMost ? 0.0F : Math::reciprocal(1.0F + power);
  return gate * sigmoid * up;
}

}  // namespace f8::kernels
