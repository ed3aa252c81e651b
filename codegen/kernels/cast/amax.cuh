// amax = max |x| over a tensor, its rows, its columns, or several of them in one kernel pass.
//
// Tensor alone: a grid-stride read. Each block leaves one word in `partials` (without atomics, and
// nothing to zero), and the reader takes their maximum. Else one block reads one 128 x 128 tile. It
// leaves the tile's amax partials in `tile_amax`, again for the reader to combine; or, where that
// is null, it raises words that the caller zeroed, for the tensor a single one. Maxima are exact,
// so the order of blocks does not matter.
//
// Of a shard, a tile's 128 rows may lie in two blocks of the whole, and the tile raises the word of
// each.
#pragma once

#include "codegen/kernels/cast/tile_amax.cuh"

namespace f8::kernels {

// Config is the stub's: kInput, kTensor, kRow, kCol, kBlock, kNoopFlag.
template <class Config>
struct Amax {
  using Values = Vec8<Config::kInput>;
  static constexpr bool kTilePartials = !Config::kTensor && Config::kInput != Input::kF32;

  // A loader gives the elements whose maxima are found: those of the tensor's x. `read` and `raise` are
  // for eight of them, of which a thread reads kInFlight times as many at once, or kStrided of rows apart; of
  // `element`, where rows follow each other, row is 0. `raise` is given the element where rows follow each other in any case. A
  // loader with two results has those of two tensors.
  struct Load {
    using Read = Values;
    static constexpr int kInFlight = 8;
    static constexpr int kStrided = 8;
    static constexpr int kResults = 1;

    static F8_DEVICE bool is_dense(const AmaxTensor& t) { return t.ld == t.cols; }
    static F8_DEVICE void read(const AmaxTensor& t, i64 row, i64 element, Read& to) {
      to.load(t.x, row * t.ld + element);
    }
    static F8_DEVICE void raise(Read& from, i64, Values (&most)[kResults]) { from.raise(most[0]); }
    static F8_DEVICE void load(const AmaxTensor& t, i32 row0, i32 column0,
                               ThreadFragment<Config::kInput>& fragment) {
      fragment.load(t.x, t.ld, t.rows, t.cols, row0, column0);
    }
  };

  // `tensors`: the loader's results go to as many of them, all of the first one's shape.
  template <class Loader = Load>
  static F8_DEVICE void tensor(const AmaxTensor* tensors, u32 block, const Loader& loader = {}) {
    constexpr int kInFlight = Loader::kInFlight;
    constexpr int kResults = Loader::kResults;
    const AmaxTensor& t = tensors[0];
    const i64 chunks_per_row = t.cols / 8;
    const i64 chunks = chunks_per_row * t.rows;
    const bool dense = loader.is_dense(t);
    const i64 step = static_cast<i64>(t.blocks) * kTileThreads;
    Values most[kResults];
#pragma unroll
    for (int r = 0; r < kResults; ++r) most[r].clear();
    i64 chunk = static_cast<i64>(block) * kTileThreads + threadIdx.x;
    if (dense) {
      for (; chunk + (kInFlight - 1) * step < chunks; chunk += kInFlight * step) {
        typename Loader::Read read[kInFlight];
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) loader.read(t, 0, (chunk + i * step) * 8, read[i]);
#pragma unroll
        for (int i = 0; i < kInFlight; ++i) loader.raise(read[i], (chunk + i * step) * 8, most);
      }
    } else if constexpr (Loader::kStrided > 1) {
      // A step is so many rows and chunks, since a division for each chunk would take longer than its read.
      const i64 step_rows = step / chunks_per_row;
      const i64 step_in_row = step - step_rows * chunks_per_row;
      i64 row = chunk / chunks_per_row;
      i64 in_row = chunk - row * chunks_per_row;
      for (; chunk + (Loader::kStrided - 1) * step < chunks; chunk += Loader::kStrided * step) {
        typename Loader::Read read[Loader::kStrided];
#pragma unroll
        for (int i = 0; i < Loader::kStrided; ++i) {
          loader.read(t, row, in_row * 8, read[i]);
          row += step_rows;
          in_row += step_in_row;
          if (in_row >= chunks_per_row) {
            in_row -= chunks_per_row;
            ++row;
          }
        }
#pragma unroll
        for (int i = 0; i < Loader::kStrided; ++i)
          loader.raise(read[i], (chunk + i * step) * 8, most);
      }
    }
    for (; chunk < chunks; chunk += step) {
      typename Loader::Read read;
      const i64 row = chunk / chunks_per_row;
      loader.read(t, row, (chunk - row * chunks_per_row) * 8, read);
      loader.raise(read, chunk * 8, most);
    }
    __shared__ u32 warps[kResults][kTileThreads / 32];
#pragma unroll
    for (int r = 0; r < kResults; ++r) {
      const u32 warp_amax = warp_max(Values::fp32_bits(most[r].largest_magnitude()));
      if (threadIdx.x % 32 == 0) warps[r][threadIdx.x / 32] = warp_amax;
    }
    __syncthreads();
    if (threadIdx.x < 32) {
#pragma unroll
      for (int r = 0; r < kResults; ++r) {
        const u32 block_amax =
            warp_max(threadIdx.x < kTileThreads / 32 ? warps[r][threadIdx.x] : 0);
        if (threadIdx.x == 0) tensors[r].partials[block] = block_amax;
      }
    }
  }

  template <class Loader = Load>
  static F8_DEVICE void rows_and_columns(const AmaxTensor& t, u32 block,
                                         const Loader& loader = {}) {
    const i32 tiles_across = (t.cols + kCastTile - 1) / kCastTile;
    const i32 row0 = static_cast<i32>(block) / tiles_across * kCastTile;
    const i32 column0 = static_cast<i32>(block) % tiles_across * kCastTile;
    ThreadFragment<Config::kInput> fragment;
    loader.load(t, row0, column0, fragment);
    u16* const partials =
        t.tile_amax == nullptr ? nullptr : t.tile_amax + i64{block} * kTileAmaxSize;
    of_tile(t, fragment, row0, column0, partials);
  }
  // The maxima of the tile at (row0, column0) go to `partials`, or raise the tensor's words, of which that
  // of the whole may be NULL.
  static F8_DEVICE void of_tile(const AmaxTensor& t, const ThreadFragment<Config::kInput>& fragment,
                                i32 row0, i32 column0, u16* partials = nullptr) {
    __shared__ TileAmax<Config::kInput> tile_amax;
    find_tile_amax<Config::kRow, Config::kCol, Config::kTensor>(fragment, tile_amax);
    __syncthreads();
    if (kTilePartials && partials != nullptr) {
      store_tile_amax<Config::kRow, Config::kCol>(partials, tile_amax);
      return;
    }
    const u32 i = threadIdx.x % kCastTile;
    if (threadIdx.x < kCastTile) {
      if (Config::kRow && row0 + static_cast<i32>(i) < t.rows)
        atomicMax(t.row_amax + row0 + i, Values::fp32_bits(tile_amax.row(i)));
    } else {
      if (Config::kCol && column0 + static_cast<i32>(i) < t.cols)
        atomicMax(t.col_amax + column0 + i, Values::fp32_bits(tile_amax.column(i)));
    }
    if (Config::kTensor && threadIdx.x == 0 && t.partials != nullptr) {
      atomicMax(t.partials, tile_amax.amax());
    }
  }

  static F8_DEVICE void blocks_of_whole(const AmaxTensor& t, u32 block) {
    const i32 tiles_across = (t.cols + kCastTile - 1) / kCastTile;
    const i32 row0 = static_cast<i32>(block) / tiles_across * kCastTile;
    const i32 tile_column = static_cast<i32>(block) % tiles_across;
    const i32 first_row = t.shard.first + row0;
    const i32 above = kCastTile - first_row % kCastTile;  // the tile's rows in its first block
    ThreadFragment<Config::kInput> fragment;
    fragment.load(t.x, t.ld, t.rows, t.cols, row0, tile_column * kCastTile);
    Values most[2];
    most[0].clear();
    most[1].clear();
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      if (fragment.row - row0 + i < above) {
        fragment.rows[i].raise(most[0]);
      } else {
        fragment.rows[i].raise(most[1]);
      }
    }
    __shared__ u32 warps[2][kTileThreads / 32];
#pragma unroll
    for (int b = 0; b < 2; ++b) {
      const u32 warp_amax = warp_max(most[b].largest_magnitude());
      if (threadIdx.x % 32 == 0) warps[b][threadIdx.x / 32] = warp_amax;
    }
    __syncthreads();
    const i32 b = static_cast<i32>(threadIdx.x);
    if (b > 1 || (b == 1 && row0 + above >= t.rows)) return;
    u32 amax = 0;
#pragma unroll
    for (int i = 0; i < kTileThreads / 32; ++i) amax = max(amax, warps[b][i]);
    const i64 row_of_blocks = first_row / kCastTile + b;
    atomicMax(t.block_amax + row_of_blocks * tiles_across + tile_column, Values::fp32_bits(amax));
  }

  template <class Args, class Loader = Load>
  static F8_DEVICE void run(const Args& args, const Loader& loader = {}) {
    grid_dependency_wait();
    launch_dependents();
    if (Config::kNoopFlag && is_noop(args.noop_flag)) return;
    const AmaxTensor& t = args.tensors[tensor_of_block(args)];
    const u32 block = blockIdx.x - static_cast<u32>(t.first_block);
    if constexpr (Config::kBlock) {
      blocks_of_whole(t, block);
    } else if constexpr (Config::kRow || Config::kCol) {
      rows_and_columns(t, block, loader);
    } else {
      tensor(&t, block, loader);
    }
  }
};

}  // namespace f8::kernels
