// The parameters of the kernels of attention (attention_forward.cuh, attention_cast.cuh), shared with the host
// like those of kernel_args.cuh. q, k and v lie in whole blocks of 128 tokens of a head, with zeros behind the
// last token.
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

F8_BOTH constexpr i32 attention_blocks(i32 tokens) {
  return (tokens + kAttentionTile - 1) / kAttentionTile;
}

struct AttentionArgs {
  static constexpr bool kWindow = false;
  const float* inv_scale_q;  // [b][h][blocks of queries]
  const float* inv_scale_k;  // [b][g][blocks of keys], and v's
  const float* inv_scale_v;
  u16* o;      // bf16 [b][queries][h][d]
  float* lse;  // [b][h][queries]
  i32 queries;
  i32 keys;
  i32 heads_q;
  i32 heads_kv;
  i32 batch;
  float scale_log2;  // of the softmax, times log2(e)
};

// Those of a sliding window: query i has the keys from i - window + 1 on, up to the i-th one. Each query has one,
// so queries - keys < window.
struct AttentionWindowArgs : AttentionArgs {
  static constexpr bool kWindow = true;
  i32 window;  // at least 1
  i32 padding;
};

// The first tile of keys that a query of a block has under a window.
F8_BOTH constexpr i32 attention_first_tile(i32 block, i32 window) {
  const i32 key = block * kAttentionTile + 1 - window;
  return key > 0 ? key / kAttentionTile : 0;
}

inline constexpr i32 kAttentionSlab = 256;  // tokens that a block of the sums of k adds
F8_BOTH constexpr i32 attention_slabs(i32 tokens) {
  return (tokens + kAttentionSlab - 1) / kAttentionSlab;
}

// q, k or v: bf16 elements x[batch][head][token][d], whose strides are in elements, and their copy.
struct AttentionOperand {
  u16* x;  // read by casts, written by their inverse
  i64 stride_batch;
  i64 stride_head;
  i64 stride_token;
  u8* copy;  // e4m3 [b][heads][blocks][128][d]; v: [b][heads][d][blocks][128], by fragment_place()
  float* inv_scale;  // [b][heads][blocks], powers of two
  i32 tokens;
  i32 heads;
};

struct AttentionCastArgs {
  AttentionOperand q;
  AttentionOperand k;
  AttentionOperand v;
  float* sums;  // of k, fp32 [b][heads][slabs][d]
  i32 batch;
  i32 padding;
};

}  // namespace f8::kernels
