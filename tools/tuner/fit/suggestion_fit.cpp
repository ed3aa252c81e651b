#include "tools/tuner/fit/suggestion_fit.hpp"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <functional>
#include <map>
#include <optional>
#include <utility>

#include "base/text.hpp"
#include "tools/tuner/search/shape_sweep.hpp"
#include "tools/tuner/statistics.hpp"
#include "tuning_db/estimate/least_squares.hpp"

namespace f8::tuner {
namespace {

using runtime::CostModel;

constexpr size_t kTerms = CostModel::kSuggestionTerms;
constexpr double kMostLag = 0.5;  // log time: how far behind a poor one is changes no choice
constexpr double kRidge = 1;      // towards 0, where the suggestions leave a coefficient open
constexpr size_t kRowsPerTerm = 10;

// A line of the table by the names of its columns.
class CsvRow {
 public:
  CsvRow(const std::map<std::string, size_t, std::less<>>& columns,
         std::vector<std::string_view> fields, int64_t line)
      : columns_(columns), fields_(std::move(fields)), line_(line) {}

  [[nodiscard]] Result<std::string_view> text(std::string_view column) const {
    const size_t at = columns_.find(column)->second;
    if (at < fields_.size() && !fields_[at].empty()) return fields_[at];
    return fail(ErrorCode::kInvalidArgument, "line {}: column {} is empty", line_, column);
  }
  template <class T>
  [[nodiscard]] Result<T> number(std::string_view column) const {
    const std::string_view field = F8_TRY(text(column));
    T value{};
    const auto [end, error] = std::from_chars(field.data(), field.data() + field.size(), value);
    if (error != std::errc() || end != field.data() + field.size() || value < T{}) {
      return fail(ErrorCode::kInvalidArgument, "line {}: column {} is {}, no number of 0 or more",
                  line_, column, quote(field));
    }
    return value;
  }

 private:
  const std::map<std::string, size_t, std::less<>>& columns_;
  std::vector<std::string_view> fields_;
  int64_t line_;
};

Result<SuggestedGemm> gemm_of(const CsvRow& row) {
  SuggestedGemm gemm;
  gemm.device = F8_TRY(row.text("device"));
  gemm.sm_count = F8_TRY(row.number<int>("sms"));
  const std::string_view type = F8_TRY(row.text("d"));
  gemm.d = F8_TRY(parse_dtype(type));
  gemm.linear = {F8_TRY(row.number<int64_t>("m")), F8_TRY(row.number<int64_t>("n")),
                 F8_TRY(row.number<int64_t>("k"))};
  F8_TRY(validate_shape(gemm.linear));
  return gemm;
}

Result<TimedSuggestion> suggestion_of(const CsvRow& row) {
  TimedSuggestion timed;
  runtime::Suggestion& s = timed.suggestion;
  s.algorithm = F8_TRY(row.number<int>("algorithm"));
  s.tile_m = F8_TRY(row.number<int>("tile_m"));
  s.tile_n = F8_TRY(row.number<int>("tile_n"));
  s.cluster_m = std::max(1, F8_TRY(row.number<int>("cluster_m")));
  s.cluster_n = std::max(1, F8_TRY(row.number<int>("cluster_n")));
  s.split_k = std::max(1, F8_TRY(row.number<int>("split_k")));
  timed.us = F8_TRY(row.number<double>("us"));
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
  return runtime::fastest_suggestion(suggestions, gemm.shape(), gemm.sm_count, model);
}

// The normal equations of the regression. Only differences within a GEMM say something, so that
// terms and lags are taken from their GEMM's mean.
class Regression {
 public:
  void add(const SuggestedGemm& gemm) {
    std::vector<std::pair<std::array<double, kTerms>, double>> rows;
    for (const TimedSuggestion& timed : gemm.timed) {
      if (timed.suggestion.algorithm != runtime::kTiledAlgorithm || timed.suggestion.tile_m == 0) {
        continue;
      }
      rows.emplace_back(runtime::suggestion_terms(timed.suggestion, gemm.shape(), gemm.sm_count),
                        std::min(kMostLag, std::log(timed.us / gemm.fastest_us())));
    }
    const auto count = static_cast<double>(rows.size());
    std::array<double, kTerms> mean{};
    double mean_lag = 0;
    for (const auto& [terms, lag] : rows) {
      for (size_t i = 0; i < kTerms; ++i) mean[i] += terms[i] / count;
      mean_lag += lag / count;
    }
    for (auto& [terms, lag] : rows) {
      for (size_t i = 0; i < kTerms; ++i) terms[i] -= mean[i];
      for (size_t i = 0; i < kTerms; ++i) {
        for (size_t j = 0; j < kTerms; ++j) a_[i][j] += terms[i] * terms[j];
        b_[i] += terms[i] * (lag - mean_lag);
      }
    }
    rows_ += rows.size();
  }
  [[nodiscard]] std::optional<std::array<double, kTerms>> solved() const {
    if (rows_ < kRowsPerTerm * kTerms) return std::nullopt;
    auto a = a_;
    for (size_t i = 0; i < kTerms; ++i) a[i][i] += kRidge;
    return tuning_db::solve(a, b_);
  }

 private:
  std::array<std::array<double, kTerms>, kTerms> a_{};
  std::array<double, kTerms> b_{};
  size_t rows_ = 0;
};

}  // namespace

double SuggestedGemm::fastest_us() const {
  return std::ranges::min(timed, {}, &TimedSuggestion::us).us;
}

Result<std::vector<SuggestedGemm>> parse_suggestions(std::string_view csv) {
  std::map<std::string, size_t, std::less<>> columns;
  std::vector<SuggestedGemm> gemms;
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
    const CsvRow row(columns, std::move(fields), line);
    SuggestedGemm gemm = F8_TRY(gemm_of(row));
    const TimedSuggestion timed = F8_TRY(suggestion_of(row));
    if (timed.us <= 0) {
      return fail(ErrorCode::kInvalidArgument, "line {}: column us is 0, no time", line);
    }
    const bool goes_on = !gemms.empty() && gemms.back().linear == gemm.linear &&
                         gemms.back().d == gemm.d && gemms.back().device == gemm.device;
    if (!goes_on) gemms.push_back(std::move(gemm));
    gemms.back().timed.push_back(timed);
  }
  return gemms;
}

SuggestionRegret regret_of_first(const std::vector<SuggestedGemm>& gemms) {
  return regret(gemms, [](const SuggestedGemm&) { return size_t{0}; });
}

SuggestionRegret regret_of_ranked(const std::vector<SuggestedGemm>& gemms, const CostModel& model) {
  return regret(gemms, [&](const SuggestedGemm& gemm) { return ranked_first(gemm, model); });
}

CostModel fit_suggestions(const std::vector<SuggestedGemm>& gemms, const CostModel& start) {
  Regression regression;
  for (const SuggestedGemm& gemm : gemms) regression.add(gemm);
  CostModel model = start;
  if (const auto solved = regression.solved()) model.suggestions = *solved;
  return model;
}

SuggestionRegret cross_validate_suggestions(const std::vector<SuggestedGemm>& gemms,
                                            const CostModel& start, int folds) {
  std::map<std::pair<int64_t, int64_t>, int> fold_of;
  for (const SuggestedGemm& gemm : gemms) fold_of.try_emplace({gemm.linear.n, gemm.linear.k}, 0);
  int next = 0;
  for (auto& [layer, fold] : fold_of) fold = next++ % folds;
  const auto fold = [&](const SuggestedGemm& gemm) {
    return fold_of.at({gemm.linear.n, gemm.linear.k});
  };
  std::vector<CostModel> models;
  for (int held_out = 0; held_out < folds; ++held_out) {
    std::vector<SuggestedGemm> seen;
    std::ranges::copy_if(gemms, std::back_inserter(seen),
                         [&](const SuggestedGemm& gemm) { return fold(gemm) != held_out; });
    models.push_back(fit_suggestions(seen, start));
  }
  return regret(gemms, [&](const SuggestedGemm& gemm) {
    return ranked_first(gemm, models[static_cast<size_t>(fold(gemm))]);
  });
}

}  // namespace f8::tuner
