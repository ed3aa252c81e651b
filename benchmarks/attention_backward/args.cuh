// The parameters of the kernels of the backward (dq.cuh, dkv.cuh).
#pragma once

#include "codegen/kernels/attention/attention_args.cuh"

namespace f8::kernels {

// The backward of attention takes so many queries at a time. A record of fp32 has what it needs of them: a factor of the
// dot products of this q and k, to which k's scale comes, the inverse scale of q, a bound of dS, one of padding, and then
// two of each query, LSE and delta.
//
// LSE is in log2, less the log2 of dO's inverse scale, so that 2^(S - LSE) is P times that scale; of what lies behind the
// last query it is so large that P is 0. delta is the sum of a row of dO O, times q's inverse scale over dO's.
inline constexpr i32 kAttentionStep = 64;
inline constexpr i32 kAttentionStepHeader = 4;
inline constexpr i32 kAttentionStepFloats = kAttentionStepHeader + 2 * kAttentionStep;

// A gradient in bf16: elements [batch][head][token][d], whose strides are in elements.
struct AttentionGradient {
  u16* x;
  i64 stride_batch;
  i64 stride_head;
  i64 stride_token;
};

// A CTA's sums in fp32, of elements of dQ or of dK and dV.
inline constexpr i32 kAttentionSumsOfQueries = 128 * 128;
inline constexpr i32 kAttentionSumsOfKeys = 2 * 128 * 128;

// Bounds are powers of two. |dO V^T - delta| is at most twice the norm of a row of dO times the largest norm of a row
// of v, so that its product with the bounds of both is at most 1: that of v is at most one over that norm, that of a step
// one over twice the largest norm in it, in the units of delta, and that of a query one over twice its norm and its
// largest P.
struct AttentionBackwardArgs {
  const float* inv_scale_k;  // [b][g][blocks of keys], and v's
  const float* inv_scale_v;
  const float* bounds_v;  // [b][g][blocks of keys]
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

}  // namespace f8::kernels
