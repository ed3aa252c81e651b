// Dynamic scaling in one launch: the maxima of a list of matrices, their scales, and the copies, as
// the amax and the cast kernel make them. One block a tile, all of them resident at once (a
// cooperative launch): a block keeps its tile in registers while it waits for the others' maxima,
// so every matrix is read once.
//
// sync, in global memory:
//   epoch           u64: counts launches
//   padding         u64
//   tiles x word    { u64 tag, u64 amax of the tile }, 16 bytes, written and read at once
//   tiles x 64 x word   { u64 tag, 4 x u16 }: the maxima of 128 rows and of 128 columns
// A word is this launch's where its tag is: tags mix the epoch and the launch's grid id. So what
// sync holds before the first launch does not matter, but between launches nobody else may write
// to it. Each word is read on its own, so nothing orders them.
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
// Whether the word has come.
F8_DEVICE bool load_word(const u64* p, u64 tag, u64& value) {
  u64 seen;
  asm volatile(
      "{\n"
      ".reg .b128 word;\n"
      "ld.relaxed.gpu.global.b128 word, [%2];\n"
      "mov.b128 {%0, %1}, word;\n"
      "}\n"
      : "=l"(seen), "=l"(value)
      : "l"(p)
      : "memory");
  return seen == tag;
}
F8_DEVICE u64 wait_word(const u64* p, u64 tag) {
  u64 value;
  while (!load_word(p, tag, value)) {
  }
  return value;
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
  static constexpr bool kRowLines = Copies::kRowLines;
  static constexpr bool kColumnLines = Copies::kColumnLines;
  static constexpr bool kLines = kRowLines || kColumnLines;
  static_assert(Config::kInput != Input::kF32 && !Config::kDelayed);

  struct Sync {
    u64* epoch;
    u64* words;
    u64* lines;
    u64 count;
    u64 tag;
    F8_DEVICE explicit Sync(const QuantizeArgs& args)
        : epoch(args.sync),
          words(args.sync + 2),
          lines(args.sync + 2 + 2 * gridDim.x),
          count(load_relaxed(args.sync) + 1),
          tag(mix(count ^ mix(grid_id()))) {}
    F8_DEVICE u64* word(i32 tile) const { return words + 2 * tile; }
    F8_DEVICE u64* line(i32 tile, u32 unit) const {
      return lines + tile * (kLinesOfTile / 2) + 2 * unit;
    }
  };

  static F8_DEVICE void publish(const Sync& sync, const TileMaxima& maxima) {
    constexpr u32 kUnits = kCastTile / 4;  // of rows, and of columns
    const i32 tile = static_cast<i32>(blockIdx.x);
    const u32 unit = threadIdx.x;
    if (kLines && unit < 2 * kUnits && (unit < kUnits ? kRowLines : kColumnLines)) {
      const u32* four = (unit < kUnits ? maxima.row : maxima.column) + unit % kUnits * 4;
      store_word(sync.line(tile, unit), sync.tag,
                 four[0] | four[1] << 16 | static_cast<u64>(four[2] | four[3] << 16) << 32);
    }
    if (threadIdx.x == kTileThreads - 1) {
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

  // Of the matrix whose tiles begin at `first_tile`.
  static F8_DEVICE void gather(const Sync& sync, i32 first_tile, const TilePlace& tile,
                               LineMaxima& lines) {
    constexpr int kAtOnce = 4;
    lines.gather<kRowLines, kColumnLines, kAtOnce>(
        tile, [&](u64(&fours)[kAtOnce], u32 unit, i32 first, i32 step, i32 count) {
          bool all;
          do {
            all = true;
#pragma unroll
            for (int i = 0; i < kAtOnce; ++i) {
              if (i < count &&
                  !load_word(sync.line(first_tile + first + i * step, unit), sync.tag, fours[i])) {
                all = false;
              }
            }
          } while (!all);
        });
  }

  static F8_DEVICE void run(const QuantizeArgs& args) {
    const CastTensor& t = args.cast.tensors[tensor_of_block(args.cast)];
    const TilePlace tile(t.rows, t.cols, static_cast<i32>(blockIdx.x) - t.first_block);
    const i32 row0 = tile.row * kCastTile;
    const i32 column0 = tile.column * kCastTile;
    prefetch_tile<Config::kInput>(t.x, t.ld, t.rows, t.cols, row0, column0);
    wait_for_previous_kernel();
    let_next_kernel_start();
    const Sync sync(args);
    Patch<Config::kInput> patch;
    patch.load(t.x, t.ld, t.rows, t.cols, row0, column0);
    __shared__ TileMaxima maxima;
    find_maxima<kRowLines, kColumnLines, true>(patch, maxima);
    __syncthreads();
    publish(sync, maxima);
    __shared__ typename Copies::Scales scales;
    if constexpr (kLines) {
      __shared__ LineMaxima lines;
      gather(sync, t.first_block, tile, lines);
      Copies::axis_scales(t, row0, column0, lines, scales);
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
