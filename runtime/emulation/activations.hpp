// Activations, gated ones and their gradients as a device computes them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "codegen/kernels/cast/activations.cuh"
#include "recipes/dtype.hpp"

namespace f8::runtime::emulation {

using kernels::Activation;

struct HostMath {
  static float fma(float a, float b, float c) { return std::fma(a, b, c); }
  static float magnitude(float x) { return std::fabs(x); }
  static float least(float a, float b) { return a < b || std::isnan(a) ? a : b; }
  static float greatest(float a, float b) { return a > b || std::isnan(a) ? a : b; }
  static float inverse(float d) { return d > 0x1p126F ? 0.0F : 1.0F / d; }
  static uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
  static float value(uint32_t bits) { return std::bit_cast<float>(bits); }
};

template <Activation kActivation>
kernels::Activated activated_to(float x, Dtype to) {
  return to == Dtype::kF32 ? kernels::activated<kActivation, HostMath, true>(x)
                           : kernels::activated<kActivation, HostMath, false>(x);
}
// The results stay in fp32, or are to be rounded to 16 bits.
[[nodiscard]] inline kernels::Activated activated(Activation activation, float x, Dtype to) {
  switch (activation) {
    case Activation::kSilu:
      return activated_to<Activation::kSilu>(x, to);
    case Activation::kGelu:
      return activated_to<Activation::kGelu>(x, to);
    case Activation::kGeluTanh:
      return activated_to<Activation::kGeluTanh>(x, to);
    case Activation::kRelu2:
      break;
  }
  return activated_to<Activation::kRelu2>(x, to);
}

// What the kernels compute of it, with up or the gradient of what forward made.
[[nodiscard]] inline float glu(Activation activation, float gate, float up, Dtype to) {
  return activated(activation, gate, to).value * up;
}
[[nodiscard]] inline kernels::GluGradients glu_backward(Activation activation, float gate, float up,
                                                        float grad, Dtype to) {
  const auto [value, slope] = activated(activation, gate, to);
  return {grad * up * slope, grad * value};
}
[[nodiscard]] inline float activation_backward(Activation activation, float x, float grad,
                                               Dtype to) {
  return grad * activated(activation, x, to).slope;
}

}  // namespace f8::runtime::emulation
