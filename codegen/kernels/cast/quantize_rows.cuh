// Fused dynamic quantization of rows, for a matrix that needs no other copy: the amax of each row,
// its scale and q = fp8(x * scale), in one launch that reads x once. No block waits for another.
//
// A row belongs to 16 to 256 threads of a block, as many as hold it in registers with kHeld loads
// of 8 elements a thread. What a row has beyond that is read a second time for the cast.
#pragma once

#include "codegen/kernels/cast/cast.cuh"
#include "codegen/kernels/experts/group_rows.cuh"

namespace f8::kernels {

// Config is that of Cast, with axis scales of q alone, and 16-bit inputs.
template <class Config>
struct QuantizeRows {
  static constexpr int kHeld = kRowElements / (8 * kTileThreads);
  static constexpr int kWarps = kTileThreads / 32;
  using Copies = Cast<Config>;
  using Values = Vec8<Config::kInput>;
  static_assert(Config::kRowMajor && !Config::kTransposed && Config::kScaleQ == Scale::kAxis &&
                Config::kInput != Input::kF32);

  // The maximum over the `threads` threads of a row.
  static F8_DEVICE u32 row_max(u32 most, i32 threads) {
    const i32 in_warp = min(threads, 32);
    for (i32 lane = in_warp / 2; lane > 0; lane /= 2) {
      most = max(most, __shfl_xor_sync(0xFFFFFFFFU, most, lane));
    }
    if (threads <= 32) return most;
    __shared__ u32 warps[kWarps];
    const i32 warp = static_cast<i32>(threadIdx.x / 32);
    if (threadIdx.x % 32 == 0) warps[warp] = most;
    __syncthreads();
    const i32 of_row = threads / 32;
    const i32 first = warp / of_row * of_row;
    for (i32 i = 0; i < of_row; ++i) most = max(most, warps[first + i]);
    return most;
  }

  // A loader reads eight elements of a row.
  struct Load {
    const CastTensor& t;

    F8_DEVICE void read(i64 row, i32 column, Values& to) const {
      to.load(t.x, row * t.ld + column);
    }
  };

  static F8_DEVICE void run(const QuantizeArgs& launch) {
    run(launch.cast, nullptr, Load{launch.cast.tensors[tensor_of_block(launch.cast)]});
  }
  static F8_DEVICE void run(const GroupRowsArgs& launch) {
    run(launch.cast, launch.row_count,
        GroupRows<Config::kSource, Config::kInput>(launch.cast.tensors[0], launch.source, 0));
  }

  // `row_count`, where it is not null, has the number of rows.
  template <class Loader>
  static F8_DEVICE void run(const CastArgs& args, const i32* row_count, const Loader& loader) {
    const CastTensor& t = args.tensors[tensor_of_block(args)];
    const i32 threads = threads_of_row(t.cols);
    const i32 lane = static_cast<i32>(threadIdx.x) % threads;
    const i64 row = i64{static_cast<i32>(blockIdx.x) - t.first_block} * (kTileThreads / threads) +
                    static_cast<i32>(threadIdx.x) / threads;
    i32 vectors = row < t.rows ? t.cols / 8 : 0;
    begin_overlapped(args.overlap);
    if (row_count != nullptr && row >= load_global(reinterpret_cast<const u32*>(row_count))) {
      vectors = 0;
    }
    Values held[kHeld];
    Values magnitudes;
    magnitudes.clear();
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const i32 vector = lane + i * threads;
      if (vector < vectors) {
        loader.read(row, vector * 8, held[i]);
      } else {
        held[i].clear();
      }
    }
#pragma unroll
    for (int i = 0; i < kHeld; ++i) held[i].raise(magnitudes);
    for (i32 vector = lane + kHeld * threads; vector < vectors; vector += threads) {
      Values more;
      loader.read(row, vector * 8, more);
      more.raise(magnitudes);
    }
    const u32 most = row_max(magnitudes.largest_magnitude(), threads);
    const float scale = Copies::to_scale(Values::fp32_bits(most));
    if (lane == 0 && vectors > 0) t.inv_scale_row[row] = inverse(scale);
    u8* q = t.q + row * t.ld_q;
#pragma unroll
    for (int i = 0; i < kHeld; ++i) {
      const i32 vector = lane + i * threads;
      if (vector < vectors) Copies::write_vec8(q + vector * 8, held[i], scale);
    }
    for (i32 vector = lane + kHeld * threads; vector < vectors; vector += threads) {
      Values more;
      loader.read(row, vector * 8, more);
      Copies::write_vec8(q + vector * 8, more, scale);
    }
    end_overlapped();
  }
};

}  // namespace f8::kernels
