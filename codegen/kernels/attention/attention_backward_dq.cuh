// dQ of attention in fp8 (attention_backward.cuh): S = Q K^T, dP = dO V^T and dQ += dS K, for 64 keys at a time.
//
// A CTA has two warpgroups of 64 queries of a head, and a warp that loads Q and dO, and tiles of 128 keys of K, V and
// K^T, the last one first. S and dP of the next 64 keys are multiplied together with dQ of these.
#pragma once

#include "codegen/kernels/attention/attention_backward.cuh"
#include "codegen/kernels/cast/scale.cuh"

namespace f8::kernels {

struct AttentionDqMaps {
  TensorMap q, dout, k, v, k_t;
};

// A Config has, besides what AttentionWorks asks for, the MMAs mma(acc, desc_a, desc_b, accumulate) of 64 rows by 64
// columns and mma_registers(acc, a, desc_b, accumulate) of 64 rows by 128.
template <class Config, class Args>
struct AttentionDq : AttentionWorks<Config, Args> {
  using Works = AttentionWorks<Config, Args>;
  using typename Works::Rounds, typename Works::Work;
  using Works::kWindow, Works::kPacked, Works::kCausal, Works::blocks_of, Works::works,
      Works::work_at;
  static constexpr u32 kStages = 3, kTile = kAttentionTile, kD = 128, kTileBytes = kTile * kD;
  static constexpr u32 kStageBytes = 3 * kTileBytes;  // of K, V and K^T
  static constexpr u32 kQueryBytes = 2 * kTileBytes;  // of Q and dO
  static constexpr u32 kKeys = 2 * kQueryBytes;       // behind two of these
  static constexpr u32 kBarriers = kKeys + kStages * kStageBytes;
  static constexpr u32 kSharedBytes = kBarriers + 8 * (4 + 4 * kStages);
  static constexpr u32 kThreads = attention_threads(2);
  static constexpr u32 kTilesOfSum = 32;  // after which sums are added up in fp32

  enum Barrier : u32 {
    kFullQ = 0,
    kEmptyQ = 2,
    kFullKV = 4,
    kEmptyKV = 4 + kStages,
    kFullT = 4 + 2 * kStages,
    kEmptyT = 4 + 3 * kStages
  };
  using Ring = AttentionRing<kStages>;
  static F8_DEVICE u32 barrier(u32 shared, u32 which, u32 index) {
    return shared + kBarriers + 8 * (which + index);
  }

  static F8_DEVICE void load(u32 shared, const AttentionDqMaps& maps, const Args& args) {
    const u32 rows_q = blocks_of(args, args.queries) * kTile;
    const u32 rows_k = blocks_of(args, args.keys) * kTile;
    Ring stage;
    AttentionRing<2> query;
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
      tma_load(to_q, &maps.q, full_q, 0, row);
      tma_load(to_q + kTileBytes, &maps.dout, full_q, 0, row);
      query.advance();
      for (u32 tile = work.tiles; tile-- > work.begin; stage.advance()) {
        const u32 to = shared + kKeys + stage.index * kStageBytes;
        const u32 first_key = work.key_block(tile) * kTile;
        const u32 key = work.kv_head * rows_k + first_key;
        const u32 full = barrier(shared, kFullKV, stage.index);
        barrier_wait(barrier(shared, kEmptyKV, stage.index), stage.phase ^ 1);
        barrier_expect(full, 2 * kTileBytes);
        tma_load(to, &maps.k, full, 0, key);
        tma_load(to + kTileBytes, &maps.v, full, 0, key);
        const u32 full_t = barrier(shared, kFullT, stage.index);
        barrier_wait(barrier(shared, kEmptyT, stage.index), stage.phase ^ 1);
        barrier_expect(full_t, kTileBytes);
        tma_load(to + 2 * kTileBytes, &maps.k_t, full_t, first_key, work.kv_head * kD);
      }
    }
  }

  // A warpgroup of 64 queries; rows and columns of its threads are those of attention_forward.cuh.
  struct Consumer {
    u32 shared;
    const Args& args;
    u32 warpgroup, lane, row;
    bool leader;
    AttentionSums sums;
    float s[32], dp[32], dq[64];
    u32 ds[8];
    float lse[2], delta[2];
    float scale_ds[2];  // of rows
    AttentionRing<2> query;
    Ring key, key_t;

    F8_DEVICE Consumer(u32 shared, const Args& args)
        : shared(shared),
          args(args),
          warpgroup(threadIdx.x / 128 - 1),
          lane(threadIdx.x % 32),
          row(warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4),
          leader(threadIdx.x % 128 == 0),
          sums(args.sums + u64{blockIdx.x} * kAttentionSumsOfQueries, warpgroup,
               kAttentionSumsOfQueries / 2) {}

    F8_DEVICE void release(u32 which, u32 index) const {
      if (leader) barrier_arrive(barrier(shared, which, index));
    }
    // Multiplies a tile of queries with 64 rows of a tile of keys.
    F8_DEVICE void multiply(float (&to)[32], u32 of_queries, u32 of_keys) {
      const u32 a = wgmma_descriptor_low(shared + query.index * kQueryBytes + of_queries +
                                         warpgroup * 64 * kD);
      const u32 b = wgmma_descriptor_low(shared + kKeys + key.index * kStageBytes + of_keys);
      multiply_rows<Config>(to, a, b);
    }
    F8_DEVICE void multiply_keys(u32 half) {
      warpgroup_fence_operand(s);
      warpgroup_fence_operand(dp);
      wgmma_fence();
      multiply(s, 0, half * 64 * kD);
      multiply(dp, kTileBytes, kTileBytes + half * 64 * kD);
    }
    F8_DEVICE void multiply_gradients(u32 half) {
      const u32 b = wgmma_descriptor_low(shared + kKeys + key_t.index * kStageBytes +
                                         2 * kTileBytes + half * 64);
      warpgroup_fence_words(ds);
      warpgroup_fence_operand(dq);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        Config::mma_registers(dq, ds + 4 * k, wgmma_descriptor(b + 2 * k), true);
      }
      wgmma_commit();
    }
    F8_DEVICE void probabilities(float factor) {
#pragma unroll
      for (int i = 0; i < 32; ++i) s[i] = exp2_approx(fmaf(s[i], factor, -lse[i % 4 / 2]));
    }
    // P of keys that a query does not have is 0.
    F8_DEVICE void mask(const Work& work, u32 first_key) {
      const i32 first = static_cast<i32>(first_key + lane % 4 * 2);
      const i32 query = static_cast<i32>(work.block * kTile + row), keys = work.keys(args);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const i32 end = kCausal ? min(keys, query + i % 4 / 2 * 8 + 1) : keys;
        if (first + i / 4 * 8 + i % 2 >= end) s[i] = 0.0F;
      }
    }
    F8_DEVICE void mask_window(const Work& work, u32 first_key) {
      const i32 begin = static_cast<i32>(work.block * kTile + 1 - first_key) - args.window;
      if (begin + static_cast<i32>(kTile) <= 1) return;  // the last row has them all
      const i32 begin_of_row = begin + static_cast<i32>(row) - static_cast<i32>(lane % 4 * 2);
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
      for (u32 i = work.begin * kCount + lane; i < work.tiles * kCount; i += 32) {
        bits = max(bits, __float_as_uint(__ldg(of_tiles + i)));
      }
      return __uint_as_float(__reduce_max_sync(~0U, bits));
    }
    F8_DEVICE void statistics(const Work& work, float norm_v, float& of_q) {
      const u32 block = work.q_head * blocks_of(args, args.queries) + work.place();
      const float* record = args.steps + u64{2 * block + warpgroup} * kAttentionStepFloats;
      of_q = load_global(record);
      const float scale_q = inverse(load_global(record + 1));
      const float bound_v = bound_of(norm_v);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* at = record + kAttentionStepHeader + 2 * (row % 64 + 8 * r);
        lse[r] = load_global(at);
        delta[r] = load_global(at + 1) * scale_q;
        const float bound = load_global(args.bounds_q + u64{block} * kTile + row + 8 * r);
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
      store_gradient(args.dq, batch, head, work.first() + row, work.end(args), dq, factor0,
                     factor1);
    }
    F8_DEVICE void differentiate(const Work& work) {
      if constexpr (kPacked) {
        if (work.is_empty()) return store_nothing(work);
      }
      const u32 first_block = work.kv_head * blocks_of(args, args.keys) + work.key_block(0);
      const float* scale_k = args.inv_scale_k + first_block;
      const float* scale_v = args.inv_scale_v + first_block;
      float of_q;
      const float* norms_v = args.norms_v + u64{first_block} * kAttentionNorms;
      statistics(work, largest<kAttentionNorms>(norms_v, work), of_q);
      u32 tile = work.tiles - 1;
      float k = __ldg(scale_k + tile), v = __ldg(scale_v + tile);
      const float largest_k = largest<1>(scale_k, work);
      const float inverse_k = inverse(largest_k);
#pragma unroll
      for (float& each : dq) each = 0.0F;
      barrier_wait(barrier(shared, kFullQ, query.index), query.phase);
      barrier_wait(barrier(shared, kFullKV, key.index), key.phase);
      multiply_keys(1);
      wgmma_wait<0>();
      warpgroup_fence_operand(s);
      warpgroup_fence_operand(dp);
      probabilities(of_q * k);
      mask(work, tile * kTile + 64);
      if constexpr (kWindow) mask_window(work, tile * kTile + 64);
      gradients(v, k * inverse_k);
      const u32 last = tile;
      bool is_first = true;
      for (u32 added = 0;; --tile) {
        // S and dP of the lower half, dQ of the upper one.
        barrier_wait(barrier(shared, kFullT, key_t.index), key_t.phase);
        multiply_keys(0);
        multiply_gradients(1);
        wgmma_wait<2>();
        warpgroup_fence_operand(s);
        probabilities(of_q * k);
        if (tile == last) mask(work, tile * kTile);
        if constexpr (kWindow) mask_window(work, tile * kTile);
        finish_products();
        release(kEmptyKV, key.index);
        key.advance();
        gradients(v, k * inverse_k);
        if (tile == work.begin) break;
        if (++added == kTilesOfSum) {
          if (is_first) {
            sums.set(dq, 1.0F, 0);
          } else {
            sums.add(dq, 1.0F, 0);
          }
          is_first = false;
          added = 0;
        }
        // S and dP of the next tile's upper half, dQ of this one's lower half.
        k = __ldg(scale_k + tile - 1);
        v = __ldg(scale_v + tile - 1);
        barrier_wait(barrier(shared, kFullKV, key.index), key.phase);
        multiply_keys(1);
        multiply_gradients(0);
        wgmma_wait<2>();
        warpgroup_fence_operand(s);
        probabilities(of_q * k);
        if constexpr (kWindow) mask_window(work, (tile - 1) * kTile + 64);
        finish_products();
        release(kEmptyT, key_t.index);
        key_t.advance();
        gradients(v, k * inverse_k);
      }
      release(kEmptyQ, query.index);
      query.advance();
      multiply_gradients(0);
      finish_products();
      release(kEmptyT, key_t.index);
      key_t.advance();
      if (!is_first) sums.take(dq, 1.0F, 0);
      const float factor = args.scale * largest_k;
      store(work, factor / scale_ds[0], factor / scale_ds[1]);
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
      for (u32 i = 0; i < 2; ++i) {
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
