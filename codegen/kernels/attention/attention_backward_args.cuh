// The parameters of the kernels of the backward in fp8 (attention_backward.cuh), shared with the host.
#pragma once

#include "codegen/kernels/attention/attention_args.cuh"

namespace f8::kernels {

// The kernel of dK and dV takes so many queries at a time, a step. A record of fp32 has what it needs of them: a factor of
// the dot products of this q and k, to which k's scale comes, the inverse scale of q, the largest norm of a row of dO and
// the largest |delta|, both in the units of delta, the log2 of dO's inverse scale, and then LSE of each query and delta of
// each.
//
// LSE is in log2, less the log2 of dO's inverse scale, so that 2^(S - LSE) is P times that scale; of what lies behind the
// last query it is so large that P is 0. delta is the sum of a row of dO O, times q's inverse scale over dO's.
inline constexpr i32 kAttentionStep = 64;
inline constexpr i32 kAttentionStepHeader = 8;
inline constexpr i32 kAttentionStepDelta = kAttentionStepHeader + kAttentionStep;
inline constexpr i32 kAttentionStepFloats = kAttentionStepDelta + kAttentionStep;
inline constexpr float kAttentionNoQuery = 1e30F;  // an LSE that makes P 0

// CTAs that share tiles of queries in the kernel of dK and dV.
inline constexpr i32 kAttentionKeyCluster = 2;

// Keys that have a norm.
inline constexpr i32 kAttentionNormKeys = 16;
inline constexpr i32 kAttentionNorms = kAttentionTile / kAttentionNormKeys;

// The floats of a CTA's sums of one gradient.
F8_BOTH constexpr i32 attention_sums(i32 head_dim) {
  return kAttentionTile * head_dim;
}

// A gradient in bf16: elements [batch][head][token][d], whose strides are in elements.
struct AttentionGradient {
  u16* x;
  i64 stride_batch;
  i64 stride_head;
  i64 stride_token;
};

// |dO V^T - delta| is at most the norm of a row of dO times that of one of v, and |delta|, which is not more. dS has a
// scale that is a power of two by these bounds. That of a query is at most one over twice its norm and its largest P.
struct AttentionBackwardArgs {
  static constexpr bool kWindow = false, kPacked = false;
  const float* inv_scale_k;  // [b][g][blocks of keys], and v's
  const float* inv_scale_v;
  const float* norms_v;   // of each 16 keys the largest: [b][g][blocks of keys][8]
  const float* steps;     // [b][h][2 blocks of queries][kAttentionStepFloats]
  const float* bounds_q;  // [b][h][blocks of queries][128]
  float* sums;            // of each CTA
  AttentionGradient dq;
  AttentionGradient dk;
  AttentionGradient dv;
  i32 queries;
  i32 keys;
  i32 heads_q;
  i32 heads_kv;
  i32 batch;
  float scale;  // of the softmax
};

// The casts before these: dO in e4m3 with a scale for each 128 tokens of a head, the copies of q, k, v and dO that
// forward did not keep, and what the records and bounds have. Forward's are in `kept`, whose operands' elements nobody
// reads.
template <class Casts>
struct AttentionBackwardCastArgs {
  Casts kept;
  AttentionOperand dout;  // its copy has rows, as q's; it has no array of scales
  AttentionOperand o;     // without a copy
  const float* lse;       // [b][h][queries]
  const float* largest_p;
  u8* q_t;  // e4m3 [b][heads][d][blocks][128], by fragment_place()
  u8* k_t;
  u8* dout_t;
  u8* v;  // e4m3 [b][g][blocks][128][d]
  float* steps;
  float* bounds_q;
  float* norms_v;
  float scale_log2;  // of the softmax, times log2(e)
  i32 padding;
};

// The bits of a power of two that is at most one over x, and at least half of it, but not more than 2^100; NaN where x is
// not finite.
F8_BOTH constexpr u32 attention_bound_bits(u32 x) {
  const u32 exponent = x >> 23;
  if (exponent >= 255) return 0x7FFFFFFFU;
  const u32 inverse = exponent < 253 ? 253U - exponent : 1U;
  return (inverse < 227U ? inverse : 227U) << 23;
}

}  // namespace f8::kernels
