// dQ of attention in fp8 (attention_backward.cuh): S = Q K^T, dP = dO V^T and dQ += dS K, for 64 keys at a time, which are
// half of a tile.
//
// A CTA has two warpgroups of 64 queries of a head, and a warp that loads Q and dO, and K, V and K^T, the last tile
// first, in stages of a tile, or of half of one where heads of 256 fill shared memory. S and dP of the next half are
// multiplied together with dQ of this one.
#pragma once

#include "codegen/kernels/attention/attention_backward.cuh"

namespace f8::kernels {

struct AttentionDqMaps {
  TensorMap q, dout, k, v, k_t;
};

// A Config has, besides what AttentionWorks asks for, kHeadDim and the MMAs mma(acc, desc_a, desc_b, accumulate) of 64
// rows by 64 columns and mma_registers(acc, a, desc_b, accumulate) of 64 rows by kHeadDim.
template <class Config, class Args>
struct AttentionDq : AttentionWorks<Config, Args> {
  using Works = AttentionWorks<Config, Args>;
  using typename Works::Rounds, typename Works::Work;
  using Works::kWindow, Works::kPacked, Works::kCausal, Works::blocks_of, Works::works,
      Works::work_at;
  static constexpr u32 kTile = kAttentionTile, kD = Config::kHeadDim, kHalf = 64;
  using Boxes = AttentionBoxes<kD>;
  // Stages of half a tile, and one place for queries, which a work waits for.
  static constexpr bool kHalves = kD > 128;
  static constexpr u32 kStages = 3, kQueries = kHalves ? 1 : 2;
  static constexpr u32 kKeysOfStage = kHalves ? kHalf : kTile;
  static constexpr u32 kPartBytes = kKeysOfStage * kD, kStageBytes = 3 * kPartBytes;
  static constexpr u32 kTileBytes = kTile * kD, kQueryBytes = 2 * kTileBytes;  // of Q and dO
  static constexpr u32 kKeys = kQueries * kQueryBytes;
  static constexpr u32 kBarriers = kKeys + kStages * kStageBytes;
  static constexpr u32 kSharedBytes = kBarriers + 8 * (2 * kQueries + 4 * kStages);
  static constexpr u32 kThreads = attention_threads(2);
  static constexpr u32 kTilesOfSum = 32;  // after which sums are added up in fp32

  enum Barrier : u32 {
    kFullQ = 0,
    kEmptyQ = kQueries,
    kFullKV = 2 * kQueries,
    kEmptyKV = kFullKV + kStages,
    kFullT = kFullKV + 2 * kStages,
    kEmptyT = kFullKV + 3 * kStages
  };
  using Ring = AttentionRing<kStages>;
  static F8_DEVICE u32 barrier(u32 shared, u32 which, u32 index) {
    return shared + kBarriers + 8 * (which + index);
  }

  static F8_DEVICE void load(u32 shared, const AttentionDqMaps& maps, const Args& args) {
    const u32 rows_q = blocks_of(args, args.queries) * kTile;
    const u32 rows_k = blocks_of(args, args.keys) * kTile;
    Ring stage;
    AttentionRing<kQueries> query;
    for (u32 i = Rounds::first(); i < works(args); i = Rounds::next(i)) {
      const Work work = work_at(args, i);
      if constexpr (kPacked) {
        if (work.is_empty()) continue;
      }
      const u32 full_q = barrier(shared, kFullQ, query.index);
      barrier_wait(barrier(shared, kEmptyQ, query.index), query.phase ^ 1);
      barrier_expect(full_q, 2 * kTileBytes);
      const u32 row = work.q_head * rows_q + work.place() * kTile;
      const u32 to_q = shared + query.index * kQueryBytes;
      Boxes::template load<kTile>(to_q, maps.q, full_q, row);
      Boxes::template load<kTile>(to_q + kTileBytes, maps.dout, full_q, row);
      query.advance();
      for (u32 tile = work.tiles; tile-- > work.begin;) {
#pragma unroll
        for (u32 part = kTile / kKeysOfStage; part-- > 0; stage.advance()) {
          const u32 to = shared + kKeys + stage.index * kStageBytes;
          const u32 first_key = work.key_block(tile) * kTile + part * kKeysOfStage;
          const u32 key = work.kv_head * rows_k + first_key;
          const u32 full = barrier(shared, kFullKV, stage.index);
          barrier_wait(barrier(shared, kEmptyKV, stage.index), stage.phase ^ 1);
          barrier_expect(full, 2 * kPartBytes);
          Boxes::template load<kKeysOfStage>(to, maps.k, full, key);
          Boxes::template load<kKeysOfStage>(to + kPartBytes, maps.v, full, key);
          const u32 full_t = barrier(shared, kFullT, stage.index);
          barrier_wait(barrier(shared, kEmptyT, stage.index), stage.phase ^ 1);
          barrier_expect(full_t, kPartBytes);
          tma_load(to + 2 * kPartBytes, &maps.k_t, full_t, first_key, work.kv_head * kD);
        }
      }
    }
  }

  // A warpgroup of 64 queries; rows and columns of its threads are those of attention_forward.cuh.
  struct Consumer {
    u32 shared;
    const Args& args;
    float s[32], dp[32], dq[kD / 2];
    u32 ds[8];
    float lse[2], delta[2];
    float scale_ds[2];  // of rows
    AttentionRing<kQueries> query;
    Ring key, key_t;

    F8_DEVICE Consumer(u32 shared, const Args& args) : shared(shared), args(args) {}

    // These are computed where they are used, since registers are few.
    static F8_DEVICE u32 warpgroup() { return threadIdx.x / 128 - 1; }
    static F8_DEVICE u32 lane() { return threadIdx.x % 32; }
    static F8_DEVICE u32 row() { return (threadIdx.x - 128) / 32 * 16 + lane() / 4; }
    F8_DEVICE AttentionSums sums() const {
      constexpr u32 kSums = attention_sums(kD);
      return {args.sums + u64{blockIdx.x} * kSums, warpgroup(), kSums / 2};
    }
    F8_DEVICE void release(u32 which, u32 index) const {
      if (threadIdx.x % 128 == 0) barrier_arrive(barrier(shared, which, index));
    }
    // Multiplies a tile of queries with 64 rows of a stage of keys.
    F8_DEVICE void multiply(float (&to)[32], u32 of_queries, u32 of_keys) {
      // Descriptors of one place would be kept over the loop, and registers are few.
      const u32 of_cta = kQueries == 1 ? opaque(shared) : shared;
      const u32 a = wgmma_descriptor_low(of_cta + query.index * kQueryBytes + of_queries +
                                         warpgroup() * 64 * Boxes::kBoxRow);
      const u32 b = wgmma_descriptor_low(shared + kKeys + key.index * kStageBytes + of_keys);
      Boxes::template multiply<Config, kTile, kKeysOfStage>(to, a, b);
    }
    F8_DEVICE void multiply_keys(u32 half) {
      const u32 first = kHalves ? 0 : half * kHalf * Boxes::kBoxRow;
      warpgroup_fence_operand(s);
      warpgroup_fence_operand(dp);
      wgmma_fence();
      multiply(s, 0, first);
      multiply(dp, kTileBytes, kPartBytes + first);
    }
    F8_DEVICE void multiply_gradients(u32 half) {
      const u32 b = wgmma_descriptor_low(shared + kKeys + key_t.index * kStageBytes +
                                         2 * kPartBytes + (kHalves ? 0 : half * kHalf));
      warpgroup_fence_words(ds);
      warpgroup_fence_operand(dq);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const u64 keys = kHalves ? wgmma_descriptor_64(b + 2 * k) : wgmma_descriptor(b + 2 * k);
        Config::mma_registers(dq, ds + 4 * k, keys, true);
      }
      wgmma_commit();
    }
    // A stage is there from its upper half on, and has been read with its lower one, if it has both.
    F8_DEVICE void wait_for_keys(u32 half) const {
      if (kHalves || half == 1) barrier_wait(barrier(shared, kFullKV, key.index), key.phase);
    }
    F8_DEVICE void wait_for_columns(u32 half) const {
      if (kHalves || half == 1) barrier_wait(barrier(shared, kFullT, key_t.index), key_t.phase);
    }
    F8_DEVICE void release_keys(u32 half) {
      if (!kHalves && half == 1) return;
      release(kEmptyKV, key.index);
      key.advance();
    }
    F8_DEVICE void release_columns(u32 half) {
      if (!kHalves && half == 1) return;
      release(kEmptyT, key_t.index);
      key_t.advance();
    }
    F8_DEVICE void probabilities(float factor) {
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = exp2_approx(fmaf(s[i], factor, -lse[i % 4 / 2]));
    }
    // P of keys that a query does not have is 0.
    F8_DEVICE void mask(const Work& work, u32 first_key) {
      const i32 first = static_cast<i32>(first_key + lane() % 4 * 2);
      const i32 query = static_cast<i32>(work.block * kTile + row()), keys = work.keys(args);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const i32 end = kCausal ? min(keys, query + i % 4 / 2 * 8 + 1) : keys;
        if (first + i / 4 * 8 + i % 2 >= end) s[i] = 0.0F;
      }
    }
    F8_DEVICE void mask_window(const Work& work, u32 first_key) {
      const i32 begin = static_cast<i32>(work.block * kTile + 1 - first_key) - args.window;
      if (begin + static_cast<i32>(kTile) <= 1) return;  // the last row has them all
      const i32 begin_of_row = begin + static_cast<i32>(row()) - static_cast<i32>(lane() % 4 * 2);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (i / 4 * 8 + i % 2 < begin_of_row + i % 4 / 2 * 8) s[i] = 0.0F;
      }
    }
    // dS in units of which k's sums are: `ratio` is that of this tile's scale to the largest one.
    F8_DEVICE void gradients(float inv_scale_v, float ratio) {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float scale = scale_ds[r] * ratio;
        const float factor = inv_scale_v * scale, less = -delta[r] * scale;
#pragma unroll
        for (int i = 2 * r; i < 32; i += i % 2 == 0 ? 1 : 3) s[i] *= fmaf(dp[i], factor, less);
      }
      round_to_operand(s, ds);
    }
    // The largest of the values of a work's tiles, kCount of each, none of which is negative; NaN where one is.
    template <u32 kCount>
    F8_DEVICE float largest(const float* of_tiles, const Work& work) const {
      u32 bits = 0;
      for (u32 i = work.begin * kCount + lane(); i < work.tiles * kCount; i += 32) {
        bits = max(bits, __float_as_uint(__ldg(of_tiles + i)));
      }
      return __uint_as_float(__reduce_max_sync(~0U, bits));
    }
    F8_DEVICE void statistics(const Work& work, float norm_v, float& of_q) {
      const u32 block = work.q_head * blocks_of(args, args.queries) + work.place();
      const float* record = args.steps + u64{2 * block + warpgroup()} * kAttentionStepFloats;
      of_q = load_global(record);
      const float scale_q = inverse_power(load_global(record + 1));
      const float bound_v = bound_of(norm_v);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* of_row = record + row() % 64 + 8 * r;
        lse[r] = load_global(of_row + kAttentionStepHeader);
        delta[r] = load_global(of_row + kAttentionStepDelta) * scale_q;
        const float bound = load_global(args.bounds_q + u64{block} * kTile + row() + 8 * r);
        scale_ds[r] = fminf(256.0F * bound * bound_v, 0x1p100F);
      }
    }
    // The gradient of queries without a key is 0.
    F8_DEVICE void store_nothing(const Work& work) {
#pragma unroll
      for (float& each : dq) each = 0.0F;
      store(work, 0.0F, 0.0F);
    }
    F8_DEVICE void store(const Work& work, float factor0, float factor1) const {
      // A pack is a batch of one.
      const u32 batch = kPacked ? 0 : work.q_head / args.heads_q;
      const u32 head = kPacked ? work.q_head : work.q_head % args.heads_q;
      store_gradient(args.dq, batch, head, work.first() + row(), work.end(args), dq, factor0,
                     factor1);
    }
    F8_DEVICE void differentiate(const Work& work) {
      if constexpr (kPacked) {
        if (work.is_empty()) return store_nothing(work);
      }
      const u32 first_block = work.kv_head * blocks_of(args, args.keys) + work.key_block(0);
      float of_q;
      const float* norms_v = args.norms_v + u64{first_block} * kAttentionNorms;
      statistics(work, largest<kAttentionNorms>(norms_v, work), of_q);
      u32 tile = work.tiles - 1;
      float k = __ldg(args.inv_scale_k + first_block + tile);
      float v = __ldg(args.inv_scale_v + first_block + tile);
      const float largest_k = largest<1>(args.inv_scale_k + first_block, work);
      const float inverse_k = inverse_power(largest_k);
#pragma unroll
      for (float& each : dq) each = 0.0F;
      barrier_wait(barrier(shared, kFullQ, query.index), query.phase);
      wait_for_keys(1);
      multiply_keys(1);
      wgmma_wait<0>();
      warpgroup_fence_operand(s);
      warpgroup_fence_operand(dp);
      release_keys(1);
      probabilities(of_q * k);
      mask(work, tile * kTile + kHalf);
      if constexpr (kWindow) mask_window(work, tile * kTile + kHalf);
      gradients(v, k * inverse_k);
      for (;; --tile) {
        // S and dP of the lower half, dQ of the upper one.
        wait_for_keys(0);
        wait_for_columns(1);
        multiply_keys(0);
        multiply_gradients(1);
        wgmma_wait<2>();
        warpgroup_fence_operand(s);
        probabilities(of_q * k);
        if (tile == work.tiles - 1) mask(work, tile * kTile);
        if constexpr (kWindow) mask_window(work, tile * kTile);
        finish_products();
        release_keys(0);
        release_columns(1);
        gradients(v, k * inverse_k);
        if (tile == work.begin) break;
        const u32 added = work.tiles - tile;
        if (added == kTilesOfSum) {
          sums().set(dq, 1.0F, 0);
        } else if (added % kTilesOfSum == 0) {
          sums().add(dq, 1.0F, 0);
        }
        // S and dP of the next tile's upper half, dQ of this one's lower half.
        k = __ldg(args.inv_scale_k + first_block + tile - 1);
        v = __ldg(args.inv_scale_v + first_block + tile - 1);
        wait_for_keys(1);
        wait_for_columns(0);
        multiply_keys(1);
        multiply_gradients(0);
        wgmma_wait<2>();
        warpgroup_fence_operand(s);
        probabilities(of_q * k);
        if constexpr (kWindow) mask_window(work, (tile - 1) * kTile + kHalf);
        finish_products();
        release_keys(1);
        release_columns(0);
        gradients(v, k * inverse_k);
      }
      release(kEmptyQ, query.index);
      query.advance();
      wait_for_columns(0);
      multiply_gradients(0);
      finish_products();
      release_columns(0);
      if (work.tiles - work.begin > kTilesOfSum) sums().take(dq, 1.0F, 0);
      const float factor = args.scale * largest_k;
      store(work, factor * inverse_power(scale_ds[0]), factor * inverse_power(scale_ds[1]));
    }
    F8_DEVICE void finish_products() {
      wgmma_wait<0>();
      warpgroup_fence_operand(dp);
      warpgroup_fence_operand(dq);
      warpgroup_fence_words(ds);
    }
  };

  static F8_DEVICE void prepare(u32 shared) {
    if (threadIdx.x == 0) {
      for (u32 i = 0; i < kQueries; ++i) {
        barrier_init(barrier(shared, kFullQ, i), 1);
        barrier_init(barrier(shared, kEmptyQ, i), 2);
      }
      for (u32 i = 0; i < kStages; ++i) {
        barrier_init(barrier(shared, kFullKV, i), 1);
        barrier_init(barrier(shared, kEmptyKV, i), 2);
        barrier_init(barrier(shared, kFullT, i), 1);
        barrier_init(barrier(shared, kEmptyT, i), 2);
      }
      barrier_init_fence();
    }
    __syncthreads();
  }
  static F8_DEVICE void run(const AttentionDqMaps& maps, const Args& args, void* memory) {
    grid_dependency_wait();
    launch_dependents();
    const u32 shared = smem_address(memory);
    prepare(shared);
    if (threadIdx.x < 128) {
      warpgroup_reg_dealloc<24>();
      if (threadIdx.x < 32 && elect_one()) load(shared, maps, args);
      return;
    }
    warpgroup_reg_alloc<240>();
    Consumer consumer(shared, args);
    for (u32 i = Rounds::first(); i < works(args); i = Rounds::next(i)) {
      consumer.differentiate(work_at(args, i));
    }
  }
};

}  // namespace f8::kernels
