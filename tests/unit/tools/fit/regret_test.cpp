// The cost model on the built-in measurements: how much slower its choices are, for layers that its
// constants have seen and for layers that they have not.
#include "tools/tuner/fit/regret.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "tools/tuner/search/gemm_candidates.hpp"

namespace f8::tuner {
namespace {

using runtime::CostModel;

const std::vector<MeasuredGemm>& measured() {
  static const std::vector<MeasuredGemm> kGemms = [] {
    const tuning_db::Database database = tuning_db::Database::builtin().value();
    return measured_gemms(database).value();
  }();
  return kGemms;
}

MeasuredGemm predicted_gemm(Shape shape, const CostModel& truth) {
  const Problem problem =
      Problem::make(Op::kOutput, find_recipe("tensorwise").value(), shape).value();
  MeasuredGemm made{.problem = problem.key(),
                    .family = gemm_spec(problem).value(),
                    .shape = shape,
                    .linear = shape,
                    .sm_count = 132,
                    .timed = {}};
  for (const GemmConfig& config : codegen::gemm_candidates(made.family)) {
    codegen::GemmSpec spec = made.family;
    spec.config = config;
    made.timed.push_back({config, runtime::predicted_clocks(spec, made.shape, 132, truth)});
  }
  return made;
}

TEST(Regrets, TheBuiltInMeasurementsAreRead) {
  ASSERT_GE(measured().size(), 100u);
  for (const MeasuredGemm& one : measured()) {
    EXPECT_GE(one.timed.size(), 2u) << one.problem;
    // cuBLASLt has no kernel for one operand scaled by rows and the other by one scale, and none for
    // some block-scaled shapes.
    const bool mixed = one.problem.starts_with("grad_input/rowwise_with_gw_hp/");
    const bool by_blocks = one.problem.find("/blockwise/") != std::string::npos;
    if (mixed || !by_blocks) {
      EXPECT_EQ(one.library_ns() > 0, !mixed) << one.problem;
    }
    EXPECT_EQ(one.sm_count, 132);
  }
}

TEST(Regrets, TheModelsChoicesAreNearTheFastest) {
  const Regret now = regret(measured(), CostModel::fitted());
  EXPECT_EQ(now.gemms, static_cast<int>(measured().size()));
  EXPECT_LE(now.median, 0.03);
  EXPECT_LE(now.p95, 0.12);
  EXPECT_LE(now.median_to_any, 0.08) << "the library's kernels counted too";
}

TEST(Regrets, RegretIsWhatAChoiceCosts) {
  MeasuredGemm one = predicted_gemm({4096, 4096, 4096}, CostModel::fitted());
  const auto chosen = std::ranges::min_element(one.timed, {}, &TimedConfig::ns);
  const double best = chosen->ns;
  // Another raster group of the same tile is predicted alike, so all configurations of the tile are
  // slow.
  for (TimedConfig& timed : one.timed) {
    const bool same_tile = timed.config.tile_m == chosen->config.tile_m &&
                           timed.config.tile_n == chosen->config.tile_n;
    timed.ns = same_tile ? 1.25 * best : best;
  }
  EXPECT_NEAR(regret({one}, CostModel::fitted()).worst, 0.25, 1e-9);
  one.library = {{"h0", best / 2}};
  const Regret all = regret({one}, CostModel::fitted());
  EXPECT_NEAR(all.worst, 0.25, 1e-9);
  EXPECT_NEAR(all.median_to_any, 1.5, 1e-9);
  EXPECT_EQ(all.worst_of, one.problem);
}

}  // namespace
}  // namespace f8::tuner
