// Sums of columns, always added up in the same order, in fp32:
//   sums[rows / 128][column]  8 rows, from the first to the last; then 16 such groups likewise
//   the column's sum          every 8th of those, from the first; then 8 such sums likewise
// Rows beyond the matrix count as 0. reference::column_sums is the specification. The cast can
// leave the sums of its tiles too, so that a gradient is read once.
#pragma once

#include "codegen/kernels/cast/matrix_tile.cuh"

namespace f8::kernels {

// All threads of a block write the sums of its tile; `sums` are those of the tile's row of tiles.
template <Input kInput>
F8_DEVICE void store_column_sums(const ThreadFragment<kInput>& fragment, i32 column0, i32 cols,
                                 float* sums) {
  constexpr u32 kGroups = kCastTile / kFragment;
  __shared__ alignas(16) float groups[kGroups][kCastTile];
  float of_column[kFragment];
#pragma unroll
  for (int c = 0; c < kFragment; ++c) {
    of_column[c] = fragment.rows[0].value(c);
#pragma unroll
    for (int i = 1; i < kFragment; ++i) of_column[c] += fragment.rows[i].value(c);
  }
  float4* to = reinterpret_cast<float4*>(&groups[threadIdx.x / 16][threadIdx.x % 16 * kFragment]);
  to[0] = make_float4(of_column[0], of_column[1], of_column[2], of_column[3]);
  to[1] = make_float4(of_column[4], of_column[5], of_column[6], of_column[7]);
  __syncthreads();
  const i32 column = column0 + static_cast<i32>(threadIdx.x);
  if (threadIdx.x >= kCastTile || column >= cols) return;
  float sum = groups[0][threadIdx.x];
#pragma unroll
  for (u32 i = 1; i < kGroups; ++i) sum += groups[i][threadIdx.x];
  sums[column] = sum;
}

// One block sums one tile of 128 x 128.
template <Input kInput>
F8_DEVICE void column_sums(const ColumnSumsArgs& args) {
  launch_dependents();
  grid_dependency_wait();
  const i32 across = (args.cols + kCastTile - 1) / kCastTile;
  const i32 row = static_cast<i32>(blockIdx.x) / across;
  const i32 column0 = static_cast<i32>(blockIdx.x) % across * kCastTile;
  ThreadFragment<kInput> fragment;
  fragment.load(args.x, args.ld, args.rows, args.cols, row * kCastTile, column0);
  store_column_sums(fragment, column0, args.cols, args.sums + i64{row} * args.cols);
}

template <Input kOutput>
F8_DEVICE float load_element(const void* p, i32 i) {
  if constexpr (kOutput == Input::kF32) return load_global(static_cast<const float*>(p) + i);
  const u32 bits = load_global(static_cast<const u16*>(p) + i);
  return __uint_as_float(kOutput == Input::kF16 ? half_to_float_bits(bits) : bits << 16);
}
template <Input kOutput>
F8_DEVICE void store_element(void* p, i32 i, float value) {
  if constexpr (kOutput == Input::kF32) {
    static_cast<float*>(p)[i] = value;
  } else if constexpr (kOutput == Input::kBf16) {
    static_cast<u16*>(p)[i] = static_cast<u16>(pack_bf16(value, 0.0F));
  } else {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    static_cast<u16*>(p)[i] = bits;
  }
}

// Each warp adds every 8th of the sums, each lane one column.
template <Input kOutput>
F8_DEVICE void bias_grad(const BiasGradArgs& args) {
  constexpr i32 kWarps = kTileThreads / 32;
  constexpr i32 kInFlight = 8;
  static_assert(kBiasColumns == 32);
  launch_dependents();
  grid_dependency_wait();
  const u32 lane = threadIdx.x % 32;
  const u32 warp = threadIdx.x / 32;
  const i32 column = static_cast<i32>(blockIdx.x) * kBiasColumns + static_cast<i32>(lane);
  const float* from = args.sums + column;
  float sum = 0;
  if (column < args.cols) {
    for (i32 i = static_cast<i32>(warp); i < args.count; i += kInFlight * kWarps) {
      float values[kInFlight];
#pragma unroll
      for (i32 j = 0; j < kInFlight; ++j) {
        const i32 at = i + j * kWarps;
        values[j] = at < args.count ? load_global(from + i64{at} * args.cols) : 0.0F;
      }
#pragma unroll
      for (i32 j = 0; j < kInFlight; ++j) {
        if (i + j * kWarps < args.count) sum += values[j];
      }
    }
  }
  __shared__ float warps[kWarps][kBiasColumns];
  warps[warp][lane] = sum;
  __syncthreads();
  if (warp != 0 || column >= args.cols) return;
#pragma unroll
  for (i32 i = 1; i < kWarps; ++i) sum += warps[i][lane];
  if (args.add != 0) sum += load_element<kOutput>(args.out, column);
  store_element<kOutput>(args.out, column, sum);
}

}  // namespace f8::kernels
