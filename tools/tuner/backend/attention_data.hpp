// The accuracy of attention is measured on operands of four kinds, by the distance to the exact results.
//
//   normal    normal numbers, which dO is of all kinds
//   outlier   0.1 % of the elements are 10 times as large, of dO too
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
  std::vector<uint16_t> q, k, v, dout;
};
[[nodiscard]] AttentionData attention_data(std::string_view kind, const AttentionShape& shape,
                                           uint64_t seed);
// O is [b][s][h][d], and the gradients lie as their operands do.
template <class T>
struct AttentionResults {
  std::vector<T> o, dq, dk, dv;  // the gradients are empty where there is no backward
};
// In fp64.
[[nodiscard]] AttentionResults<double> exact_attention(const AttentionShape& shape,
                                                       const AttentionData& data, bool backward);

// The softmax of the scores of a query with so many keys, of which `q(c)` and `k(j, c)` give the elements.
template <class Q, class K>
std::vector<double> exact_softmax(int64_t keys, int64_t head_dim, const Q& q, const K& k) {
  std::vector<double> p(static_cast<size_t>(keys));
  for (int64_t j = 0; j < keys; ++j) {
    double& score = p[static_cast<size_t>(j)];
    for (int64_t c = 0; c < head_dim; ++c) score += static_cast<double>(q(c)) * k(j, c);
    score /= std::sqrt(static_cast<double>(head_dim));
  }
  const double most = *std::ranges::max_element(p);
  double sum = 0;
  for (double& each : p) sum += each = std::exp(each - most);
  for (double& each : p) each /= sum;
  return p;
}
// The gradients of these scores, with their factor, where the query's O has the gradient `dout(c)`.
template <class V, class Dout>
std::vector<double> exact_score_gradients(std::span<const double> p, int64_t head_dim, const V& v,
                                          const Dout& dout) {
  std::vector<double> ds(p.size());
  double delta = 0;
  for (size_t j = 0; j < p.size(); ++j) {
    for (int64_t c = 0; c < head_dim; ++c) {
      ds[j] += static_cast<double>(dout(c)) * v(static_cast<int64_t>(j), c);
    }
    delta += p[j] * ds[j];
  }
  for (size_t j = 0; j < p.size(); ++j) {
    ds[j] = p[j] * (ds[j] - delta) / std::sqrt(static_cast<double>(head_dim));
  }
  return ds;
}
// The sum of rows x(j, c): O of a softmax and v, dQ of its gradients and k.
template <class X>
std::vector<double> weighted_sum(std::span<const double> weights, int64_t head_dim, const X& x) {
  std::vector<double> sum(static_cast<size_t>(head_dim));
  for (size_t j = 0; j < weights.size(); ++j) {
    for (int64_t c = 0; c < head_dim; ++c) {
      sum[static_cast<size_t>(c)] += weights[j] * x(static_cast<int64_t>(j), c);
    }
  }
  return sum;
}

[[nodiscard]] tuning_db::Accuracy accuracy_of(std::string_view data, std::string_view tensor,
                                              std::span<const float> actual,
                                              std::span<const double> exact);

}  // namespace f8::tuner
