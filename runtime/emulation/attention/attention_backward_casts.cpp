// The casts of the backward of attention in fp8 (attention_backward_cast.cuh), to the same bits but for the sums of rows.
#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

#include "recipes/dtype.hpp"
#include "recipes/scales/scale.hpp"
#include "runtime/emulation/attention/attention_heads.hpp"

namespace f8::runtime::emulation {
namespace {

void transpose(const AttentionHeads& heads, int64_t rows, bool to_rows, uint8_t* to) {
  for (int64_t row = 0; row < rows; ++row) {
    for (int64_t block = 0; block < heads.count(); ++block) {
      for (int32_t t = 0; t < kernels::kAttentionTile; ++t) {
        for (int64_t c = 0; c < heads.d; ++c) {
          to[heads.in_copy(row, block, t, c, !to_rows)] =
              heads.of.copy[heads.in_copy(row, block, t, c, to_rows)];
        }
      }
    }
  }
}

// The largest norm of each 16 rows of v.
void norms_of(const AttentionHeads& v, int64_t rows, const uint8_t* copy, float* norms) {
  constexpr int64_t kRows = kernels::kAttentionNormKeys;
  for (int64_t at = 0; at < rows * v.count() * kernels::kAttentionNorms; ++at) {
    float most = 0;
    for (int64_t t = 0; t < kRows; ++t) {
      float sum = 0;
      for (int64_t c = 0; c < v.d; ++c) {
        const float x = e4m3(copy[(at * kRows + t) * v.d + c]);
        sum += x * x;
      }
      if (!(sum <= most)) most = sum;
    }
    norms[at] = std::sqrt(most) * v.of.inv_scale[at / kernels::kAttentionNorms];
  }
}

// The 128 queries of a block of a head: dO's copies, records and bounds.
template <class Args>
void cast_gradient(const Args& args, const AttentionHeads& heads, const AttentionHeads& o,
                   int64_t row, int64_t at) {
  constexpr int64_t kTokens = kernels::kAttentionTile, kQueriesOfStep = kernels::kAttentionStep;
  const kernels::AttentionBlock& block = heads.blocks[static_cast<size_t>(at)];
  uint32_t amax = 0;
  for (int64_t t = 0; t < block.tokens; ++t) {
    for (int64_t c = 0; c < heads.d; ++c) {
      const float x = decode_bf16(heads.of.x[heads.at(row, block.token + t, c)]);
      amax = std::max(amax, std::bit_cast<uint32_t>(x) & 0x7FFFFFFFU);
    }
  }
  const float scale = scale_from_amax(std::bit_cast<float>(amax), Dtype::kE4m3, true);
  const float inv_scale = 1.0F / scale;
  const int64_t place = row * heads.count() + at;
  const float inv_q = args.kept.q.inv_scale[place];
  for (int64_t step = 0; step < kTokens / kQueriesOfStep; ++step) {
    float* const record =
        args.steps + (place * kTokens / kQueriesOfStep + step) * kernels::kAttentionStepFloats;
    float largest = 0, largest_delta = 0;
    for (int64_t i = 0; i < kQueriesOfStep; ++i) {
      const int64_t t = step * kQueriesOfStep + i;
      const bool has = t < block.tokens;
      float squares = 0, delta = 0;
      for (int64_t c = 0; c < heads.d; ++c) {
        const float x = has ? decode_bf16(heads.of.x[heads.at(row, block.token + t, c)]) : 0;
        const uint8_t byte = encode_fp8(x * scale, Dtype::kE4m3);
        for (const bool transposed : {false, true}) {
          uint8_t* const copy = transposed ? args.dout_t : args.dout.copy;
          copy[heads.in_copy(row, at, static_cast<int32_t>(t), c, transposed)] = byte;
        }
        squares += e4m3(byte) * e4m3(byte);
        if (has) delta += e4m3(byte) * decode_bf16(o.of.x[o.at(row, block.token + t, c)]);
      }
      float lse = kernels::kAttentionNoQuery, largest_p = 0;
      if (has) {
        const int64_t query = row * args.dout.tokens + block.token + t;
        if (args.lse[query] != -std::numeric_limits<float>::infinity()) {
          lse = std::fma(args.lse[query], 1.44269504F, -std::log2(inv_scale));
        }
        largest_p = args.largest_p[query];
      }
      const float norm = std::sqrt(squares);
      if (!(norm * inv_q <= largest)) largest = norm * inv_q;
      delta *= inv_q;
      if (!(std::abs(delta) <= largest_delta)) largest_delta = std::abs(delta);
      record[kernels::kAttentionStepHeader + i] = lse;
      record[kernels::kAttentionStepDelta + i] = delta;
      args.bounds_q[place * kTokens + t] = bound_of(2 * norm * inv_scale * largest_p);
    }
    record[0] = inv_q * args.scale_log2;
    record[1] = inv_q;
    record[2] = largest;
    record[3] = largest_delta;
    record[4] = std::log2(inv_scale);
  }
}

template <class Casts>
void cast_all(const codegen::AttentionCastSpec& spec, const Call& call) {
  const auto& args = call.args<kernels::AttentionBackwardCastArgs<Casts>>();
  const auto& kept = args.kept;
  if (args.dout.x == nullptr || args.dout.copy == nullptr || args.o.x == nullptr ||
      args.lse == nullptr || args.largest_p == nullptr || args.q_t == nullptr ||
      args.k_t == nullptr || args.dout_t == nullptr || args.v == nullptr || args.steps == nullptr ||
      args.bounds_q == nullptr || args.norms_v == nullptr || args.dout.tokens != kept.q.tokens ||
      args.dout.heads != kept.q.heads) {
    call.fault("{}: an array is null, or dO has other queries than q", call.module.key);
    return;
  }
  const int64_t rows_q = int64_t{kept.batch} * kept.q.heads;
  const int64_t rows_k = int64_t{kept.batch} * kept.k.heads;
  const AttentionHeads q = attention_heads(spec, call, kept.q, false);
  const AttentionHeads v = attention_heads(spec, call, kept.v, true);
  transpose(q, rows_q, false, args.q_t);
  transpose(attention_heads(spec, call, kept.k, true), rows_k, false, args.k_t);
  transpose(v, rows_k, true, args.v);
  norms_of(v, rows_k, args.v, args.norms_v);
  const AttentionHeads dout = attention_heads(spec, call, args.dout, false);
  const AttentionHeads o = attention_heads(spec, call, args.o, false);
  for (int64_t row = 0; row < rows_q; ++row) {
    for (int64_t at = 0; at < q.count(); ++at) cast_gradient(args, dout, o, row, at);
  }
}

}  // namespace

void emulate_backward_cast(const codegen::AttentionCastSpec& spec, const Call& call) {
  if (spec.packed) return cast_all<kernels::AttentionPackedCastArgs>(spec, call);
  cast_all<kernels::AttentionCastArgs>(spec, call);
}

}  // namespace f8::runtime::emulation
