#include "tools/tuner/statistics.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numbers>

namespace f8::tuner {
namespace {

double normal(Random& random) {
  const double u = 1 - random.uniform();
  return std::sqrt(-2 * std::log(u)) * std::cos(2 * std::numbers::pi * random.uniform());
}

TEST(Statistics, MedianOfOddAndEvenCounts) {
  EXPECT_EQ(median(std::vector<double>{3, 1, 2}), 2);
  EXPECT_EQ(median(std::vector<double>{4, 1, 3, 2}), 2.5);
  EXPECT_EQ(median(std::vector<double>{7}), 7);
}

TEST(Statistics, OneOutlierMovesNeitherMedianNorMad) {
  EXPECT_EQ(median(std::vector<double>{1, 2, 3, 4, 1e9}), 3);
  EXPECT_EQ(median_absolute_deviation(std::vector<double>{1, 2, 3, 4, 1e9}), 1);
}

TEST(Statistics, PercentileInterpolates) {
  const std::vector<double> samples = {10, 20, 30, 40, 50};
  EXPECT_EQ(percentile(samples, 0), 10);
  EXPECT_EQ(percentile(samples, 1), 50);
  EXPECT_DOUBLE_EQ(percentile(samples, 0.25), 20);
  EXPECT_DOUBLE_EQ(percentile(samples, 0.1), 14);
}

Blocks correlated(uint64_t seed, int count, double between, double within) {
  Random random(seed);
  Blocks blocks;
  for (int i = 0; i < count; ++i) {
    const double level = 100 * (1 + between * normal(random));
    std::vector<double> block;
    for (int j = 0; j < 8; ++j) block.push_back(level * (1 + within * normal(random)));
    blocks.push_back(block);
  }
  return blocks;
}

TEST(Statistics, BootstrapIsTheSameForTheSameSeed) {
  const Blocks blocks = correlated(1, 20, 0.01, 0.002);
  const Interval a = bootstrap_median(blocks, 42);
  const Interval b = bootstrap_median(blocks, 42);
  const Interval c = bootstrap_median(blocks, 43);
  EXPECT_EQ(a.lo, b.lo);
  EXPECT_EQ(a.hi, b.hi);
  EXPECT_NE(std::pair(a.lo, a.hi), std::pair(c.lo, c.hi));
}

TEST(Statistics, IntervalHoldsTheMedianOfTheSample) {
  for (uint64_t seed = 0; seed < 50; ++seed) {
    const Blocks blocks = correlated(seed, 3, 0.05, 0.01);
    const Summary summary = summarize(blocks, seed);
    EXPECT_LE(summary.ci.lo, summary.median);
    EXPECT_GE(summary.ci.hi, summary.median);
    EXPECT_EQ(summary.n, 24);
  }
}

// Launches of one block share its level. Samples that are taken as independent promise too much.
TEST(Statistics, BlocksAreDrawnWhole) {
  const Blocks blocks = correlated(5, 20, 0.02, 0.0005);
  Blocks singles;
  for (const auto& block : blocks) {
    for (const double sample : block) singles.push_back({sample});
  }
  const Interval whole = bootstrap_median(blocks, 1);
  const Interval apart = bootstrap_median(singles, 1);
  EXPECT_GT(whole.hi - whole.lo, 1.5 * (apart.hi - apart.lo));
}

TEST(Statistics, IntervalCoversTheTruthAboutAsOftenAsItSays) {
  int covered = 0;
  constexpr int kTrials = 200;
  for (int i = 0; i < kTrials; ++i) {
    const Interval ci =
        bootstrap_median(correlated(static_cast<uint64_t>(i) + 1000, 30, 0.01, 0.002), 9, 300);
    covered += ci.lo <= 100 && 100 <= ci.hi ? 1 : 0;
  }
  EXPECT_GE(covered, kTrials * 88 / 100);
  EXPECT_LT(covered, kTrials);  // an interval that never misses is no 95 % interval
}

TEST(Statistics, PairedRatioCancelsALinearDrift) {
  // The device gets 40 % slower while it is measured; mirrored order, ABBA.
  Blocks a;
  Blocks b;
  double clock = 1;
  for (int i = 0; i < 40; ++i) {
    const double step = 0.4 / 160;
    const double a1 = 100 * clock;
    const double b1 = 150 * (clock + step);
    const double b2 = 150 * (clock + 2 * step);
    const double a2 = 100 * (clock + 3 * step);
    clock += 4 * step;
    a.push_back({a1, a2});
    b.push_back({b1, b2});
  }
  const PairedRatio ratio = paired_ratio(a, b, 1);
  EXPECT_NEAR(ratio.ratio, 1.5, 1e-4);
  EXPECT_LE(ratio.ci.hi - ratio.ci.lo, 1e-3);
  // Without interleaving, the same device says something else.
  EXPECT_GT(std::abs(150 * (1 + 0.3) / (100 * (1 + 0.1)) - 1.5), 0.2);
}

TEST(Statistics, ShuffleIsAPermutationThatTheSeedDecides) {
  std::vector<int> a = {1, 2, 3, 4, 5, 6, 7, 8};
  std::vector<int> b = a;
  Random(3).shuffle(a);
  Random(3).shuffle(b);
  EXPECT_EQ(a, b);
  EXPECT_NE(a, (std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8}));
  std::ranges::sort(a);
  EXPECT_EQ(a, (std::vector<int>{1, 2, 3, 4, 5, 6, 7, 8}));
}

}  // namespace
}  // namespace f8::tuner
