// The casts of q, k and v for attention_forward.cuh, and their inverse: e4m3 with a scale for each 128 tokens of
// a head, a power of two, so that the values are exact in bf16.
//
// k is cast without its mean over the tokens of its head: a vector that all keys of a head have in common changes
// no softmax, and no gradient. v is cast transposed, its tokens in the order of fragments.
//
// A CTA has 128 tokens of a head, which its threads have in registers: each of its items is four tokens that lie
// side by side in the order of fragments, 0, 1, 8 and 9 of 16 or 2, 3, 10 and 11, ..., of eight columns. So a word
// of v^T is made in one thread, as are the words of a row of q or k.
//
// The means of packed sequences are those of a head in a sequence, so that no sequence changes the bits of another
// one, and a launch before these (layout) tells each block where its tokens lie.
#pragma once

#include "codegen/kernels/attention/attention_args.cuh"
#include "codegen/kernels/attention/e4m3.cuh"
#include "codegen/kernels/cast/scale.cuh"
#include "codegen/kernels/ptx.cuh"

namespace f8::kernels {

template <u32 kD, class Args = AttentionCastArgs>
struct AttentionCast {
  static constexpr bool kPacked = Args::kPacked;
  static constexpr u32 kThreads = kTileThreads, kTile = kAttentionTile, kChunk = 8;
  static constexpr u32 kChunks = kD / kChunk;             // of a token
  static constexpr u32 kItems = 32 * kChunks / kThreads;  // of a thread
  static constexpr u32 kRows = kThreads / kChunks;        // that the sums of k add at a time
  static_assert(kD == 64 || kD == 128 || kD == 256, "a thread has whole items");

  // The block of tokens that a CTA has.
  struct Block {
    const AttentionOperand* operand;
    u32 batch, head, tile;
    bool is_k, is_v;
    AttentionBlock packed;  // where it is that of a sequence
    u32 packed_blocks;      // of a head

    F8_DEVICE u32 row() const { return batch * operand->heads + head; }  // of [b][heads]
    F8_DEVICE u32 blocks() const {
      return kPacked ? packed_blocks : attention_blocks(operand->tokens);
    }
    F8_DEVICE u32 first() const { return kPacked ? packed.token : tile * kTile; }
    F8_DEVICE i32 keys(const Args& args) const { return kPacked ? packed.keys : args.k.tokens; }
    F8_DEVICE i32 end() const { return kPacked ? packed.token + packed.tokens : operand->tokens; }
    F8_DEVICE u16* at(u32 token, u32 column) const {
      return operand->x + batch * operand->stride_batch + head * operand->stride_head +
             (first() + token) * operand->stride_token + column;
    }
    F8_DEVICE bool has(u32 token) const { return first() + token < static_cast<u32>(end()); }
    // A line of a copy begins here: that of a token, or of a column where the copy is transposed.
    F8_DEVICE u64 line(u32 token) const {
      return (u64{row()} * blocks() * kTile + tile * kTile + token) * kD;
    }
    F8_DEVICE u64 column(u32 column) const {
      return (u64{row()} * kD + column) * blocks() * kTile + tile * kTile;
    }
    F8_DEVICE float& inv_scale() const { return operand->inv_scale[row() * blocks() + tile]; }
  };
  static F8_DEVICE i32 blocks_of(const Args& args, const AttentionOperand& operand) {
    return attention_blocks_of(args, operand.tokens);
  }
  static F8_DEVICE Block block_at(const Args& args, u32 index) {
    Block r;
    const u32 of_q = blocks_of(args, args.q) * args.q.heads * args.batch;
    const u32 of_k = blocks_of(args, args.k) * args.k.heads * args.batch;
    r.is_k = index >= of_q && index < of_q + of_k;
    r.is_v = index >= of_q + of_k;
    r.operand = r.is_v ? &args.v : r.is_k ? &args.k : &args.q;
    if (r.is_v) index -= of_k;
    if (r.is_v || r.is_k) index -= of_q;
    if constexpr (kPacked) r.packed_blocks = blocks_of(args, *r.operand);
    r.tile = index % r.blocks();
    index /= r.blocks();
    r.head = index % r.operand->heads;
    r.batch = index / r.operand->heads;
    if constexpr (kPacked) r.packed = (r.is_v || r.is_k ? args.blocks_k : args.blocks_q)[r.tile];
    return r;
  }

  // Item i of the thread: its columns, and the first of its tokens.
  static F8_DEVICE u32 chunk(u32 i) { return (threadIdx.x + i * kThreads) % kChunks; }
  static F8_DEVICE u32 group(u32 i) { return (threadIdx.x + i * kThreads) / kChunks; }
  static F8_DEVICE u32 token(u32 i, u32 j) {
    return group(i) / 4 * 16 + group(i) % 4 * 2 + j % 2 + j / 2 * 8;
  }
  // The place of a word in shared memory that has [kD][32] of them, so that threads of a warp meet in no bank.
  static F8_DEVICE u32 place(u32 column, u32 word) {
    return column * 32 + (word ^ (column / kChunk * 2 & 31));
  }

  static F8_DEVICE void unpack(const u32 (&words)[4], float (&x)[kChunk]) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      x[2 * i] = __uint_as_float(words[i] << 16);
      x[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000U);
    }
  }

  // Adds slabs of k's tokens, in an order that is fixed: rows of a slab by kRows, then those.
  static F8_DEVICE void sum_keys(const Args& args) {
    grid_dependency_wait();
    launch_dependents();
    const AttentionOperand& k = args.k;
    const u32 slabs = kPacked ? blocks_of(args, k) : attention_slabs(k.tokens);
    const u32 slab = blockIdx.x % slabs, head = blockIdx.x / slabs;
    const u32 column = threadIdx.x % kChunks * kChunk, row = threadIdx.x / kChunks;
    const u16* x = k.x + head / k.heads * k.stride_batch + head % k.heads * k.stride_head + column;
    u32 first = slab * kAttentionSlab + row;
    u32 end = min(static_cast<u32>(k.tokens), (slab + 1) * kAttentionSlab);
    if constexpr (kPacked) {
      const AttentionBlock block = args.blocks_k[slab];
      if (block.tokens == 0 || block.index % 2 != 0) return;
      first = block.token + row;
      end = block.token + min(block.keys - block.index * kAttentionTile, kAttentionSlab);
    }
    float sum[kChunk] = {};
#pragma unroll 8
    for (u32 token = first; token < end; token += kRows) {
      u32 words[4];
      load_global_words(x + token * k.stride_token, words);
      float values[kChunk];
      unpack(words, values);
#pragma unroll
      for (u32 c = 0; c < kChunk; ++c) sum[c] += values[c];
    }
    __shared__ float sums[kRows][kD];
#pragma unroll
    for (u32 c = 0; c < kChunk; ++c) sums[row][column + c] = sum[c];
    __syncthreads();
    if (threadIdx.x >= kD) return;
    float total = 0;
#pragma unroll
    for (u32 r = 0; r < kRows; ++r) total += sums[r][threadIdx.x];
    args.sums[u64{blockIdx.x} * kD + threadIdx.x] = total;
  }
  static F8_DEVICE void mean_of_keys(const Args& args, const Block& block, float* mean) {
    constexpr u32 kStep = kPacked ? 2 * kD : kD;
    if (threadIdx.x < kD) {
      const u32 slabs = attention_slabs(block.keys(args));
      const float* from = args.sums +
                          (kPacked ? u64{block.row()} * block.blocks() + block.packed.first
                                   : u64{block.row()} * slabs) *
                              kD +
                          threadIdx.x;
      float sum = 0;
#pragma unroll 8
      for (u32 i = 0; i < slabs; ++i) sum += load_global(from + i * kStep);
      mean[threadIdx.x] = __fdiv_rn(sum, static_cast<float>(block.keys(args)));
    }
    __syncthreads();
  }

  static F8_DEVICE u32 largest_of_block(u32 bits) {
    __shared__ u32 warps[kThreads / 32];
    bits = warp_max(bits);
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = bits;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < kThreads / 32; ++i) bits = max(bits, warps[i]);
    return bits;
  }

  // The thread's elements as they are loaded, zeros behind the last token: half of the registers of fp32.
  struct Loaded {
    u32 words[kItems][4][4];

    F8_DEVICE explicit Loaded(const Block& block) {
#pragma unroll
      for (u32 i = 0; i < kItems; ++i) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
#pragma unroll
          for (u32& word : words[i][j]) word = 0;
          if (block.has(token(i, j))) {
            load_global_words(block.at(token(i, j), chunk(i) * kChunk), words[i][j]);
          }
        }
      }
    }
    // ptxas keeps no fp32 of them over this line, which would be twice as many registers.
    F8_DEVICE void fence() {
#pragma unroll
      for (u32 i = 0; i < kItems; ++i) {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
#pragma unroll
          for (u32& word : words[i][j]) asm volatile("" : "+r"(word));
        }
      }
    }
    // `mean`: of k's columns; others have none.
    F8_DEVICE void row(const Block& block, u32 i, u32 j, const float* mean,
                       float (&x)[kChunk]) const {
      unpack(words[i][j], x);
      if (!block.is_k || !block.has(token(i, j))) return;
#pragma unroll
      for (u32 c = 0; c < kChunk; ++c) x[c] -= mean[chunk(i) * kChunk + c];
    }
  };

  static F8_DEVICE void cast(const Args& args) {
    __shared__ float mean[kD];
    __shared__ u32 words[kD * 32];  // of v^T
    grid_dependency_wait();
    launch_dependents();
    const Block block = block_at(args, blockIdx.x);
    Loaded loaded(block);
    if (block.is_k) mean_of_keys(args, block, mean);
    u32 largest = 0;
#pragma unroll
    for (u32 i = 0; i < kItems; ++i) {
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        float x[kChunk];
        loaded.row(block, i, j, mean, x);
#pragma unroll
        for (const float each : x) largest = max(largest, __float_as_uint(each) & 0x7FFFFFFFU);
      }
    }
    const float scale = scale_from_amax<Fp8::kE4m3, true>(largest_of_block(largest));
    if (threadIdx.x == 0) block.inv_scale() = inverse(scale);
    loaded.fence();
#pragma unroll
    for (u32 i = 0; i < kItems; ++i) {
      float x[4][kChunk];
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        loaded.row(block, i, j, mean, x[j]);
#pragma unroll
        for (float& each : x[j]) each *= scale;
      }
      if (block.is_v) {
#pragma unroll
        for (u32 c = 0; c < kChunk; ++c) {
          words[place(chunk(i) * kChunk + c, group(i))] =
              pack_e4m3(x[0][c], x[1][c], x[2][c], x[3][c]);
        }
      } else {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
          *reinterpret_cast<uint2*>(block.operand->copy + block.line(token(i, j)) +
                                    chunk(i) * kChunk) =
              make_uint2(pack_e4m3(x[j][0], x[j][1], x[j][2], x[j][3]),
                         pack_e4m3(x[j][4], x[j][5], x[j][6], x[j][7]));
        }
      }
    }
    if (!block.is_v) return;
    __syncthreads();
    store_columns(block, block.operand->copy, words);
  }
  // Stores words [kD][32] as the columns of a transposed copy, or loads them.
  static F8_DEVICE void store_columns(const Block& block, u8* copy, const u32* words) {
    for (u32 i = threadIdx.x; i < kD * 8; i += kThreads) {
      const u32 column = i / 8, quad = i % 8 * 4;
      const uint2 low = *reinterpret_cast<const uint2*>(words + place(column, quad));
      const uint2 high = *reinterpret_cast<const uint2*>(words + place(column, quad + 2));
      *reinterpret_cast<uint4*>(copy + block.column(column) + quad * 4) =
          make_uint4(low.x, low.y, high.x, high.y);
    }
  }
  static F8_DEVICE void load_columns(const Block& block, const u8* copy, u32* words) {
    for (u32 i = threadIdx.x; i < kD * 8; i += kThreads) {
      const u32 column = i / 8, quad = i % 8 * 4;
      const uint4 loaded = *reinterpret_cast<const uint4*>(copy + block.column(column) + quad * 4);
      *reinterpret_cast<uint2*>(words + place(column, quad)) = make_uint2(loaded.x, loaded.y);
      *reinterpret_cast<uint2*>(words + place(column, quad + 2)) = make_uint2(loaded.z, loaded.w);
    }
  }

  // Writes the values of the copies in bf16.
  static F8_DEVICE void dequantize(const Args& args) {
    __shared__ u32 words[kD * 32];  // of v^T
    grid_dependency_wait();
    launch_dependents();
    const Block block = block_at(args, blockIdx.x);
    const float inverse = load_global(&block.inv_scale());
    if (block.is_v) {
      load_columns(block, block.operand->copy, words);
      __syncthreads();
    }
#pragma unroll
    for (u32 i = 0; i < kItems; ++i) {
      float x[4][kChunk];
      if (block.is_v) {
#pragma unroll
        for (u32 c = 0; c < kChunk; ++c) {
          const u32 word = words[place(chunk(i) * kChunk + c, group(i))];
          unpack_e4m3(static_cast<u16>(word), x[0][c], x[1][c]);
          unpack_e4m3(static_cast<u16>(word >> 16), x[2][c], x[3][c]);
        }
      } else {
#pragma unroll
        for (u32 j = 0; j < 4; ++j) {
          const uint2 row = *reinterpret_cast<const uint2*>(
              block.operand->copy + block.line(token(i, j)) + chunk(i) * kChunk);
#pragma unroll
          for (u32 half = 0; half < 2; ++half) {
            const u32 word = half == 0 ? row.x : row.y;
            unpack_e4m3(static_cast<u16>(word), x[j][4 * half], x[j][4 * half + 1]);
            unpack_e4m3(static_cast<u16>(word >> 16), x[j][4 * half + 2], x[j][4 * half + 3]);
          }
        }
      }
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        if (!block.has(token(i, j))) continue;
        u32 packed[4];
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
          packed[c] = pack_bf16(x[j][2 * c] * inverse, x[j][2 * c + 1] * inverse);
        }
        store_global_words(block.at(token(i, j), chunk(i) * kChunk), packed);
      }
    }
  }

  // The offsets of queries (0) or keys (1), by one warp: each is the largest one so far, the first is 0 and the last
  // is all tokens, so that whatever the caller's are, sequences have tokens of the operand, and each token has one.
  // Returns the index of the first one that was another, or ~0.
  static F8_DEVICE u32 clean_offsets(const Args& args, u32 which) {
    const i32 lane = static_cast<i32>(threadIdx.x % 32);
    const i32 tokens = which == 0 ? args.q.tokens : args.k.tokens;
    const i32* from = which == 0 ? args.offsets_q : args.offsets_k;
    i32* to = args.offsets + which * (args.sequences + 1);
    i32 before = 0;
    u32 bad = ~0U;
    for (i32 first = 0; first <= args.sequences; first += 32) {
      const i32 i = first + lane;
      const bool has = i <= args.sequences;
      const i32 given =
          has ? static_cast<i32>(load_global(reinterpret_cast<const u32*>(from + i))) : 0;
      i32 offset = i == 0 ? 0 : i == args.sequences ? tokens : min(max(given, 0), tokens);
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const i32 other = __shfl_up_sync(~0U, offset, step);
        if (lane >= step) offset = max(offset, other);
      }
      offset = max(offset, before);
      before = __shfl_sync(~0U, offset, 31);
      if (!has) continue;
      to[i] = offset;
      if (offset != given) bad = min(bad, static_cast<u32>(i));
    }
    return __reduce_min_sync(~0U, bad);
  }

  // Writes the blocks of packed sequences. One CTA does it, a warp a sequence.
  static F8_DEVICE void layout(const Args& args) {
    __shared__ u32 bad[2], too_long[2];
    grid_dependency_wait();
    launch_dependents();
    const i32 warp = static_cast<i32>(threadIdx.x / 32), lane = static_cast<i32>(threadIdx.x % 32);
    if (warp < 2) {
      bad[warp] = clean_offsets(args, warp);
      too_long[warp] = ~0U;
    }
    __syncthreads();
    for (i32 s = warp; s < args.sequences; s += kThreads / 32) {
      const i32* of_q = args.offsets + s;
      const i32* of_k = of_q + args.sequences + 1;
      const i32 keys = of_k[1] - of_k[0], first_k = attention_packed_blocks(of_k[0], s);
      const auto write = [&](AttentionBlock* blocks, const i32* offsets, u32 which) {
        const i32 first = attention_packed_blocks(offsets[0], s);
        const i32 count = attention_packed_blocks(offsets[1], s + 1) - first;
        const i32 tokens = offsets[1] - offsets[0];
        const i32 queries = of_q[1] - of_q[0], first_q = attention_packed_blocks(of_q[0], s);
        const i32 longest = which == 0 ? args.longest_q : args.longest_k;
        if (lane == 0 && longest > 0 && tokens > longest) {
          atomicMin(&too_long[which], static_cast<u32>(s));
        }
        for (i32 i = lane; i < count; i += 32) {
          const i32 of_block = min(max(tokens - i * kAttentionTile, 0), kAttentionTile);
          blocks[first + i] = {
              offsets[0] + i * kAttentionTile, of_block, i, keys, first_k, queries, first_q, 0};
        }
      };
      write(args.blocks_q, of_q, 0);
      write(args.blocks_k, of_k, 1);
    }
    __syncthreads();
    if (threadIdx.x != 0 || args.error == nullptr || args.error[0] != kNoPackError) return;
    const auto keep = [&](i32 error, const u32(&first)[2]) {
      const u32 which = first[0] != ~0U ? 0 : 1;
      if (first[which] == ~0U) return false;
      args.error[0] = error + static_cast<i32>(which);
      args.error[1] = static_cast<i32>(first[which]);
      return true;
    };
    if (!keep(kBadOffset, bad)) keep(kLongSequence, too_long);
  }
};

}  // namespace f8::kernels
