#include "runtime/emulation/matmul.hpp"

#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "recipes/reference/reference.hpp"

namespace f8::runtime::emulation {
namespace {

constexpr int64_t kBlock = 128;

std::array<float, 256> decoded(Dtype format) {
  std::array<float, 256> values{};
  for (size_t bits = 0; bits < values.size(); ++bits) {
    values[bits] = decode_fp8(static_cast<uint8_t>(bits), format);
  }
  return values;
}

// Gives [rows][columns]: the part [first, first + columns) of K.
std::vector<double> slice(const Elements& from, int64_t rows, int64_t first, int64_t columns) {
  static const std::array<float, 256> e4m3 = decoded(Dtype::kE4m3);
  static const std::array<float, 256> e5m2 = decoded(Dtype::kE5m2);
  const float* values = from.type == Dtype::kE4m3 ? e4m3.data() : e5m2.data();
  const auto* bytes = static_cast<const uint8_t*>(from.base);
  std::vector<double> out;
  out.reserve(static_cast<size_t>(rows * columns));
  for (int64_t i = 0; i < rows; ++i) {
    for (int64_t k = first; k < first + columns; ++k) {
      const int64_t shard = from.shard_k == 0 ? 0 : k / from.shard_k;
      const int64_t at = shard * from.shard_stride + i * from.row_stride +
                         (k - shard * from.shard_k) * from.column_stride;
      const float value =
          is_fp8(from.type) ? values[bytes[at]] : load_element(from.base, at, from.type);
      out.push_back(static_cast<double>(value));
    }
  }
  return out;
}

// Gives the inverse scale of row i and block j of K.
float scale_of(const InverseScales& scales, int64_t i, int64_t j) {
  if (scales.values == nullptr) return 1;
  switch (scales.mode) {
    case codegen::ScaleMode::kTensor:
      return scales.values[0];
    case codegen::ScaleMode::kAxis:
      return scales.values[i * scales.stride];
    case codegen::ScaleMode::kBlock1x128:
      return scales.values[j * scales.stride + i];
    case codegen::ScaleMode::kBlock128x128:
      return scales.values[i / kBlock * scales.stride + j];
  }
  return 1;
}

// Gives the sums over a part of K, not scaled.
std::vector<double> sums(const Matmul& p, int64_t first_k, int64_t count_k) {
  return reference::matmul(slice(p.a, p.m, first_k, count_k), slice(p.b, p.n, first_k, count_k),
                           static_cast<size_t>(p.m), static_cast<size_t>(p.n),
                           static_cast<size_t>(count_k));
}

std::vector<double> block_scaled_sums(const Matmul& p) {
  std::vector<double> total(static_cast<size_t>(p.m * p.n));
  for (int64_t k = 0; k < p.k; k += kBlock) {
    const std::vector<double> part = sums(p, k, std::min(kBlock, p.k - k));
    size_t at = 0;
    for (int64_t i = 0; i < p.m; ++i) {
      const float scale_a = scale_of(p.scale_a, i, k / kBlock);
      for (int64_t j = 0; j < p.n; ++j, ++at) {
        total[at] += part[at] * static_cast<double>(scale_a * scale_of(p.scale_b, j, k / kBlock));
      }
    }
  }
  return total;
}

}  // namespace

void compute(const Matmul& p) {
  const bool block = is_block(p.scale_a.mode);
  const std::vector<double> totals = block ? block_scaled_sums(p) : sums(p, 0, p.k);
  size_t at = 0;
  for (int64_t i = 0; i < p.m; ++i) {
    for (int64_t j = 0; j < p.n; ++j, ++at) {
      auto result = static_cast<float>(totals[at]);
      if (!block) result *= scale_of(p.scale_a, i, 0) * scale_of(p.scale_b, j, 0);
      if (p.bias != nullptr) result += load_element(p.bias, j, p.d_type);
      if (p.amax != nullptr) {
        *p.amax = std::max(*p.amax, std::bit_cast<uint32_t>(result) & 0x7fffffffU);
      }
      const int64_t to = i * p.ld_d + j;
      const float before = p.add ? load_element(p.d, to, p.d_type) : 0;
      if (p.add && p.round_before_add) {
        store_element(p.d, to, result, p.d_type);
        result = load_element(p.d, to, p.d_type);
      }
      store_element(p.d, to, p.add ? result + before : result, p.d_type);
    }
  }
}

}  // namespace f8::runtime::emulation
