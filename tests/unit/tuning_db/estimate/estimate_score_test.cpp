// Estimates of shapes that were left out, and what verdicts by them cost.
#include "tuning_db/estimate/estimate_score.hpp"

#include <gtest/gtest.h>

#include "tests/unit/tuning_db/measured_shapes.hpp"

namespace f8::tuning_db {
namespace {

// Ten layers under three M each.
template <class Speedup>
TuningTable table_with(const Speedup& speedup, const char* device = "A") {
  TuningTable table;
  table.devices = {{.name = device, .cc = 90}};
  table.sources = {{"test"}};
  for (const Shape shape : measured_shapes()) {
    const double s = speedup(shape);
    table.add({.recipe = "rowwise",
               .shape = shape,
               .speedup = s,
               .lo = 0.99 * s,
               .hi = 1.01 * s,
               .bf16_ns = 6e-3 * static_cast<double>(shape.m * shape.n * shape.k) / 600});
  }
  return table;
}

TEST(EstimateScore, ALayerThatIsLeftOutIsNotSeen) {
  const auto speedup = [](Shape s) { return s.n == 4096 && s.k == 4096 ? 3.0 : 1.3; };
  const auto found = leave_layers_out(table_with(speedup), "rowwise");
  ASSERT_EQ(found.size(), measured_shapes().size());
  for (const ScoredEstimate& one : found) {
    EXPECT_DOUBLE_EQ(one.truth.speedup, speedup(one.truth.shape));
    EXPECT_NE(one.estimate.evidence, Evidence::kMeasured);
    if (one.truth.speedup == 3.0) {
      EXPECT_LT(one.estimate.speedup, 2) << "the others say 1.3";
      EXPECT_FALSE(one.is_held());
    }
  }
  EXPECT_TRUE(leave_layers_out(table_with(speedup), "tensorwise").empty());
  EXPECT_TRUE(leave_layers_out(table_with(speedup), "rowwise", "B").empty());
}

TEST(EstimateScore, OfManyLayersASampleIsLeftOut) {
  const TuningTable table = table_with([](Shape) { return 1.3; });
  EXPECT_EQ(leave_layers_out(table, "rowwise", {}, 8 * 10 * 30).size(), 3u * 8);
  const auto few = leave_layers_out(table, "rowwise", {}, 1);
  EXPECT_EQ(few.size(), 3 * kLeastLeftOut);
  EXPECT_EQ(few.back().truth.shape.n, 28672) << "the sample goes to the end";
}

TEST(EstimateScore, OfATruthTheUnknownShapesAreEstimated) {
  const TuningTable table = table_with([](Shape) { return 1.3; });
  TuningTable truth = table;
  EXPECT_TRUE(estimate_unknown(table, truth, "rowwise").empty());
  truth.add({.recipe = "rowwise",
             .shape = {8192, 3072, 4096},
             .speedup = 1.4,
             .lo = 1.39,
             .hi = 1.41,
             .bf16_ns = 1e6});
  const auto found = estimate_unknown(table, truth, "rowwise");
  ASSERT_EQ(found.size(), 1u);
  EXPECT_EQ(found[0].truth.shape, (Shape{8192, 3072, 4096}));
  EXPECT_NEAR(found[0].estimate.speedup, 1.3, 0.02);
  EXPECT_TRUE(estimate_unknown({}, truth, "rowwise").empty());
}

// What was measured elsewhere is worth less.
TEST(EstimateScore, RowsOfAnotherDeviceHaveAWiderInterval) {
  TuningTable table = table_with([](Shape) { return 1.3; });
  const Shape shape = {8192, 4096, 4096};
  const Machine here = {{.name = "B", .cc = 90}};
  const Estimator own(table, "rowwise");
  const Estimator elsewhere(table, "rowwise", {}, &here);
  const Estimate measured = own.estimate(shape).value();
  const Estimate widened = elsewhere.estimate(shape).value();
  EXPECT_EQ(measured.evidence, Evidence::kMeasured);
  EXPECT_EQ(widened.evidence, Evidence::kModelled);
  EXPECT_DOUBLE_EQ(widened.speedup, 1.3);
  const double half = std::hypot(std::log(1 / 0.99), kBetweenDevices);
  EXPECT_NEAR(widened.lo, 1.3 * std::exp(-half), 1e-3);
  EXPECT_GT(widened.hi, 1.3 * std::exp(kBetweenDevices));
  const std::string where = "on another device, " + table.devices.front().name;
  EXPECT_TRUE(widened.basis.starts_with(where + ", give or take 9 %")) << widened.basis;
  EXPECT_EQ(widened.device, table.devices.front().name);
  // Two classes of one name differ in power.
  const Machine weaker = {{.name = where.substr(19), .cc = 90, .power_limit_w = 1}};
  const Estimator of_class(table, "rowwise", {}, &weaker);
  EXPECT_TRUE(of_class.estimate(shape)->basis.starts_with("on another device, give or take 9 %"));
  // Its own rows are asked first, and alone have the narrow interval.
  table.devices.push_back(here.device);
  table.add({.recipe = "rowwise",
             .shape = shape,
             .speedup = 1.36,
             .lo = 1.35,
             .hi = 1.37,
             .bf16_ns = 1e6,
             .device = 1});
  const Estimator both(table, "rowwise", "B");
  EXPECT_EQ(both.estimate(shape)->speedup, 1.36);
  const auto found = leave_device_out(table, "rowwise", "B");
  ASSERT_EQ(found.size(), 1u);
  EXPECT_DOUBLE_EQ(found[0].estimate.speedup, 1.3);
  EXPECT_TRUE(found[0].is_held());
  EXPECT_TRUE(leave_device_out(table, "delayed", "B").empty());
}

// So is what other tools made, which is known only where both say what they are.
TEST(EstimateScore, RowsByAnotherToolchainHaveAWiderInterval) {
  TuningTable table = table_with([](Shape) { return 1.3; });
  const Shape shape = {8192, 4096, 4096};
  Machine here = {table.devices.front(), {3, "13.0", "13.1.0"}};
  const auto estimate = [&] { return Estimator(table, "rowwise", {}, &here).estimate(shape); };
  EXPECT_EQ(estimate()->evidence, Evidence::kMeasured) << "the rows do not say";
  table.sources.front().toolchain = here.toolchain;
  EXPECT_EQ(estimate()->evidence, Evidence::kMeasured);
  EXPECT_EQ(estimate()->terms.toolchain, 0);

  here.toolchain.cublaslt = "13.2.0";
  const Estimate widened = estimate().value();
  EXPECT_EQ(widened.evidence, Evidence::kModelled);
  EXPECT_DOUBLE_EQ(widened.speedup, 1.3);
  EXPECT_EQ(widened.terms.toolchain, kBetweenToolchains);
  EXPECT_EQ(widened.terms.device, 0);
  EXPECT_NEAR(widened.lo, 1.3 * std::exp(-std::hypot(std::log(1 / 0.99), kBetweenToolchains)),
              1e-3);
  EXPECT_TRUE(widened.basis.starts_with(
      "by another toolchain, NVRTC 13.0, cuBLASLt 13.1.0, generator 3, give or take 3 %: measured"))
      << widened.basis;
  here.device.name = "B";
  const Estimate both = estimate().value();
  EXPECT_EQ(both.terms.toolchain, kBetweenToolchains);
  EXPECT_EQ(both.terms.device, kBetweenDevices);
  EXPECT_LT(both.lo, widened.lo);

  // A truth by other tools scores the rows that the table has.
  TuningTable truth = table;
  truth.sources.front().toolchain.nvrtc = "13.5";
  const auto found = estimate_unknown(table, truth, "rowwise");
  ASSERT_EQ(found.size(), table.speedups().size());
  EXPECT_EQ(found.front().estimate.terms.toolchain, kBetweenToolchains);
}

ScoredEstimate scored(double truth, double bf16_ns, SpeedupInterval said,
                      const char* recipe = "rowwise") {
  ScoredEstimate one;
  one.truth = {.recipe = recipe, .shape = {1, 4096, 1024}, .speedup = truth, .bf16_ns = bf16_ns};
  one.estimate.speedup = said.speedup;
  one.estimate.lo = said.lo;
  one.estimate.hi = said.hi;
  return one;
}

TEST(EstimateScore, WrongVerdictsCostTheTimeThatTheyLose) {
  // The first is twice as fast in fp8 and said to be; the second is half as fast, and the estimate is
  // wrong. torchao's rule keeps both: K is 1024.
  const std::vector<ScoredEstimate> both = {scored(2.0, 200, {1.9, 1.8, 2.0}),
                                            scored(0.5, 100, {1.5, 1.4, 1.6})};
  const EstimateScore score = score_estimates(both, 0.02);
  EXPECT_EQ(score.shapes, 2u);
  EXPECT_EQ(score.held, 1u);
  EXPECT_EQ(score.decided, 2u);
  EXPECT_EQ(score.right, 1u);
  EXPECT_NEAR(score.bias, (std::log(1.9 / 2) + std::log(3)) / 2, 1e-12);
  EXPECT_DOUBLE_EQ(score.regrets.measured, (100 + 200) / 200.0 - 1);
  EXPECT_DOUBLE_EQ(score.regrets.convert_all, (100 + 200) / 200.0 - 1);
  EXPECT_DOUBLE_EQ(score.regrets.keep_all, (200 + 100) / 200.0 - 1);
  EXPECT_DOUBLE_EQ(score.regrets.torchao, (200 + 100) / 200.0 - 1);
  EXPECT_DOUBLE_EQ(score_estimates({&both[0], 1}, 0.02).regrets.measured, 0);
  // Without a rule torchao converts all. An interval around 1 + margin decides nothing, and keeps.
  const std::vector<ScoredEstimate> open = {scored(1.1, 110, {1.05, 0.9, 1.2}, "delayed")};
  const EstimateScore undecided = score_estimates(open, 0.02);
  EXPECT_EQ(undecided.decided, 0u);
  EXPECT_NEAR(undecided.regrets.measured, 0.1, 1e-12);
  EXPECT_DOUBLE_EQ(undecided.regrets.torchao, 0);
  EXPECT_EQ(score_estimates({}, 0.02).shapes, 0u);
}

}  // namespace
}  // namespace f8::tuning_db
