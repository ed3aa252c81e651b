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

// The medians of samples whose blocks are drawn with replacement. The samples are sorted once.
class DrawnMedian {
 public:
  explicit DrawnMedian(const Blocks& blocks) : blocks_(blocks), times_(blocks.size()) {
    for (size_t i = 0; i < blocks.size(); ++i) {
      for (const double sample : blocks[i]) sorted_.emplace_back(sample, i);
    }
    std::ranges::sort(sorted_);
  }

  // Of as many blocks as there are.
  double draw(Random& random) {
    std::ranges::fill(times_, 0);
    size_t drawn = 0;
    for (size_t i = 0; i < blocks_.size(); ++i) {
      const size_t block = random.below(blocks_.size());
      ++times_[block];
      drawn += blocks_[block].size();
    }
    assert(drawn > 0);
    size_t at = 0;
    size_t before = 0;  // the drawn samples before sorted_[at]
    const auto of_rank = [&](size_t rank) {
      while (before + times_[sorted_[at].second] <= rank) before += times_[sorted_[at++].second];
      return sorted_[at].first;
    };
    if (drawn % 2 == 1) return of_rank(drawn / 2);
    const double below = of_rank(drawn / 2 - 1);
    return (below + of_rank(drawn / 2)) / 2;
  }

 private:
  const Blocks& blocks_;
  std::vector<size_t> times_;                      // that each block is drawn
  std::vector<std::pair<double, size_t>> sorted_;  // with their blocks
};

// The interval that holds the share `confidence` of the resampled statistic, widened to hold
// `centre`.
Interval quantiles(const std::vector<double>& statistic, double confidence, double centre) {
  const double tail = (1 - confidence) / 2;
  return {.lo = std::min(percentile(statistic, tail), centre),
          .hi = std::max(percentile(statistic, 1 - tail), centre)};
}

std::vector<double> medians_of_drawn(const Blocks& blocks, uint64_t seed, int resamples) {
  Random random(seed);
  DrawnMedian median(blocks);
  std::vector<double> medians;
  for (int i = 0; i < resamples; ++i) medians.push_back(median.draw(random));
  return medians;
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
  return quantiles(medians_of_drawn(blocks, seed, resamples), confidence, median(flatten(blocks)));
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
  Blocks ratios;
  for (size_t i = 0; i < candidate.size(); ++i) {
    ratios.push_back({mean(reference[i]) / mean(candidate[i])});
  }
  const double centre = median(flatten(ratios));
  return {.ratio = centre,
          .ci = quantiles(medians_of_drawn(ratios, seed, resamples), kConfidence, centre)};
}

uint64_t Random::next() {
  uint64_t z = (state_ += 0x9e3779b97f4a7c15ULL);
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ULL;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebULL;
  return z ^ (z >> 31);
}

}  // namespace f8::tuner
