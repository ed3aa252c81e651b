// Two kernels surround a library's attention of packed sequences. attention_spans runs first and says where the sequences lie; its
// first CTA writes the spans. For a backward each CTA takes a head, whose row of lse it copies, and whose gradients it clears where the
// library computes none. attention_finish runs behind a forward: each CTA takes a block of 128 queries, writes their lse as float8 has
// it, and clears those without keys.
#pragma once

#include "codegen/kernels/attention/attention_args.cuh"
#include "codegen/kernels/ptx.cuh"

namespace f8::kernels {

F8_DEVICE i32 offset_of(const AttentionSpanArgs& args, bool of_keys, i32 sequence) {
  return args.offsets[(of_keys ? args.sequences + 1 : 0) + min(sequence, args.sequences)];
}

F8_DEVICE void clear_gradient(const AttentionSpanArgs& args, i32 span, i32 head, i32 sequence) {
  const i32 which = span - kSpanDq;
  const i32 first = offset_of(args, is_of_keys(span), sequence);
  const i32 count = (offset_of(args, is_of_keys(span), sequence + 1) - first) * args.head_dim;
  u16* to = args.gradients[which] + head * args.head_strides[which] + first * args.strides[span];
  for (i32 i = static_cast<i32>(threadIdx.x); i < count; i += kTileThreads) {
    to[i / args.head_dim * args.strides[span] + i % args.head_dim] = 0;
  }
}

// Gives the library's backward a head's row of lse. A query without a key has -inf there, whose exp(score - lse) is NaN even where
// the score is -inf; beside +inf it is 0.
F8_DEVICE void prepare_backward(const AttentionSpanArgs& args, i32 head) {
  constexpr u32 kInfinity = 0x7F800000U;
  const float* from = args.lse + static_cast<i64>(head) * args.queries;
  float* to = args.padded_lse + static_cast<i64>(head) * args.padded_queries;
  for (i32 t = static_cast<i32>(threadIdx.x); t < args.queries; t += kTileThreads) {
    const float lse = from[t];
    to[t] = lse == -__uint_as_float(kInfinity) ? __uint_as_float(kInfinity) : lse;
  }
  for (i32 s = 0; s < args.sequences; ++s) {
    const bool queries = offset_of(args, false, s + 1) > offset_of(args, false, s);
    const bool keys = offset_of(args, true, s + 1) > offset_of(args, true, s);
    if (queries == keys) continue;
    if (queries) clear_gradient(args, kSpanDq, head, s);
    if (keys && head < args.heads_kv) {
      clear_gradient(args, kSpanDk, head, s);
      clear_gradient(args, kSpanDv, head, s);
    }
  }
}

F8_DEVICE void write_attention_spans(const AttentionSpanArgs& args) {
  grid_dependency_wait();
  launch_dependents();
  const i32 head = static_cast<i32>(blockIdx.x), thread = static_cast<i32>(threadIdx.x);
  if (args.lse != nullptr) prepare_backward(args, head);
  if (head != 0) return;
  for (i32 i = thread; i < 2 * args.padded; i += kTileThreads) {
    const bool of_keys = i >= args.padded;
    const i32 s = of_keys ? i - args.padded : i;
    args.tokens[i] =
        min(offset_of(args, of_keys, s + 1) - offset_of(args, of_keys, s), args.longest[of_keys]);
  }
  for (i32 i = thread; i < kAttentionSpans * (args.padded + 1); i += kTileThreads) {
    const i32 span = i / (args.padded + 1), s = i % (args.padded + 1);
    args.starts[i] = offset_of(args, is_of_keys(span), s) * args.strides[span];
  }
}

F8_DEVICE void finish_attention(const AttentionFinishArgs& args) {
  grid_dependency_wait();
  launch_dependents();
  const i32 thread = static_cast<i32>(threadIdx.x);
  const AttentionBlock block = args.blocks[blockIdx.x];
  // The queries of a sequence that have a key are its first ones.
  const i32 keys = min(block.keys, args.longest[1]);
  i64 has_key = keys > 0 ? args.longest[0] : 0;
  if (keys > 0 && args.window > 0) has_key = min(has_key, i64{keys} + args.window - 1);
  const i64 left = has_key - block.index * kAttentionTile;
  const i32 count = left <= 0 ? 0 : static_cast<i32>(min(left, i64{block.tokens}));
  for (i32 i = thread; i < kAttentionTile * args.heads; i += kTileThreads) {
    const i32 token = i % kAttentionTile, head = i / kAttentionTile;
    if (token >= block.tokens) continue;
    const i64 query = block.token + token;
    args.lse[i64{head} * args.queries + query] =
        token < count ? args.library_lse[query * args.heads + head] : __uint_as_float(0xFF800000U);
  }
  const i64 row = i64{args.heads} * args.head_dim;
  u16* o = args.o + (i64{block.token} + count) * row;
  for (i64 i = thread; i < (block.tokens - count) * row; i += kTileThreads) o[i] = 0;
}

}  // namespace f8::kernels
