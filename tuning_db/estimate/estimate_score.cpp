#include "tuning_db/estimate/estimate_score.hpp"

#include <algorithm>
#include <cmath>
#include <set>
#include <utility>

#include "recipes/model/filter_rule.hpp"

namespace f8::tuning_db {
namespace {

// Times of all linears under some decisions.
class Times {
 public:
  void add(const LinearSpeedup& truth, bool convert) {
    const double fp8 = truth.bf16_ns / truth.speedup;
    taken_ += convert ? fp8 : truth.bf16_ns;
    least_ += std::min(fp8, truth.bf16_ns);
  }
  [[nodiscard]] double regret() const { return least_ > 0 ? taken_ / least_ - 1 : 0; }

 private:
  double taken_ = 0, least_ = 0;
};

}  // namespace

std::vector<ScoredEstimate> leave_layers_out(const TuningTable& table, std::string_view recipe,
                                             std::string_view device, size_t effort) {
  std::vector<ScoredEstimate> scored;
  const Estimator all(table, recipe, device);
  if (all.empty()) return scored;
  std::set<std::pair<int64_t, int64_t>> layers;
  for (const LinearSpeedup& row : all.first().points()) layers.insert({row.shape.n, row.shape.k});
  const size_t rows = all.first().points().size();
  const size_t most = std::max(kLeastLeftOut, effort / (layers.size() * rows));
  size_t index = 0;
  for (const auto& [n, k] : layers) {
    // Of n layers the i-th is taken where i * most / n passes a whole number.
    const size_t i = index++;
    const size_t count = layers.size();
    if (most < count && (i + 1) * most / count == i * most / count) continue;
    const TuningTable rest = table.linears([&, n = n, k = k](const LinearSpeedup& row) {
      return row.recipe == recipe && (row.shape.n != n || row.shape.k != k);
    });
    const Estimator estimator(rest, recipe, device);
    for (const LinearSpeedup& row : all.first().points()) {
      if (row.shape.n != n || row.shape.k != k) continue;
      if (auto estimate = estimator.estimate(row.shape)) {
        estimate->rows.clear();  // they are the surface's, which ends here
        scored.push_back({row, *std::move(estimate)});
      }
    }
  }
  return scored;
}

std::vector<ScoredEstimate> leave_device_out(const TuningTable& table, std::string_view recipe,
                                             std::string_view device) {
  std::vector<ScoredEstimate> scored;
  const Estimator all(table, recipe, device);
  if (all.empty()) return scored;
  const size_t own = all.first().points().front().device;
  const TuningTable rest = table.linears([&](const LinearSpeedup& row) {
    return row.recipe == recipe && table.devices[row.device].name != table.devices[own].name;
  });
  const Machine here = {table.devices[own]};
  const Estimator estimator(rest, recipe, {}, &here);
  for (const LinearSpeedup& row : all.first().points()) {
    if (auto estimate = estimator.estimate(row.shape)) {
      estimate->rows.clear();
      scored.push_back({row, *std::move(estimate)});
    }
  }
  return scored;
}

std::vector<ScoredEstimate> estimate_unknown(const TuningTable& table, const TuningTable& truth,
                                             std::string_view recipe, std::string_view device) {
  std::vector<ScoredEstimate> scored;
  const Estimator known(truth, recipe, device);
  if (known.empty()) return scored;
  const Machine here = {truth.devices[known.first().points().front().device]};
  const Estimator estimator(table, recipe, device, &here);
  for (const LinearSpeedup& row : known.first().points()) {
    auto estimate = estimator.estimate(row.shape, truth.sources[row.source].toolchain);
    if (!estimate || estimate->evidence == Evidence::kMeasured) continue;
    estimate->rows.clear();
    scored.push_back({row, *std::move(estimate)});
  }
  return scored;
}

EstimateScore score_estimates(std::span<const ScoredEstimate> estimates, double margin) {
  EstimateScore score;
  score.shapes = estimates.size();
  Times measured, torchao, converted, kept;
  for (const ScoredEstimate& scored : estimates) {
    const auto& [truth, estimate] = scored;
    const bool converts = estimate.lo > 1 + margin;
    score.held += scored.is_held() ? 1 : 0;
    if (converts || estimate.hi < 1 + margin) {
      ++score.decided;
      score.right += converts == (truth.speedup > 1 + margin) ? 1 : 0;
    }
    const double error = std::log(estimate.speedup / truth.speedup);
    score.bias += error;
    score.rms += error * error;
    score.half_width += std::log(estimate.hi / estimate.lo) / 2;
    measured.add(truth, converts);
    torchao.add(
        truth,
        torchao_verdict(recipe_of_label(truth.recipe), {"", truth.shape.k, truth.shape.n}).convert);
    converted.add(truth, true);
    kept.add(truth, false);
  }
  if (estimates.empty()) return score;
  const auto count = static_cast<double>(estimates.size());
  score.bias /= count;
  score.rms = std::sqrt(score.rms / count);
  score.half_width /= count;
  score.regrets = {measured.regret(), torchao.regret(), converted.regret(), kept.regret()};
  return score;
}

}  // namespace f8::tuning_db
