// Packs of sequences for the tests of attention, and a sequence's part of them.
#pragma once

#include <numeric>
#include <vector>

#include "tests/gpu/attention/gradients.hpp"

namespace f8::runtime::gpu {

struct PackCase {
  const char* name;
  int64_t heads_q, heads_kv;
  std::vector<int32_t> queries, keys;  // of each sequence
  bool causal = true;
  int64_t window = 0;
  int64_t d = 128;

  [[nodiscard]] AttentionDesc desc() const {
    return {.heads_q = heads_q, .heads_kv = heads_kv, .causal = causal, .window = window};
  }
};

// Where sequences begin, and where the last one ends.
inline std::vector<int32_t> pack_offsets(const std::vector<int32_t>& tokens) {
  std::vector<int32_t> offsets(tokens.size() + 1);
  std::partial_sum(tokens.begin(), tokens.end(), offsets.begin() + 1);
  return offsets;
}

// The tokens of a sequence.
inline Elements part(const Elements& of, int64_t first, int64_t tokens) {
  Elements r = of;
  r.tokens = tokens;
  const auto stride = static_cast<size_t>(of.token_stride());
  r.bits.assign(of.bits.begin() + first * of.token_stride(),
                of.bits.begin() + (first + tokens) * of.token_stride());
  r.bits.resize(static_cast<size_t>(tokens) * stride);
  return r;
}

// Those of sequence i of a pack.
inline Operands part(const Operands& all, const std::vector<int32_t>& cu_q,
                     const std::vector<int32_t>& cu_k, size_t i) {
  const int64_t queries = cu_q[i + 1] - cu_q[i], keys = cu_k[i + 1] - cu_k[i];
  Operands own = all;
  own.q = part(all.q, cu_q[i], queries);
  own.k = part(all.k, cu_k[i], keys);
  own.v = part(all.v, cu_k[i], keys);
  own.dout = part(all.dout, cu_q[i], queries);
  return own;
}

}  // namespace f8::runtime::gpu
