// What the CTAs of attention_forward.cuh work on: the queries of a head, 64 for each of two or three warpgroups, their
// tiles of 128 keys and values in shared memory, and the warp that loads them.
//
// Queries of two warpgroups are a block with one scale, and packed sequences have no others. Those of three are one and
// a half: each warpgroup has a scale, and under a causal mask a last tile, of its own, and passes over later ones.
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

// The place of a ring of kCount stages, and the parity of its barriers.
template <u32 kCount>
struct AttentionRing {
  u32 index = 0, phase = 0;
  F8_DEVICE void advance() {
    if (++index == kCount) index = 0, phase ^= 1;
  }
};

// Clusters of kCluster CTAs take works in rounds, which begin with the ones with the most keys. Under a causal mask every
// second round goes from the last cluster to the first, so that none has more keys than the others in all of them. The
// last round may be short: where it goes backward, that moves its end.
template <bool kCausal, u32 kCluster = 1>
struct AttentionRounds {
  static F8_DEVICE u32 first() { return blockIdx.x / kCluster; }
  static F8_DEVICE u32 next(u32 i) {
    const u32 all = gridDim.x / kCluster, own = blockIdx.x / kCluster;
    if constexpr (kCausal) {
      const u32 round = i / all + 1;
      return round * all + (round % 2 == 0 ? own : all - 1 - own);
    }
    return i + all;
  }
};

// The queries that CTAs work on. A Config has kWarpgroups and kCausal; with the Args of a window it is causal.
template <class Config, class Args>
struct AttentionWorks {
  static constexpr bool kWindow = Args::kWindow;
  static constexpr bool kPacked = Args::kPacked;
  static constexpr bool kCausal = Config::kCausal;
  static constexpr u32 kWarpgroups = Config::kWarpgroups;
  static constexpr u32 kTileM = 64 * kWarpgroups, kTileN = 128;
  static constexpr bool kIsBlock = kWarpgroups == 2;  // The CTA's queries are a block.
  static_assert(kIsBlock || (kWarpgroups == 3 && !kPacked), "packed sequences are blocks");
  using Rounds = AttentionRounds<kCausal>;
  // Queries of a head and their tiles of keys, from `begin` to `tiles`. `block` counts those of CTAs; the CTAs take those with the most keys first.
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
    return attention_blocks_of(args, tokens);
  }
  static F8_DEVICE i32 works_of_head(const Args& args) {
    if constexpr (kIsBlock) {
      return blocks_of(args, args.queries);
    } else {
      return (args.queries + static_cast<i32>(kTileM) - 1) / static_cast<i32>(kTileM);
    }
  }
  static F8_DEVICE u32 works(const Args& args) {
    return static_cast<u32>(works_of_head(args) * args.heads_q * args.batch);
  }
  static F8_DEVICE Work work_at(const Args& args, u32 index) {
    const u32 heads = args.heads_q * args.batch, blocks = works_of_head(args);
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
      r.begin = attention_first_tile(static_cast<i32>(r.block * kTileM / kTileN), args.window);
    }
    const u32 causal = kIsBlock ? r.block + 1 : ((r.block + 1) * kTileM - 1) / kTileN + 1;
    r.tiles = kCausal ? min(causal, key_blocks) : key_blocks;
    return r;
  }
};

// Rows of a head in shared memory, in the boxes of a tile.
template <u32 kD>
struct AttentionBoxes {
  static_assert(kD == 64 || kD == 128 || kD == 256, "boxes are whole");
  static constexpr u32 kBoxRow = kD < 128 ? kD : 128, kBoxes = kD / kBoxRow;

  static F8_DEVICE u64 descriptor(u32 low) {
    return kBoxRow == 64 ? wgmma_descriptor_64(low) : wgmma_descriptor(low);
  }
  // Multiplies rows of a tile of kRowsA by those of one of kRowsB, which begin at these descriptors' low words.
  template <class Config, u32 kRowsA, u32 kRowsB, int kCount>
  static F8_DEVICE void multiply(float (&to)[kCount], u32 a, u32 b) {
#pragma unroll
    for (u32 k = 0; k < kD / 32; ++k) {
      const u32 of_a = a + k / 4 * (kRowsA * kBoxRow >> 4) + k % 4 * 2;
      const u32 of_b = b + k / 4 * (kRowsB * kBoxRow >> 4) + k % 4 * 2;
      Config::mma(to, descriptor(of_a), descriptor(of_b), k > 0);
    }
    wgmma_commit();
  }
  // Loads a tile of kRows from its first row; the barrier expects its bytes.
  template <u32 kRows>
  static F8_DEVICE void load(u32 to, const TensorMap& map, u32 full, u32 row) {
#pragma unroll
    for (u32 i = 0; i < kBoxes; ++i) {
      tma_load(to + i * kRows * kBoxRow, &map, full, i * kBoxRow, row);
    }
  }
};

// The memory of a CTA and the warp that fills it. A Config has besides kHeadDim and kStages.
template <class Config, class Args>
struct AttentionTiles : AttentionWorks<Config, Args> {
  using Works = AttentionWorks<Config, Args>;
  using typename Works::Rounds, typename Works::Work;
  using Works::kPacked, Works::kWarpgroups, Works::kTileM, Works::kTileN, Works::blocks_of,
      Works::works, Works::work_at;
  static constexpr u32 kStages = Config::kStages, kD = Config::kHeadDim;
  using Boxes = AttentionBoxes<kD>;
  static constexpr u32 kBoxRow = Boxes::kBoxRow;  // bytes of q and k, and rows of v^T
  static constexpr u32 kQueryBytes = kTileM * kD, kTileBytes = kTileN * kD;
  static constexpr u32 kBoxBytes = kTileN * kBoxRow;
  static constexpr u32 kKeys = 2 * kQueryBytes;  // places in shared memory, behind two of Q
  static constexpr u32 kValues = kKeys + kStages * kTileBytes;
  static constexpr u32 kBarriers = kValues + kStages * kTileBytes;
  static constexpr u32 kSharedBytes = kBarriers + 8 * (4 + 4 * kStages);
  static constexpr u32 kThreads = attention_threads(kWarpgroups);

  // Which barriers tell that a tile is there, and that it has been read.
  enum Barrier : u32 {
    kFullQ = 0,
    kEmptyQ = 2,
    kFullK = 4,
    kEmptyK = 4 + kStages,
    kFullV = 4 + 2 * kStages,
    kEmptyV = 4 + 3 * kStages
  };
  static F8_DEVICE u32 barrier(u32 shared, u32 which, u32 index) {
    return shared + kBarriers + 8 * (which + index);
  }

  static F8_DEVICE void prepare(u32 shared) {
    if (threadIdx.x == 0) {
      for (u32 i = 0; i < 2; ++i) {
        barrier_init(barrier(shared, kFullQ, i), 1);
        barrier_init(barrier(shared, kEmptyQ, i), kWarpgroups);
      }
      for (u32 i = 0; i < kStages; ++i) {
        barrier_init(barrier(shared, kFullK, i), 1);
        barrier_init(barrier(shared, kFullV, i), 1);
        barrier_init(barrier(shared, kEmptyK, i), kWarpgroups);
        barrier_init(barrier(shared, kEmptyV, i), kWarpgroups);
      }
      barrier_init_fence();
    }
    __syncthreads();
  }

  static F8_DEVICE void load(u32 shared, const AttentionMaps& maps, const Args& args) {
    const u32 rows_q = blocks_of(args, args.queries) * kAttentionTile;
    const u32 rows_k = blocks_of(args, args.keys) * kTileN;
    AttentionRing<kStages> stage;
    AttentionRing<2> query;
    for (u32 i = Rounds::first(); i < works(args); i = Rounds::next(i)) {
      const Work work = work_at(args, i);
      if constexpr (kPacked) {
        if (work.is_empty()) continue;
      }
      barrier_wait(barrier(shared, kEmptyQ, query.index), query.phase ^ 1);
      const u32 full_q = barrier(shared, kFullQ, query.index);
      barrier_expect(full_q, kQueryBytes);
      Boxes::template load<kTileM>(shared + query.index * kQueryBytes, maps.q, full_q,
                                   work.q_head * rows_q + work.place() * kTileM);
      query.advance();
      for (u32 tile = work.tiles; tile-- > work.begin;) {
        barrier_wait(barrier(shared, kEmptyK, stage.index), stage.phase ^ 1);
        const u32 full_k = barrier(shared, kFullK, stage.index);
        barrier_expect(full_k, kTileBytes);
        Boxes::template load<kTileN>(shared + kKeys + stage.index * kTileBytes, maps.k, full_k,
                                     work.kv_head * rows_k + work.key_block(tile) * kTileN);
        barrier_wait(barrier(shared, kEmptyV, stage.index), stage.phase ^ 1);
        const u32 full_v = barrier(shared, kFullV, stage.index);
        barrier_expect(full_v, kTileBytes);
#pragma unroll
        for (u32 i = 0; i < Boxes::kBoxes; ++i) {
          tma_load(shared + kValues + stage.index * kTileBytes + i * kBoxBytes, &maps.v, full_v,
                   work.key_block(tile) * kTileN, work.kv_head * kD + i * kBoxRow);
        }
        stage.advance();
      }
    }
  }
};

}  // namespace f8::kernels
