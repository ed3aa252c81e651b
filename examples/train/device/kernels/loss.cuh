// Cross entropy of a token's 256 logits, of which each lane of a warp has eight; and the end of a
// step.
#pragma once

#include "common.cuh"

namespace train {

extern "C" __global__ void __launch_bounds__(kThreads) train_loss(const LossArgs args) {
  static_assert(kBytes == 8 * 32, "eight logits a lane");
  const i32 token = static_cast<i32>(blockIdx.x * kThreads + threadIdx.x) / 32;
  if (token >= args.tokens) return;
  const i32 lane = static_cast<i32>(threadIdx.x) % 32;
  const i64 at = static_cast<i64>(token) * kBytes + lane * 8;
  const i32 target = static_cast<i32>(args.targets[token]) - lane * 8;
  Vec8 x(load8(args.logits + at));
  float most = x.v[0];
#pragma unroll
  for (i32 j = 1; j < 8; ++j) most = fmaxf(most, x.v[j]);
  most = warp_most(most);
  float sum = 0;
  float wanted = 0;  // the target's logit, in the lane that has it
#pragma unroll
  for (i32 j = 0; j < 8; ++j) {
    x.v[j] -= most;
    if (j == target) wanted = x.v[j];
    x.v[j] = expf(x.v[j]);
    sum += x.v[j];
  }
  sum = warp_sum(sum);
  wanted = warp_sum(wanted);
  if (lane == 0) args.losses[token] = logf(sum) - wanted;
  const float mean =
      1.0F / static_cast<float>(args.step_tokens == 0 ? args.tokens : args.step_tokens);
#pragma unroll
  for (i32 j = 0; j < 8; ++j) x.v[j] = (x.v[j] / sum - (j == target ? 1.0F : 0.0F)) * mean;
  x.store(args.dlogits + at);
}

extern "C" __global__ void __launch_bounds__(kThreads) train_finish(const FinishArgs args) {
  __shared__ BlockSum<kThreads, 1> block_sum;
  float sum[1] = {};
#pragma unroll 8
  for (i32 i = static_cast<i32>(threadIdx.x); i < args.tokens; i += kThreads) {
    sum[0] += args.losses[i];
  }
  block_sum.run(sum, 0);
  if (threadIdx.x != 0) return;
  args.curve[*args.step] = sum[0] / static_cast<float>(args.tokens);
  *args.step += 1;
}

}  // namespace train
