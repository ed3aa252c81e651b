// silu(gate) up as a device computes it.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

#include "codegen/kernels/swiglu.cuh"

namespace f8::runtime::emulation {

struct HostMath {
  static float fma(float a, float b, float c) { return std::fma(a, b, c); }
  static float reciprocal(float x) { return 1.0F / x; }
  static uint32_t bits(float x) { return std::bit_cast<uint32_t>(x); }
  static float value(uint32_t bits) { return std::bit_cast<float>(bits); }
};

[[nodiscard]] inline float swiglu(float gate, float up) {
  return kernels::swiglu<HostMath>(gate, up);
}

}  // namespace f8::runtime::emulation
