// dK and dV of attention in fp8 (attention_backward.cuh): S^T = K Q^T, dP^T = V dO^T, dV += P^T dO and dK += dS^T Q, for
// 64 queries at a time. Registers hold the sums of both for heads of 64 and 128; for heads of 256 there is a kernel of
// each, which has the operands and products that it needs.
//
// A cluster of two CTAs has two blocks of 128 keys of a head, each in two warpgroups of 64 keys, and goes through all
// queries of the heads that share it. A warp of each CTA loads one half of each tile of queries for both: Q and dO, their
// transposed copies, and its own copy of the record of these queries (attention_backward_args.cuh).
#pragma once

#include "codegen/kernels/attention/attention_backward.cuh"

namespace f8::kernels {

struct AttentionDkvMaps {
  TensorMap k, v, q, dout, q_t, dout_t;
};

// A Config is that of AttentionDq, with kDk and kDv, which say what gradients the kernel computes.
template <class Config, class Args>
struct AttentionDkv {
  static constexpr bool kWindow = Args::kWindow, kPacked = Args::kPacked;
  static constexpr bool kCausal = Config::kCausal;
  static constexpr u32 kCluster = kAttentionKeyCluster;
  static constexpr bool kDk = Config::kDk, kDv = Config::kDv;
  static constexpr u32 kTile = kAttentionTile, kD = Config::kHeadDim;
  static constexpr u32 kStages = kDk && kD > 128 ? 3 : 4;
  using Rounds = AttentionRounds<kCausal, kCluster>;
  using Boxes = AttentionBoxes<kD>;
  static constexpr u32 kTileBytes = kTile * kD, kStepBytes = kAttentionStep * kD;
  static constexpr u32 kRecordBytes = 4 * kAttentionStepFloats;
  // Q, and dO for dK; dO^T for dV, and Q^T for dK.
  static constexpr u32 kRowBytes = (1 + kDk) * kStepBytes;
  static constexpr u32 kColumnBytes = (kDk + kDv) * kStepBytes;
  static constexpr u32 kRows = (1 + kDk) * kTileBytes;  // behind K, and V for dK
  static constexpr u32 kColumns = kRows + kStages * kRowBytes;
  static constexpr u32 kColumnsOfDout = kDk ? kStepBytes : 0;  // behind Q^T
  static constexpr u32 kRecords = kColumns + kStages * kColumnBytes;
  static constexpr u32 kValues = kRecords + kStages * kRecordBytes;  // of each warp
  static constexpr u32 kValueBytes = 32;
  static constexpr u32 kBarriers = kValues + 8 * kValueBytes;
  static constexpr u32 kSharedBytes = kBarriers + 8 * (2 + 4 * kStages);
  static constexpr u32 kThreads = attention_threads(2);
  static constexpr u32 kStepsOfSum = 64;  // after which sums are added up in fp32

  enum Barrier : u32 {
    kFullK = 0,
    kEmptyK = 1,
    kFullRows = 2,
    kEmptyRows = 2 + kStages,
    kFullColumns = 2 + 2 * kStages,
    kEmptyColumns = 2 + 3 * kStages
  };
  static F8_DEVICE u32 barrier(u32 shared, u32 which, u32 index) {
    return shared + kBarriers + 8 * (which + index);
  }

  // Two blocks of keys of a sequence, and the steps of 64 queries of each head that have them. These and `block` count in
  // the sequence.
  struct Work {
    u32 block, kv_head, first, end;
    i32 queries, keys;
    u32 place, first_step;  // of all blocks of keys, and of all steps, of a head
    u32 token;              // the sequence's first one

    F8_DEVICE u32 steps() const { return end - first; }
  };
  static F8_DEVICE u32 blocks_of(const Args& args, i32 tokens) {
    return attention_blocks_of(args, tokens);
  }
  // A work begins with each block of packed sequences; one with an odd index, or without keys, is empty.
  static F8_DEVICE u32 works_of_head(const Args& args) {
    const u32 blocks = blocks_of(args, args.keys);
    return kPacked ? blocks : (blocks + kCluster - 1) / kCluster;
  }
  static F8_DEVICE u32 works(const Args& args) {
    return works_of_head(args) * args.heads_kv * args.batch;
  }
  static F8_DEVICE Work work_at(const Args& args, u32 index) {
    const u32 heads = args.heads_kv * args.batch;
    Work r;
    r.kv_head = index % heads;
    if constexpr (kPacked) {
      r.place = index / heads;
      const AttentionBlock block = args.blocks_k[r.place];
      r.block = block.index;
      r.queries = block.queries;
      r.keys = block.tokens > 0 ? block.keys : 0;
      r.first_step = 2 * block.first_q;
      r.token = block.token - block.index * kAttentionTile;
    } else {
      r.block = r.place = index / heads * kCluster;
      r.queries = args.queries;
      r.keys = args.keys;
      r.first_step = r.token = 0;
    }
    r.end = 2 * static_cast<u32>(attention_blocks(r.queries));
    if constexpr (kWindow) {  // The last key's last query is the window's.
      const u64 query = u64{(r.block + kCluster) * kTile} + static_cast<u32>(args.window) - 2;
      r.end = static_cast<u32>(min(u64{r.end}, query / kAttentionStep + 1));
    }
    r.first = kCausal ? min(2 * r.block, r.end) : 0;
    return r;
  }
  static F8_DEVICE bool is_empty(const Work& work) {
    return kPacked && (work.keys == 0 || work.block % kCluster != 0);
  }

  // This CTA's part of the rows, or of the columns, of a step, for both.
  static constexpr u16 kBoth = (1 << kCluster) - 1;
  static F8_DEVICE void load_rows(u32 to, const TensorMap& map, u32 full, u32 row) {
    const u32 first = blockIdx.x % kCluster * (kAttentionStep / kCluster);
#pragma unroll
    for (u32 i = 0; i < Boxes::kBoxes; ++i) {
      tma_load_multicast(to + (i * kAttentionStep + first) * Boxes::kBoxRow, &map, full, kBoth,
                         i * Boxes::kBoxRow, row + first);
    }
  }
  static F8_DEVICE void load_columns(u32 to, const TensorMap& map, u32 full, u32 step, u32 head) {
    const u32 first = blockIdx.x % kCluster * (kD / kCluster);
    tma_load_multicast(to + first * kAttentionStep, &map, full, kBoth, step * kAttentionStep,
                       head * kD + first);
  }
  static F8_DEVICE void load(u32 shared, const AttentionDkvMaps& maps, const Args& args) {
    const u32 rank = blockIdx.x % kCluster, group = args.heads_q / args.heads_kv;
    const u32 rows_k = blocks_of(args, args.keys) * kTile;
    const u32 steps_of_head = 2 * blocks_of(args, args.queries);
    AttentionRing<kStages> stage;
    u32 phase = 0;
    for (u32 i = Rounds::first(); i < works(args); i = Rounds::next(i)) {
      const Work work = work_at(args, i);
      if (is_empty(work)) continue;
      const u32 full_k = barrier(shared, kFullK, 0);
      barrier_wait(barrier(shared, kEmptyK, 0), phase ^ 1);
      phase ^= 1;
      barrier_expect(full_k, (1 + kDk) * kTileBytes);
      const u32 key = work.kv_head * rows_k + (work.place + rank) * kTile;
      Boxes::template load<kTile>(shared, maps.k, full_k, key);
      if constexpr (kDk) Boxes::template load<kTile>(shared + kTileBytes, maps.v, full_k, key);
      for (u32 head = work.kv_head * group; head < (work.kv_head + 1) * group; ++head) {
        for (u32 i = work.first; i < work.end; ++i, stage.advance()) {
          const u32 step = work.first_step + i;
          const u64 record = u64{head} * steps_of_head + step;
          const u32 full = barrier(shared, kFullRows, stage.index);
          barrier_wait(barrier(shared, kEmptyRows, stage.index), stage.phase ^ 1);
          barrier_expect(full, kRowBytes + kRecordBytes);
          const u32 rows = shared + kRows + stage.index * kRowBytes;
          const u32 row = static_cast<u32>(record) * kAttentionStep;
          load_rows(rows, maps.q, full, row);
          if constexpr (kDk) load_rows(rows + kStepBytes, maps.dout, full, row);
          bulk_load(shared + kRecords + stage.index * kRecordBytes,
                    args.steps + record * kAttentionStepFloats, full, kRecordBytes);
          const u32 full_t = barrier(shared, kFullColumns, stage.index);
          barrier_wait(barrier(shared, kEmptyColumns, stage.index), stage.phase ^ 1);
          barrier_expect(full_t, kColumnBytes);
          const u32 columns = shared + kColumns + stage.index * kColumnBytes;
          if constexpr (kDk) load_columns(columns, maps.q_t, full_t, step, head);
          if constexpr (kDv) {
            load_columns(columns + kColumnsOfDout, maps.dout_t, full_t, step, head);
          }
        }
      }
    }
  }

  // A warpgroup of 64 keys. A thread has the keys of two rows, and of each eight queries two.
  struct Consumer {
    u32 shared;
    const Args& args;
    u32 first_key = 0;  // of the warpgroup
    float s[32], dp[32], dk[kD / 2], dv[kD / 2];
    u32 p[8], ds[8];
    float exponent_p;  // P is multiplied by 2^-exponent_p
    float scale_ds;    // and dS by this besides
    bool saturates;    // whether an element of P may
    u32 phase_k = 0;
    u32 steps = 0;  // so far, of all works

    F8_DEVICE Consumer(u32 shared, const Args& args) : shared(shared), args(args) {}

    // These are computed where they are used, since registers are few.
    static F8_DEVICE u32 lane() { return threadIdx.x % 32; }
    F8_DEVICE u32 row() const { return threadIdx.x % 128 / 32 * 16 + lane() / 4; }
    F8_DEVICE u32 warpgroup() const { return first_key / 64 % 2; }
    F8_DEVICE AttentionSums sums() const {
      constexpr u32 kSums = (kDk + kDv) * attention_sums(kD);
      return {args.sums + u64{blockIdx.x} * kSums, warpgroup(), kSums / 2};
    }
    // The first query of a head's steps, and the one behind the last.
    F8_DEVICE u32 first_query() const {
      if constexpr (kWindow || kPacked) return count(kFirstQuery);
      return kCausal ? first_key / (kCluster * kTile) * (kCluster * kTile) : 0;
    }
    F8_DEVICE u32 end_query() const {
      if constexpr (kWindow || kPacked) return count(kEndQuery);
      return attention_blocks(args.queries) * kTile;
    }
    // The stage of this step, and of the one before it, whose columns are multiplied together with this one's rows.
    static F8_DEVICE u32 stage(u32 step) { return step % kStages; }
    static F8_DEVICE u32 phase(u32 step) { return step / kStages % 2; }
    F8_DEVICE void wait_for_rows() const {
      barrier_wait(barrier(shared, kFullRows, stage(steps)), phase(steps));
    }
    F8_DEVICE void wait_for_columns() const {
      barrier_wait(barrier(shared, kFullColumns, stage(steps - 1)), phase(steps - 1));
    }
    // Each warp reads records for itself, so each tells both CTAs that it has.
    F8_DEVICE void release(u32 which, u32 index) const {
      __syncwarp();
      if (lane() < kCluster) barrier_arrive_remote(barrier(shared, which, index), lane());
    }
    // A warp keeps these values of a work in shared memory, since registers are few.
    enum Value : u32 {
      kInvScaleK = 0,
      kInvScaleV = 4,
      kNormV = 8,  // the largest one of the warp's keys
      kKeys = 12,  // of the sequence
      kFirstQuery = 16,
      kEndQuery = 20
    };
    F8_DEVICE u32 values() const { return shared + kValues + (threadIdx.x / 32 - 4) * kValueBytes; }
    F8_DEVICE float value(Value which) const { return load_shared(values() + which); }
    F8_DEVICE u32 count(Value which) const { return __float_as_uint(value(which)); }
    F8_DEVICE void keep(const Work& work, u32 block_of_all) const {
      __syncwarp();
      store_shared(values() + kInvScaleK, __ldg(args.inv_scale_k + block_of_all));
      store_shared(values() + kInvScaleV, __ldg(args.inv_scale_v + block_of_all));
      const u32 norm = block_of_all * kAttentionNorms + threadIdx.x / 32 - 4;
      store_shared(values() + kNormV, __ldg(args.norms_v + norm));
      store_shared(values() + kKeys, static_cast<u32>(work.keys));
      store_shared(values() + kFirstQuery, work.first * kAttentionStep);
      store_shared(values() + kEndQuery, work.end * kAttentionStep);
      __syncwarp();
    }
    F8_DEVICE u32 record() const { return shared + kRecords + stage(steps) * kRecordBytes; }
    // LSE or delta, which begin `at` floats in the record, of queries 8 i + 2 (lane % 4) and the next one.
    F8_DEVICE float2 of_queries(i32 at, u32 i) const {
      return load_shared_pair(record() + 4 * at + i * 32 + threadIdx.x % 4 * 8);
    }
    F8_DEVICE void multiply(float (&to)[32], u32 of_keys, u32 of_rows) {
      const u32 a =
          wgmma_descriptor_low(opaque(shared) + of_keys + warpgroup() * 64 * Boxes::kBoxRow);
      const u32 b = wgmma_descriptor_low(shared + kRows + stage(steps) * kRowBytes + of_rows);
      Boxes::template multiply<Config, kTile, kAttentionStep>(to, a, b);
    }
    F8_DEVICE void multiply_queries() {
      warpgroup_fence_operand(s);
      if constexpr (kDk) warpgroup_fence_operand(dp);
      wgmma_fence();
      multiply(s, 0, 0);
      if constexpr (kDk) multiply(dp, kTileBytes, kStepBytes);
    }
    F8_DEVICE void fence_gradients() {
      if constexpr (kDv) warpgroup_fence_words(p);
      if constexpr (kDk) warpgroup_fence_words(ds);
      if constexpr (kDk) warpgroup_fence_operand(dk);
      if constexpr (kDv) warpgroup_fence_operand(dv);
    }
    static F8_DEVICE void add_products(float (&to)[kD / 2], const u32 (&a)[8], u32 b) {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        Config::mma_registers(to, a + 4 * k, wgmma_descriptor_64(b + 2 * k), true);
      }
    }
    F8_DEVICE void multiply_gradients() {
      const u32 b = wgmma_descriptor_low(shared + kColumns + stage(steps - 1) * kColumnBytes);
      fence_gradients();
      wgmma_fence();
      if constexpr (kDv) add_products(dv, p, b + (kColumnsOfDout >> 4));
      if constexpr (kDk) add_products(dk, ds, b);
      wgmma_commit();
    }
    F8_DEVICE void finish_gradients() {
      wgmma_wait<0>();
      if constexpr (kDk) warpgroup_fence_operand(dp);
      fence_gradients();
      release(kEmptyColumns, stage(steps - 1));
    }
    // Returns true where a query of a step does not have a key of the warpgroup.
    F8_DEVICE bool is_masked(u32 first_query) const {
      bool r = kCausal && first_query < first_key + 64;
      if constexpr (kWindow) {
        r = r || first_query + kAttentionStep > first_key + static_cast<u32>(args.window);
      }
      return r;
    }
    // Scores of keys that a query does not have are -inf.
    F8_DEVICE void mask(u32 first_query) {
      const i32 key = static_cast<i32>(first_key + row());
      const i32 query = static_cast<i32>(first_query + threadIdx.x % 4 * 2);
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        const i32 before = query + i / 4 * 8 + i % 2 - key - i % 4 / 2 * 8;
        bool has = !kCausal || before >= 0;
        if constexpr (kWindow) has = has && before < args.window;
        if (!has) s[i] = __int_as_float(static_cast<i32>(0xFF800000U));
      }
    }
    // Sets what lies behind the last key to x: it has a score of 0, whose P may be larger than all others.
    F8_DEVICE void set_behind_last_key(float x) {
      const i32 left = static_cast<i32>(count(kKeys) - first_key - row());
#pragma unroll
      for (int i = 0; i < 32; ++i) {
        if (i % 4 / 2 * 8 >= left) s[i] = x;
      }
    }
    // P^T times dO's scales and 2^-exponent_p.
    template <bool kFirst>
    F8_DEVICE void probabilities(u32 first_query) {
      const float factor = value(kInvScaleK) * load_shared(record());
      const float less = kFirst ? 0.0F : exponent_p;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 lse = of_queries(kAttentionStepHeader, j);
        const float even = -lse.x - less, odd = -lse.y - less;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[4 * j + i] = fmaf(s[4 * j + i], factor, i % 2 == 0 ? even : odd);
        }
      }
      if (is_masked(first_query)) mask(first_query);
      if constexpr (kFirst) {
        set_behind_last_key(__int_as_float(static_cast<i32>(0xFF800000U)));
        first_exponent();
      }
#pragma unroll
      for (float& each : s) each = exp2_approx(each);
      if constexpr (!kFirst) saturates = may_saturate(s);
    }
    static F8_DEVICE float largest(const float (&x)[32]) {
      float most = 0;
#pragma unroll
      for (int i = 0; i < 32; ++i) most = fmaxf(most, fabsf(x[i]));
      return __uint_as_float(__reduce_max_sync(~0U, __float_as_uint(most)));
    }
    // The first step's P is at most 2^7. Where it has none it is as if P were 2^-40.
    F8_DEVICE void first_exponent() {
      float most = load_shared(record() + 16) - 40.0F;
#pragma unroll
      for (const float each : s) most = fmaxf(most, each);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        most = fmaxf(most, __shfl_xor_sync(~0U, most, step));
      }
      exponent_p = ceilf(most) - 7.0F;
#pragma unroll
      for (float& each : s) each -= exponent_p;
    }
    template <int kCount>
    static F8_DEVICE void multiply_all(float (&x)[kCount], float by) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) x[i] *= by;
    }
    // Multiplies P, and what was added of it, so that no element saturates.
    F8_DEVICE void scale_p() {
      set_behind_last_key(0.0F);
      float by = scale_for_e4m3(largest(s));
      if (by > 1.0F) by = 1.0F;
      exponent_p -= __log2f(by);
      multiply_all(s, by);
      if constexpr (kDv) multiply_all(dv, by);
      if constexpr (kDk) multiply_all(dk, by);
    }
    // Makes dS no larger than P, by a bound of dO V^T - delta.
    template <bool kFirst>
    F8_DEVICE void bound_gradients() {
      const float scale =
          bound_of(fmaf(value(kNormV), load_shared(record() + 8), load_shared(record() + 12)));
      if constexpr (kFirst) {
        scale_ds = scale;
      } else if (!(scale >= scale_ds)) {
        multiply_all(dk, scale * inverse_power(scale_ds));
        scale_ds = scale;
      }
    }
    // Rounds P^T, and then dS^T, which takes its place.
    template <bool kFirst>
    F8_DEVICE void round() {
      if (!kFirst && __any_sync(~0U, saturates)) scale_p();
      if constexpr (kDv) round_to_operand(s, p);
      if constexpr (kDk) round_gradients<kFirst>();
    }
    template <bool kFirst>
    F8_DEVICE void round_gradients() {
      bound_gradients<kFirst>();
      const float factor = value(kInvScaleV) * load_shared(record() + 4) * scale_ds;
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        const float2 delta = of_queries(kAttentionStepDelta, j);
        const float even = -delta.x * scale_ds, odd = -delta.y * scale_ds;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
          s[4 * j + i] *= fmaf(dp[4 * j + i], factor, i % 2 == 0 ? even : odd);
        }
      }
      round_to_operand(s, ds);
    }
    F8_DEVICE float scale_of_sums() const {
      return exp2_approx(exponent_p);
    }
    static constexpr u32 kSumsOfDk = kDv ? kD / 8 : 0;  // the vectors of dK's sums, behind dV's
    F8_DEVICE void add_up(float (&x)[kD / 2], float factor, u32 at, bool is_first) const {
      if (is_first) {
        sums().set(x, factor, at);
      } else {
        sums().add(x, factor, at);
      }
    }
    F8_DEVICE void add_up(bool is_first) {
      const float of_p = scale_of_sums();
      if constexpr (kDv) add_up(dv, of_p, 0, is_first);
      if constexpr (kDk) add_up(dk, of_p * inverse_power(scale_ds), kSumsOfDk, is_first);
    }
    F8_DEVICE void take(float (&x)[kD / 2], float factor, u32 at, bool is_first) const {
      if (is_first) {
        multiply_all(x, factor);
      } else {
        sums().take(x, factor, at);
      }
    }
    F8_DEVICE void take(bool is_first) {
      const float of_p = scale_of_sums();
      if constexpr (kDv) take(dv, of_p, 0, is_first);
      if constexpr (kDk) take(dk, of_p * inverse_power(scale_ds), kSumsOfDk, is_first);
    }
    F8_DEVICE void store(const Work& work) const {
      const u32 batch = kPacked ? 0 : work.kv_head / args.heads_kv;
      const u32 head = kPacked ? work.kv_head : work.kv_head % args.heads_kv;
      const u32 token = work.token + first_key + row();
      const i32 end = static_cast<i32>(work.token) + work.keys;
      if constexpr (kDv) store_gradient(args.dv, batch, head, token, end, dv, 1.0F, 1.0F);
      if constexpr (kDk) {
        store_gradient(args.dk, batch, head, token, end, dk, args.scale, args.scale);
      }
    }
    // Computes the gradients of work `index`. Registers are few, so values that the loop does not need are computed before
    // and behind it.
    F8_DEVICE void differentiate(u32 index) {
      u32 left, query;  // steps to come, and a step's first query
      {
        const Work work = work_at(args, index);
        if (is_empty(work)) return;
        const u32 rank = blockIdx.x % kCluster, blocks = blocks_of(args, args.keys);
        keep(work, work.kv_head * blocks + min(work.place + rank, blocks - 1));
        first_key = (work.block + rank) * kTile + (threadIdx.x / 128 - 1) * 64;
        query = work.first * kAttentionStep;
        left = work.steps() * (args.heads_q / args.heads_kv);
      }
#pragma unroll
      for (u32 i = 0; i < kD / 2; ++i) dk[i] = dv[i] = 0.0F;
      barrier_wait(barrier(shared, kFullK, 0), phase_k);
      phase_k ^= 1;
      if (left > 0) {
        wait_for_rows();
        multiply_queries();
        wgmma_wait<0>();
        warpgroup_fence_operand(s);
        if constexpr (kDk) warpgroup_fence_operand(dp);
        probabilities<true>(query);
        round<true>();
        release(kEmptyRows, stage(steps));
        ++steps;
        bool is_first = true;
        while (--left > 0) {
          query += kAttentionStep;
          if (query == end_query()) query = first_query();
          wait_for_rows();
          wait_for_columns();
          multiply_queries();
          multiply_gradients();
          wgmma_wait<kDk ? 2 : 1>();
          warpgroup_fence_operand(s);
          probabilities<false>(query);
          finish_gradients();
          if (left % kStepsOfSum == 0) {
            add_up(is_first);
            is_first = false;
          }
          round<false>();
          release(kEmptyRows, stage(steps));
          ++steps;
        }
        wait_for_columns();
        multiply_gradients();
        finish_gradients();
        take(is_first);
      }
      if (threadIdx.x % 128 == 0) barrier_arrive(barrier(shared, kEmptyK, 0));
      store(work_at(args, opaque(index)));
    }
  };

  static F8_DEVICE void prepare(u32 shared) {
    if (threadIdx.x == 0) {
      barrier_init(barrier(shared, kFullK, 0), 1);
      barrier_init(barrier(shared, kEmptyK, 0), 2);
      for (u32 i = 0; i < kStages; ++i) {
        barrier_init(barrier(shared, kFullRows, i), 1);
        barrier_init(barrier(shared, kEmptyRows, i), 8 * kCluster);
        barrier_init(barrier(shared, kFullColumns, i), 1);
        barrier_init(barrier(shared, kEmptyColumns, i), 8 * kCluster);
      }
      barrier_init_fence();
    }
    __syncthreads();
    cluster_sync();
  }
  static F8_DEVICE void run(const AttentionDkvMaps& maps, const Args& args, void* memory) {
    grid_dependency_wait();
    launch_dependents();
    const u32 shared = smem_address(memory);
    prepare(shared);
    if (threadIdx.x < 128) {
      warpgroup_reg_dealloc<24>();
      if (threadIdx.x < 32 && elect_one()) load(shared, maps, args);
      __syncwarp();
    } else {
      warpgroup_reg_alloc<240>();
      Consumer consumer(shared, args);
      for (u32 i = Rounds::first(); i < works(args); i = Rounds::next(i)) {
        consumer.differentiate(i);
      }
    }
    cluster_sync();  // no CTA tells another one that has ended
  }
};

}  // namespace f8::kernels
