// What the kernels of attention and its casts share, on the emulated device.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <span>
#include <vector>

#include "codegen/kernels/attention/attention_backward_args.cuh"
#include "recipes/dtype.hpp"
#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::emulation {

[[nodiscard]] inline float e4m3(uint8_t byte) {
  static const auto values = [] {
    std::array<float, 256> r{};
    for (size_t i = 0; i < r.size(); ++i) r[i] = decode_fp8(static_cast<uint8_t>(i), Dtype::kE4m3);
    return r;
  }();
  return values[byte];
}

// Products are rounded before they are added, each sum in the order of its calls.
inline void add_multiple(float factor, std::span<const float> x, float* to) {
  for (size_t i = 0; i < x.size(); ++i) to[i] += factor * x[i];
}

[[nodiscard]] inline float bound_of(float x) {
  return std::bit_cast<float>(kernels::attention_bound_bits(std::bit_cast<uint32_t>(x)));
}

// The block `index` of the `tokens` of a sequence of a batch, which has as many queries and keys.
[[nodiscard]] inline kernels::AttentionBlock block_of_batch(int64_t index, int32_t tokens,
                                                            int32_t queries, int32_t keys) {
  constexpr int32_t kTokens = kernels::kAttentionTile;
  const auto first = static_cast<int32_t>(index) * kTokens;
  return {
      first, std::min(tokens - first, kTokens), static_cast<int32_t>(index), keys, 0, queries, 0,
      0};
}

// Whether these are the offsets of sequences of all tokens, as a forward leaves them. A call of other sizes than the
// forward's looks for them elsewhere, and most likely finds none.
[[nodiscard]] inline bool are_offsets(const int32_t* of, int64_t sequences, int64_t tokens) {
  return of[0] == 0 && of[sequences] == tokens && std::is_sorted(of, of + sequences + 1);
}

// The heads of a batch of an operand, each of which has the same blocks.
struct AttentionHeads {
  const kernels::AttentionOperand& of;
  int64_t d;
  std::vector<kernels::AttentionBlock> blocks;
  bool packed;

  [[nodiscard]] int64_t count() const { return static_cast<int64_t>(blocks.size()); }
  // The index of an element, of a row of [b][heads].
  [[nodiscard]] int64_t at(int64_t row, int64_t token, int64_t column) const {
    return row / of.heads * of.stride_batch + row % of.heads * of.stride_head +
           token * of.stride_token + column;
  }
  // The index of an element of a copy, transposed or not.
  [[nodiscard]] int64_t in_copy(int64_t row, int64_t block, int32_t token, int64_t column,
                                bool transposed) const {
    constexpr int64_t kTokens = kernels::kAttentionTile;
    if (!transposed) return ((row * count() + block) * kTokens + token) * d + column;
    return ((row * d + column) * count() + block) * kTokens + kernels::fragment_place(token);
  }
};

// The blocks of an operand: `of_keys` says whether it is k or v.
[[nodiscard]] AttentionHeads attention_heads(const codegen::AttentionCastSpec& spec,
                                             const Call& call, const kernels::AttentionOperand& of,
                                             bool of_keys);

// AttentionStep::kBackwardCast.
void emulate_backward_cast(const codegen::AttentionCastSpec& spec, const Call& call);

}  // namespace f8::runtime::emulation
