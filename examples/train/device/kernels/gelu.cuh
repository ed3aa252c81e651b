// GELU in its tanh form, u * sigmoid(2 z) with z = sqrt(2/pi) (u + 0.044715 u^3), and its gradient.
#pragma once

#include "common.cuh"

namespace train {

inline constexpr float kGeluInner = 0.7978845608F;
inline constexpr float kGeluCube = 0.044715F;

TRAIN_DEVICE float gelu_sigmoid(float u) {
  return __fdividef(1.0F, 1.0F + __expf(-2.0F * kGeluInner * u * (1.0F + kGeluCube * u * u)));
}

// Calls load(k, i), then store(k, i), for this thread's vectors i, in groups of up to kInFlight
// whose loads are in flight together; k counts within a group.
template <class Load, class Store>
TRAIN_DEVICE void each_vector(i64 vectors, Load&& load, Store&& store) {
  constexpr i32 kInFlight = 4;
  const i64 step = static_cast<i64>(gridDim.x) * kThreads;
  i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x;
  for (; i + (kInFlight - 1) * step < vectors; i += kInFlight * step) {
#pragma unroll
    for (i32 k = 0; k < kInFlight; ++k) load(k, i + k * step);
#pragma unroll
    for (i32 k = 0; k < kInFlight; ++k) store(k, i + k * step);
  }
  for (; i < vectors; i += step) {
    load(0, i);
    store(0, i);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) train_gelu(const GeluArgs args) {
  Packed u[4];
  each_vector(
      args.count / 8, [&](i32 k, i64 i) { u[k] = load8(args.u + i * 8); },
      [&](i32 k, i64 i) {
        Vec8 x(u[k]);
#pragma unroll
        for (i32 j = 0; j < 8; ++j) x.v[j] *= gelu_sigmoid(x.v[j]);
        x.store(args.a + i * 8);
      });
}

extern "C" __global__ void __launch_bounds__(kThreads) train_gelu_grad(const GeluGradArgs args) {
  Packed u[4];
  Packed da[4];
  each_vector(
      args.count / 8,
      [&](i32 k, i64 i) {
        u[k] = load8(args.u + i * 8);
        da[k] = load8(args.da + i * 8);
      },
      [&](i32 k, i64 i) {
        const Vec8 x(u[k]);
        Vec8 d(da[k]);
#pragma unroll
        for (i32 j = 0; j < 8; ++j) {
          const float s = gelu_sigmoid(x.v[j]);
          const float slope = 2.0F * kGeluInner * (1.0F + 3.0F * kGeluCube * x.v[j] * x.v[j]);
          d.v[j] *= s + x.v[j] * s * (1.0F - s) * slope;
        }
        d.store(args.du + i * 8);
      });
}

}  // namespace train
