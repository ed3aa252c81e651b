// Dynamic scaling in one launch: the maxima of a list of matrices, their scales, and the copies, as
// the amax and the cast kernel make them. One block a tile, all of them resident at once (a
// cooperative launch): a block keeps its tile in registers while it waits for the others' maxima,
// so every matrix is read once.
//
// sync, in global memory:
//   epoch           u64: counts launches
//   padding         u64
//   tiles x word    { u64 tag, u64 amax of the tile }, 16 bytes, written and read at once
//   tiles x lines   u16 maxima of the tile's 128 rows, of its 128 columns       axis scales alone
// A word is this launch's where its tag is: tags mix the epoch and the launch's grid id. So what
// sync holds before the first launch does not matter, but between launches nobody else may write
// to it. The word of a tile is released after the tile's lines.
#pragma once

#include "cast.cuh"

namespace f8::kernels {

// --- words
F8_DEVICE void store_word(u64* p, u64 tag, u64 value) {
  asm volatile(
      "{\n"
      ".reg .b128 word;\n"
      "mov.b128 word, {%1, %2};\n"
      "st.relaxed.gpu.global.b128 [%0], word;\n"
      "}\n" ::"l"(p),
      "l"(tag), "l"(value)
      : "memory");
}
F8_DEVICE u64 wait_word(const u64* p, u64 tag) {
  u64 seen;
  u64 value;
  do {
    asm volatile(
        "{\n"
        ".reg .b128 word;\n"
        "ld.relaxed.gpu.global.b128 word, [%2];\n"
        "mov.b128 {%0, %1}, word;\n"
        "}\n"
        : "=l"(seen), "=l"(value)
        : "l"(p)
        : "memory");
  } while (seen != tag);
  return value;
}
F8_DEVICE void fence_gpu() {
  asm volatile("fence.acq_rel.gpu;" ::: "memory");
}
F8_DEVICE u64 load_relaxed(const u64* p) {
  u64 r;
  asm volatile("ld.relaxed.gpu.global.u64 %0, [%1];" : "=l"(r) : "l"(p) : "memory");
  return r;
}
// Different for different x.
F8_DEVICE u64 mix(u64 x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}
F8_DEVICE u64 grid_id() {
  u64 r;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(r));
  return r;
}

// Config is Cast's, with tensor and axis scales alone, and 16-bit inputs.
template <class Config>
struct Quantize {
  using Copies = Cast<Config>;
  using Values = Eight<Config::kInput>;
  static constexpr bool kRowLines = Config::kRowMajor && Config::kScaleQ == Scale::kAxis;
  static constexpr bool kColumnLines = Config::kTransposed && Config::kScaleQt == Scale::kAxis;
  static constexpr bool kLines = kRowLines || kColumnLines;
  static_assert(Config::kInput != Input::kF32 && !Config::kDelayed);

  // This block's tile: its matrix, and where it lies there.
  struct Tile {
    const CastTensor& t;
    i32 across, down, row, column;  // the matrix in tiles, and the tile's place

    F8_DEVICE explicit Tile(const CastArgs& args) : t(args.tensors[tensor_of_block(args)]) {
      const i32 index = static_cast<i32>(blockIdx.x) - t.first_block;
      across = (t.cols + kCastTile - 1) / kCastTile;
      down = (t.rows + kCastTile - 1) / kCastTile;
      row = index / across;
      column = index % across;
    }
  };

  struct Sync {
    u64* epoch;
    u64* words;
    u16* lines;
    u64 count;
    u64 tag;
    F8_DEVICE explicit Sync(const QuantizeArgs& args)
        : epoch(args.sync),
          words(args.sync + 2),
          lines(reinterpret_cast<u16*>(args.sync + 2 + 2 * gridDim.x)),
          count(load_relaxed(args.sync) + 1),
          tag(mix(count ^ mix(grid_id()))) {}
    F8_DEVICE u64* word(i32 tile) const { return words + 2 * tile; }
    F8_DEVICE u16* lines_of(i32 tile) const { return lines + tile * (2 * kCastTile); }
  };

  static F8_DEVICE void publish(const Sync& sync, const TileMaxima& maxima) {
    const i32 tile = static_cast<i32>(blockIdx.x);
    if constexpr (kLines) {
      const u32 i = threadIdx.x % kCastTile;
      if (kRowLines && threadIdx.x < kCastTile) {
        sync.lines_of(tile)[i] = static_cast<u16>(maxima.row[i]);
      }
      if (kColumnLines && threadIdx.x >= kCastTile) {
        sync.lines_of(tile)[kCastTile + i] = static_cast<u16>(maxima.column[i]);
      }
      __syncthreads();
    }
    if (threadIdx.x == 0) {
      if constexpr (kLines) fence_gpu();
      store_word(sync.word(tile), sync.tag, tile_amax<Config::kInput>(maxima));
    }
  }

  // The matrix's amax, by every thread.
  static F8_DEVICE u32 wait_for_tensor(const Sync& sync, const CastTensor& t) {
    __shared__ u32 warps[kTileThreads / 32];
    u32 most = 0;
    for (i32 i = static_cast<i32>(threadIdx.x); i < t.blocks; i += kTileThreads) {
      most = max(most, static_cast<u32>(wait_word(sync.word(t.first_block + i), sync.tag)));
    }
    most = warp_max(most);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
    __syncthreads();
    most = 0;
#pragma unroll
    for (int i = 0; i < kTileThreads / 32; ++i) most = max(most, warps[i]);
    return most;
  }

  // The amax of each of the tile's rows and columns over the whole matrix. Four warps go over the
  // tiles beside this one, four over those above and below, each lane 4 lines of a tile.
  struct LineMaxima {
    u32 pairs[kTileThreads / 32][kCastTile / 2];  // of each warp, two lines a word
    F8_DEVICE u32 magnitude(u32 first_warp, u32 line) const {
      u32 most = 0;
#pragma unroll
      for (int w = 0; w < 4; ++w) most = max_u16x2(most, pairs[first_warp + w][line / 2]);
      return line % 2 == 0 ? most & 0xFFFFU : most >> 16;
    }
  };
  static F8_DEVICE void wait_for_lines(const Sync& sync, const Tile& tile, LineMaxima& maxima) {
    const i32 first = tile.t.first_block;
    const auto beside = [&](i32 i) { return first + tile.row * tile.across + i; };
    const auto above = [&](i32 i) { return first + i * tile.across + tile.column; };
    const i32 rows = kRowLines ? tile.across : 0;
    const i32 columns = kColumnLines ? tile.down : 0;
    for (i32 i = static_cast<i32>(threadIdx.x); i < rows + columns; i += kTileThreads) {
      wait_word(sync.word(i < rows ? beside(i) : above(i - rows)), sync.tag);
      fence_gpu();
    }
    __syncthreads();
    const i32 warp = static_cast<i32>(threadIdx.x / 32);
    const u32 lane = threadIdx.x % 32;
    const bool by_row = warp < 4;
    const i32 count = by_row ? rows : columns;
    u32 low = 0;
    u32 high = 0;
#pragma unroll 8
    for (i32 i = warp % 4; i < count; i += 4) {
      const u16* lines = sync.lines_of(by_row ? beside(i) : above(i)) + (by_row ? 0 : kCastTile);
      const u64 four = load_relaxed(reinterpret_cast<const u64*>(lines) + lane);
      low = max_u16x2(low, static_cast<u32>(four));
      high = max_u16x2(high, static_cast<u32>(four >> 32));
    }
    maxima.pairs[warp][2 * lane] = low;
    maxima.pairs[warp][2 * lane + 1] = high;
    __syncthreads();
  }

  static F8_DEVICE float line_scale(u32 magnitude) {
    return Copies::to_scale(Values::fp32_bits(magnitude));
  }
  // Scales of the tile's lines; the first tile of a row or column of tiles leaves their inverses.
  static F8_DEVICE void line_scales(const Tile& tile, const LineMaxima& maxima,
                                    typename Copies::Scales& scales) {
    const i32 i = static_cast<i32>(threadIdx.x) % kCastTile;
    if (kRowLines && threadIdx.x < kCastTile) {
      const float scale = line_scale(maxima.magnitude(0, static_cast<u32>(i)));
      const i32 row = tile.row * kCastTile + i;
      scales.row[i] = scale;
      if (tile.column == 0 && row < tile.t.rows) tile.t.inv_scale_row[row] = inverse(scale);
    }
    if (kColumnLines && threadIdx.x >= kCastTile) {
      const float scale = line_scale(maxima.magnitude(4, static_cast<u32>(i)));
      const i32 column = tile.column * kCastTile + i;
      scales.column[i] = scale;
      if (tile.row == 0 && column < tile.t.cols) tile.t.inv_scale_col[column] = inverse(scale);
    }
  }

  static F8_DEVICE void run(const QuantizeArgs& args) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const Sync sync(args);
    const Tile tile(args.cast);
    const CastTensor& t = tile.t;
    const i32 row0 = tile.row * kCastTile;
    const i32 column0 = tile.column * kCastTile;
    Patch<Config::kInput> patch;
    patch.load(t.x, t.ld, t.rows, t.cols, row0, column0);
    __shared__ TileMaxima maxima;
    find_maxima<kRowLines, kColumnLines, true>(patch, maxima);
    __syncthreads();
    publish(sync, maxima);
    __shared__ typename Copies::Scales scales;
    if constexpr (kLines) {
      __shared__ LineMaxima lines;
      wait_for_lines(sync, tile, lines);
      line_scales(tile, lines, scales);
    }
    u32 amax = 0;
    if constexpr (Copies::kTensorScale) {
      amax = wait_for_tensor(sync, t);
      if (threadIdx.x == 0) scales.tensor = Copies::to_scale(amax);
    }
    __syncthreads();
    if constexpr (Config::kRowMajor) Copies::write_row_major(t, patch, scales);
    if constexpr (Config::kTransposed) Copies::write_transposed(t, patch, scales, row0, column0);
    if (Copies::kTensorScale && row0 == 0 && column0 == 0 && threadIdx.x == 0) {
      Copies::publish_tensor_scale(t, scales.tensor);
      if (t.amax != nullptr) atomicMax(t.amax, amax);
    }
    if (blockIdx.x == 0) {  // when all blocks have published, all have read the epoch
      for (u32 i = threadIdx.x; i < gridDim.x; i += kTileThreads) {
        wait_word(sync.word(static_cast<i32>(i)), sync.tag);
      }
      __syncthreads();
      if (threadIdx.x == 0) *sync.epoch = sync.count;
    }
  }
};

}  // namespace f8::kernels
