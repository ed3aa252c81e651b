// Scores the ranking of cuBLASLt's suggestions on GEMMs of which all suggestions were timed, and fits
// its coefficients to them: by ridge regression of a suggestion's lag behind its GEMM's fastest.
#pragma once

#include <array>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "runtime/gemm/suggestions.hpp"

namespace f8::tuner {

struct TimedSuggestion {
  runtime::Suggestion suggestion;
  double us = 0;
};
// The suggestions of one linear's grad_weight that were timed, in cuBLASLt's order.
struct SuggestedGemm {
  std::string device;
  int sm_count = 0;
  Dtype d = Dtype::kBf16;
  Shape linear;
  std::vector<TimedSuggestion> timed;

  [[nodiscard]] Shape shape() const { return gemm_shape(linear, Gemm::kGradWeight); }
  [[nodiscard]] double fastest_us() const;
};

// The columns of the CSV file that `bench suggestions` writes, a row for each suggestion.
inline constexpr std::array<std::string_view, 14> kSuggestionColumns = {
    "device",    "sms",    "d",      "m",         "n",         "k",       "heuristic",
    "algorithm", "tile_m", "tile_n", "cluster_m", "cluster_n", "split_k", "us"};
// The error names the line and the column.
[[nodiscard]] Result<std::vector<SuggestedGemm>> parse_suggestions(std::string_view csv);

// How much slower than the fastest suggestion the chosen one is.
struct SuggestionRegret {
  int gemms = 0;
  double mean = 0, median = 0, p95 = 0;
};
[[nodiscard]] SuggestionRegret regret_of_first(const std::vector<SuggestedGemm>& gemms);
[[nodiscard]] SuggestionRegret regret_of_ranked(const std::vector<SuggestedGemm>& gemms,
                                                const runtime::CostModel& model);

// `start` with other coefficients. There must be ten ranked suggestions for each.
[[nodiscard]] Result<runtime::CostModel> fit_suggestions(const std::vector<SuggestedGemm>& gemms,
                                                         const runtime::CostModel& start);
// The regret where each of `folds` parts of the layers (n, k) is ranked by a fit to the others.
[[nodiscard]] Result<SuggestionRegret> cross_validate_suggestions(
    const std::vector<SuggestedGemm>& gemms, const runtime::CostModel& start, int folds);
// Those of layers (n, k) that `seen` has none of.
[[nodiscard]] std::vector<SuggestedGemm> of_other_layers(const std::vector<SuggestedGemm>& gemms,
                                                         const std::vector<SuggestedGemm>& seen);

}  // namespace f8::tuner
