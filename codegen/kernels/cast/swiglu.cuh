// silu(gate) * up and its gradients in fp32, to the same bits on a device and on a host: sums, products
// and fused multiply-adds that round to nearest, and no branch, so that a thread's elements overlap.
//
//   silu(g)  = g s / (1 + e), e = exp(-|g|) in [0, 1], s = e where g is negative, else 1
//   silu'(g) = s / (1 + e) (1 + g r / (1 + e)), r = 1 where g is negative, else e
//
//   e       2^(n + f) with an integer n and |f| <= 1/2; 2^f is a polynomial. Beyond |g| = 104 e is 0.
//   1 / d   of d in [1, 2], from a line through cubic and Newton steps, to 4e-8
#pragma once

#include "codegen/kernels/kernel_args.cuh"

namespace f8::kernels {

struct SiluParts {
  float e;
  float inverse;  // of 1 + e
};

// Math has what the two sides name apart: fma, least of a number and one that may be NaN, and a
// float's bits. kSingle: the result stays in fp32, within 4 ulp of the product in fp64. Else it is to be
// rounded to 16 bits, and is within 2^-17 of it.
template <class Math, bool kSingle>
F8_BOTH SiluParts silu_parts(float gate) {
  constexpr float kLog2e = 0x1.715476p+0F;
  constexpr float kLog2eRest = 0x1.4ae0cp-26F;
  constexpr float kRound = 0x1.8p+23F;  // a sum with it is rounded to an integer, its last bits
  constexpr float kDown = 0x1p-64F;     // 2^f times this times 2^(n + 64): n goes down to -159
  constexpr u32 kUpBits = (64 + 127) << 23;
  const float x = Math::least(110.0F, Math::magnitude(gate));
  const float rounded = Math::fma(x, -kLog2e, kRound);
  const float n = rounded - kRound;
  float f = Math::fma(x, -kLog2e, -n);
  float power;
  if constexpr (kSingle) {
    f = Math::fma(x, -kLog2eRest, f);
    power = Math::fma(kDown * 0x1.41fbbcp-13F, f, kDown * 0x1.5f3e54p-10F);
    power = Math::fma(power, f, kDown * 0x1.3b2d4cp-7F);
    power = Math::fma(power, f, kDown * 0x1.c6aee8p-5F);
    power = Math::fma(power, f, kDown * 0x1.ebfbdcp-3F);
    power = Math::fma(power, f, kDown * 0x1.62e43p-1F);
  } else {
    power = Math::fma(kDown * 0x1.3a02ccp-7F, f, kDown * 0x1.c9fc46p-5F);
    power = Math::fma(power, f, kDown * 0x1.ec0378p-3F);
    power = Math::fma(power, f, kDown * 0x1.62e12cp-1F);
  }
  power = Math::fma(power, f, kDown);
  const float e = power * Math::value((Math::bits(rounded) << 23) + kUpBits);
  const float d = 1.0F + e;
  float inverse = Math::fma(d, -0x1.e1e1e2p-2F, 0x1.69696ap+0F);
  float rest = Math::fma(-d, inverse, 1.0F);
  inverse = Math::fma(inverse, Math::fma(rest, rest, rest), inverse);
  rest = Math::fma(-d, inverse, 1.0F);
  inverse = Math::fma(inverse, rest, inverse);
  return {e, inverse};
}

template <class Math, bool kSingle>
F8_BOTH float swiglu(float gate, float up) {
  const auto [e, inverse] = silu_parts<Math, kSingle>(gate);
  return gate * (gate < 0.0F ? e : 1.0F) * inverse * up;
}

struct SwigluGradients {
  float gate, up;
};
// The gradients with respect to gate and up, where `grad` is the product's.
template <class Math, bool kSingle>
F8_BOTH SwigluGradients swiglu_backward(float gate, float up, float grad) {
  const auto [e, inverse] = silu_parts<Math, kSingle>(gate);
  const float sigmoid = (gate < 0.0F ? e : 1.0F) * inverse;
  const float slope = sigmoid * Math::fma(gate, (gate < 0.0F ? 1.0F : e) * inverse, 1.0F);
  return {grad * up * slope, grad * (gate * (gate < 0.0F ? e : 1.0F) * inverse)};
}

}  // namespace f8::kernels
