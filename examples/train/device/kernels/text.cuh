// These kernels lead from text to the residual stream, and give the embeddings' gradient on the way
// back.
#pragma once

#include "common.cuh"

namespace train {

inline constexpr i32 kSlotWidth = kWidth / kContext;  // columns of a slot
inline constexpr i32 kLanes = kSlotWidth / 8;         // threads that cover them

extern "C" __global__ void __launch_bounds__(kThreads) train_sample(const SampleArgs args) {
  const i32 token = static_cast<i32>(blockIdx.x * kThreads + threadIdx.x);
  if (token >= args.tokens) return;
  const i32 step_tokens = args.step_tokens == 0 ? args.tokens : args.step_tokens;
  const u64 counter =
      static_cast<u64>(*args.step) * static_cast<u64>(step_tokens) + (args.first + token);
  const u64 random = mix((static_cast<u64>(args.seed) << 40) + counter + 1);
  const u32 places = args.text_bytes - static_cast<u32>(kContext);
  const u8* at = args.text + kContext + ((random * places) >> 32);
  args.targets[token] = *at;
  for (i32 slot = 0; slot < kContext; ++slot) {
    args.slots[static_cast<i64>(slot) * args.tokens + token] = *(at - 1 - slot);
  }
}

extern "C" __global__ void __launch_bounds__(kThreads) train_embed(const EmbedArgs args) {
  constexpr i32 kOfToken = kWidth / 8;
  const i64 count = static_cast<i64>(args.tokens) * kOfToken;
  const i64 step = static_cast<i64>(gridDim.x) * kThreads;
  for (i64 i = static_cast<i64>(blockIdx.x) * kThreads + threadIdx.x; i < count; i += step) {
    const i32 token = static_cast<i32>(i / kOfToken);
    const i32 column = static_cast<i32>(i % kOfToken);
    const i32 slot = column / kLanes;
    const i32 value = args.slots[static_cast<i64>(slot) * args.tokens + token];
    const u16* row = args.table + static_cast<i64>(slot * kBytes + value) * kSlotWidth;
    *reinterpret_cast<Packed*>(args.h + i * 8) = load8(row + column % kLanes * 8);
  }
}

// Each embedding (slot and byte) has a block, which lists the tokens that took it, in order, and
// adds up their gradients, so neither atomics nor a sort are needed.
extern "C" __global__ void __launch_bounds__(kThreads, 4)
    train_embed_grad(const EmbedGradArgs args) {
  static_assert(kLanes >= 1 && kLanes <= kThreads, "a block covers a slot");
  constexpr i32 kGroups = kThreads / kLanes;  // tokens that are added side by side
  constexpr i32 kRound = 16 * kThreads;       // tokens that are searched side by side
  __shared__ u16 list[kRound];
  __shared__ u32 warp_counts[kThreads / 32];
  __shared__ float sums[kGroups][kSlotWidth];
  const i32 slot = static_cast<i32>(blockIdx.x) / kBytes;
  const u32 value = blockIdx.x % kBytes;
  const i32 thread = static_cast<i32>(threadIdx.x);
  const i32 group = thread / kLanes;
  const i32 column = thread % kLanes * 8;
  const u8* bytes = args.slots + static_cast<i64>(slot) * args.tokens;

  float sum[8] = {};
  for (i32 first = 0; first < args.tokens; first += kRound) {
    const i32 mine = first + thread * 16;
    u32 words[4] = {};
    u32 found = 0;  // bit i stands for token mine + i
    if (mine < args.tokens) {
      const uint4 loaded = *reinterpret_cast<const uint4*>(bytes + mine);
      words[0] = loaded.x, words[1] = loaded.y, words[2] = loaded.z, words[3] = loaded.w;
#pragma unroll
      for (i32 i = 0; i < 16; ++i) {
        found |= ((words[i / 4] >> (i % 4 * 8)) & 255u) == value ? 1u << i : 0u;
      }
    }
    // `before` becomes the place where this thread's part of the list begins.
    const u32 count = __popc(found);
    u32 before = count;
#pragma unroll
    for (i32 step = 1; step < 32; step *= 2) {
      const u32 other = __shfl_up_sync(0xffffffffu, before, step);
      if (thread % 32 >= step) before += other;
    }
    if (thread % 32 == 31) warp_counts[thread / 32] = before;
    before -= count;
    __syncthreads();
    u32 total = 0;
    for (i32 warp = 0; warp < kThreads / 32; ++warp) {
      if (warp == thread / 32) before += total;
      total += warp_counts[warp];
    }
    for (; found != 0; found &= found - 1) {
      list[before++] = static_cast<u16>(thread * 16 + __ffs(found) - 1);
    }
    __syncthreads();
    if (group < kGroups) {
#pragma unroll 4
      for (u32 i = static_cast<u32>(group); i < total; i += kGroups) {
        const i64 token = first + list[i];
        const Vec8 d(load8(args.dh + token * kWidth + slot * kSlotWidth + column));
#pragma unroll
        for (i32 j = 0; j < 8; ++j) sum[j] += d.v[j];
      }
    }
    __syncthreads();
  }
  if (group < kGroups) {
#pragma unroll
    for (i32 j = 0; j < 8; ++j) sums[group][column + j] = sum[j];
  }
  __syncthreads();
  float* out = args.dtable + static_cast<i64>(blockIdx.x) * kSlotWidth;
  for (i32 c = thread; c < kSlotWidth; c += kThreads) {
    float total = 0;
    for (i32 g = 0; g < kGroups; ++g) total += sums[g][c];
    out[c] = total;
  }
}

}  // namespace train
