// The trainer's kernels share these: 16 bytes of bf16 as eight floats, and sums over a block that
// come out the same in every run.
#pragma once

#include "args.cuh"

#define TRAIN_DEVICE __device__ __forceinline__

namespace train {

// kernels.cpp defines the macros. A block has kThreads threads where a kernel does not say
// otherwise.
inline constexpr int kWidth = TRAIN_WIDTH;
inline constexpr int kContext = TRAIN_CONTEXT;
inline constexpr int kThreads = TRAIN_THREADS;
inline constexpr int kNormThreads = TRAIN_NORM_THREADS;

TRAIN_DEVICE u32 pack_bf16(float low, float high) {
  u32 packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Eight values as they are loaded, in four registers.
using Packed = uint4;

TRAIN_DEVICE Packed load8(const u16* p) {
  return *reinterpret_cast<const Packed*>(p);
}

struct Vec8 {
  float v[8];

  TRAIN_DEVICE explicit Vec8(const Packed& p) {
    const u32 words[4] = {p.x, p.y, p.z, p.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      v[2 * i] = __uint_as_float(words[i] << 16);
      v[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
  }
  TRAIN_DEVICE Packed packed() const {
    return make_uint4(pack_bf16(v[0], v[1]), pack_bf16(v[2], v[3]), pack_bf16(v[4], v[5]),
                      pack_bf16(v[6], v[7]));
  }
  TRAIN_DEVICE void store(u16* p) const {
    *reinterpret_cast<Packed*>(p) = packed();
  }
};

TRAIN_DEVICE void load8(const float* p, float (&v)[8]) {
  const float4 a = reinterpret_cast<const float4*>(p)[0];
  const float4 b = reinterpret_cast<const float4*>(p)[1];
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w;
  v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

TRAIN_DEVICE float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(0xffffffffu, x, step);
  return x;
}
TRAIN_DEVICE float warp_most(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, step));
  return x;
}

// Replaces each of kCount values by its sum over the block's kBlock threads. The block may call it
// again at once: two calls in a row use different halves of `scratch`.
template <int kBlock, int kCount>
struct BlockSum {
  static constexpr int kWarps = kBlock / 32;
  float scratch[2][kCount][kWarps];

  TRAIN_DEVICE void run(float (&x)[kCount], int turn) {
    float(&half)[kCount][kWarps] = scratch[turn % 2];
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = warp_sum(x[i]);
      if (threadIdx.x % 32 == 0) half[i][threadIdx.x / 32] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      x[i] = 0;
#pragma unroll
      for (int warp = 0; warp < kWarps; ++warp) x[i] += half[i][warp];
    }
  }
};

}  // namespace train
