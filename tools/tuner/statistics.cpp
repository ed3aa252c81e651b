#include "tools/tuner/statistics.hpp"

#include <algorithm>
#include <cassert>
#include <cmath>
#include <numeric>

namespace f8::tuner {
namespace {

double median_in_place(std::vector<double>& values) {
  assert(!values.empty());
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  if (values.size() % 2 == 1) return *middle;
  return (*std::max_element(values.begin(), middle) + *middle) / 2;
}

// The interval that holds the share `confidence` of the resampled statistic, widened to hold
// `centre`.
Interval quantiles(const std::vector<double>& statistic, double confidence, double centre) {
  const double tail = (1 - confidence) / 2;
  return {.lo = std::min(percentile(statistic, tail), centre),
          .hi = std::max(percentile(statistic, 1 - tail), centre)};
}

std::vector<double> flatten(const Blocks& blocks) {
  std::vector<double> all;
  for (const auto& block : blocks) all.insert(all.end(), block.begin(), block.end());
  return all;
}

}  // namespace

double mean(std::span<const double> samples) {
  assert(!samples.empty());
  return std::accumulate(samples.begin(), samples.end(), 0.0) / static_cast<double>(samples.size());
}

double median(std::span<const double> samples) {
  std::vector<double> copy(samples.begin(), samples.end());
  return median_in_place(copy);
}

double median_absolute_deviation(std::span<const double> samples) {
  const double centre = median(samples);
  std::vector<double> deviations;
  deviations.reserve(samples.size());
  for (const double s : samples) deviations.push_back(std::abs(s - centre));
  return median_in_place(deviations);
}

double percentile(std::span<const double> samples, double p) {
  assert(!samples.empty());
  std::vector<double> sorted(samples.begin(), samples.end());
  std::ranges::sort(sorted);
  const double position = std::clamp(p, 0.0, 1.0) * static_cast<double>(sorted.size() - 1);
  const auto below = static_cast<size_t>(position);
  const size_t above = std::min(below + 1, sorted.size() - 1);
  return std::lerp(sorted[below], sorted[above], position - static_cast<double>(below));
}

Interval bootstrap_median(const Blocks& blocks, uint64_t seed, int resamples, double confidence) {
  Random random(seed);
  std::vector<double> statistic;
  statistic.reserve(static_cast<size_t>(resamples));
  std::vector<double> drawn;
  for (int i = 0; i < resamples; ++i) {
    drawn.clear();
    for (size_t j = 0; j < blocks.size(); ++j) {
      const auto& block = blocks[random.below(blocks.size())];
      drawn.insert(drawn.end(), block.begin(), block.end());
    }
    statistic.push_back(median_in_place(drawn));
  }
  return quantiles(statistic, confidence, median(flatten(blocks)));
}

void Summary::scale(double factor) {
  for (double* value : {&median, &mad, &p05, &p95, &ci.lo, &ci.hi}) *value *= factor;
}

Summary summarize(const Blocks& blocks, uint64_t seed, int resamples) {
  const std::vector<double> all = flatten(blocks);
  return {.n = static_cast<int64_t>(all.size()),
          .median = median(all),
          .mad = median_absolute_deviation(all),
          .p05 = percentile(all, 0.05),
          .p95 = percentile(all, 0.95),
          .ci = bootstrap_median(blocks, seed, resamples)};
}

PairedRatio paired_ratio(const Blocks& candidate, const Blocks& reference, uint64_t seed,
                         int resamples) {
  assert(candidate.size() == reference.size() && !candidate.empty());
  std::vector<double> ratios;
  for (size_t i = 0; i < candidate.size(); ++i) {
    ratios.push_back(mean(reference[i]) / mean(candidate[i]));
  }
  Random random(seed);
  std::vector<double> statistic;
  std::vector<double> drawn(ratios.size());
  for (int i = 0; i < resamples; ++i) {
    for (double& value : drawn) value = ratios[random.below(ratios.size())];
    statistic.push_back(median_in_place(drawn));
  }
  const double centre = median(ratios);
  return {.ratio = centre, .ci = quantiles(statistic, kConfidence, centre)};
}

uint64_t Random::next() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

}  // namespace f8::tuner
