// Fused dynamic quantization in one launch: the amaxes of a list of matrices, their scales, and the
// copies, with the same results as the amax and the cast kernel. All blocks are resident at once (a
// cooperative launch). Each has one tile or, where the grid is smaller than the number of tiles,
// two neighbouring ones: it keeps one in registers and the other in shared memory while it waits
// for the amaxes of the others, so that every matrix is read once.
//
// A strip is a row or a column of tiles; a quad is the amaxes of 4 neighbouring rows or columns, as
// u16[4]. Blocks exchange words of 16 bytes, { u64 tag, u64 value }, each written and read by one
// instruction, through `sync` in global memory:
//   epoch                  u64: counts launches; u64 of padding
//   matrices x word        the matrix's amax
//   tiles x word           the amax of each block's tiles; some are unused where blocks have two
//   tiles x 64 x word      with axis scales alone: the quads of a tile's 128 rows and 128 columns;
//                          quads of a strip that both tiles of a block share lie with the first one
//   strips x 32 x word     the quads of whole strips: of each matrix's rows of tiles, then of its
//                          columns of tiles, one matrix after another
// The block of a matrix's first tile gathers the matrix's amax. Every block gathers the quads of
// its strips where they are few; else the blocks of a strip gather them for each other, some quads
// each, since reading every tile's words in every block would take longer than reading the matrix
// does. A block does all of these duties before it waits for a result, so no block waits in a
// circle.
//
// A word belongs to this launch where it has the launch's tag: tags mix the epoch and the grid id.
// So the contents of `sync` before the first launch do not matter, but nobody else may write to it
// between launches. Each word is read on its own, so nothing needs to order them.
#pragma once

#include "codegen/kernels/cast/cast.cuh"

namespace f8::kernels {

// --- tagged words
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
// True when the word has come.
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
// Mixes the bits of x; it is a bijection.
F8_DEVICE u64 mix(u64 x) {
  x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ULL;
  x = (x ^ (x >> 27)) * 0x94D049BB133111EBULL;
  return x ^ (x >> 31);
}
F8_DEVICE u64 max_of_quads(u64 a, u64 b) {
  const u32 low = max_u16x2(static_cast<u32>(a), static_cast<u32>(b));
  const u32 high = max_u16x2(static_cast<u32>(a >> 32), static_cast<u32>(b >> 32));
  return low | static_cast<u64>(high) << 32;
}
F8_DEVICE u64 grid_id() {
  u64 r;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(r));
  return r;
}

// Config is that of Cast, with tensor and axis scales alone, and 16-bit inputs.
template <class Config>
struct Quantize {
  using Copies = Cast<Config>;
  static constexpr bool kRowAxis = Copies::kRowAxis;
  static constexpr bool kColumnAxis = Copies::kColumnAxis;
  static constexpr bool kAxis = kRowAxis || kColumnAxis;
  static constexpr i32 kQuads = kCastTile / 4;  // of a strip
  static constexpr i32 kWarps = kTileThreads / 32;
  // A block gathers its strips itself where it has at most as many tiles to read, for one and for
  // two tiles of its own.
  static constexpr i32 kMaxDirect = 56;
  static constexpr i32 kMaxDirectOfTwo = 64;
  static constexpr i32 kSharedBytes = kStashBytes;  // dynamic: the tile that waits
  static_assert(Config::kInput != Input::kF32 && !Config::kDelayed);

  // The place of a strip's words, in u64 from Sync::quads().
  struct Strip {
    bool is_row;
    bool shared;  // both of a block's tiles are in it
    i32 count;    // of the tiles that have words
    i32 mine;     // the index of this block's tile among these
    i32 words;    // the words of the first tile
    i32 step;     // from the words of one tile to those of the next
    i32 results;  // the words of the whole strip
    F8_DEVICE bool used() const { return is_row ? kRowAxis : kColumnAxis; }
  };
  static constexpr i32 kU64sOfTile = 2 * 2 * kQuads;

  // Which tiles a block has. `pairs`: blocks have two.
  struct BlockTiles {
    i32 matrix = 0;
    i32 first_block = 0, first_strip = 0;  // of the matrix
    i32 blocks, across, down;
    bool wide, tall;  // two tiles lie side by side, one above the other
    i32 row, column;  // of the first tile
    F8_DEVICE BlockTiles(const CastArgs& args, i32 block, bool pairs) {
      for (;; ++matrix) {
        const CastTensor& t = args.tensors[matrix];
        across = (t.cols + kCastTile - 1) / kCastTile;
        down = (t.rows + kCastTile - 1) / kCastTile;
        blocks = pairs ? static_cast<i32>(pairs_of_tiles(across, down)) : across * down;
        if (block < first_block + blocks) break;
        first_block += blocks;
        first_strip += across + down;
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
    F8_DEVICE bool reads_strips() const {
      if (wide) return (across + 1) / 2 + 2 * down <= kMaxDirectOfTwo;
      if (tall) return 2 * across + (down + 1) / 2 <= kMaxDirectOfTwo;
      return across + down <= kMaxDirect;
    }
    // The strips of a block: 0 is the row of its first tile, 1 the column, and 2 the one of these
    // that a second tile does not share.
    F8_DEVICE Strip strip(i32 set, i32 first_tile, i32 all_tiles) const {
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
              (first_tile + of * (is_row ? across : 1)) * kU64sOfTile + (is_row ? 0 : 2 * kQuads),
              (shared ? 2 * step : step) * kU64sOfTile,
              all_tiles * kU64sOfTile + (first_strip + (is_row ? of : down + of)) * 2 * kQuads};
    }
  };

  // BlockTiles and its strips for later, in shared memory: computing them again in all warps of an
  // SM would take longer than the words that they wait for.
  static constexpr i32 kSets = 3;
  struct BlockPlan {
    i32 matrix;
    i32 first_block, blocks;  // of the matrix
    i32 tiles;
    i32 row0[kMaxTilesOfBlock], column0[kMaxTilesOfBlock];
    bool leads;         // is the matrix's first block
    bool reads_strips;  // gathers its strips itself, else the blocks of a strip share them
    bool tall;
    Strip strips[kSets];
    F8_DEVICE i32 sets() const { return 1 + tiles; }
    F8_DEVICE i32 set_of_row(i32 tile) const { return tall ? 2 * tile : 0; }
    F8_DEVICE i32 set_of_column(i32 tile) const { return tall ? 1 : 1 + tile; }

    // The first kSets threads fill it.
    F8_DEVICE void fill(const CastArgs& args, const BlockTiles& block_tiles, i32 all_tiles) {
      const i32 set = static_cast<i32>(threadIdx.x);
      strips[set] = block_tiles.strip(set, args.tensors[block_tiles.matrix].first_block, all_tiles);
      if (set > 0) return;
      matrix = block_tiles.matrix;
      first_block = block_tiles.first_block;
      blocks = block_tiles.blocks;
      tiles = block_tiles.tiles();
      for (i32 i = 0; i < kMaxTilesOfBlock; ++i) {
        row0[i] = block_tiles.row0(i);
        column0[i] = block_tiles.column0(i);
      }
      leads = block_tiles.row == 0 && block_tiles.column == 0;
      reads_strips = block_tiles.reads_strips();
      tall = block_tiles.tall;
    }
  };

  struct Sync {
    u64* epoch;
    i32 tile_count;
    u64 tag;
    F8_DEVICE Sync(u64* sync, i32 tiles)
        : epoch(sync), tile_count(tiles), tag(mix(count() ^ mix(grid_id()))) {}
    // This launch's number, valid until the last block has published.
    F8_DEVICE u64 count() const { return load_relaxed(epoch) + 1; }
    F8_DEVICE u64* matrix(i32 i) const { return epoch + 2 + 2 * i; }
    F8_DEVICE u64* block(i32 i) const { return matrix(kMaxTensors) + 2 * i; }
    // Each tile has the quads of its rows, then of its columns; behind all tiles are the results.
    F8_DEVICE u64* quads() const { return block(tile_count); }
  };

  // The amaxes of the first of two tiles, kept while the second is read.
  struct FirstTileAmax {
    u64 quads[2 * kQuads];
    u32 amax;
  };
  static F8_DEVICE void keep(const TileAmax<Config::kInput>& tile_amax, FirstTileAmax& first) {
    const u32 index = threadIdx.x;
    if (kAxis && index < 2 * kQuads && (index < kQuads ? kRowAxis : kColumnAxis)) {
      first.quads[index] = index < kQuads ? tile_amax.quad_of_rows(index)
                                          : tile_amax.quad_of_columns(index - kQuads);
    }
    if (index == kTileThreads - 1) first.amax = tile_amax.amax();
  }

  // Writes the words of the block's tiles. `tile_amax` is that of the last tile.
  static F8_DEVICE void publish(const Sync& sync, const BlockPlan& plan,
                                const TileAmax<Config::kInput>& tile_amax,
                                const FirstTileAmax& first) {
    const u32 set = threadIdx.x / kQuads;
    const u32 index = threadIdx.x % kQuads;
    const bool two = plan.tiles == 2;
    if (kAxis && set < static_cast<u32>(plan.sets()) && plan.strips[set].used()) {
      const Strip& strip = plan.strips[set];
      u64 quad = strip.is_row ? tile_amax.quad_of_rows(index) : tile_amax.quad_of_columns(index);
      if (two && set < 2) {
        const u64 quad_of_first = first.quads[strip.is_row ? index : kQuads + index];
        quad = strip.shared ? max_of_quads(quad, quad_of_first) : quad_of_first;
      }
      store_word(sync.quads() + strip.words + strip.mine * strip.step + 2 * index, sync.tag, quad);
    }
    if (threadIdx.x == kTileThreads - 1) {
      const u32 amax = tile_amax.amax();
      store_word(sync.block(blockIdx.x), sync.tag, two ? max(amax, first.amax) : amax);
    }
  }

  // A warp gathers one quad of a strip.
  static F8_DEVICE void reduce_quad(const Sync& sync, const Strip& strip, i32 index) {
    u64 most = 0;
    const u64* const words = sync.quads() + strip.words + 2 * index;
    for (i32 i = static_cast<i32>(threadIdx.x % 32); i < strip.count; i += 32) {
      most = max_of_quads(most, wait_word(words + i * strip.step, sync.tag));
    }
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
      most = max_of_quads(most, __shfl_xor_sync(0xFFFFFFFFU, most, lane));
    }
    if (threadIdx.x % 32 == 0) {
      store_word(sync.quads() + strip.results + 2 * index, sync.tag, most);
    }
  }

  // Gathers this block's part of the results of its strips and of its matrix.
  static F8_DEVICE void gather(const Sync& sync, const CastArgs& args, const BlockPlan& plan) {
    if (kAxis && !plan.reads_strips) {
      i32 next =
          static_cast<i32>(threadIdx.x / 32);  // of the block's quads, distributed over its warps
      for (i32 set = 0; set < plan.sets(); ++set) {
        const Strip& strip = plan.strips[set];
        if (!strip.used()) continue;
        // The block has the strip's quads mine, mine + count, ...
        i32 index = strip.mine + next * strip.count;
        for (; index < kQuads; index += kWarps * strip.count, next += kWarps) {
          reduce_quad(sync, strip, index);
        }
        next -= (kQuads - 1 - strip.mine + strip.count) / strip.count;
      }
    }
    if (Copies::kTensorScale && plan.leads) {
      __shared__ u32 warps[kWarps];
      u32 most = 0;
      for (i32 i = static_cast<i32>(threadIdx.x); i < plan.blocks; i += kTileThreads) {
        most = max(most, static_cast<u32>(wait_word(sync.block(plan.first_block + i), sync.tag)));
      }
      most = warp_max(most);
      if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = most;
      __syncthreads();
      if (threadIdx.x == 0) {
        for (int i = 1; i < kWarps; ++i) most = max(most, warps[i]);
        store_word(sync.matrix(plan.matrix), sync.tag, most);
        u32* const amax = args.tensors[plan.matrix].amax;
        if (amax != nullptr) atomicMax(amax, most);
      }
      __syncthreads();
    }
  }

  // Gathers the block's strips from the words of all of their tiles, each lane a quad: four warps
  // read each of two strips; of three, four read the one that both tiles share, and two each of the
  // others.
  static F8_DEVICE void read_strips(const Sync& sync, const BlockPlan& plan,
                                    u64 (&results)[kSets][kQuads]) {
    __shared__ u64 parts[kWarps][kQuads];
    const i32 warp = static_cast<i32>(threadIdx.x / 32);
    const i32 lane = static_cast<i32>(threadIdx.x % 32);
    const i32 longest = plan.tall ? 1 : 0;
    const Strip& strip = plan.strips[warp < 4                       ? longest
                                     : warp >= 6 && plan.tiles == 2 ? 2
                                                                    : 1 - longest];
    const i32 warps = warp >= 4 && plan.tiles == 2 ? 2 : 4;
    const i32 count = strip.used() ? strip.count : 0;
    const i32 step = strip.step;
    const u64* const words = sync.quads() + strip.words + 2 * lane;
    u64 most = 0;
    for (i32 i = warp % warps; i < count; i += 2 * warps) {  // two words in flight
      const u64* const at[] = {words + i * step, words + min(i + warps, count - 1) * step};
      u64 quads[2];
      bool all;
      do {
        all = load_word(at[0], sync.tag, quads[0]);
        all = load_word(at[1], sync.tag, quads[1]) && all;
      } while (!all);
      most = max_of_quads(most, max_of_quads(quads[0], quads[1]));
    }
    parts[warp][lane] = most;
    __syncthreads();
    if (warp >= plan.sets()) return;
    const i32 first = warp == longest ? 0 : warp == 2 ? 6 : 4;
    most = max_of_quads(parts[first][lane], parts[first + 1][lane]);
    if (warp == longest || plan.tiles == 1) {
      most = max_of_quads(most, max_of_quads(parts[first + 2][lane], parts[first + 3][lane]));
    }
    results[warp][lane] = most;
  }

  // Leaves the quads of the block's strips in `amax` and a tensor scale in `scales`, valid after
  // the next __syncthreads().
  static F8_DEVICE void wait_for_amax(const Sync& sync, const CastArgs& args, const BlockPlan& plan,
                                      u64 (&amax)[kSets][kQuads], typename Copies::Scales& scales) {
    const i32 thread = static_cast<i32>(threadIdx.x);
    if constexpr (Copies::kTensorScale) {
      if (thread == kTileThreads - 1) {
        scales.tensor =
            Copies::to_scale(static_cast<u32>(wait_word(sync.matrix(plan.matrix), sync.tag)));
        if (plan.leads) Copies::publish_tensor_scale(args.tensors[plan.matrix], scales.tensor);
      }
    }
    if constexpr (kAxis) {
      const i32 set = thread / kQuads;
      if (plan.reads_strips) {
        read_strips(sync, plan, amax);
      } else if (set < plan.sets() && plan.strips[set].used()) {
        amax[set][thread % kQuads] =
            wait_word(sync.quads() + plan.strips[set].results + thread % kQuads * 2, sync.tag);
      }
    }
  }

  static F8_DEVICE void run(const QuantizeArgs& launch) {
    const CastArgs& args = launch.cast;
    const CastTensor& last = args.tensors[args.count - 1];
    const i32 tiles = last.first_block + last.blocks;
    const i32 blocks = static_cast<i32>(gridDim.x);
    const BlockTiles block_tiles(args, static_cast<i32>(blockIdx.x), blocks < tiles);
    const CastTensor& t = args.tensors[block_tiles.matrix];
    for (i32 i = 0; i < block_tiles.tiles(); ++i) {
      prefetch_tile<Config::kInput>(t.x, t.ld, t.rows, t.cols, block_tiles.row0(i),
                                    block_tiles.column0(i));
    }
    __shared__ BlockPlan plan;
    if (threadIdx.x < kSets) plan.fill(args, block_tiles, tiles);
    begin_overlapped(args.overlap);
    const Sync sync(launch.sync, tiles);
    ThreadFragment<Config::kInput> fragment;
    __shared__ FirstTileAmax first;
    i32 row0 = block_tiles.row0(0);
    i32 column0 = block_tiles.column0(0);
    for (i32 i = 0;; ++i) {
      __shared__ TileAmax<Config::kInput> tile_amax;
      fragment.load(t.x, t.ld, t.rows, t.cols, row0, column0);
      find_tile_amax<kRowAxis, kColumnAxis, true>(fragment, tile_amax);
      __syncthreads();
      if (i + 1 == plan.tiles) {
        publish(sync, plan, tile_amax, first);
        break;
      }
      keep(tile_amax, first);
      fragment.stash();
      row0 = plan.row0[1];
      column0 = plan.column0[1];
      __syncthreads();
    }
    gather(sync, args, plan);
    __shared__ typename Copies::Scales scales;
    __shared__ u64 amax[kSets][kQuads];
    wait_for_amax(sync, args, plan, amax, scales);
    for (i32 i = plan.tiles - 1;; --i) {
      row0 = plan.row0[i];
      column0 = plan.column0[i];
      __syncthreads();
      if constexpr (kAxis) {
        using Values = Vec8<Config::kInput>;
        const u16* rows = reinterpret_cast<const u16*>(amax[plan.set_of_row(i)]);
        const u16* columns = reinterpret_cast<const u16*>(amax[plan.set_of_column(i)]);
        Copies::axis_scales(
            t, row0, column0, [&](i32 j) { return Values::fp32_bits(rows[j]); },
            [&](i32 j) { return Values::fp32_bits(columns[j]); }, scales);
        __syncthreads();
      }
      if constexpr (Config::kRowMajor) Copies::write_row_major(t, fragment, scales);
      if constexpr (Config::kTransposed) {
        Copies::write_transposed(t, fragment, scales, row0, column0);
      }
      if (i == 0) break;
      fragment.restore(plan.row0[0], plan.column0[0]);
    }
    if (blockIdx.x == 0) {  // all blocks have read the epoch when all have published
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
    end_overlapped();
  }
};

}  // namespace f8::kernels
