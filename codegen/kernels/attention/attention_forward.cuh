// The forward of attention in fp8: O = softmax(scale Q K^T) V for heads of 64, 128 and 256, with LSE, full, causal or
// causal within a sliding window, of a batch or of packed sequences (attention_args.cuh).
//
//   q [b][h][s][d], k [b][g][s][d]     e4m3, with a scale for each 128 tokens of a head, a power of two
//   v^T [b][g][d][s]                   e4m3, the tokens of each 16 in the order of fragments (below)
//   o [b][queries][h][d] bf16, lse [b][h][queries] fp32
//
// s is a whole number of blocks of 128 tokens, of the queries' or of the keys'; what lies behind the last key
// is masked, and of what lies behind the last query nothing is stored. Under a causal mask query i has the
// keys up to the i-th one, and of these in a window the last ones. Tiles are read from the last one to the first,
// so a query's first tile has a key of its own: later ones that are masked as a whole find a finite maximum.
//
// A CTA has two or three warpgroups of 64 queries of a head, next to one warp that loads. Both products are fp8
// MMAs; S, its softmax and the sums are fp32. P is rounded to e4m3 of 2^8 P in registers, and is the next
// MMA's operand as it lies there: an accumulator has columns 2c, 2c + 1, 8 + 2c, 9 + 2c where an operand has
// k = 4c to 4c + 3, so v^T has the tokens 0, 1, 8, 9, 2, 3, 10, 11, ... of each 16.
//
// The sum over keys is added to O in fp32 every 128 keys, by the multiplication that the softmax does anyway
// (O = O correction + tile), so that it is exact for long sequences.
//
// Two warpgroups with heads up to 128 multiply S of a tile together with P V of the tile before it, and add that one to O
// between the exponentials of this one. A thread has no registers for that where there are three, or heads of 256: P V
// of a tile follows its softmax, in parts of 64 columns.
#pragma once

#include "codegen/kernels/attention/attention_tiles.cuh"
#include "codegen/kernels/attention/e4m3.cuh"
#include "codegen/kernels/ptx.cuh"

namespace f8::kernels {

F8_DEVICE float exp2_approx(float x) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(x));
  return r;
}
template <int kCount>
F8_DEVICE void warpgroup_fence_words(u32 (&words)[kCount]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) asm volatile("" : "+r"(words[i])::"memory");
}
// The largest, and the sum, of the four threads that have a row of an accumulator.
F8_DEVICE float row_max(float x) {
  x = fmaxf(x, __shfl_xor_sync(~0U, x, 1));
  return fmaxf(x, __shfl_xor_sync(~0U, x, 2));
}

F8_DEVICE float row_sum(float x) {
  x += __shfl_xor_sync(~0U, x, 1);
  return x + __shfl_xor_sync(~0U, x, 2);
}

// A Config has, besides what AttentionTiles asks for, the MMAs mma(acc, desc_a, desc_b, accumulate) of 64 rows by 128
// columns and mma_registers(acc, a, desc_b, accumulate) of 64 rows by kValueColumns, whose a is four words.
template <class Config, class Args = AttentionArgs>
struct AttentionForward : AttentionTiles<Config, Args> {
  using Tiles = AttentionTiles<Config, Args>;
  using Tiles::kWindow, Tiles::kPacked, Tiles::kCausal, Tiles::kStages, Tiles::kD,
      Tiles::kWarpgroups, Tiles::kIsBlock, Tiles::kTileM, Tiles::kQueryBytes, Tiles::kTileN,
      Tiles::kTileBytes, Tiles::kBoxRow, Tiles::kKeys, Tiles::kValues, Tiles::kFullQ,
      Tiles::kEmptyQ, Tiles::kFullK, Tiles::kEmptyK, Tiles::kFullV, Tiles::kEmptyV, Tiles::barrier,
      Tiles::blocks_of;
  using typename Tiles::Boxes, typename Tiles::Rounds, typename Tiles::Work;

  // P V follows the softmax of its tile, in parts of kValueColumns.
  static constexpr bool kInParts = kD > 128 || kWarpgroups > 2;
  static constexpr u32 kValueColumns = kInParts ? 64 : kD;
  static constexpr u32 kParts = kD / kValueColumns;
  // A warpgroup's last tile of keys may be another than the CTA's.
  static constexpr bool kOwnLastTile = kCausal && !kIsBlock;
  // P V comes in the next round of the loop over tiles, before S of that one. Three warpgroups are faster so, and two
  // are not, by measuring.
  static constexpr bool kInNextRound = kWarpgroups == 3;
  static constexpr u32 kBuffers = kInParts && kParts > 2 ? 2 : 1;
  static constexpr int kOfThread = kD / 2, kOfPart = kValueColumns / 2;  // elements of O

  // A warpgroup of 64 queries. A thread has the rows g and g + 8 of its warp's 16, g = lane / 4: of
  // each eight columns 2 (lane % 4) and the next one.
  struct Consumer {
    u32 shared;
    const Args& args;
    u32 warpgroup, lane, row;
    bool leader;
    float s[64], o[kOfThread];
    float tile[kBuffers][kOfPart];  // of P V
    u32 p[16];
    float most[2], sum[2];
    float correction_o[2];  // of what lies in o, by the tile that follows
    AttentionRing<2> query;
    AttentionRing<kStages> key, value;

    F8_DEVICE Consumer(u32 shared, const Args& args)
        : shared(shared),
          args(args),
          // The same in all threads of a warp, so that what depends on it needs no register of each.
          warpgroup(kIsBlock && !kPacked ? threadIdx.x / 128 - 1
                                         : __reduce_max_sync(~0U, threadIdx.x / 128 - 1)),
          lane(threadIdx.x % 32),
          row(warpgroup * 64 + threadIdx.x % 128 / 32 * 16 + lane / 4),
          leader(threadIdx.x % 128 == 0) {}

    F8_DEVICE void release(u32 which, u32 index) const {
      if (leader) barrier_arrive(barrier(shared, which, index));
    }
    F8_DEVICE void multiply_keys() {
      const u32 a =
          wgmma_descriptor_low(shared + query.index * kQueryBytes + warpgroup * 64 * kBoxRow);
      const u32 b = wgmma_descriptor_low(shared + kKeys + key.index * kTileBytes);
      warpgroup_fence_operand(s);
      wgmma_fence();
      Boxes::template multiply<Config, kTileM, kTileN>(s, a, b);
    }
    F8_DEVICE void multiply_values(u32 part = 0) {
      float(&to)[kOfPart] = tile[part % kBuffers];
      const u32 b = wgmma_descriptor_low(shared + kValues + value.index * kTileBytes +
                                         part * kValueColumns * kTileN);
      warpgroup_fence_words(p);
      warpgroup_fence_operand(to);
      wgmma_fence();
#pragma unroll
      for (int k = 0; k < 4; ++k)
        Config::mma_registers(to, p + 4 * k, wgmma_descriptor(b + 2 * k), k > 0);
      wgmma_commit();
    }
    F8_DEVICE void release_values() {
      warpgroup_fence_words(p);
      release(kEmptyV, value.index);
      value.advance();
    }
    F8_DEVICE void add_to_o(u32 part, int i) {
      float& sum_of = o[part * kOfPart + i];
      sum_of = fmaf(sum_of, correction_o[i % 4 / 2], tile[part % kBuffers][i]);
    }
    // P V of a tile by parts.
    F8_DEVICE void attend_values() {
      barrier_wait(barrier(shared, kFullV, value.index), value.phase);
#pragma unroll
      for (u32 part = 0; part < kBuffers; ++part) multiply_values(part);
#pragma unroll
      for (u32 part = 0; part < kParts; ++part) {
        if (part + 1 < kParts) {
          wgmma_wait<kBuffers - 1>();
        } else {
          wgmma_wait<0>();
          release_values();
        }
        warpgroup_fence_operand(tile[part % kBuffers]);
#pragma unroll
        for (int i = 0; i < kOfPart; ++i) add_to_o(part, i);
        if (part + kBuffers < kParts) multiply_values(part + kBuffers);
      }
    }
    // Masks what rows of the last tile of keys do not have: those behind the last key, and causal ones.
    F8_DEVICE void mask(const Work& work, u32 key_tile) {
      const i32 first = static_cast<i32>(key_tile * kTileN + lane % 4 * 2);
      const i32 query_of_row = static_cast<i32>(work.block * kTileM + row);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const i32 all = work.keys(args);
        const i32 keys = kCausal ? min(all, query_of_row + 8 * r + 1) : all;
#pragma unroll
        for (int i = 2 * r; i < 64; i += i % 2 == 0 ? 1 : 3) {
          if (first + i / 4 * 8 + i % 2 >= keys)
            s[i] = __int_as_float(static_cast<i32>(0xFF800000U));
        }
      }
    }
    // Masks the keys of a tile that lie before the windows of rows.
    F8_DEVICE void mask_window(const Work& work, u32 key_tile) {
      const i32 begin = static_cast<i32>(work.block * kTileM + 1 - key_tile * kTileN) - args.window;
      if (begin + static_cast<i32>(kTileM) <= 1) return;  // the last row has them all
      const i32 begin_of_row = begin + static_cast<i32>(row) - static_cast<i32>(lane % 4 * 2);
#pragma unroll
      for (int i = 0; i < 64; ++i) {
        if (i / 4 * 8 + i % 2 < begin_of_row + i % 4 / 2 * 8)
          s[i] = __int_as_float(static_cast<i32>(0xFF800000U));
      }
    }
    // Four chains for each row: one would wait for each comparison.
    F8_DEVICE void maxima(float* of_rows) const {
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        const float* x = s + 2 * r;
        float chains[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) chains[i] = fmaxf(x[4 * i], x[4 * i + 1]);
#pragma unroll
        for (int i = 4; i < 16; ++i) {
          chains[i % 4] = fmaxf(fmaxf(chains[i % 4], x[4 * i]), x[4 * i + 1]);
        }
        of_rows[r] = row_max(fmaxf(fmaxf(chains[0], chains[1]), fmaxf(chains[2], chains[3])));
      }
    }
    // 2^8 P, where `factor` makes scores of what Q K^T has, and its sums over the thread's columns. With kAdd it
    // adds the tile before this one to O, whose additions have room between the exponentials.
    template <bool kAdd>
    F8_DEVICE void exponentials(float factor, float* sums) {
      float chains[2][4] = {};
#pragma unroll
      for (int i = 0; i < 64; i += 2) {
        const int r = i % 4 / 2;
        s[i] = exp2_approx(fmaf(s[i], factor, 8.0F - most[r]));
        s[i + 1] = exp2_approx(fmaf(s[i + 1], factor, 8.0F - most[r]));
        chains[r][i / 4 % 4] += s[i] + s[i + 1];
        if (kAdd && i % (128 / kOfThread) == 0) {
          add_to_o(0, i * kOfThread / 64);
          add_to_o(0, i * kOfThread / 64 + 1);
        }
      }
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sums[r] = (chains[r][0] + chains[r][1]) + (chains[r][2] + chains[r][3]);
      }
    }
    F8_DEVICE void round_p() {
#pragma unroll
      for (int i = 0; i < 16; ++i) {
        const float* x = s + i / 4 * 16 + i % 4 / 2 * 8 + i % 2 * 2;
        p[i] = pack_e4m3(x[0], x[1], x[4], x[5]);
      }
    }
    F8_DEVICE void wait_for_values() {
      wgmma_wait<0>();
      warpgroup_fence_operand(tile[0]);
      release_values();
    }
    // All warps see both phases before the leader lets the next ones come.
    F8_DEVICE void pass_over_tile() {
      barrier_wait(barrier(shared, kFullK, key.index), key.phase);
      barrier_wait(barrier(shared, kFullV, value.index), value.phase);
      warpgroup_sync(1 + warpgroup);
      release(kEmptyK, key.index);
      key.advance();
      release(kEmptyV, value.index);
      value.advance();
    }
    // The block that a warpgroup's queries are of.
    F8_DEVICE i32 own_block(const Work& work) const {
      return static_cast<i32>((work.block * kTileM + warpgroup * 64) / kAttentionTile);
    }
    // The scale of a warpgroup's queries.
    F8_DEVICE float inv_scale_q(const Work& work, i32 blocks) const {
      const u32 place =
          kIsBlock ? work.place() : static_cast<u32>(min(own_block(work), blocks - 1));
      return __ldg(args.inv_scale_q + work.q_head * blocks + place);
    }
    F8_DEVICE void first_tile(const Work& work, u32 key_tile, float factor) {
      barrier_wait(barrier(shared, kFullQ, query.index), query.phase);
      barrier_wait(barrier(shared, kFullK, key.index), key.phase);
      multiply_keys();
      wgmma_wait<0>();
      warpgroup_fence_operand(s);
      release(kEmptyK, key.index);
      key.advance();
      if (kCausal || work.tiles * kTileN > static_cast<u32>(work.keys(args))) {
        mask(work, kOwnLastTile ? key_tile : work.tiles - 1);
      }
      if constexpr (kWindow) mask_window(work, key_tile);
      float largest[2];
      maxima(largest);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        most[r] = largest[r] * factor;
        if constexpr (kWindow && kPacked) {  // a query may have no key: its sum is 0
          if (most[r] == __int_as_float(static_cast<i32>(0xFF800000U))) most[r] = 0.0F;
        }
        correction_o[r] = 0.0F;
      }
      exponentials<false>(factor, sum);
      round_p();
#pragma unroll
      for (float& each : o) each = 0.0F;
      if constexpr (!kInParts) {
        barrier_wait(barrier(shared, kFullV, value.index), value.phase);
      } else if constexpr (!kInNextRound) {
        attend_values();
      }
    }
    // S of a tile and P V of the tile before it, whose values are v_ratio times those of this one.
    F8_DEVICE void next_tile(const Work& work, u32 key_tile, float factor, float v_ratio,
                             bool last) {
      if constexpr (kInParts) {
        if constexpr (kInNextRound) attend_values();
        // This wait keeps additions to O, whose operands' registers S takes, before the MMAs of S.
        barrier_wait(barrier(shared, kFullK, key.index), key.phase);
        multiply_keys();
        wgmma_wait<0>();
      } else {
        multiply_keys();
        multiply_values();
        wgmma_wait<1>();
      }
      warpgroup_fence_operand(s);
      release(kEmptyK, key.index);
      key.advance();
      if constexpr (kWindow) mask_window(work, key_tile);
      float largest[2], correction[2], sums[2];
      maxima(largest);
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        largest[r] = fmaxf(most[r], largest[r] * factor);
        correction[r] = exp2_approx(most[r] - largest[r]);
        most[r] = largest[r];
      }
      if constexpr (!kInParts) wait_for_values();
      exponentials<!kInParts>(factor, sums);
      round_p();
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        sum[r] = fmaf(sum[r], correction[r], sums[r]);
        correction_o[r] = correction[r] * v_ratio;
      }
      if constexpr (!kInParts) {
        if (!last) barrier_wait(barrier(shared, kFullK, key.index), key.phase);
        barrier_wait(barrier(shared, kFullV, value.index), value.phase);
      } else if constexpr (!kInNextRound) {
        attend_values();
      }
    }
    F8_DEVICE void store(const Work& work, float inv_scale_v) const {
      const u32 token = work.first() + row;
      const u64 batch = kPacked ? 0 : work.q_head / args.heads_q;  // a pack is a batch of one
      const u64 head = kPacked ? work.q_head : work.q_head % args.heads_q;
#pragma unroll
      for (int r = 0; r < 2; ++r) {
        if (token + 8 * r >= static_cast<u32>(work.end(args))) continue;
        float inverse = inv_scale_v / sum[r];
        if (kPacked && sum[r] == 0.0F) inverse = 0.0F;  // without a key
        const u64 line = (batch * args.queries + token + 8 * r) * args.heads_q + head;
        u16* to = args.o + line * kD + lane % 4 * 2;
#pragma unroll
        for (int i = 0; i < kOfThread / 4; ++i) {
          const float* x = o + 4 * i + 2 * r;
          *reinterpret_cast<u32*>(to + 8 * i) = pack_bf16(x[0] * inverse, x[1] * inverse);
        }
        if (lane % 4 == 0) {
          const u64 of_query = u64{work.q_head} * args.queries + token + 8 * r;
          args.lse[of_query] = (most[r] - 8.0F + log2f(sum[r])) * 0.693147181F;
          // The largest of 2^8 P was 2^8.
          if (args.largest_p != nullptr) {
            args.largest_p[of_query] = kPacked && sum[r] == 0.0F ? 0.0F : 256.0F / sum[r];
          }
        }
      }
    }
    // O of queries without a key is 0, and LSE is -inf.
    F8_DEVICE void store_nothing(const Work& work) {
#pragma unroll
      for (float& each : o) each = 0.0F;
#pragma unroll
      for (int r = 0; r < 2; ++r) most[r] = sum[r] = 0.0F;
      store(work, 0.0F);
    }
    F8_DEVICE void attend(const Work& work) {
      if constexpr (kPacked) {
        if (work.is_empty()) return store_nothing(work);
      }
      const i32 blocks_q = blocks_of(args, args.queries), blocks_k = blocks_of(args, args.keys);
      const float* scale_k = args.inv_scale_k + work.kv_head * blocks_k + work.key_block(0);
      const float* scale_v = args.inv_scale_v + work.kv_head * blocks_k + work.key_block(0);
      const float of_q = args.scale_log2 * inv_scale_q(work, blocks_q);
      i32 first = static_cast<i32>(work.tiles) - 1;
      const i32 begin = static_cast<i32>(work.begin);
      if constexpr (kOwnLastTile) first = min(first, own_block(work));
      float v = __ldg(scale_v + first);
      const i32 second = max(first - 1, begin);
      float k_ahead = __ldg(scale_k + second), v_ahead = __ldg(scale_v + second);
      if constexpr (kOwnLastTile) {
        for (i32 t = static_cast<i32>(work.tiles) - 1; t > first; --t) pass_over_tile();
      }
      first_tile(work, static_cast<u32>(first), of_q * __ldg(scale_k + first));
      if (!kInParts && first > begin) {
        barrier_wait(barrier(shared, kFullK, key.index), key.phase);
      }
      for (i32 t = first - 1; t >= begin; --t) {
        const float factor = of_q * k_ahead, v_next = v_ahead;
        k_ahead = __ldg(scale_k + max(t - 1, begin));
        v_ahead = __ldg(scale_v + max(t - 1, begin));
        // The ratio of two powers of two.
        const float v_ratio = v * __int_as_float(0x7F000000 - __float_as_int(v_next));
        next_tile(work, static_cast<u32>(t), factor, v_ratio, t == begin);
        v = v_next;
      }
      release(kEmptyQ, query.index);
      query.advance();
      if constexpr (kInNextRound) attend_values();
      if constexpr (!kInParts) multiply_values();
#pragma unroll
      for (float& each : sum) each = row_sum(each);
      if constexpr (!kInParts) {
        wait_for_values();
#pragma unroll
        for (int i = 0; i < kOfThread; ++i) add_to_o(0, i);
      }
      store(work, v);
    }
  };

  // The same values, in registers that a warp has once.
  static F8_DEVICE AttentionBlock uniform(AttentionBlock block) {
    const auto of = [](i32 x) { return __reduce_max_sync(~0U, x); };
    return {of(block.token),
            of(block.tokens),
            of(block.index),
            of(block.keys),
            of(block.first),
            0,
            0,
            0};
  }

  static F8_DEVICE void run(const AttentionMaps& maps, const Args& args, void* memory) {
    grid_dependency_wait();
    launch_dependents();
    const u32 shared = smem_address(memory);
    Tiles::prepare(shared);
    if (threadIdx.x < 128) {
      warpgroup_reg_dealloc<kIsBlock ? 24 : 32>();
      if (threadIdx.x < 32 && elect_one()) Tiles::load(shared, maps, args);
      return;
    }
    warpgroup_reg_alloc<kIsBlock ? 240 : 160>();
    Consumer consumer(shared, args);
    for (u32 i = Rounds::first(); i < Tiles::works(args); i = Rounds::next(i)) {
      Work work = Tiles::work_at(args, i);
      if constexpr (kPacked) work.packed = uniform(work.packed);
      consumer.attend(work);
    }
  }
};

}  // namespace f8::kernels
