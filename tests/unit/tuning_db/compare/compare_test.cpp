// The verdicts of two sets of measurements.
#include "tuning_db/compare/compare.hpp"

#include <gtest/gtest.h>

#include <cmath>

#include "tests/unit/tuning_db/sample.hpp"

namespace f8::tuning_db {
namespace {

// A row with an interval of `half` (a part of the time) on either side.
TrialRow row(double median_ns, double half = 0.005) {
  TrialRow row;
  row.uuid = "u";
  row.run_uuid = "run-1";
  row.problem = gemm(8192, 4096, 4096);
  row.candidate = generated("128x256s4c2x1w2g8");
  row.result = timed(median_ns);
  row.result.timing->ci_lo_ns = median_ns * (1 - half);
  row.result.timing->ci_hi_ns = median_ns * (1 + half);
  row.device = h100();
  row.device_name = row.device.name;
  row.toolchain = "driver 580, float8 0.1.0 (abc)";
  row.method_key = "m1";
  row.fidelity = "final";
  row.at = "2026-01-01T00:00:00.000Z";
  return row;
}

Comparison one(const TrialRow& a, const TrialRow& b, const CompareOptions& options = {}) {
  const CompareResult result = compare({a}, {b}, options);
  EXPECT_EQ(result.compared.size(), 1U);
  return result.compared.at(0);
}

TEST(Compare, FasterSlowerSame) {
  const Comparison faster = one(row(110), row(100));
  EXPECT_EQ(faster.outcome, Outcome::kFaster);
  EXPECT_NEAR(faster.ratio, 1.1, 1e-12);
  EXPECT_EQ(faster.reason, "");
  EXPECT_EQ(one(row(100), row(110)).outcome, Outcome::kSlower);
  EXPECT_EQ(one(row(100), row(101)).outcome, Outcome::kSame);
  EXPECT_EQ(to_string(Outcome::kFaster), "FASTER");
  EXPECT_EQ(to_string(Outcome::kAmbiguous), "AMBIGUOUS");
}

TEST(Compare, TheIntervalsAddAsSquaresOfLogarithms) {
  const Comparison c = one(row(110, 0.003), row(100, 0.004));
  EXPECT_NEAR(c.lo, 1.1 * std::exp(-std::hypot(std::log(1 / 0.997), std::log(1.004))), 1e-12);
  EXPECT_NEAR(c.hi, 1.1 * std::exp(std::hypot(std::log(1.003), std::log(1 / 0.996))), 1e-12);
  EXPECT_LT(c.lo, c.ratio);
  EXPECT_GT(c.hi, c.ratio);
  // Exchanged sides give the reciprocal.
  const Comparison back = one(row(100, 0.004), row(110, 0.003));
  EXPECT_NEAR(back.lo, 1 / c.hi, 1e-12);
  EXPECT_NEAR(back.hi, 1 / c.lo, 1e-12);
}

TEST(Compare, TheThresholdSaysWhatIsTheSame) {
  CompareOptions options;
  options.threshold = 0.2;
  EXPECT_EQ(one(row(110), row(100), options).outcome, Outcome::kSame);
  EXPECT_EQ(one(row(100), row(110), options).outcome, Outcome::kSame);
  options.threshold = 0.05;
  EXPECT_EQ(one(row(110), row(100), options).outcome, Outcome::kFaster);
  options.threshold = 0;
  EXPECT_EQ(one(row(102), row(100)).outcome, Outcome::kAmbiguous);
  EXPECT_EQ(one(row(102), row(100), options).outcome, Outcome::kFaster);
}

TEST(Compare, AmbiguousForTheIntervals) {
  const Comparison overlap = one(row(105, 0.04), row(100, 0.04));
  EXPECT_EQ(overlap.outcome, Outcome::kAmbiguous);
  EXPECT_EQ(overlap.reason, "the intervals overlap");
  EXPECT_EQ(one(row(102), row(100)).reason, "the interval holds 1.02");
  EXPECT_EQ(one(row(100), row(102)).reason, "the interval holds 0.9804");
}

TEST(Compare, AmbiguousForTheConditions) {
  const TrialRow a = row(100);
  TrialRow b = row(200);
  b.result.timing->n = kFewSamples - 1;
  EXPECT_EQ(one(a, b).outcome, Outcome::kAmbiguous);
  EXPECT_EQ(one(a, b).reason, "B has few samples: 9");
  EXPECT_EQ(one(b, a).reason, "A has few samples: 9");
  b.result.timing->n = kFewSamples;
  EXPECT_EQ(one(a, b).outcome, Outcome::kSlower);

  b = row(200);
  b.result.state = TrialState::kNoisy;
  EXPECT_EQ(one(a, b).reason, "B is noisy");

  b = row(200);
  b.device.power_limit_w = 500;
  EXPECT_EQ(one(a, b).reason, "other power limits: 700 W and 500 W");

  b = row(200);
  b.result.sm_mhz_mean = 1400;
  EXPECT_EQ(one(a, b).reason, "other clocks: 1612 MHz and 1400 MHz");
  b.device.name = "NVIDIA H200";  // which has clocks of its own
  EXPECT_EQ(one(a, b).outcome, Outcome::kSlower);
  b.result.sm_mhz_mean = 1580;
  EXPECT_EQ(one(a, b).outcome, Outcome::kSlower);
}

TEST(Compare, SpeedupsOfLinearsBearAnotherClock) {
  TrialRow a = row(100);
  a.problem = linear({8192, 4096, 4096});
  a.candidate = {Impl::kFloat8, "{}", "ff"};
  a.result.ratio = Ratio{"", 1.2, 1.195, 1.205};
  TrialRow b = a;
  b.result = timed(150, 1.3);
  b.result.sm_mhz_mean = 1000;
  CompareOptions options;
  EXPECT_EQ(one(a, b, options).outcome, Outcome::kAmbiguous);
  options.quantity = Quantity::kSpeedup;
  EXPECT_EQ(one(a, b, options).outcome, Outcome::kFaster);
  EXPECT_NEAR(one(a, b, options).ratio, 1.3 / 1.2, 1e-12);
  EXPECT_EQ(one(b, a, options).outcome, Outcome::kSlower);
  EXPECT_TRUE(compare({row(1)}, {row(1)}, options).compared.empty()) << "a GEMM has no speedup";
}

TEST(Compare, UnlikeMethodsAreNeverCompared) {
  TrialRow b = row(100);
  b.method_key = "m2";
  const CompareResult result = compare({row(100)}, {b}, {});
  EXPECT_TRUE(result.compared.empty());
  ASSERT_EQ(result.unlike.size(), 1U);
  EXPECT_EQ(result.unlike[0].b.method_key, "m2");
  // A later row of the method that A has makes it comparable.
  TrialRow later = row(120);
  later.at = "2026-02-01T00:00:00.000Z";
  const CompareResult common = compare({row(100)}, {b, later}, {});
  EXPECT_TRUE(common.unlike.empty());
  EXPECT_EQ(common.compared.at(0).outcome, Outcome::kSlower);
}

TEST(Compare, TheFastestOfTheNewestToolchainStandsForAProblem) {
  TrialRow old = row(50);
  old.toolchain = "older";
  TrialRow fast = row(90);
  TrialRow slow = row(95);
  fast.at = slow.at = "2026-02-01T00:00:00.000Z";
  fast.uuid = "fast";
  slow.uuid = "slow";
  EXPECT_EQ(compare({row(100)}, {old, slow, fast}, {}).compared.at(0).b.uuid, "fast");
  fast.result.state = TrialState::kNoisy;
  EXPECT_EQ(compare({row(100)}, {old, slow, fast}, {}).compared.at(0).b.uuid, "slow");
}

TEST(Compare, Bf16KernelsCountOnlyWhereNothingIsFp8) {
  TrialRow bf16 = row(10);
  bf16.candidate.impl = Impl::kBf16CublasLt;
  EXPECT_EQ(compare({row(100)}, {bf16, row(100)}, {}).compared.at(0).outcome, Outcome::kSame);
  EXPECT_EQ(compare({bf16}, {bf16}, {}).compared.size(), 1U);
  TrialRow baseline = bf16;
  baseline.candidate.impl = Impl::kBf16;
  EXPECT_TRUE(compare({baseline}, {baseline}, {}).compared.empty());
}

TEST(Compare, WhatOnlyOneHasAndOtherDevices) {
  TrialRow other = row(100);
  other.problem = gemm(4096, 4096, 4096);
  TrialRow h200 = row(50);
  h200.device_name = h200.device.name = "NVIDIA H200";
  const CompareResult result = compare({row(100), other}, {row(100), h200}, {});
  EXPECT_EQ(result.compared.size(), 1U);
  ASSERT_EQ(result.only_a.size(), 1U);
  EXPECT_EQ(result.only_a[0].problem, other.problem);
  ASSERT_EQ(result.only_b.size(), 1U);
  EXPECT_EQ(result.only_b[0].device_name, "NVIDIA H200");
  CompareOptions across;
  across.across_devices = true;
  EXPECT_EQ(one(row(100), h200, across).outcome, Outcome::kFaster);
}

TEST(Compare, TheSummaryIsTheGeometricMean) {
  TrialRow a = row(100);
  TrialRow b = row(100);
  b.problem = a.problem = gemm(4096, 4096, 4096);
  b.result.timing->median_ns = 50;
  b.result.timing->ci_lo_ns = 49.9;
  b.result.timing->ci_hi_ns = 50.1;
  const CompareResult result = compare({row(100), a}, {row(200), b}, {});
  EXPECT_NEAR(result.geometric_mean, 1.0, 1e-12);
  EXPECT_EQ(result.count(Outcome::kFaster), 1U);
  EXPECT_EQ(result.count(Outcome::kSlower), 1U);
  EXPECT_EQ(result.count(Outcome::kSame), 0U);
}

TEST(Compare, SelectionsAdmitByRunToolchainAndDevice) {
  EXPECT_TRUE(Selection{}.admits(row(1)));
  EXPECT_TRUE((Selection{"run-", "(abc)", "H100"}.admits(row(1))));
  EXPECT_FALSE((Selection{"un-1", "", ""}.admits(row(1))));
  EXPECT_FALSE((Selection{"", "(abd)", ""}.admits(row(1))));
  EXPECT_FALSE((Selection{"", "", "H200"}.admits(row(1))));
}

TEST(Compare, TheFieldsInWhichMethodsDiffer) {
  EXPECT_EQ(take(differing_fields(R"({"name":"v1","gemm":{"ms":60,"ci":1}})",
                                  R"({"name":"v1","gemm":{"ms":30,"ci":1},"hot":true})")),
            (std::vector<std::string>{"gemm.ms is 60 and 30", "hot is absent and true"}));
  EXPECT_FALSE(differing_fields("{", "{}").has_value());
}

TEST(Compare, TimedRowsAreThoseOfFinalMethodsWithATime) {
  const TempFolder folder;
  Database db = take(Database::open(folder / "a.db", OpenMode::kCreate));
  const std::vector<TrialKey> cells = {{gemm(8192, 4096, 4096), heuristic(0)},
                                       {gemm(8192, 4096, 4096), heuristic(1)},
                                       {gemm(8192, 4096, 4096), heuristic(2)}};
  sweep(db, cells, [](const TrialKey& cell) {
    TrialResult result = timed(100);
    if (cell.candidate.config == heuristic(1).config) result.state = TrialState::kNoisy;
    if (cell.candidate.config == heuristic(2).config) return TrialResult{TrialState::kWrong, "x"};
    return result;
  });
  sweep(db, {cells[0]}, [](const TrialKey&) { return timed(1); }, h100(), toolchain(),
        {"screen", "{}"});
  const std::vector<TrialRow> rows = take(db.timed());
  ASSERT_EQ(rows.size(), 2U);
  for (const TrialRow& r : rows) EXPECT_EQ(r.result.timing->median_ns, 100);
  const auto methods = take(db.methods());
  EXPECT_EQ(methods.size(), 2U);
  EXPECT_EQ(methods.at(rows[0].method_key).fidelity, "final");
}

}  // namespace
}  // namespace f8::tuning_db
