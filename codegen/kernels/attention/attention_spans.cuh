// Where the sequences of a pack lie, for a backward by a library (AttentionSpanArgs). A CTA has a head's row of lse, and the
// first one the spans.
#pragma once

#include "codegen/kernels/attention/attention_args.cuh"
#include "codegen/kernels/ptx.cuh"

namespace f8::kernels {

F8_DEVICE void write_attention_spans(const AttentionSpanArgs& args) {
  grid_dependency_wait();
  launch_dependents();
  const i32 head = static_cast<i32>(blockIdx.x), thread = static_cast<i32>(threadIdx.x);
  const float* from = args.lse + static_cast<i64>(head) * args.queries;
  float* to = args.padded_lse + static_cast<i64>(head) * args.padded_queries;
  for (i32 t = thread; t < args.queries; t += kTileThreads) to[t] = from[t];
  if (head != 0) return;
  const auto offset = [&](bool of_keys, i32 sequence) {
    return args.offsets[(of_keys ? args.sequences + 1 : 0) + min(sequence, args.sequences)];
  };
  for (i32 i = thread; i < 2 * args.padded; i += kTileThreads) {
    const bool of_keys = i >= args.padded;
    const i32 sequence = of_keys ? i - args.padded : i;
    args.tokens[i] =
        min(offset(of_keys, sequence + 1) - offset(of_keys, sequence), args.longest[of_keys]);
  }
  for (i32 i = thread; i < kAttentionSpans * (args.padded + 1); i += kTileThreads) {
    const i32 span = i / (args.padded + 1), sequence = i % (args.padded + 1);
    args.starts[i] = offset(is_of_keys(span), sequence) * args.strides[span];
  }
}

}  // namespace f8::kernels
