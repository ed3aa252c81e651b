// The casts of q, k and v for attention_forward.cuh, and their inverse: e4m3 with a scale for each 128 tokens of
// a head, a power of two, so that the values are exact in bf16.
//
// k is cast without its mean over the tokens of its head: a vector that all keys of a head have in common changes
// no softmax, and no gradient. v is cast transposed, its tokens in the order of fragments.
//
// A CTA has 128 tokens of a head, which its threads have in registers: each of its items is four tokens that lie
// side by side in the order of fragments, 0, 1, 8 and 9 of 16 or 2, 3, 10 and 11, ..., of eight columns. So a word
// of v^T is made in one thread, as are the words of a row of q or k.
#pragma once

#include "codegen/kernels/attention/attention_args.cuh"
#include "codegen/kernels/attention/e4m3.cuh"
#include "codegen/kernels/cast/scale.cuh"
#include "codegen/kernels/ptx.cuh"

namespace f8::kernels {

template <u32 kD>
struct AttentionCast {
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

    F8_DEVICE u32 row() const { return batch * operand->heads + head; }  // of [b][heads]
    F8_DEVICE u32 blocks() const { return attention_blocks(operand->tokens); }
    F8_DEVICE u16* at(u32 token, u32 column) const {
      return operand->x + batch * operand->stride_batch + head * operand->stride_head +
             (tile * kTile + token) * operand->stride_token + column;
    }
    F8_DEVICE bool has(u32 token) const {
      return tile * kTile + token < static_cast<u32>(operand->tokens);
    }
    F8_DEVICE u8* copy_of_row(u32 token) const {  // of q or k
      return operand->copy + (u64{row()} * blocks() * kTile + tile * kTile + token) * kD;
    }
    F8_DEVICE u8* copy_of_column(u32 column) const {  // of v
      return operand->copy + (u64{row()} * kD + column) * blocks() * kTile + tile * kTile;
    }
    F8_DEVICE float& inv_scale() const { return operand->inv_scale[row() * blocks() + tile]; }
  };
  static F8_DEVICE Block block_at(const AttentionCastArgs& args, u32 index) {
    Block r;
    const u32 of_q = attention_blocks(args.q.tokens) * args.q.heads * args.batch;
    const u32 of_k = attention_blocks(args.k.tokens) * args.k.heads * args.batch;
    r.is_k = index >= of_q && index < of_q + of_k;
    r.is_v = index >= of_q + of_k;
    r.operand = r.is_v ? &args.v : r.is_k ? &args.k : &args.q;
    if (r.is_v) index -= of_k;
    if (r.is_v || r.is_k) index -= of_q;
    r.tile = index % r.blocks();
    index /= r.blocks();
    r.head = index % r.operand->heads;
    r.batch = index / r.operand->heads;
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
  static F8_DEVICE void sum_keys(const AttentionCastArgs& args) {
    grid_dependency_wait();
    launch_dependents();
    const AttentionOperand& k = args.k;
    const u32 slabs = attention_slabs(k.tokens);
    const u32 slab = blockIdx.x % slabs, head = blockIdx.x / slabs;
    const u32 column = threadIdx.x % kChunks * kChunk, row = threadIdx.x / kChunks;
    const u16* x = k.x + head / k.heads * k.stride_batch + head % k.heads * k.stride_head + column;
    const u32 first = slab * kAttentionSlab + row;
    const u32 end = min(static_cast<u32>(k.tokens), (slab + 1) * kAttentionSlab);
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
  static F8_DEVICE void mean_of_keys(const AttentionCastArgs& args, const Block& block,
                                     float* mean) {
    if (threadIdx.x < kD) {
      const u32 slabs = attention_slabs(args.k.tokens);
      const float* from = args.sums + u64{block.row()} * slabs * kD + threadIdx.x;
      float sum = 0;
#pragma unroll 8
      for (u32 i = 0; i < slabs; ++i) sum += load_global(from + i * kD);
      mean[threadIdx.x] = __fdiv_rn(sum, static_cast<float>(args.k.tokens));
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

  static F8_DEVICE void cast(const AttentionCastArgs& args) {
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
          *reinterpret_cast<uint2*>(block.copy_of_row(token(i, j)) + chunk(i) * kChunk) =
              make_uint2(pack_e4m3(x[j][0], x[j][1], x[j][2], x[j][3]),
                         pack_e4m3(x[j][4], x[j][5], x[j][6], x[j][7]));
        }
      }
    }
    if (!block.is_v) return;
    __syncthreads();
    for (u32 i = threadIdx.x; i < kD * 8; i += kThreads) {
      const u32 column = i / 8, quad = i % 8 * 4;
      const uint2 low = *reinterpret_cast<const uint2*>(words + place(column, quad));
      const uint2 high = *reinterpret_cast<const uint2*>(words + place(column, quad + 2));
      *reinterpret_cast<uint4*>(block.copy_of_column(column) + quad * 4) =
          make_uint4(low.x, low.y, high.x, high.y);
    }
  }

  // Writes the values of the copies in bf16.
  static F8_DEVICE void dequantize(const AttentionCastArgs& args) {
    __shared__ u32 words[kD * 32];  // of v^T
    grid_dependency_wait();
    launch_dependents();
    const Block block = block_at(args, blockIdx.x);
    const float inverse = load_global(&block.inv_scale());
    if (block.is_v) {
      for (u32 i = threadIdx.x; i < kD * 8; i += kThreads) {
        const u32 column = i / 8, quad = i % 8 * 4;
        const uint4 loaded =
            *reinterpret_cast<const uint4*>(block.copy_of_column(column) + quad * 4);
        *reinterpret_cast<uint2*>(words + place(column, quad)) = make_uint2(loaded.x, loaded.y);
        *reinterpret_cast<uint2*>(words + place(column, quad + 2)) = make_uint2(loaded.z, loaded.w);
      }
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
          const uint2 row =
              *reinterpret_cast<const uint2*>(block.copy_of_row(token(i, j)) + chunk(i) * kChunk);
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
};

}  // namespace f8::kernels
