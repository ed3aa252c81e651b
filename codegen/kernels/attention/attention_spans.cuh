// This tells a library where the sequences of a pack lie (AttentionSpanArgs), for its backward. A CTA has a head, whose row of lse it
// copies, and whose gradients it clears where the library computes none; the first one has the spans.
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

F8_DEVICE void write_attention_spans(const AttentionSpanArgs& args) {
  grid_dependency_wait();
  launch_dependents();
  const i32 head = static_cast<i32>(blockIdx.x), thread = static_cast<i32>(threadIdx.x);
  const float* from = args.lse + static_cast<i64>(head) * args.queries;
  float* to = args.padded_lse + static_cast<i64>(head) * args.padded_queries;
  for (i32 t = thread; t < args.queries; t += kTileThreads) to[t] = from[t];
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

}  // namespace f8::kernels
