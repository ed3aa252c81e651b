// Dynamic scaling in one launch: the maxima of a list of matrices, their scales, and the copies, as
// the amax and the cast kernel make them. All blocks are resident at once (a cooperative launch),
// and each has one tile or, where the grid is smaller than all tiles, two neighbours: a block keeps
// one in registers and the other in shared memory while it waits for the others' maxima, so every
// matrix is read once.
//
// Blocks pass words of 16 bytes, { u64 tag, u64 value }, written and read at once, through sync, in
// global memory:
//   epoch                     u64: counts launches; u64 of padding
//   matrices x word           the matrix's amax
//   tiles x word              the amax of each block's tiles; some unused where blocks have two
//   tiles x 64 x word         axis alone: the maxima of a tile's 128 rows and 128 columns, u16[4];
//                             lines that two neighbours share are with the first of them
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
F8_DEVICE u64 max_of_four(u64 a, u64 b) {
  const u32 low = max_u16x2(static_cast<u32>(a), static_cast<u32>(b));
  const u32 high = max_u16x2(static_cast<u32>(a >> 32), static_cast<u32>(b >> 32));
  return low | static_cast<u64>(high) << 32;
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
  // Words of its lines that a block reads itself, of one tile and of two.
  static constexpr i32 kMostDirect = 56;
  static constexpr i32 kMostDirectOfTwo = 64;
  static_assert(Config::kInput != Input::kF32 && !Config::kDelayed);

  // A row or column of tiles: where its lines' words are, in u64 from Sync::lines().
  struct LineOfTiles {
    bool is_row;
    bool shared;  // by both of a block's tiles
    i32 count;    // of the tiles that have words
    i32 mine;     // this block's place among these
    i32 words;    // the first tile's
    i32 step;     // from one tile's to the next one's
    i32 results;
    F8_DEVICE bool used() const { return is_row ? kRowLines : kColumnLines; }
  };
  static constexpr i32 kWordsOfTile = 2 * 2 * kUnits;

  // Where a block's tiles are. `pairs`: blocks have two.
  struct Place {
    i32 matrix = 0;
    i32 first_block = 0, first_line = 0;  // of the matrix
    i32 blocks, across, down;
    bool wide, tall;  // two tiles lie side by side, one above the other
    i32 row, column;  // of the first tile
    F8_DEVICE Place(const CastArgs& args, i32 block, bool pairs) {
      for (;; ++matrix) {
        const CastTensor& t = args.tensors[matrix];
        across = (t.cols + kCastTile - 1) / kCastTile;
        down = (t.rows + kCastTile - 1) / kCastTile;
        blocks = pairs ? static_cast<i32>(pairs_of_tiles(across, down)) : across * down;
        if (block < first_block + blocks) break;
        first_block += blocks;
        first_line += across + down;
      }
      wide = pairs && across >= down;
      tall = pairs && across < down;
      const i32 of_row = wide ? (across + 1) / 2 : across;
      const i32 row_of_blocks = (block - first_block) / of_row;
      row = row_of_blocks * (tall ? 2 : 1);
      column = (block - first_block - row_of_blocks * of_row) * (wide ? 2 : 1);
    }
    F8_DEVICE i32 tiles() const {
      return (wide && column + 1 < across) || (tall && row + 1 < down) ? 2 : 1;
    }
    F8_DEVICE i32 row0(i32 tile) const { return (tall ? row + tile : row) * kCastTile; }
    F8_DEVICE i32 column0(i32 tile) const { return (wide ? column + tile : column) * kCastTile; }
    F8_DEVICE bool reads_lines() const {
      if (wide) return (across + 1) / 2 + 2 * down <= kMostDirectOfTwo;
      if (tall) return 2 * across + (down + 1) / 2 <= kMostDirectOfTwo;
      return across + down <= kMostDirect;
    }
    // The row of the first tile, its column, and the one of these that a second tile does not
    // share.
    F8_DEVICE LineOfTiles line(i32 set, i32 first_tile, i32 all_tiles) const {
      const bool is_row = set == 0 || (set == 2 && tall);
      const bool shared = is_row ? wide : tall;
      const i32 of = (is_row ? row : column) + (set == 2 ? 1 : 0);
      const i32 along = is_row ? across : down;
      const i32 mine = is_row ? column : row;
      const i32 step = is_row ? 1 : across;
      return {is_row,
              shared,
              shared ? (along + 1) / 2 : along,
              shared ? mine / 2 : mine,
              (first_tile + of * (is_row ? across : 1)) * kWordsOfTile + (is_row ? 0 : 2 * kUnits),
              (shared ? 2 * step : step) * kWordsOfTile,
              all_tiles * kWordsOfTile + (first_line + (is_row ? of : down + of)) * 2 * kUnits};
    }
  };

  // The same for later, in shared memory: all warps of an SM working it out again take longer than
  // the words that they wait for.
  static constexpr i32 kSets = 3;
  struct Work {
    i32 matrix;
    i32 first_block, blocks;  // of the matrix
    i32 tiles;
    i32 row0[kMostTilesOfBlock], column0[kMostTilesOfBlock];
    bool leads;        // the matrix's first block
    bool reads_lines;  // itself, else what blocks gather for each other
    bool tall;
    LineOfTiles lines[kSets];
    F8_DEVICE i32 sets() const { return 1 + tiles; }
    F8_DEVICE i32 set_of_row(i32 tile) const { return tall ? 2 * tile : 0; }
    F8_DEVICE i32 set_of_column(i32 tile) const { return tall ? 1 : 1 + tile; }

    // By the first kSets threads.
    F8_DEVICE void note(const CastArgs& args, const Place& place, i32 all_tiles) {
      const i32 set = static_cast<i32>(threadIdx.x);
      lines[set] = place.line(set, args.tensors[place.matrix].first_block, all_tiles);
      if (set > 0) return;
      matrix = place.matrix;
      first_block = place.first_block;
      blocks = place.blocks;
      tiles = place.tiles();
      for (i32 i = 0; i < kMostTilesOfBlock; ++i) {
        row0[i] = place.row0(i);
        column0[i] = place.column0(i);
      }
      leads = place.row == 0 && place.column == 0;
      reads_lines = place.reads_lines();
      tall = place.tall;
    }
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
    F8_DEVICE u64* block(i32 i) const { return matrix(kMaxTensors) + 2 * i; }
    // Of each tile the words of its rows, then of its columns; behind them the results.
    F8_DEVICE u64* lines() const { return block(tile_count); }
  };

  // What is kept of the first of two tiles.
  struct FirstMaxima {
    u64 lines[2 * kUnits];
    u32 amax;
  };
  static F8_DEVICE void keep(const TileMaxima<Config::kInput>& maxima, FirstMaxima& first) {
    const u32 unit = threadIdx.x;
    if (kLines && unit < 2 * kUnits && (unit < kUnits ? kRowLines : kColumnLines)) {
      first.lines[unit] =
          unit < kUnits ? maxima.four_rows(unit) : maxima.four_columns(unit - kUnits);
    }
    if (unit == kTileThreads - 1) first.amax = maxima.amax();
  }

  // maxima: of the block's last tile.
  static F8_DEVICE void publish(const Sync& sync, const Work& work,
                                const TileMaxima<Config::kInput>& maxima,
                                const FirstMaxima& first) {
    const u32 set = threadIdx.x / kUnits;
    const u32 unit = threadIdx.x % kUnits;
    const bool two = work.tiles == 2;
    if (kLines && set < static_cast<u32>(work.sets()) && work.lines[set].used()) {
      const LineOfTiles& line = work.lines[set];
      u64 four = line.is_row ? maxima.four_rows(unit) : maxima.four_columns(unit);
      if (two && set < 2) {
        const u64 of_first = first.lines[line.is_row ? unit : kUnits + unit];
        four = line.shared ? max_of_four(four, of_first) : of_first;
      }
      store_word(sync.lines() + line.words + line.mine * line.step + 2 * unit, sync.tag, four);
    }
    if (threadIdx.x == kTileThreads - 1) {
      const u32 amax = maxima.amax();
      store_word(sync.block(blockIdx.x), sync.tag, two ? max(amax, first.amax) : amax);
    }
  }

  // By a warp: the maxima of 4 lines.
  static F8_DEVICE void reduce_unit(const Sync& sync, const LineOfTiles& line, i32 unit) {
    u64 most = 0;
    const u64* const words = sync.lines() + line.words + 2 * unit;
    for (i32 i = static_cast<i32>(threadIdx.x % 32); i < line.count; i += 32) {
      most = max_of_four(most, wait_word(words + i * line.step, sync.tag));
    }
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
      most = max_of_four(most, __shfl_xor_sync(0xFFFFFFFFU, most, lane));
    }
    if (threadIdx.x % 32 == 0) {
      store_word(sync.lines() + line.results + 2 * unit, sync.tag, most);
    }
  }

  // The block's share of what its matrix, and its rows and columns of tiles, have to gather.
  static F8_DEVICE void gather(const Sync& sync, const CastArgs& args, const Work& work) {
    if (kLines && !work.reads_lines) {
      i32 next = static_cast<i32>(threadIdx.x / 32);  // of the block's units, dealt to its warps
      for (i32 set = 0; set < work.sets(); ++set) {
        const LineOfTiles& line = work.lines[set];
        if (!line.used()) continue;
        // It has the line's units mine, mine + count, ...
        i32 unit = line.mine + next * line.count;
        for (; unit < kUnits; unit += kWarps * line.count, next += kWarps) {
          reduce_unit(sync, line, unit);
        }
        next -= (kUnits - 1 - line.mine + line.count) / line.count;
      }
    }
    if (Copies::kTensorScale && work.leads) {
      __shared__ u32 warps[kWarps];
      u32 most = 0;
      for (i32 i = static_cast<i32>(threadIdx.x); i < work.blocks; i += kTileThreads) {
        most = max(most, static_cast<u32>(wait_word(sync.block(work.first_block + i), sync.tag)));
      }
      most = warp_max(most);
      if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
      __syncthreads();
      if (threadIdx.x == 0) {
        for (int i = 1; i < kWarps; ++i) most = max(most, warps[i]);
        store_word(sync.matrix(work.matrix), sync.tag, most);
        u32* const amax = args.tensors[work.matrix].amax;
        if (amax != nullptr) atomicMax(amax, most);
      }
      __syncthreads();
    }
  }

  // The maxima of the block's lines from all tiles of its rows and columns of tiles: of two sets
  // four warps go over each; of three, four over the one that both tiles share. Each lane a unit.
  static F8_DEVICE void read_lines(const Sync& sync, const Work& work,
                                   u64 (&results)[kSets][kUnits]) {
    __shared__ u64 parts[kWarps][kUnits];
    const i32 warp = static_cast<i32>(threadIdx.x / 32);
    const i32 lane = static_cast<i32>(threadIdx.x % 32);
    const i32 longest = work.tall ? 1 : 0;
    const LineOfTiles& line = work.lines[warp < 4                       ? longest
                                         : warp >= 6 && work.tiles == 2 ? 2
                                                                        : 1 - longest];
    const i32 warps = warp >= 4 && work.tiles == 2 ? 2 : 4;
    const i32 count = line.used() ? line.count : 0;
    const i32 step = line.step;
    const u64* const words = sync.lines() + line.words + 2 * lane;
    u64 most = 0;
    for (i32 i = warp % warps; i < count; i += 2 * warps) {  // two words on their way
      const u64* const at[] = {words + i * step, words + min(i + warps, count - 1) * step};
      u64 fours[2];
      bool all;
      do {
        all = load_word(at[0], sync.tag, fours[0]);
        all = load_word(at[1], sync.tag, fours[1]) && all;
      } while (!all);
      most = max_of_four(most, max_of_four(fours[0], fours[1]));
    }
    parts[warp][lane] = most;
    __syncthreads();
    if (warp >= work.sets()) return;
    const i32 first = warp == longest ? 0 : warp == 2 ? 6 : 4;
    most = max_of_four(parts[first][lane], parts[first + 1][lane]);
    if (warp == longest || work.tiles == 1) {
      most = max_of_four(most, max_of_four(parts[first + 2][lane], parts[first + 3][lane]));
    }
    results[warp][lane] = most;
  }

  // Leaves the maxima of the block's lines in `lines` and a tensor's scale in `scales`, after the
  // next __syncthreads().
  static F8_DEVICE void wait_for_maxima(const Sync& sync, const CastArgs& args, const Work& work,
                                        u64 (&lines)[kSets][kUnits],
                                        typename Copies::Scales& scales) {
    const i32 thread = static_cast<i32>(threadIdx.x);
    if constexpr (Copies::kTensorScale) {
      if (thread == kTileThreads - 1) {
        scales.tensor =
            Copies::to_scale(static_cast<u32>(wait_word(sync.matrix(work.matrix), sync.tag)));
        if (work.leads) Copies::publish_tensor_scale(args.tensors[work.matrix], scales.tensor);
      }
    }
    if constexpr (kLines) {
      const i32 set = thread / kUnits;
      if (work.reads_lines) {
        read_lines(sync, work, lines);
      } else if (set < work.sets() && work.lines[set].used()) {
        lines[set][thread % kUnits] =
            wait_word(sync.lines() + work.lines[set].results + thread % kUnits * 2, sync.tag);
      }
    }
  }

  static F8_DEVICE void run(const QuantizeArgs& launch) {
    const CastArgs& args = launch.cast;
    const CastTensor& last = args.tensors[args.count - 1];
    const i32 tiles = last.first_block + last.blocks;
    const i32 blocks = static_cast<i32>(gridDim.x);
    const Place place(args, static_cast<i32>(blockIdx.x), blocks < tiles);
    const CastTensor& t = args.tensors[place.matrix];
    for (i32 i = 0; i < place.tiles(); ++i) {
      prefetch_tile<Config::kInput>(t.x, t.ld, t.rows, t.cols, place.row0(i), place.column0(i));
    }
    __shared__ Work work;
    if (threadIdx.x < kSets) work.note(args, place, tiles);
    begin_after_previous(args.beside);
    const Sync sync(launch.sync, tiles);
    Patch<Config::kInput> patch;
    __shared__ FirstMaxima first;
    i32 row0 = place.row0(0);
    i32 column0 = place.column0(0);
    for (i32 i = 0;; ++i) {
      __shared__ TileMaxima<Config::kInput> maxima;
      patch.load(t.x, t.ld, t.rows, t.cols, row0, column0);
      find_maxima<kRowLines, kColumnLines, true>(patch, maxima);
      __syncthreads();
      if (i + 1 == work.tiles) {
        publish(sync, work, maxima, first);
        break;
      }
      keep(maxima, first);
      patch.put_aside();
      row0 = work.row0[1];
      column0 = work.column0[1];
      __syncthreads();
    }
    gather(sync, args, work);
    __shared__ typename Copies::Scales scales;
    __shared__ u64 lines[kSets][kUnits];
    wait_for_maxima(sync, args, work, lines, scales);
    for (i32 i = work.tiles - 1;; --i) {
      row0 = work.row0[i];
      column0 = work.column0[i];
      __syncthreads();
      if constexpr (kLines) {
        using Values = Eight<Config::kInput>;
        const u16* rows = reinterpret_cast<const u16*>(lines[work.set_of_row(i)]);
        const u16* columns = reinterpret_cast<const u16*>(lines[work.set_of_column(i)]);
        Copies::axis_scales(
            t, row0, column0, [&](i32 j) { return Values::fp32_bits(rows[j]); },
            [&](i32 j) { return Values::fp32_bits(columns[j]); }, scales);
        __syncthreads();
      }
      if constexpr (Config::kRowMajor) Copies::write_row_major(t, patch, scales);
      if constexpr (Config::kTransposed) {
        Copies::write_transposed(t, patch, scales, row0, column0);
      }
      if (i == 0) break;
      patch.take_back(work.row0[0], work.column0[0]);
    }
    if (blockIdx.x == 0) {  // when all blocks have published, all have read the epoch
      constexpr i32 kAtOnce = 4;
      for (i32 i = static_cast<i32>(threadIdx.x); i < blocks; i += kAtOnce * kTileThreads) {
        bool all;
        do {
          all = true;
#pragma unroll
          for (i32 j = 0; j < kAtOnce; ++j) {
            u64 value;
            const i32 other = min(i + j * kTileThreads, blocks - 1);
            all = load_word(sync.block(other), sync.tag, value) && all;
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
