// Dynamic scaling in one launch: the maxima of a list of matrices, their scales, and the copies, as
// the amax and the cast kernel make them. All blocks are resident at once (a cooperative launch),
// and each has one tile or two: a block keeps one in registers and the other in shared memory while
// it waits for the others' maxima, so every matrix is read once.
//
// Blocks pass words of 16 bytes, { u64 tag, u64 value }, written and read at once, through sync, in
// global memory:
//   epoch                     u64: counts launches; u64 of padding
//   matrices x word           the matrix's amax
//   tiles x word              the tile's amax
//   tiles x 64 x word         axis alone: the maxima of a tile's 128 rows and 128 columns, u16[4]
//   lines of tiles x 32 x word    the same of the matrix: of each matrix's rows of tiles, then of
//                                 its columns of tiles, one matrix after another
// A matrix's amax is gathered by the block of its first tile. The maxima of a row or column of
// tiles: by every block where they are few, else by all of its blocks, 4 lines at a time, since
// that each reads every tile's words would take longer than the matrix does. A block does all of
// these duties before it waits for a result, so no block waits in a circle.
//
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
  static constexpr i32 kUnits = kCastTile / 4;  // words of the lines of a row or column of tiles
  static constexpr i32 kWarps = kTileThreads / 32;
  static constexpr i32 kMostDirect = 56;  // tiles in a row and a column whose lines a block reads
  static_assert(Config::kInput != Input::kF32 && !Config::kDelayed);

  // A tile of the launch.
  struct Work {
    const CastTensor& t;
    i32 matrix, tile;
    TilePlace place;
    i32 row0, column0;
    F8_DEVICE Work(const CastArgs& args, i32 tile_of_launch)
        : Work(args, tile_of_launch, tensor_of_tile(args, tile_of_launch)) {}
    F8_DEVICE bool leads() const { return tile == t.first_block; }
    F8_DEVICE bool reads_lines() const { return place.across + place.down <= kMostDirect; }

   private:
    F8_DEVICE Work(const CastArgs& args, i32 tile_of_launch, i32 of)
        : t(args.tensors[of]),
          matrix(of),
          tile(tile_of_launch),
          place(t.rows, t.cols, tile_of_launch - t.first_block),
          row0(place.row * kCastTile),
          column0(place.column * kCastTile) {}
  };

  struct Sync {
    u64* epoch;
    i32 tile_count;
    u64 tag;
    F8_DEVICE Sync(u64* sync, i32 tiles)
        : epoch(sync), tile_count(tiles), tag(mix(count() ^ mix(grid_id()))) {}
    // Of this launch; until the last block has published.
    F8_DEVICE u64 count() const { return load_relaxed(epoch) + 1; }
    F8_DEVICE u64* matrix(i32 i) const { return epoch + 2 + 2 * i; }
    F8_DEVICE u64* tile(i32 i) const { return matrix(kMaxTensors) + 2 * i; }
    // Rows, then columns.
    F8_DEVICE u64* tile_lines(i32 of_tile, i32 unit) const {
      return tile(tile_count) + 2 * (2 * kUnits * of_tile + unit);
    }
    F8_DEVICE u64* line_result(i32 line_of_tiles, i32 unit) const {
      return tile_lines(tile_count, kUnits * line_of_tiles + unit);
    }
  };

  static F8_DEVICE void publish(const Sync& sync, i32 tile,
                                const TileMaxima<Config::kInput>& maxima) {
    const u32 unit = threadIdx.x;
    if (kLines && unit < 2 * kUnits && (unit < kUnits ? kRowLines : kColumnLines)) {
      store_word(sync.tile_lines(tile, static_cast<i32>(unit)), sync.tag,
                 unit < kUnits ? maxima.four_rows(unit) : maxima.four_columns(unit - kUnits));
    }
    if (unit == kTileThreads - 1) store_word(sync.tile(tile), sync.tag, maxima.amax());
  }

  // The first line of tiles of a matrix's: rows of tiles come before columns.
  static F8_DEVICE i32 first_line(const CastArgs& args, i32 matrix) {
    i32 first = 0;
    for (i32 i = 0; i < matrix; ++i) {
      first += (args.tensors[i].rows + kCastTile - 1) / kCastTile +
               (args.tensors[i].cols + kCastTile - 1) / kCastTile;
    }
    return first;
  }

  // By a warp: the maxima of 4 lines over `count` tiles, `step` apart.
  static F8_DEVICE void reduce_unit(const Sync& sync, i32 unit, i32 first, i32 count, i32 step,
                                    u64* result) {
    u32 low = 0;
    u32 high = 0;
    for (i32 i = static_cast<i32>(threadIdx.x % 32); i < count; i += 32) {
      const u64 four = wait_word(sync.tile_lines(first + i * step, unit), sync.tag);
      low = max_u16x2(low, static_cast<u32>(four));
      high = max_u16x2(high, static_cast<u32>(four >> 32));
    }
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
      low = max_u16x2(low, __shfl_xor_sync(0xFFFFFFFFU, low, lane));
      high = max_u16x2(high, __shfl_xor_sync(0xFFFFFFFFU, high, lane));
    }
    if (threadIdx.x % 32 == 0) store_word(result, sync.tag, low | static_cast<u64>(high) << 32);
  }

  // The tile's share of what its matrix, and its row and column of tiles, have to gather.
  static F8_DEVICE void gather(const Sync& sync, const CastArgs& args, const Work& work) {
    const TilePlace& place = work.place;
    if (kLines && !work.reads_lines()) {
      const i32 line = first_line(args, work.matrix);
      const i32 warp = static_cast<i32>(threadIdx.x / 32);
      const i32 first_tile = work.t.first_block;
      // Of the rows' units the tile has column, column + across, ...; of the columns' likewise.
      const i32 of_rows = kRowLines ? (kUnits - 1 - place.column + place.across) / place.across : 0;
      const i32 of_columns = kColumnLines ? (kUnits - 1 - place.row + place.down) / place.down : 0;
      for (i32 i = warp; i < of_rows + of_columns; i += kWarps) {
        if (i < of_rows) {
          const i32 unit = place.column + i * place.across;
          reduce_unit(sync, unit, first_tile + place.beside(0), place.across, 1,
                      sync.line_result(line + place.row, unit));
        } else {
          const i32 unit = place.row + (i - of_rows) * place.down;
          reduce_unit(sync, kUnits + unit, first_tile + place.above(0), place.down, place.across,
                      sync.line_result(line + place.down + place.column, unit));
        }
      }
    }
    if (Copies::kTensorScale && work.leads()) {
      __shared__ u32 warps[kWarps];
      u32 most = 0;
      for (i32 i = static_cast<i32>(threadIdx.x); i < work.t.blocks; i += kTileThreads) {
        most = max(most, static_cast<u32>(wait_word(sync.tile(work.tile + i), sync.tag)));
      }
      most = warp_max(most);
      if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
      __syncthreads();
      if (threadIdx.x == 0) {
        for (int i = 1; i < kWarps; ++i) most = max(most, warps[i]);
        store_word(sync.matrix(work.matrix), sync.tag, most);
        if (work.t.amax != nullptr) atomicMax(work.t.amax, most);
      }
      __syncthreads();
    }
  }

  // The maxima of the lines of the tile's row and column of tiles, from all of their tiles: four
  // warps go over the row, four over the column, each lane a unit.
  static F8_DEVICE void read_lines(const Sync& sync, const Work& work, u64 (&lines)[2 * kUnits]) {
    constexpr i32 kAtOnce = 2;
    __shared__ u64 parts[kWarps][kUnits];
    const TilePlace& place = work.place;
    const i32 warp = static_cast<i32>(threadIdx.x / 32);
    const i32 lane = static_cast<i32>(threadIdx.x % 32);
    const bool by_row = warp < 4;
    const i32 count = by_row ? (kRowLines ? place.across : 0) : (kColumnLines ? place.down : 0);
    const i32 first = work.t.first_block + (by_row ? place.beside(0) : place.above(0));
    const i32 step = by_row ? 1 : place.across;
    const i32 unit = by_row ? lane : kUnits + lane;
    u32 low = 0;
    u32 high = 0;
    for (i32 i = warp % 4; i < count; i += 4 * kAtOnce) {
      u64 fours[kAtOnce] = {};
      bool all;
      do {
        all = true;
#pragma unroll
        for (i32 j = 0; j < kAtOnce; ++j) {
          const i32 peer = i + 4 * j;
          if (peer < count &&
              !load_word(sync.tile_lines(first + peer * step, unit), sync.tag, fours[j])) {
            all = false;
          }
        }
      } while (!all);
#pragma unroll
      for (i32 j = 0; j < kAtOnce; ++j) {
        low = max_u16x2(low, static_cast<u32>(fours[j]));
        high = max_u16x2(high, static_cast<u32>(fours[j] >> 32));
      }
    }
    parts[warp][lane] = low | static_cast<u64>(high) << 32;
    __syncthreads();
    if (warp >= 2) return;
    low = high = 0;
#pragma unroll
    for (i32 i = 0; i < 4; ++i) {
      const u64 four = parts[4 * warp + i][lane];
      low = max_u16x2(low, static_cast<u32>(four));
      high = max_u16x2(high, static_cast<u32>(four >> 32));
    }
    lines[kUnits * warp + lane] = low | static_cast<u64>(high) << 32;
  }

  static F8_DEVICE void wait_for_scales(const Sync& sync, const CastArgs& args, const Work& work,
                                        typename Copies::Scales& scales) {
    using Values = Eight<Config::kInput>;
    const i32 thread = static_cast<i32>(threadIdx.x);
    if constexpr (Copies::kTensorScale) {
      if (thread == kTileThreads - 1) {
        scales.tensor =
            Copies::to_scale(static_cast<u32>(wait_word(sync.matrix(work.matrix), sync.tag)));
        if (work.leads()) Copies::publish_tensor_scale(work.t, scales.tensor);
      }
    }
    if constexpr (kLines) {
      __shared__ u64 lines[2 * kUnits];
      if (work.reads_lines()) {
        read_lines(sync, work, lines);
      } else if (thread < 2 * kUnits && (thread < kUnits ? kRowLines : kColumnLines)) {
        const i32 line = first_line(args, work.matrix) +
                         (thread < kUnits ? work.place.row : work.place.down + work.place.column);
        lines[thread] = wait_word(sync.line_result(line, thread % kUnits), sync.tag);
      }
      __syncthreads();
      const u16* of_tile = reinterpret_cast<const u16*>(lines);
      Copies::axis_scales(
          work.t, work.row0, work.column0, [&](i32 i) { return Values::fp32_bits(of_tile[i]); },
          [&](i32 i) { return Values::fp32_bits(of_tile[kCastTile + i]); }, scales);
    }
    __syncthreads();
  }

  static F8_DEVICE void run(const QuantizeArgs& launch) {
    const CastArgs& args = launch.cast;
    const CastTensor& last = args.tensors[args.count - 1];
    const i32 tiles = last.first_block + last.blocks;
    const i32 blocks = static_cast<i32>(gridDim.x);
    const i32 block = static_cast<i32>(blockIdx.x);
    for (i32 tile = block; tile < tiles; tile += blocks) {
      const Work work(args, tile);
      prefetch_tile<Config::kInput>(work.t.x, work.t.ld, work.t.rows, work.t.cols, work.row0,
                                    work.column0);
    }
    begin_after_previous(args.beside);
    const Sync sync(launch.sync, tiles);
    Patch<Config::kInput> patch;
    for (i32 tile = block;; tile += blocks) {
      __shared__ TileMaxima<Config::kInput> maxima;
      const Work work(args, tile);
      patch.load(work.t.x, work.t.ld, work.t.rows, work.t.cols, work.row0, work.column0);
      find_maxima<kRowLines, kColumnLines, true>(patch, maxima);
      __syncthreads();
      publish(sync, tile, maxima);
      if (tile + blocks >= tiles) break;
      patch.put_aside();
      __syncthreads();
    }
    for (i32 tile = block; tile < tiles; tile += blocks) gather(sync, args, Work(args, tile));
    for (i32 tile = block + blocks < tiles ? block + blocks : block;; tile = block) {
      __shared__ typename Copies::Scales scales;
      const Work work(args, tile);
      wait_for_scales(sync, args, work, scales);
      if constexpr (Config::kRowMajor) Copies::write_row_major(work.t, patch, scales);
      if constexpr (Config::kTransposed) {
        Copies::write_transposed(work.t, patch, scales, work.row0, work.column0);
      }
      if (tile == block) break;
      const Work next(args, block);
      patch.take_back(next.row0, next.column0);
      __syncthreads();
    }
    if (block == 0) {  // when all blocks have published, all have read the epoch
      constexpr i32 kAtOnce = 4;
      for (i32 i = static_cast<i32>(threadIdx.x); i < tiles; i += kAtOnce * kTileThreads) {
        bool all;
        do {
          all = true;
#pragma unroll
          for (i32 j = 0; j < kAtOnce; ++j) {
            u64 value;
            const i32 tile = min(i + j * kTileThreads, tiles - 1);
            all = load_word(sync.tile(tile), sync.tag, value) && all;
          }
        } while (!all);
      }
      __syncthreads();
      if (threadIdx.x == 0) *sync.epoch = sync.count();
    }
    end_after_previous();
  }
};

}  // namespace f8::kernels
