// The parameters of the forward of attention (attention_forward.cuh), shared with the host like those of
// kernel_args.cuh.
#pragma once

#include "codegen/kernels/kernel_args.cuh"

namespace f8::kernels {

inline constexpr i32 kAttentionTile = 128;  // queries of a CTA, and keys of a tile
inline constexpr i32 kAttentionThreads = 384;

// The place of a token of a tile in v^T, which has each 16 tokens in the order of fragments.
F8_BOTH constexpr i32 fragment_place(i32 token) {
  const i32 of_16 = token % 16;
  return token - of_16 + of_16 % 8 / 2 * 4 + of_16 / 8 * 2 + of_16 % 2;
}

struct AttentionArgs {
  const float* inv_scale_q;  // [b][h][s / 128]
  const float* inv_scale_k;  // [b][g][s / 128], and v's
  const float* inv_scale_v;
  u16* o;      // bf16 [b][s][h][d]
  float* lse;  // [b][h][s]
  i32 tokens;  // s, a multiple of 128
  i32 heads_q;
  i32 heads_kv;
  i32 batch;
  float scale_log2;  // of the softmax, times log2(e)
  i32 padding;
};

}  // namespace f8::kernels
