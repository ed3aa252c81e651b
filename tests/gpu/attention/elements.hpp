// Operands of attention for its tests.
#pragma once

#include <cstdint>
#include <random>
#include <vector>

#include "float8/attention.h"
#include "recipes/dtype.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {

// [batch][tokens][heads][d] in bf16, of which each token has `gap` elements more.
struct Elements {
  int64_t batch, heads, tokens, gap, d;
  std::vector<uint16_t> bits;

  Elements(int64_t sequences, int64_t of_heads, int64_t of_tokens, int64_t between, unsigned seed,
           float mean, int64_t of_head = 128)
      : batch(sequences),
        heads(of_heads),
        tokens(of_tokens),
        gap(between),
        d(of_head),
        bits(static_cast<size_t>(batch * tokens * token_stride())) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (uint16_t& each : bits) each = encode_bf16(normal(random) + mean);
  }
  [[nodiscard]] int64_t token_stride() const { return heads * d + gap; }
  [[nodiscard]] size_t at(int64_t row, int64_t token, int64_t column) const {
    return static_cast<size_t>((row / heads * tokens + token) * token_stride() + row % heads * d +
                               column);
  }
  [[nodiscard]] double value(int64_t row, int64_t token, int64_t column) const {
    return decode_bf16(bits[at(row, token, column)]);
  }
  // All of them, [batch * heads][tokens][d].
  [[nodiscard]] std::vector<double> values() const {
    std::vector<double> all;
    for (int64_t i = 0; i < batch * heads * tokens * d; ++i) {
      all.push_back(value(i / d / tokens, i / d % tokens, i % d));
    }
    return all;
  }
  // The same values, with nothing between tokens.
  [[nodiscard]] Elements dense() const {
    Elements r = *this;
    r.gap = 0;
    r.bits.clear();
    for (auto at = bits.begin(); at != bits.end(); at += token_stride()) {
      r.bits.insert(r.bits.end(), at, at + r.token_stride());
    }
    return r;
  }
  [[nodiscard]] float8_heads on(const DeviceBuffer& buffer) const {
    return {.data = buffer.as(),
            .batch_stride = tokens * token_stride(),
            .head_stride = d,
            .token_stride = token_stride()};
  }
};

}  // namespace f8::runtime::gpu
