// The activations of an MLP and their slopes in fp32, to the same bits on a device and on a host: sums,
// products and fused multiply-adds that round to nearest, a reciprocal, and no branch, so that a thread's
// elements overlap.
//
//   silu(x)       x s, s = 1 / (1 + e), e = exp(-x)
//   silu'(x)      s (1 + x e s)
//   gelu_tanh(x)  x s of z = 2 sqrt(2 / pi) (x + 0.044715 x^3) in place of x
//   gelu(x)       x t where x is negative, else x (1 - t): t = exp(-x^2 / 2) p is the normal distribution
//                 at -|x|, and p a polynomial in 1 / (1 + 0.3 |x|)
//   relu2(x)      x^2 where x is positive, else 0
#pragma once

#include "codegen/kernels/kernel_args.cuh"

namespace f8::kernels {

struct Activated {
  float value;
  float slope;
};

// Math has what the two sides name apart: fma, the lesser and the greater of two, of which a NaN stays, a
// float's bits, and 1 / d of a d from 1 on, which is 0 where d is above 2^126. kSingle: the result stays in fp32,
// within 4 ulp of fp64, or of gelu_tanh within 4 (1 + z). Else it is to be rounded to 16 bits, and is within
// 2^-17 of fp64, or of a GELU within 2^-16.

// exp(-x) of an x in [-88, 87], or NaN: 2^(n + f) with an integer n and |f| <= 1/2; 2^f is a polynomial, and n
// is added to its exponent.
template <class Math, bool kSingle>
F8_BOTH float exp_of_minus(float x) {
  constexpr float kLog2e = 0x1.715476p+0F;
  constexpr float kLog2eRest = 0x1.4ae0cp-26F;
  constexpr float kRound = 0x1.8p+23F;  // a sum with it is rounded to an integer, its last bits
  const float rounded = Math::fma(x, -kLog2e, kRound);
  const float n = rounded - kRound;
  float f = Math::fma(x, -kLog2e, -n);
  float power;
  if constexpr (kSingle) {
    f = Math::fma(x, -kLog2eRest, f);
    power = Math::fma(0x1.41fbbcp-13F, f, 0x1.5f3e54p-10F);
    power = Math::fma(power, f, 0x1.3b2d4cp-7F);
    power = Math::fma(power, f, 0x1.c6aee8p-5F);
    power = Math::fma(power, f, 0x1.ebfbdcp-3F);
    power = Math::fma(power, f, 0x1.62e43p-1F);
  } else {
    power = Math::fma(0x1.3a02ccp-7F, f, 0x1.c9fc46p-5F);
    power = Math::fma(power, f, 0x1.ec0378p-3F);
    power = Math::fma(power, f, 0x1.62e12cp-1F);
  }
  power = Math::fma(power, f, 1.0F);
  return Math::value((Math::bits(rounded) << 23) + Math::bits(power));
}

template <class Math>
F8_BOTH float clamped(float x, float low, float high) {
  return Math::least(high, Math::greatest(low, x));
}

struct SigmoidParts {
  float sigmoid;  // 0 where it is below 2^-126
  float rest;     // 1 less it, or 0
};
template <class Math, bool kSingle>
F8_BOTH SigmoidParts sigmoid_parts(float x) {
  const float e = exp_of_minus<Math, kSingle>(x);
  const float sigmoid = Math::inverse(1.0F + e);
  return {sigmoid, e * sigmoid};
}

template <class Math, bool kSingle>
F8_BOTH Activated silu(float x) {
  const float within = clamped<Math>(x, -88.0F, 87.0F);
  const auto [sigmoid, rest] = sigmoid_parts<Math, kSingle>(within);
  return {x * sigmoid, sigmoid * Math::fma(within, rest, 1.0F)};
}

template <class Math, bool kSingle>
F8_BOTH Activated gelu_tanh(float x) {
  constexpr float kLine = 0x1.988454p+0F;
  constexpr float kCube = 0x1.2444f2p-4F;
  const float within = clamped<Math>(x, -10.03F, 9.9F);
  const float square = within * within;
  const auto [sigmoid, rest] =
      sigmoid_parts<Math, kSingle>(within * Math::fma(square, kCube, kLine));
  const float grown = within * Math::fma(square, 3.0F * kCube, kLine);  // x times z's slope
  return {x * sigmoid, sigmoid * Math::fma(grown, rest, 1.0F)};
}

template <class Math, bool kSingle>
F8_BOTH Activated gelu(float x) {
  constexpr float kDensity = 0x1.988454p-2F;                  // 1 / sqrt(2 pi)
  const float most = Math::least(15.0F, Math::magnitude(x));  // t is 0 from there on
  const float half = 0.5F * most;
  const float exponent = half * half;  // half of the one that counts, which is up to 112
  float root = exp_of_minus<Math, kSingle>(exponent);
  if constexpr (kSingle) root = Math::fma(-root, Math::fma(half, half, -exponent), root);
  const float e = root * root;
  const float d = Math::fma(most, kSingle ? 0x1.63244ep-2F : 0x1.3d70a4p-2F, 1.0F);
  const float y = Math::inverse(d);
  float p;
  if constexpr (kSingle) {
    p = Math::fma(-0x1.d62178p-6F, y, 0x1.28e54p-3F);
    p = Math::fma(p, y, -0x1.102bd6p-2F);
    p = Math::fma(p, y, 0x1.6a9c86p-3F);
    p = Math::fma(p, y, -0x1.07f4fp-5F);
    p = Math::fma(p, y, 0x1.c041fep-4F);
    p = Math::fma(p, y, 0x1.e43204p-4F);
    p = Math::fma(p, y, 0x1.1c0752p-3F);
    p = Math::fma(p, y, 0x1.1b55fep-3F);
  } else {
    p = Math::fma(-0x1.2ecf1ap-4F, y, 0x1.718e3ep-3F);
    p = Math::fma(p, y, 0x1.0204a4p-6F);
    p = Math::fma(p, y, 0x1.1142bap-3F);
    p = Math::fma(p, y, 0x1.ed5442p-4F);
    p = Math::fma(p, y, 0x1.fb5552p-4F);
  }
  p *= y;
  // A condition with a product in one arm alone would become a branch.
  const float side = x < 0.0F ? e : -e;
  const float base = x < 0.0F ? 0.0F : 1.0F;
  return {x * Math::fma(side, p, base), Math::fma(side, Math::fma(-kDensity, most, p), base)};
}

F8_BOTH Activated relu2(float x) {
  const float positive = x < 0.0F ? 0.0F : x;
  return {positive * positive, 2.0F * positive};
}

template <Activation kActivation, class Math, bool kSingle>
F8_BOTH Activated activated(float x) {
  if constexpr (kActivation == Activation::kSilu) {
    return silu<Math, kSingle>(x);
  } else if constexpr (kActivation == Activation::kGelu) {
    return gelu<Math, kSingle>(x);
  } else if constexpr (kActivation == Activation::kGeluTanh) {
    return gelu_tanh<Math, kSingle>(x);
  } else {
    return relu2(x);
  }
}

// A Function computes an element of one element, or of two at equal places.
template <Activation kActivation>
struct Activate {
  static constexpr bool kPair = false;
  template <class Math, bool kSingle>
  static F8_BOTH float of(float x, float) {
    return activated<kActivation, Math, kSingle>(x).value;
  }
};
template <Activation kActivation>
struct Glu {
  static constexpr bool kPair = true;
  template <class Math, bool kSingle>
  static F8_BOTH float of(float gate, float up) {
    return activated<kActivation, Math, kSingle>(gate).value * up;
  }
};
// The gradient with respect to x, where `grad` is the activation's.
template <Activation kActivation>
struct ActivateBackward {
  static constexpr bool kPair = true;
  template <class Math, bool kSingle>
  static F8_BOTH float of(float x, float grad) {
    return grad * activated<kActivation, Math, kSingle>(x).slope;
  }
};

struct GluGradients {
  float gate, up;
};
// The gradients with respect to gate and up, where `grad` is the product's.
template <Activation kActivation, class Math, bool kSingle>
F8_BOTH GluGradients glu_backward(float gate, float up, float grad) {
  const auto [value, slope] = activated<kActivation, Math, kSingle>(gate);
  return {grad * up * slope, grad * value};
}

}  // namespace f8::kernels
