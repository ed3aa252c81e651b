// The parameters of the kernels of attention (attention_forward.cuh, attention_cast.cuh), shared with the host
// like those of kernel_args.cuh. q, k and v lie in whole blocks of 128 tokens of a head, with zeros behind the
// last token.
//
// Packed sequences lie one behind the other in [tokens][heads][d], from offsets that the device alone knows. Their
// blocks begin with each sequence, so that a block, its scales and a tile of keys are of one sequence: the kernel
// of attention has the loop that it has for a batch, and a sequence has the same bits wherever it lies. Sequence i
// has the blocks from offsets[i] / 128 + i on, which is room for all of its tokens without a sum over the sequences
// before it; where it has fewer, a block is left without tokens.
#pragma once

#include "codegen/kernels/kernel_args.cuh"

namespace f8::kernels {

// Tokens of a block, which has a scale, and keys of a tile.
inline constexpr i32 kAttentionTile = 128;
F8_BOTH constexpr i32 attention_threads(i32 warpgroups) {
  return 128 * (warpgroups + 1);
}

// The place of a token of a tile in v^T, which has each 16 tokens in the order of fragments.
F8_BOTH constexpr i32 fragment_place(i32 token) {
  const i32 of_16 = token % 16;
  return token - of_16 + of_16 % 8 / 2 * 4 + of_16 / 8 * 2 + of_16 % 2;
}

F8_BOTH constexpr i32 attention_blocks(i32 tokens) {
  return (tokens + kAttentionTile - 1) / kAttentionTile;
}

F8_BOTH constexpr i32 attention_packed_blocks(i32 tokens, i32 sequences) {
  return tokens / kAttentionTile + sequences;
}

// A block of packed tokens.
struct AttentionBlock {
  i32 token;    // its first one, of all tokens of the pack
  i32 tokens;   // that it has: 0 to 128
  i32 index;    // of the blocks of its sequence
  i32 keys;     // of its sequence
  i32 first;    // the block of keys that its sequence's begin with
  i32 queries;  // of its sequence
  i32 first_q;  // the block of queries that its sequence's begin with
  i32 padding;
};

struct AttentionArgs {
  static constexpr bool kWindow = false, kPacked = false;
  const float* inv_scale_q;  // [b][h][blocks of queries]
  const float* inv_scale_k;  // [b][g][blocks of keys], and v's
  const float* inv_scale_v;
  u16* o;            // bf16 [b][queries][h][d]
  float* lse;        // [b][h][queries]
  float* largest_p;  // of each query, likewise; or null
  i32 queries;
  i32 keys;
  i32 heads_q;
  i32 heads_kv;
  i32 batch;
  float scale_log2;  // of the softmax, times log2(e)
};

// Those of a sliding window: query i has the keys from i - window + 1 on, up to the i-th one. Each query has one,
// so queries - keys < window, unless sequences are packed.
template <class Args>
struct AttentionWindow : Args {
  static constexpr bool kWindow = true;
  i32 window;  // at least 1
  i32 padding_of_window;
};
using AttentionWindowArgs = AttentionWindow<AttentionArgs>;

// Those of packed sequences, in a batch of 1.
template <class Args>
struct AttentionPackedArgs : Args {
  static constexpr bool kPacked = true;
  const AttentionBlock* blocks_q;
  const AttentionBlock* blocks_k;
  i32 sequences;
  i32 padding_of_sequences;
};

// The blocks of a head, of a batch's sequence or of all packed ones.
template <class Args>
F8_BOTH constexpr i32 attention_blocks_of(const Args& args, i32 tokens) {
  if constexpr (Args::kPacked) {
    return attention_packed_blocks(tokens, args.sequences);
  } else {
    return attention_blocks(tokens);
  }
}

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
  static constexpr bool kPacked = false;
  AttentionOperand q;
  AttentionOperand k;
  AttentionOperand v;
  float* sums;  // of k, fp32 [b][heads][slabs][d]
  i32 batch;
  i32 padding;
};

// These are of queries, and one more is of keys. The index beside them is that of an offset, or of a sequence.
enum AttentionPackError : i32 { kNoPackError = 0, kBadOffset = 1, kLongSequence = 3 };

// Those of packed sequences, in a batch of 1. A slab is two blocks of a sequence, and its sums lie at the first one's
// place in [heads][blocks of keys][d]: they are added in the order of a sequence of its own.
struct AttentionPackedCastArgs : AttentionCastArgs {
  static constexpr bool kPacked = true;
  AttentionBlock* blocks_q;  // written by the layout, as blocks_k and offsets
  AttentionBlock* blocks_k;
  const i32* offsets_q;  // [sequences + 1], read by the layout alone
  const i32* offsets_k;
  i32* offsets;  // [2][sequences + 1]: both, from 0 to all tokens without a fall
  i32* error;    // or null: AttentionPackError and an index, kept where it is not 0
  i32 sequences;
  i32 longest_q;  // tokens that a sequence has at most, for the error alone; 0: any
  i32 longest_k;
  i32 padding_of_sequences;
};

// The tensors of a forward or a backward in bf16 by a library, in the order of AttentionSpanArgs.
enum AttentionSpan : i32 {
  kSpanQ,
  kSpanK,
  kSpanV,
  kSpanO,
  kSpanDout,
  kSpanDq,
  kSpanDk,
  kSpanDv,
  kSpanLse,
  kAttentionSpans
};
F8_BOTH constexpr bool is_of_keys(i32 span) {
  return span == kSpanK || span == kSpanV || span == kSpanDk || span == kSpanDv;
}

// This says where the sequences of a pack lie, as a library takes it: tokens of each, and the element of each tensor that it begins
// with. The arrays, and the rows of lse, are longer than the pack needs, so that few sizes stand for all; sequences that are
// not there have no tokens. A forward has neither lse nor gradients.
struct AttentionSpanArgs {
  const i32* offsets;  // [2][sequences + 1], of queries and of keys
  const float* lse;    // [h][queries], or null: of a backward, as all that has gradients
  i32* tokens;         // [2][padded]
  i64* starts;         // [kAttentionSpans][padded + 1]
  float* padded_lse;   // [h][padded_queries]
  // bf16, by span - kSpanDq. The library leaves what has no queries, or no keys, and it becomes 0.
  u16* gradients[3];
  i64 head_strides[3];
  i64 strides[kAttentionSpans];  // of a token
  i32 longest[2];  // tokens that a sequence has at most, of queries and of keys: more are left out
  i32 sequences;
  i32 padded;
  i32 queries;
  i32 padded_queries;
  i32 heads_kv;
  i32 head_dim;
};

// A library's forward of a pack leaves this to do: it writes the lse of each token's heads side by side, and results of its own
// for queries without a key.
struct AttentionFinishArgs {
  const AttentionBlock* blocks;  // of queries
  const float* library_lse;      // [queries][h]
  float* lse;                    // [h][queries]
  u16* o;                        // bf16 [queries][h][d]
  i32 queries;
  i32 heads;
  i32 head_dim;
  i32 longest[2];  // tokens that the library took of a sequence at most, of queries and of keys
  i32 window;      // the keys that a causal query has at most; 0: all
};

}  // namespace f8::kernels
