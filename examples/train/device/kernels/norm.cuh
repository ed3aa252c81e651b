// RMSNorm with the residual's addition, and its gradient. A block takes kRows tokens at a time and
// each of its threads the same columns of all of them, so that one barrier serves several sums.
#pragma once

#include "common.cuh"

namespace train {

inline constexpr i32 kVectors = kWidth / 8;  // vectors of a token
inline constexpr i32 kPerThread = (kVectors + kNormThreads - 1) / kNormThreads;
inline constexpr i32 kRows = kPerThread > 2 ? 1 : 4 / kPerThread;

TRAIN_DEVICE bool has_vector(i32 i) {
  return kVectors % kNormThreads == 0 ||
         static_cast<i32>(threadIdx.x) + i * kNormThreads < kVectors;
}
TRAIN_DEVICE i64 column_of(i32 i) {
  return (static_cast<i64>(threadIdx.x) + i * kNormThreads) * 8;
}

extern "C" __global__ void __launch_bounds__(kNormThreads) train_norm(const NormArgs args) {
  __shared__ BlockSum<kNormThreads, kRows> block_sum;
  int turn = 0;
  for (i32 row = static_cast<i32>(blockIdx.x) * kRows; row < args.tokens;
       row += static_cast<i32>(gridDim.x) * kRows) {
    Packed h[kRows][kPerThread];
    Packed y[kRows][kPerThread];
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
      for (i32 i = 0; i < kPerThread; ++i) {
        h[r][i] = y[r][i] = make_uint4(0, 0, 0, 0);
        if (!has_vector(i)) continue;
        const i64 at = static_cast<i64>(row + r) * kWidth + column_of(i);
        h[r][i] = load8(args.h + at);
        if (args.y != nullptr) y[r][i] = load8(args.y + at);
      }
    }
    float squares[kRows] = {};
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
      for (i32 i = 0; i < kPerThread; ++i) {
        if (!has_vector(i)) continue;
        if (args.y != nullptr) {
          Vec8 sum(h[r][i]);
          const Vec8 added(y[r][i]);
#pragma unroll
          for (i32 j = 0; j < 8; ++j) sum.v[j] += added.v[j];
          h[r][i] = sum.packed();
          *reinterpret_cast<Packed*>(args.sum + static_cast<i64>(row + r) * kWidth + column_of(i)) =
              h[r][i];
        }
        const Vec8 x(h[r][i]);  // as the backward pass will see it
#pragma unroll
        for (i32 j = 0; j < 8; ++j) squares[r] += x.v[j] * x.v[j];
      }
    }
    block_sum.run(squares, turn++);
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const float inv_rms = rsqrtf(squares[r] / kWidth + kNormEpsilon);
      if (threadIdx.x == 0) args.inv_rms[row + r] = inv_rms;
#pragma unroll
      for (i32 i = 0; i < kPerThread; ++i) {
        if (!has_vector(i)) continue;
        float gain[8];
        load8(args.gain + column_of(i), gain);
        Vec8 x(h[r][i]);
#pragma unroll
        for (i32 j = 0; j < 8; ++j) x.v[j] *= inv_rms * gain[j];
        x.store(args.n + static_cast<i64>(row + r) * kWidth + column_of(i));
      }
    }
  }
}

// The gradients are dh = inv_rms (g - z mean(g z)) and d gain = sum of dn z, where z = h inv_rms
// and g = gain dn.
extern "C" __global__ void __launch_bounds__(kNormThreads)
    train_norm_grad(const NormGradArgs args) {
  __shared__ BlockSum<kNormThreads, kRows> block_sum;
  int turn = 0;
  float gain[kPerThread][8];
  float d_gain[kPerThread][8] = {};
#pragma unroll
  for (i32 i = 0; i < kPerThread; ++i) {
    if (has_vector(i)) load8(args.gain + column_of(i), gain[i]);
  }
  for (i32 row = static_cast<i32>(blockIdx.x) * kRows; row < args.tokens;
       row += static_cast<i32>(gridDim.x) * kRows) {
    Packed dn[kRows][kPerThread];
    Packed h[kRows][kPerThread];
    Packed residual[kRows][kPerThread];
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
#pragma unroll
      for (i32 i = 0; i < kPerThread; ++i) {
        dn[r][i] = h[r][i] = residual[r][i] = make_uint4(0, 0, 0, 0);
        if (!has_vector(i)) continue;
        const i64 at = static_cast<i64>(row + r) * kWidth + column_of(i);
        dn[r][i] = load8(args.dn + at);
        h[r][i] = load8(args.h + at);
        if (args.d_residual != nullptr) residual[r][i] = load8(args.d_residual + at);
      }
    }
    float products[kRows] = {};
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const float inv_rms = args.inv_rms[row + r];
#pragma unroll
      for (i32 i = 0; i < kPerThread; ++i) {
        if (!has_vector(i)) continue;
        const Vec8 d(dn[r][i]);
        const Vec8 x(h[r][i]);
#pragma unroll
        for (i32 j = 0; j < 8; ++j) {
          const float dz = d.v[j] * x.v[j] * inv_rms;
          d_gain[i][j] += dz;
          products[r] += dz * gain[i][j];
        }
      }
    }
    block_sum.run(products, turn++);
#pragma unroll
    for (i32 r = 0; r < kRows; ++r) {
      const float inv_rms = args.inv_rms[row + r];
      const float mean = products[r] / kWidth;
#pragma unroll
      for (i32 i = 0; i < kPerThread; ++i) {
        if (!has_vector(i)) continue;
        const Vec8 d(dn[r][i]);
        const Vec8 x(h[r][i]);
        Vec8 out(residual[r][i]);
#pragma unroll
        for (i32 j = 0; j < 8; ++j) {
          out.v[j] += inv_rms * (d.v[j] * gain[i][j] - x.v[j] * inv_rms * mean);
        }
        out.store(args.dh + static_cast<i64>(row + r) * kWidth + column_of(i));
      }
    }
  }
#pragma unroll
  for (i32 i = 0; i < kPerThread; ++i) {
    if (!has_vector(i)) continue;
    float4* out = reinterpret_cast<float4*>(args.partials + static_cast<i64>(blockIdx.x) * kWidth +
                                            column_of(i));
    out[0] = make_float4(d_gain[i][0], d_gain[i][1], d_gain[i][2], d_gain[i][3]);
    out[1] = make_float4(d_gain[i][4], d_gain[i][5], d_gain[i][6], d_gain[i][7]);
  }
}

// A block takes 32 columns; its warps take the rows in turn.
extern "C" __global__ void __launch_bounds__(kThreads) train_sum_rows(const SumRowsArgs args) {
  constexpr i32 kWarps = kThreads / 32;
  __shared__ float sums[kWarps][32];
  const i32 warp = static_cast<i32>(threadIdx.x) / 32;
  const i32 lane = static_cast<i32>(threadIdx.x) % 32;
  const i32 column = static_cast<i32>(blockIdx.x) * 32 + lane;
  float sum = 0;
  if (column < args.width) {
#pragma unroll 8
    for (i32 row = warp; row < args.rows; row += kWarps) {
      sum += args.partials[static_cast<i64>(row) * args.width + column];
    }
  }
  sums[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= args.width) return;
  sum = 0;
  for (i32 i = 0; i < kWarps; ++i) sum += sums[i][lane];
  args.out[column] = sum;
}

}  // namespace train
