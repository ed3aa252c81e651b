#include "tools/tuner/fit/suggestion_fit.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <iterator>
#include <map>
#include <set>
#include <utility>

#include "base/text.hpp"
#include "tools/tuner/search/shape_sweep.hpp"
#include "tools/tuner/statistics.hpp"
#include "tuning_db/estimate/least_squares.hpp"

namespace f8::tuner {
namespace {

using runtime::CostModel;

constexpr size_t kTerms = CostModel::kSuggestionTerms;
constexpr double kMostBehind = 0.5;     // log time: how far behind a poor one is changes no choice
constexpr double kSuggestionRidge = 1;  // towards 0, where the suggestions leave a coefficient open
constexpr size_t kSuggestionRows = 10;

// A line of the table by the names of its columns.
class CsvRow {
 public:
  CsvRow(const std::map<std::string, size_t, std::less<>>& columns,
         std::vector<std::string_view> fields)
      : columns_(columns), fields_(std::move(fields)) {}

  [[nodiscard]] std::string_view text(std::string_view column) const {
    const size_t at = columns_.find(column)->second;
    return at < fields_.size() ? fields_[at] : std::string_view();
  }
  template <class T>
  [[nodiscard]] Result<T> number(std::string_view column, T least, T most) const {
    const std::string_view field = text(column);
    T value{};
    const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
    const bool whole = error == std::errc() && end == field.data() + field.size();
    if (whole && value >= least && value <= most) return value;  // no NaN is
    return fail(ErrorCode::kInvalidArgument, "column {} is {}; a number of {} to {} stands there",
                column, quote(field), least, most);
  }

 private:
  const std::map<std::string, size_t, std::less<>>& columns_;
  std::vector<std::string_view> fields_;
};

Result<SuggestedGemm> gemm_of(const CsvRow& row) {
  SuggestedGemm gemm;
  gemm.device = row.text("device");
  gemm.sm_count = F8_TRY(row.number("sms", 1, 1 << 16));
  const auto type = parse_dtype(row.text("d"));
  if (!type || is_fp8(*type)) {
    return fail(ErrorCode::kInvalidArgument, "column d is {}; bf16, f16 or f32 stands there",
                quote(row.text("d")));
  }
  gemm.d = *type;
  gemm.linear = {F8_TRY(row.number("m", int64_t{1}, kMaxDim)),
                 F8_TRY(row.number("n", int64_t{1}, kMaxDim)),
                 F8_TRY(row.number("k", int64_t{1}, kMaxDim))};
  return gemm;
}

Result<TimedSuggestion> suggestion_of(const CsvRow& row) {
  constexpr int kMostExtent = 1 << 12;
  TimedSuggestion timed;
  runtime::Suggestion& s = timed.suggestion;
  s.algorithm = F8_TRY(row.number("algorithm", 0, 1 << 20));
  s.tile_m = F8_TRY(row.number("tile_m", 0, kMostExtent));
  s.tile_n = F8_TRY(row.number("tile_n", s.tile_m > 0 ? 1 : 0, s.tile_m > 0 ? kMostExtent : 0));
  s.cluster_m = F8_TRY(row.number("cluster_m", 0, kMostExtent));
  s.cluster_n =
      F8_TRY(row.number("cluster_n", s.cluster_m > 0 ? 1 : 0, s.cluster_m > 0 ? kMostExtent : 0));
  s.split_k = F8_TRY(row.number("split_k", 1, kMostExtent));
  timed.us = F8_TRY(row.number("us", 1e-3, 1e9));
  return timed;
}

SuggestionRegret regret(const std::vector<SuggestedGemm>& gemms,
                        const std::function<size_t(const SuggestedGemm&)>& choose) {
  std::vector<double> lost;
  double sum = 0;
  for (const SuggestedGemm& gemm : gemms) {
    lost.push_back(gemm.timed[choose(gemm)].us / gemm.fastest_us() - 1);
    sum += lost.back();
  }
  if (lost.empty()) return {};
  return {.gemms = static_cast<int>(lost.size()),
          .mean = sum / static_cast<double>(lost.size()),
          .median = median(lost),
          .p95 = percentile(lost, 0.95)};
}

size_t ranked_first(const SuggestedGemm& gemm, const CostModel& model) {
  std::vector<runtime::Suggestion> suggestions;
  for (const TimedSuggestion& timed : gemm.timed) suggestions.push_back(timed.suggestion);
  return runtime::rank_first(suggestions, gemm.shape(), gemm.sm_count, model);
}

// Only differences within a GEMM say something, so that terms and lags are taken from its mean.
void add(const SuggestedGemm& gemm, tuning_db::NormalEquations<kTerms>& equations) {
  std::vector<std::pair<std::array<double, kTerms>, double>> rows;
  for (const TimedSuggestion& timed : gemm.timed) {
    if (!timed.suggestion.is_ranked()) continue;
    rows.emplace_back(runtime::suggestion_terms(timed.suggestion, gemm.shape(), gemm.sm_count),
                      std::min(kMostBehind, std::log(timed.us / gemm.fastest_us())));
  }
  std::array<double, kTerms> mean{};
  double mean_lag = 0;
  const auto count = static_cast<double>(rows.size());
  for (const auto& [terms, lag] : rows) {
    for (size_t i = 0; i < kTerms; ++i) mean[i] += terms[i] / count;
    mean_lag += lag / count;
  }
  for (auto& [terms, lag] : rows) {
    for (size_t i = 0; i < kTerms; ++i) terms[i] -= mean[i];
    equations.add(terms, lag - mean_lag);
  }
}

using Layer = std::pair<int64_t, int64_t>;

Layer layer_of(const SuggestedGemm& gemm) {
  return {gemm.linear.n, gemm.linear.k};
}

}  // namespace

double SuggestedGemm::fastest_us() const {
  return std::ranges::min(timed, {}, &TimedSuggestion::us).us;
}

Result<std::vector<SuggestedGemm>> parse_suggestions(std::string_view csv) {
  std::map<std::string, size_t, std::less<>> columns;
  std::vector<SuggestedGemm> gemms;
  int last = 0;  // the number of the suggestion in the line before
  for (int64_t line = 1; !csv.empty(); ++line) {
    std::vector<std::string_view> fields = csv_fields(take_until(csv, '\n'));
    if (fields.size() == 1 && fields.front().empty()) continue;
    if (columns.empty()) {
      for (size_t i = 0; i < fields.size(); ++i) columns.emplace(fields[i], i);
      for (const std::string_view name : kSuggestionColumns) {
        if (columns.contains(name)) continue;
        return fail(ErrorCode::kInvalidArgument,
                    "line {}: no column {}; `float8-tune bench suggestions --csv` writes the table",
                    line, name);
      }
      continue;
    }
    const CsvRow row(columns, std::move(fields));
    const auto failed = [line](const Error& error) {
      return fail(error.code, "line {}: {}", line, error.message);
    };
    auto gemm = gemm_of(row);
    if (!gemm) return failed(gemm.error());
    const auto number = row.number("heuristic", 0, 1 << 10);
    if (!number) return failed(number.error());
    const auto timed = suggestion_of(row);
    if (!timed) return failed(timed.error());
    const bool goes_on = !gemms.empty() && *number > last && gemms.back().linear == gemm->linear &&
                         gemms.back().d == gemm->d && gemms.back().device == gemm->device;
    if (!goes_on) gemms.push_back(*std::move(gemm));
    gemms.back().timed.push_back(*timed);
    last = *number;
  }
  return gemms;
}

SuggestionRegret regret_of_first(const std::vector<SuggestedGemm>& gemms) {
  return regret(gemms, [](const SuggestedGemm&) { return size_t{0}; });
}

SuggestionRegret regret_of_ranked(const std::vector<SuggestedGemm>& gemms, const CostModel& model) {
  return regret(gemms, [&](const SuggestedGemm& gemm) { return ranked_first(gemm, model); });
}

Result<CostModel> fit_suggestions(const std::vector<SuggestedGemm>& gemms, const CostModel& start) {
  tuning_db::NormalEquations<kTerms> equations;
  for (const SuggestedGemm& gemm : gemms) add(gemm, equations);
  const auto solved = equations.solved(kSuggestionRidge);
  if (equations.rows() < kSuggestionRows * kTerms || !solved) {
    return fail(ErrorCode::kInvalidArgument,
                "{} ranked suggestions of {} GEMMs do not tell {} coefficients; measure {} and "
                "more with `float8-tune bench suggestions`",
                equations.rows(), gemms.size(), kTerms, kSuggestionRows * kTerms);
  }
  CostModel model = start;
  model.suggestions = *solved;
  return model;
}

Result<SuggestionRegret> cross_validate_suggestions(const std::vector<SuggestedGemm>& gemms,
                                                    const CostModel& start, int folds) {
  std::map<Layer, int> fold_of;
  for (const SuggestedGemm& gemm : gemms) fold_of.try_emplace(layer_of(gemm), 0);
  int next = 0;
  for (auto& [layer, fold] : fold_of) fold = next++ % folds;
  std::vector<CostModel> models;
  for (int held_out = 0; held_out < folds; ++held_out) {
    std::vector<SuggestedGemm> seen;
    std::ranges::copy_if(gemms, std::back_inserter(seen), [&](const SuggestedGemm& gemm) {
      return fold_of.at(layer_of(gemm)) != held_out;
    });
    models.push_back(F8_TRY(fit_suggestions(seen, start)));
  }
  return regret(gemms, [&](const SuggestedGemm& gemm) {
    return ranked_first(gemm, models[static_cast<size_t>(fold_of.at(layer_of(gemm)))]);
  });
}

std::vector<SuggestedGemm> of_other_layers(const std::vector<SuggestedGemm>& gemms,
                                           const std::vector<SuggestedGemm>& seen) {
  std::set<Layer> layers;
  for (const SuggestedGemm& gemm : seen) layers.insert(layer_of(gemm));
  std::vector<SuggestedGemm> others;
  std::ranges::copy_if(gemms, std::back_inserter(others),
                       [&](const SuggestedGemm& gemm) { return !layers.contains(layer_of(gemm)); });
  return others;
}

}  // namespace f8::tuner
