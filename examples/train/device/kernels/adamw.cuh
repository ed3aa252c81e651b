// The optimizer over all weights of the model, which lie end to end.
#pragma once

#include "common.cuh"

namespace train {

extern "C" __global__ void __launch_bounds__(kThreads) train_square_sum(const SquareSumArgs args) {
  __shared__ BlockSum<kThreads, 1> block_sum;
  const float4* x = reinterpret_cast<const float4*>(args.x);
  const i64 chunk = (args.count / 4 + gridDim.x - 1) / gridDim.x;
  const i64 first = chunk * blockIdx.x;
  const i64 end = first + chunk < args.count / 4 ? first + chunk : args.count / 4;
  float sum[1] = {};
#pragma unroll 8
  for (i64 i = first + threadIdx.x; i < end; i += kThreads) {
    const float4 v = x[i];
    sum[0] += v.x * v.x + v.y * v.y + v.z * v.z + v.w * v.w;
  }
  block_sum.run(sum, 0);
  if (threadIdx.x == 0) args.partials[blockIdx.x] = sum[0];
}

extern "C" __global__ void __launch_bounds__(kThreads) train_add(const AddArgs args) {
  const float4* from = reinterpret_cast<const float4*>(args.from);
  float4* to = reinterpret_cast<float4*>(args.to);
  const i64 step = static_cast<i64>(gridDim.x) * kThreads;
  for (i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; i < args.count / 4;
       i += step) {
    const float4 a = to[i];
    const float4 b = from[i];
    to[i] = make_float4(a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w);
  }
}

struct AdamStep {
  float clip;
  float lr;
  float m_correction;
  float v_correction;

  TRAIN_DEVICE float run(const AdamArgs& args, float grad, float& w, float& m, float& v,
                         float decay) const {
    grad *= clip;
    m = args.beta1 * m + (1.0F - args.beta1) * grad;
    v = args.beta2 * v + (1.0F - args.beta2) * grad * grad;
    const float direction = m * m_correction / (sqrtf(v * v_correction) + args.epsilon);
    w -= lr * (direction + decay * w);
    return w;
  }
};

extern "C" __global__ void __launch_bounds__(kThreads) train_adamw(const AdamArgs args) {
  __shared__ BlockSum<kThreads, 1> block_sum;
  float square[1] = {};
  for (i32 i = static_cast<i32>(threadIdx.x); i < args.partial_count; i += kThreads) {
    square[0] += args.partials[i];
  }
  block_sum.run(square, 0);
  const StepScalars now = args.schedule[*args.step];
  const float norm = sqrtf(square[0]);
  const AdamStep adam{norm > args.max_norm ? args.max_norm / norm : 1.0F, now.lr, now.m_correction,
                      now.v_correction};

  const float4* grads = reinterpret_cast<const float4*>(args.grad);
  float4* masters = reinterpret_cast<float4*>(args.master);
  float4* ms = reinterpret_cast<float4*>(args.m);
  float4* vs = reinterpret_cast<float4*>(args.v);
  const i64 step = static_cast<i64>(gridDim.x) * kThreads;
  for (i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; i < args.count / 4;
       i += step) {
    const float decay = i * 4 < args.decayed ? args.weight_decay : 0.0F;
    const float4 g = grads[i];
    float4 w = masters[i];
    float4 m = ms[i];
    float4 v = vs[i];
    adam.run(args, g.x, w.x, m.x, v.x, decay);
    adam.run(args, g.y, w.y, m.y, v.y, decay);
    adam.run(args, g.z, w.z, m.z, v.z, decay);
    adam.run(args, g.w, w.w, m.w, v.w, decay);
    masters[i] = w;
    ms[i] = m;
    vs[i] = v;
    reinterpret_cast<uint2*>(args.copy)[i] = make_uint2(pack_bf16(w.x, w.y), pack_bf16(w.z, w.w));
  }
}

}  // namespace train
