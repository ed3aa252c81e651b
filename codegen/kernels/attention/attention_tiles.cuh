// What the CTAs of attention_forward.cuh work on: blocks of 128 queries of a head, their tiles of 128 keys and values in
// shared memory, and the warp that loads them.
//
// A tile of q or k has its rows in boxes of 128 columns, and a tile of v^T in boxes of 128 rows, one behind the other:
// one box for heads of 64 and 128, two for heads of 256. A row of a box is 128 bytes with the swizzle of 128 bytes,
// but for q and k of heads of 64: these have 64, with the swizzle of 64.
#pragma once

#include "codegen/kernels/attention/attention_args.cuh"
#include "codegen/kernels/ptx.cuh"

namespace f8::kernels {

struct AttentionMaps {
  TensorMap q, k, v;
};

// A Config has kHeadDim, kCausal and kStages. With the Args of a window it is causal.
template <class Config, class Args>
struct AttentionTiles {
  static constexpr bool kWindow = Args::kWindow;
  static constexpr bool kPacked = Args::kPacked;
  static constexpr bool kCausal = Config::kCausal;
  static constexpr u32 kStages = Config::kStages;
  static constexpr u32 kD = Config::kHeadDim, kTileM = 128, kTileN = 128;
  static_assert(kD == 64 || kD == 128 || kD == 256, "boxes are whole");
  static constexpr u32 kTileBytes = 128 * kD;
  static constexpr u32 kBoxRow = kD < 128 ? kD : 128;  // bytes of q and k, and rows of v^T
  static constexpr u32 kBoxBytes = 128 * kBoxRow;
  static constexpr u32 kBoxes = kD / kBoxRow;
  static constexpr u32 kKeys = 2 * kTileBytes;  // places in shared memory, behind two of Q
  static constexpr u32 kValues = kKeys + kStages * kTileBytes;
  static constexpr u32 kBarriers = kValues + kStages * kTileBytes;
  static constexpr u32 kSharedBytes = kBarriers + 8 * (4 + 4 * kStages);
  static constexpr u32 kThreads = kAttentionThreads;

  // Which barriers tell that a tile is there, and that it has been read.
  enum Barrier : u32 {
    kFullQ = 0,
    kEmptyQ = 2,
    kFullK = 4,
    kEmptyK = 4 + kStages,
    kFullV = 4 + 2 * kStages,
    kEmptyV = 4 + 3 * kStages
  };
  template <u32 kCount>
  struct Stage {
    u32 index = 0, phase = 0;
    F8_DEVICE void advance() {
      if (++index == kCount) index = 0, phase ^= 1;
    }
  };
  // Queries of a head and their tiles of keys, from `begin` to `tiles`; the CTAs take those with the most keys first.
  struct Work {
    u32 block, q_head, kv_head, begin, tiles;
    AttentionBlock packed;  // where `block` is that of a sequence
    u32 packed_at;          // of all blocks of a head

    // These are the places of this block, and of a tile of its keys, among all blocks of a head.
    F8_DEVICE u32 place() const { return kPacked ? packed_at : block; }
    F8_DEVICE u32 key_block(u32 tile) const { return kPacked ? packed.first + tile : tile; }
    F8_DEVICE i32 keys(const Args& args) const { return kPacked ? packed.keys : args.keys; }
    // These are this block's first token among all queries, and the one behind its last.
    F8_DEVICE u32 first() const { return kPacked ? packed.token : block * kTileM; }
    F8_DEVICE i32 end(const Args& args) const {
      return kPacked ? packed.token + packed.tokens : args.queries;
    }
    F8_DEVICE bool is_empty() const { return begin >= tiles; }
  };
  static F8_DEVICE i32 blocks_of(const Args& args, i32 tokens) {
    if constexpr (kPacked) {
      return attention_packed_blocks(tokens, args.sequences);
    } else {
      return attention_blocks(tokens);
    }
  }
  static F8_DEVICE u32 works(const Args& args) {
    return static_cast<u32>(blocks_of(args, args.queries) * args.heads_q * args.batch);
  }
  static F8_DEVICE Work work_at(const Args& args, u32 index) {
    const u32 heads = args.heads_q * args.batch, blocks = blocks_of(args, args.queries);
    Work r;
    r.block = blocks - 1 - index / heads;
    if constexpr (kPacked) {
      r.packed_at = r.block;
      r.packed = args.blocks_q[r.packed_at];
      r.block = r.packed.index;
      if (r.packed.tokens == 0) r.packed.keys = 0;
    }
    const u32 key_blocks = attention_blocks(r.keys(args));
    r.q_head = index % heads;
    r.kv_head = r.q_head / (args.heads_q / args.heads_kv);
    r.begin = 0;
    if constexpr (kWindow) {
      r.begin = attention_first_tile(static_cast<i32>(r.block), args.window);
    }
    r.tiles = kCausal ? min(r.block + 1, key_blocks) : key_blocks;
    return r;
  }
  static F8_DEVICE u32 barrier(u32 shared, u32 which, u32 index) {
    return shared + kBarriers + 8 * (which + index);
  }

  static F8_DEVICE void prepare(u32 shared) {
    if (threadIdx.x == 0) {
      for (u32 i = 0; i < 2; ++i) {
        barrier_init(barrier(shared, kFullQ, i), 1);
        barrier_init(barrier(shared, kEmptyQ, i), 2);
      }
      for (u32 i = 0; i < kStages; ++i) {
        barrier_init(barrier(shared, kFullK, i), 1);
        barrier_init(barrier(shared, kFullV, i), 1);
        barrier_init(barrier(shared, kEmptyK, i), 2);
        barrier_init(barrier(shared, kEmptyV, i), 2);
      }
      barrier_init_fence();
    }
    __syncthreads();
  }

  // A tile of q or k from its first row.
  static F8_DEVICE void load_rows(u32 to, const TensorMap& map, u32 full, u32 row) {
    barrier_expect(full, kTileBytes);
#pragma unroll
    for (u32 i = 0; i < kBoxes; ++i) tma_load(to + i * kBoxBytes, &map, full, i * kBoxRow, row);
  }
  static F8_DEVICE void load(u32 shared, const AttentionMaps& maps, const Args& args) {
    const u32 rows_q = blocks_of(args, args.queries) * kTileM;
    const u32 rows_k = blocks_of(args, args.keys) * kTileN;
    Stage<kStages> stage;
    Stage<2> query;
    for (u32 i = blockIdx.x; i < works(args); i += gridDim.x) {
      const Work work = work_at(args, i);
      if constexpr (kPacked) {
        if (work.is_empty()) continue;
      }
      barrier_wait(barrier(shared, kEmptyQ, query.index), query.phase ^ 1);
      load_rows(shared + query.index * kTileBytes, maps.q, barrier(shared, kFullQ, query.index),
                work.q_head * rows_q + work.place() * kTileM);
      query.advance();
      for (u32 tile = work.tiles; tile-- > work.begin;) {
        barrier_wait(barrier(shared, kEmptyK, stage.index), stage.phase ^ 1);
        load_rows(shared + kKeys + stage.index * kTileBytes, maps.k,
                  barrier(shared, kFullK, stage.index),
                  work.kv_head * rows_k + work.key_block(tile) * kTileN);
        barrier_wait(barrier(shared, kEmptyV, stage.index), stage.phase ^ 1);
        const u32 full = barrier(shared, kFullV, stage.index);
        barrier_expect(full, kTileBytes);
#pragma unroll
        for (u32 i = 0; i < kBoxes; ++i) {
          tma_load(shared + kValues + stage.index * kTileBytes + i * kBoxBytes, &maps.v, full,
                   work.key_block(tile) * kTileN, work.kv_head * kD + i * kBoxRow);
        }
        stage.advance();
      }
    }
  }
};

}  // namespace f8::kernels
