// The sizes that cuDNN's graphs are built for, and what those of packed sequences have beside the caller's tensors.
#pragma once

#include <algorithm>
#include <bit>
#include <utility>

#include "codegen/kernels/attention/attention_args.cuh"
#include "recipes/fp8_layout.hpp"
#include "runtime/attention/attention.hpp"

namespace f8::runtime {

// The sizes that a graph is built for. Of a pack, tokens are the longest sequence's, and `packed_q` and `packed_kv` all of
// them, each rounded up.
struct GraphSizes {
  int64_t batch, tokens_q, tokens_kv, packed_q = 0, packed_kv = 0;
  auto operator<=>(const GraphSizes&) const = default;
};

// Rounds up by at most an eighth.
inline int64_t rounded_tokens(int64_t tokens) {
  constexpr int64_t kLeast = 128;
  const auto step = std::max(
      kLeast,
      static_cast<int64_t>(std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(tokens, 1)))) /
          8);
  return ceil_div(tokens, step) * step;
}

inline GraphSizes graph_sizes(const AttentionDesc& desc, const AttentionSizes& sizes) {
  if (!desc.packed) return {sizes.batch, sizes.tokens_q, sizes.tokens_kv};
  constexpr int64_t kLeastSequences = 8;
  const auto longest = [](int64_t of, int64_t tokens) {
    return rounded_tokens(of == 0 ? tokens : std::min(of, tokens));
  };
  return {static_cast<int64_t>(
              std::bit_ceil(static_cast<uint64_t>(std::max(sizes.batch, kLeastSequences)))),
          longest(sizes.longest_q, sizes.tokens_q), longest(sizes.longest_kv, sizes.tokens_kv),
          rounded_tokens(sizes.tokens_q), rounded_tokens(sizes.tokens_kv)};
}

// What a pack's graph has beside the caller's tensors, at the beginning of the workspace.
struct PackSpans {
  size_t tokens = 0, starts = 0, lse = 0, bytes = 0;  // where they begin, and all of them end

  PackSpans(const AttentionDesc& desc, const GraphSizes& sizes) {
    if (!desc.packed) return;
    constexpr int64_t kAlignment = 256;
    const auto take = [this](int64_t size) {
      return std::exchange(bytes,
                           bytes + static_cast<size_t>(ceil_div(size, kAlignment) * kAlignment));
    };
    tokens = take(2 * sizes.batch * int64_t{sizeof(int32_t)});
    starts = take(kernels::kAttentionSpans * (sizes.batch + 1) * int64_t{sizeof(int64_t)});
    lse = take(desc.heads_q * sizes.packed_q * int64_t{sizeof(float)});
  }
};

}  // namespace f8::runtime
