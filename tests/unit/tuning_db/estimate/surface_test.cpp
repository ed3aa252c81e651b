// The estimates behind the filter against surfaces that are known everywhere.
#include "tuning_db/estimate/surface.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>

#include "tests/unit/tuning_db/measured_shapes.hpp"

namespace f8::tuning_db {
namespace {

double d(int64_t v) {
  return static_cast<double>(v);
}

// A plausible GPU: launches, a compute rate that small tiles do not reach, bandwidth, and ripples
// that no smooth model has.
double truth_bf16_ns(Shape s) {
  const double flops = 6 * d(s.m) * d(s.n) * d(s.k);
  const double fill = flops / (flops + 4e10);
  return 14'000 + flops / (720e3 * fill);
}

double truth_fp8_ns(Shape s) {
  const double flops = 6 * d(s.m) * d(s.n) * d(s.k);
  const double fill = flops / (flops + 1.2e11);
  const double elements = d(s.m) * d(s.k) + d(s.n) * d(s.k) + d(s.m) * d(s.n);
  const double ripple = 1 + 0.02 * std::sin(3 * std::log2(d(s.n)) + 5 * std::log2(d(s.k)));
  return (32'000 + flops / (1350e3 * fill) + elements * 3e-3) * ripple;
}

double truth(Shape s) {
  return truth_bf16_ns(s) / truth_fp8_ns(s);
}

std::vector<LinearSpeedup> points_of(const std::vector<Shape>& shapes) {
  std::vector<LinearSpeedup> points;
  for (const Shape& s : shapes) {
    const double speedup = truth(s);
    points.push_back({.recipe = "tensorwise",
                      .shape = s,
                      .speedup = speedup,
                      .lo = speedup * 0.995,
                      .hi = speedup * 1.005,
                      .bf16_ns = truth_bf16_ns(s)});
  }
  return points;
}

int64_t random_multiple(std::mt19937& random, double lo, double hi) {
  const double v =
      std::exp2(std::uniform_real_distribution<double>(std::log2(lo), std::log2(hi))(random));
  return std::max<int64_t>(1, std::llround(v / 16)) * 16;
}

TEST(Surface, InterpolatedIntervalsHoldTheTruth) {
  const Surface surface(points_of(measured_shapes()));
  std::mt19937 random(5);
  int inside = 0;
  int held = 0;
  double worst = 0;
  for (int i = 0; i < 2000; ++i) {
    const Shape s{random_multiple(random, 2048, 16'384), random_multiple(random, 1024, 28'672),
                  random_multiple(random, 1024, 14'336)};
    const auto e = surface.estimate(s);
    ASSERT_TRUE(e);
    ASSERT_LE(e->lo, e->speedup);
    ASSERT_LE(e->speedup, e->hi);
    if (e->evidence != Evidence::kInterpolated) continue;
    ++inside;
    held += e->lo <= truth(s) && truth(s) <= e->hi;
    worst = std::max(worst, std::abs(std::log(e->speedup / truth(s))));
  }
  EXPECT_GT(inside, 1000);
  EXPECT_GE(held, inside * 95 / 100) << "of " << inside;
  EXPECT_LT(worst, 0.12);
}

TEST(Surface, ModelledIntervalsHoldTheTruthNearby) {
  const Surface surface(points_of(measured_shapes()));
  std::mt19937 random(6);
  int outside = 0;
  int held = 0;
  for (int i = 0; i < 2000; ++i) {
    const Shape s{random_multiple(random, 512, 65'536), random_multiple(random, 512, 57'344),
                  random_multiple(random, 512, 28'672)};
    const auto e = surface.estimate(s);
    ASSERT_TRUE(e);
    if (e->evidence != Evidence::kModelled) continue;
    ++outside;
    held += e->lo <= truth(s) && truth(s) <= e->hi;
  }
  EXPECT_GT(outside, 500);
  EXPECT_GE(held, outside * 90 / 100) << "of " << outside;
}

TEST(Surface, OutsideInMOfAMeasuredWeightStaysNearItsRows) {
  const Surface surface(points_of(measured_shapes()));
  int held = 0;
  int cells = 0;
  for (const Shape& s : measured_shapes()) {
    for (const int64_t m : {1024, 1536, 24'576, 32'768}) {
      const Shape outside{m, s.n, s.k};
      const auto e = surface.estimate(outside);
      ASSERT_TRUE(e);
      EXPECT_EQ(e->evidence, Evidence::kModelled);
      EXPECT_LT(e->hi / e->lo, 1.35);
      held += e->lo <= truth(outside) && truth(outside) <= e->hi;
      ++cells;
    }
  }
  EXPECT_GE(held, cells * 90 / 100) << "of " << cells;
}

TEST(Surface, AMeasuredRowIsNotSmoothed) {
  std::vector<LinearSpeedup> points = points_of(measured_shapes());
  points[7].speedup = 0.3;
  points[7].lo = 0.29;
  points[7].hi = 0.31;
  const Shape odd = points[7].shape;
  const Surface surface(std::move(points));
  const auto e = surface.estimate(odd);
  ASSERT_TRUE(e);
  EXPECT_EQ(e->speedup, 0.3);
  EXPECT_EQ(e->evidence, Evidence::kMeasured);
}

TEST(Surface, NoisierRowsMakeWiderIntervals) {
  std::vector<LinearSpeedup> rough = points_of(measured_shapes());
  std::mt19937 random(9);
  for (LinearSpeedup& p : rough) {
    const double factor = std::exp(std::normal_distribution<double>(0, 0.15)(random));
    p.speedup *= factor;
    p.lo *= factor;
    p.hi *= factor;
  }
  const Surface smooth(points_of(measured_shapes()));
  const Surface noisy(std::move(rough));
  const Shape s{8192, 6144, 6144};
  const auto a = smooth.estimate(s);
  const auto b = noisy.estimate(s);
  ASSERT_TRUE(a && b);
  EXPECT_GT(b->hi / b->lo, 1.2 * (a->hi / a->lo));
}

TEST(Surface, TimesAreEstimatedToo) {
  const Surface surface(points_of(measured_shapes()));
  for (const Shape s :
       {Shape{4096, 4096, 4096}, Shape{8192, 6144, 6144}, Shape{16'384, 5120, 8192}}) {
    const auto e = surface.estimate(s);
    ASSERT_TRUE(e);
    EXPECT_NEAR(e->bf16_ns / truth_bf16_ns(s), 1, 0.15);
  }
}

// A stranger's table may have any number of shapes: all of them in turn would take minutes, which is longer than
// this test may take.
TEST(Surface, ManyColumnsTakeNoSquareOfTheirTime) {
  std::vector<Shape> shapes;
  for (int64_t n = 1; n <= 200; ++n) {
    for (int64_t k = 1; k <= 200; ++k) shapes.push_back({8192, 16 * n, 16 * k});
  }
  const Surface surface(points_of(shapes));
  EXPECT_TRUE(surface.estimate({8192, 4096, 4096}).has_value());
}

TEST(SpeedModel, FindsItsOwnCoefficients) {
  SpeedModel::Sums rows;
  const auto time = [](Shape s, double launches, double rate, double element) {
    return launches + 6 * d(s.m) * d(s.n) * d(s.k) / rate +
           (d(s.m) * d(s.k) + d(s.n) * d(s.k) + d(s.m) * d(s.n)) * element;
  };
  for (const Shape& s : measured_shapes()) {
    rows.add({s, time(s, 10'000, 700e3, 1e-3), time(s, 35'000, 1400e3, 4e-3)});
  }
  const auto model = SpeedModel::fit(rows);
  ASSERT_TRUE(model);
  const Shape far{100'000, 512, 65'536};
  const Terms terms = SpeedModel::terms_of(far);
  EXPECT_NEAR(model->bf16_ns(terms) / time(far, 10'000, 700e3, 1e-3), 1, 1e-6);
  EXPECT_NEAR(model->fp8_ns(terms) / time(far, 35'000, 1400e3, 4e-3), 1, 1e-6);
}

TEST(SpeedModel, NeverGivesANegativeTime) {
  std::mt19937 random(3);
  for (int round = 0; round < 200; ++round) {
    SpeedModel::Sums rows;
    for (const Shape& s : measured_shapes()) {
      std::uniform_real_distribution<double> any(1, 1e9);
      rows.add({s, any(random), any(random)});
    }
    const auto model = SpeedModel::fit(rows);
    ASSERT_TRUE(model);
    for (const Shape s : {Shape{1, 16, 16}, Shape{1 << 20, 16, 1 << 20}}) {
      EXPECT_GT(model->bf16_ns(SpeedModel::terms_of(s)), 0);
      EXPECT_GT(model->fp8_ns(SpeedModel::terms_of(s)), 0);
    }
  }
}

TEST(SpeedModel, FewRowsAreNoModel) {
  EXPECT_FALSE(SpeedModel::fit({}));
  SpeedModel::Sums five;
  for (int i = 0; i < 5; ++i) five.add({{8192, 4096, 4096}, 2e6, 1e6});
  EXPECT_FALSE(SpeedModel::fit(five));
}

}  // namespace
}  // namespace f8::tuning_db
