// What the accuracy of attention is measured on: operands of four kinds, the exact O, and the distance to it.
//
//   normal    normal numbers
//   outlier   0.1 % of the elements are 10 times as large
//   bias      the channels of k have means of 8 to 15
//   sharp     queries match keys: q has 0.75 k added
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "recipes/attention.hpp"
#include "tuning_db/database.hpp"

namespace f8::tuner {

inline constexpr std::array<std::string_view, 4> kAttentionData = {"normal", "outlier", "bias",
                                                                   "sharp"};

// In bf16, [b][h][s][d] and [b][g][s][d].
struct AttentionData {
  std::vector<uint16_t> q, k, v;
};
[[nodiscard]] AttentionData attention_data(std::string_view kind, const AttentionShape& shape,
                                           uint64_t seed);
// O in fp64, [b][s][h][d].
[[nodiscard]] std::vector<double> exact_attention(const AttentionShape& shape,
                                                  const AttentionData& data);
// O of one query with so many keys, of which `q(c)`, `k(j, c)` and `v(j, c)` give the elements.
template <class Q, class K, class V>
std::vector<double> exact_query(int64_t keys, int64_t head_dim, const Q& q, const K& k,
                                const V& v) {
  std::vector<double> scores(static_cast<size_t>(keys)), o(static_cast<size_t>(head_dim));
  for (int64_t j = 0; j < keys; ++j) {
    double& score = scores[static_cast<size_t>(j)];
    for (int64_t c = 0; c < head_dim; ++c) score += static_cast<double>(q(c)) * k(j, c);
    score /= std::sqrt(static_cast<double>(head_dim));
  }
  const double most = *std::ranges::max_element(scores);
  double sum = 0;
  for (int64_t j = 0; j < keys; ++j) {
    const double p = std::exp(scores[static_cast<size_t>(j)] - most);
    sum += p;
    for (int64_t c = 0; c < head_dim; ++c) o[static_cast<size_t>(c)] += p * v(j, c);
  }
  for (double& each : o) each /= sum;
  return o;
}

[[nodiscard]] tuning_db::Accuracy accuracy_of(std::string_view data, std::string_view tensor,
                                              std::span<const float> actual,
                                              std::span<const double> exact);

}  // namespace f8::tuner
