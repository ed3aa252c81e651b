// silu(gate) up and its gradients as a device computes them.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "codegen/kernels/cast/swiglu.cuh"
#include "recipes/dtype.hpp"

namespace f8::runtime::emulation {

struct HostMath {
  static float fma(float a, float b, float c) { return std::fma(a, b, c); }
  static float magnitude(float x) { return std::fabs(x); }
  static float least(float a, float may_be_nan) { return std::fmin(a, may_be_nan); }
  static uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
  static float value(uint32_t bits) { return std::bit_cast<float>(bits); }
};

// The results stay in fp32, or are to be rounded to 16 bits.
[[nodiscard]] inline float swiglu(float gate, float up, Dtype to) {
  return to == Dtype::kF32 ? kernels::swiglu<HostMath, true>(gate, up)
                           : kernels::swiglu<HostMath, false>(gate, up);
}

[[nodiscard]] inline kernels::SwigluGradients swiglu_backward(float gate, float up, float grad,
                                                              Dtype to) {
  return to == Dtype::kF32 ? kernels::swiglu_backward<HostMath, true>(gate, up, grad)
                           : kernels::swiglu_backward<HostMath, false>(gate, up, grad);
}

}  // namespace f8::runtime::emulation
