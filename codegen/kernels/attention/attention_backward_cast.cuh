// The casts before the kernels of the backward (attention_backward.cuh), in one launch: dO, and the other copies of what
// forward kept, q^T, k^T and v. A CTA has 128 tokens of a head of one of them, in the items of attention_cast.cuh.
//
// delta is the sum of a row of dO O with dO as it is rounded, since the other products take it so.
#pragma once

#include "codegen/kernels/attention/attention_backward_args.cuh"
#include "codegen/kernels/attention/attention_cast.cuh"

namespace f8::kernels {

template <u32 kD, class Args>
struct AttentionBackwardCast : AttentionCast<kD, decltype(Args::kept)> {
  using Cast = AttentionCast<kD, decltype(Args::kept)>;
  using Cast::kTile, Cast::kChunk, Cast::kChunks, Cast::kItems, Cast::chunk, Cast::group,
      Cast::token, Cast::place, Cast::unpack, Cast::store_columns, Cast::load_columns;
  using typename Cast::Block, typename Cast::Loaded;
  static_assert(kChunks <= 32, "a row is a warp's");

  // Makes words of columns from four words of rows, or of rows from four of columns.
  static F8_DEVICE void transpose(const u32 (&from)[4], u32 (&to)[4]) {
    const u32 low01 = __byte_perm(from[0], from[1], 0x5140);
    const u32 low23 = __byte_perm(from[2], from[3], 0x5140);
    const u32 high01 = __byte_perm(from[0], from[1], 0x7362);
    const u32 high23 = __byte_perm(from[2], from[3], 0x7362);
    to[0] = __byte_perm(low01, low23, 0x5410);
    to[1] = __byte_perm(low01, low23, 0x7632);
    to[2] = __byte_perm(high01, high23, 0x5410);
    to[3] = __byte_perm(high01, high23, 0x7632);
  }
  // Item i of the thread as words of columns in shared memory: rows[j][half] is half of the chunk of its token j.
  static F8_DEVICE void put_columns(const u32 (&rows)[4][2], u32 i, u32* words) {
#pragma unroll
    for (u32 half = 0; half < 2; ++half) {
      const u32 from[4] = {rows[0][half], rows[1][half], rows[2][half], rows[3][half]};
      u32 to[4];
      transpose(from, to);
#pragma unroll
      for (u32 c = 0; c < 4; ++c) words[place(chunk(i) * kChunk + 4 * half + c, group(i))] = to[c];
    }
  }
  static F8_DEVICE float sum_of_squares(const u32 (&row)[2]) {
    float sum = 0;
#pragma unroll
    for (u32 i = 0; i < 4; ++i) {
      float x, y;
      unpack_e4m3(static_cast<u16>(row[i / 2] >> i % 2 * 16), x, y);
      sum = fmaf(x, x, fmaf(y, y, sum));
    }
    return sum;
  }
  // The sum over the threads that have a token.
  static F8_DEVICE float sum_of_token(float x) {
#pragma unroll
    for (u32 step = 1; step < kChunks; step *= 2) x += __shfl_xor_sync(~0U, x, step);
    return x;
  }

  static F8_DEVICE void transpose_rows(const Block& block, u8* to, u32* words) {
#pragma unroll
    for (u32 i = 0; i < kItems; ++i) {
      u32 rows[4][2];
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        const uint2 loaded = *reinterpret_cast<const uint2*>(
            block.operand->copy + block.line(token(i, j)) + chunk(i) * kChunk);
        rows[j][0] = loaded.x;
        rows[j][1] = loaded.y;
      }
      put_columns(rows, i, words);
    }
    __syncthreads();
    store_columns(block, to, words);
  }

  // Writes the rows of v, and the largest norm of each 16.
  static F8_DEVICE void transpose_values(const Args& args, const Block& block, u32* words) {
    __shared__ u32 largest[kAttentionNorms];
    if (threadIdx.x < kAttentionNorms) largest[threadIdx.x] = 0;
    load_columns(block, block.operand->copy, words);
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < kItems; ++i) {
      u32 rows[4][2];
#pragma unroll
      for (u32 half = 0; half < 2; ++half) {
        u32 from[4], to[4];
#pragma unroll
        for (u32 c = 0; c < 4; ++c) {
          from[c] = words[place(chunk(i) * kChunk + 4 * half + c, group(i))];
        }
        transpose(from, to);
#pragma unroll
        for (u32 j = 0; j < 4; ++j) rows[j][half] = to[j];
      }
      u32 squares = 0;
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        *reinterpret_cast<uint2*>(args.v + block.line(token(i, j)) + chunk(i) * kChunk) =
            make_uint2(rows[j][0], rows[j][1]);
        squares = max(squares, __float_as_uint(sum_of_token(sum_of_squares(rows[j]))));
      }
      if (chunk(i) == 0) atomicMax(&largest[token(i, 0) / kAttentionNormKeys], squares);
    }
    __syncthreads();
    if (threadIdx.x >= kAttentionNorms) return;
    const u32 at = block.row() * block.blocks() + block.tile;
    const float norm = __fsqrt_rn(__uint_as_float(largest[threadIdx.x]));
    args.norms_v[at * kAttentionNorms + threadIdx.x] = norm * load_global(&block.inv_scale());
  }

  // Records take these of the queries, in the units of the copies.
  struct Rows {
    float squares[kTile];  // of dO
    float delta[kTile];
    u32 norms[kTile / 32];   // the largest of each warp
    u32 deltas[kTile / 32];  // likewise, without signs
  };
  static F8_DEVICE void write_records(const Args& args, const Block& block, float inv_scale,
                                      Rows& rows) {
    const u32 t = threadIdx.x, at = block.row() * block.blocks() + block.tile;
    const float inv_q = load_global(args.kept.q.inv_scale + at);
    float norm = 0, delta = 0;
    if (t < kTile) {
      norm = __fsqrt_rn(rows.squares[t]);
      delta = rows.delta[t] * inv_q;
      const u32 of_warp = warp_max(__float_as_uint(norm * inv_q));
      const u32 of_delta = warp_max(__float_as_uint(fabsf(delta)));
      if (t % 32 == 0) {
        rows.norms[t / 32] = of_warp;
        rows.deltas[t / 32] = of_delta;
      }
    }
    __syncthreads();
    if (t >= kTile) return;
    float lse = kAttentionNoQuery, largest_p = 0.0F;
    if (block.has(t)) {
      const u64 query = u64{block.row()} * args.dout.tokens + block.first() + t;
      const float x = load_global(args.lse + query);
      // A query without a key has none.
      if (x != __uint_as_float(0xFF800000U)) lse = fmaf(x, 1.44269504F, -log2f(inv_scale));
      largest_p = load_global(args.largest_p + query);
    }
    float* record = args.steps + u64{2 * at + t / kAttentionStep} * kAttentionStepFloats;
    if (t % kAttentionStep == 0) {
      record[0] = inv_q * args.scale_log2;
      record[1] = inv_q;
      record[2] = __uint_as_float(max(rows.norms[t / 32], rows.norms[t / 32 + 1]));
      record[3] = __uint_as_float(max(rows.deltas[t / 32], rows.deltas[t / 32 + 1]));
      record[4] = log2f(inv_scale);
    }
    record[kAttentionStepHeader + t % kAttentionStep] = lse;
    record[kAttentionStepDelta + t % kAttentionStep] = delta;
    args.bounds_q[u64{at} * kTile + t] =
        __uint_as_float(attention_bound_bits(__float_as_uint(2.0F * norm * inv_scale * largest_p)));
  }

  static F8_DEVICE void cast_gradient(const Args& args, const Block& block, u32* words) {
    __shared__ Rows of_tokens;
    Block of_o = block;
    of_o.operand = &args.o;
    Loaded loaded(block);
    u32 largest = 0;
#pragma unroll
    for (u32 i = 0; i < kItems; ++i) {
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
#pragma unroll
        for (const u32 word : loaded.words[i][j]) {
          largest = max(largest, max(word << 16 & 0x7FFF0000U, word & 0x7FFF0000U));
        }
      }
    }
    const float scale = scale_from_amax<Fp8::kE4m3, true>(Cast::largest_of_block(largest));
    loaded.fence();
#pragma unroll
    for (u32 i = 0; i < kItems; ++i) {
      u32 rows[4][2];
#pragma unroll
      for (u32 j = 0; j < 4; ++j) {
        float x[kChunk];
        unpack(loaded.words[i][j], x);
#pragma unroll
        for (float& each : x) each *= scale;
        rows[j][0] = pack_e4m3(x[0], x[1], x[2], x[3]);
        rows[j][1] = pack_e4m3(x[4], x[5], x[6], x[7]);
        *reinterpret_cast<uint2*>(args.dout.copy + block.line(token(i, j)) + chunk(i) * kChunk) =
            make_uint2(rows[j][0], rows[j][1]);
        float o[kChunk] = {};
        if (block.has(token(i, j))) {
          u32 of_token[4];
          load_global_words(of_o.at(token(i, j), chunk(i) * kChunk), of_token);
          unpack(of_token, o);
        }
        float delta = 0;
#pragma unroll
        for (u32 c = 0; c < kChunk; c += 2) {
          float low, high;
          unpack_e4m3(static_cast<u16>(rows[j][c / 4] >> c % 4 * 8), low, high);
          delta = fmaf(low, o[c], fmaf(high, o[c + 1], delta));
        }
        delta = sum_of_token(delta);
        const float squares = sum_of_token(sum_of_squares(rows[j]));
        if (chunk(i) == 0) {
          of_tokens.delta[token(i, j)] = delta;
          of_tokens.squares[token(i, j)] = squares;
        }
      }
      put_columns(rows, i, words);
    }
    __syncthreads();
    store_columns(block, args.dout_t, words);
    write_records(args, block, inverse(scale), of_tokens);
  }

  static F8_DEVICE void run(const Args& args) {
    __shared__ u32 words[kD * 32];
    grid_dependency_wait();
    launch_dependents();
    const u32 of_q = Cast::blocks_of(args.kept, args.kept.q) * args.kept.q.heads * args.kept.batch;
    Block block = Cast::block_at(args.kept, blockIdx.x < of_q ? blockIdx.x : blockIdx.x - of_q);
    if (blockIdx.x < of_q) {
      block.operand = &args.dout;
      cast_gradient(args, block, words);
    } else if (block.is_v) {
      transpose_values(args, block, words);
    } else {
      transpose_rows(block, block.is_k ? args.k_t : args.q_t, words);
    }
  }
};

}  // namespace f8::kernels
