#include "runtime/gemm/suggestions.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

namespace f8::runtime {
namespace {

double above(double value, double bend) {
  return std::max(0.0, value - bend);
}

double lag(const Suggestion& suggestion, Shape shape, int sm_count, const CostModel& model) {
  if (suggestion.algorithm == kVectorAlgorithm) return std::numeric_limits<double>::lowest();
  if (!suggestion.is_ranked()) return std::numeric_limits<double>::max();
  const auto terms = suggestion_terms(suggestion, shape, sm_count);
  return std::inner_product(terms.begin(), terms.end(), model.suggestions.begin(), 0.0);
}

}  // namespace

std::array<double, CostModel::kSuggestionTerms> suggestion_terms(const Suggestion& suggestion,
                                                                 Shape shape, int sm_count) {
  const auto m = static_cast<double>(shape.m);
  const auto n = static_cast<double>(shape.n);
  const double tiles_m = std::ceil(m / suggestion.tile_m);
  const double tiles_n = std::ceil(n / suggestion.tile_n);
  const int cluster = suggestion.cluster_m * suggestion.cluster_n;
  const double ctas = std::ceil(tiles_m / suggestion.cluster_m) *
                      std::ceil(tiles_n / suggestion.cluster_n) * cluster * suggestion.split_k;
  const double wave = std::max(1, sm_count / cluster) * cluster;
  const double area = static_cast<double>(suggestion.tile_m) * suggestion.tile_n;
  // Whole waves of whole tiles compute so much more than is asked for.
  const double idle = std::log(std::ceil(ctas / wave) * wave * area / suggestion.split_k / (m * n));
  const double log_waves =
      std::log2(tiles_m * tiles_n * suggestion.split_k / std::max(1, sm_count));
  const double log_area = std::log2(area);
  const double aspect =
      std::abs(std::log2(static_cast<double>(suggestion.tile_m) / suggestion.tile_n));
  const double log_k = std::log2(static_cast<double>(shape.k));
  const double split = suggestion.split_k > 1 ? 1 : 0;
  return {idle,
          idle * above(log_k, 6),
          log_waves,
          above(log_waves, 1),
          above(log_waves, 1) * above(log_k, 6),
          above(log_waves, 2),
          above(log_area, 14),
          log_area * above(log_k, 10),
          above(aspect, 1),
          above(aspect, 2) * above(log_k, 6),
          split,
          split * (log_k - 10)};
}

size_t rank_first(std::span<const Suggestion> suggestions, Shape shape, int sm_count,
                  const CostModel& model) {
  const auto lag_of = [&](const Suggestion& s) { return lag(s, shape, sm_count, model); };
  return static_cast<size_t>(std::ranges::min_element(suggestions, {}, lag_of) -
                             suggestions.begin());
}

}  // namespace f8::runtime
