// Searches replayed on made-up times, of which the best is known.
#include "tools/tuner/fit/replay.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "tools/tuner/search/gemm_candidates.hpp"

namespace f8::tuner {
namespace {

using runtime::CostModel;

// Times as the model predicts them, but for one configuration that is `faster` than all others.
MeasuredGemm made_gemm(Shape shape, size_t winner, double faster = 0.5, double mad = 1e-4) {
  const Problem problem =
      Problem::make(Op::kOutput, find_recipe("tensorwise").value(), shape).value();
  MeasuredGemm made{.problem = problem.key(),
                    .device = "h100",
                    .device_class = h100(),
                    .family = gemm_spec(problem).value(),
                    .shape = shape,
                    .linear = shape,
                    .sm_count = 132,
                    .timed = {},
                    .library = {}};
  double best = 1e18;
  for (const GemmConfig& config : codegen::gemm_candidates(made.family)) {
    codegen::GemmSpec spec = made.family;
    spec.config = config;
    const double ns = runtime::predicted_clocks(spec, shape, 132, CostModel::fitted());
    best = std::min(best, ns);
    made.timed.push_back({config, ns, mad * ns});
  }
  std::ranges::sort(made.timed, {}, &TimedConfig::ns);
  made.timed[winner].ns = faster * best;
  made.library = {{"h0", 1.5 * best, mad * best}, {"h1", 1.4 * best, mad * best}};
  return made;
}

std::vector<MeasuredGemm> made_gemms(size_t winner, double faster = 0.5, double mad = 1e-4) {
  return {made_gemm({4096, 4096, 4096}, winner, faster, mad),
          made_gemm({2048, 8192, 1024}, winner, faster, mad),
          made_gemm({8192, 1024, 8192}, winner, faster, mad)};
}

ReplayedSearch replayed(const ExhaustiveSet& set, const char* strategy, uint64_t seed = 1,
                        const SweepOptions& options = {}) {
  const auto searched = replay(set.gemms.front(), find_strategy(strategy, options).value(), seed);
  EXPECT_TRUE(searched) << (searched ? "" : searched.error().message);
  return searched.value_or(ReplayedSearch{});
}

TEST(Replay, FindsTheBestWhereItIsMeasured) {
  // Rank 20 of the model: among the first 8 it is not.
  const ExhaustiveSet set = exhaustive_set(made_gemms(20));
  ASSERT_EQ(set.gemms.size(), 3U);
  EXPECT_EQ(set.left_out, 0U);
  for (const char* strategy : {"exhaustive", "halving"}) {
    EXPECT_EQ(replayed(set, strategy).regret, 0) << strategy;
    EXPECT_EQ(replayed(set, strategy).candidates,
              static_cast<int>(set.gemms.front().measured.timed.size()) + 2);
  }
  SweepOptions few;
  few.keep = 1;
  const ReplayedSearch missed = replayed(set, "auto", 1, few);
  EXPECT_LE(missed.candidates, 1 + 2 + 2) << "one, the choices without a search, the library's";
}

TEST(Replay, CostsWhatIsMeasured) {
  const ExhaustiveSet set = exhaustive_set(made_gemms(0));
  const double exhaustive = replayed(set, "exhaustive").gpu_s;
  const double halving = replayed(set, "halving").gpu_s;
  const double automatic = replayed(set, "auto").gpu_s;
  EXPECT_GT(exhaustive, halving);
  EXPECT_GT(halving, automatic);
  EXPECT_EQ(replayed(set, "untuned").gpu_s, 0);
  // At least the method's shares and what each candidate costs beside them.
  const SweepOptions options;
  const auto count = static_cast<double>(replayed(set, "exhaustive").candidates);
  EXPECT_GT(exhaustive, count * (options.final_ms / 2e3 + kCandidateS));
  EXPECT_LT(exhaustive, count * (options.final_ms / 1e3 + kCandidateS + 0.005) + 1);
  EXPECT_LT(replayed(set, "race").gpu_s, automatic);
}

TEST(Replay, ASeedGivesTheSameSearchAgain) {
  const ExhaustiveSet set = exhaustive_set(made_gemms(3, 0.999, 0.02));
  const ReplayedSearch first = replayed(set, "auto", 7);
  const ReplayedSearch again = replayed(set, "auto", 7);
  EXPECT_EQ(first.regret, again.regret);
  EXPECT_EQ(first.gpu_s, again.gpu_s);
  EXPECT_NE(replayed(set, "auto", 8).gpu_s, first.gpu_s);
}

// The noise of the stored times is the search's too: what is best by less than that is missed.
TEST(Replay, NoiseMakesItChooseAnother) {
  const ExhaustiveSet set = exhaustive_set(made_gemms(2, 0.9999, 0.2));
  double worst = 0;
  for (uint64_t seed = 1; seed <= 20; ++seed) {
    worst = std::max(worst, replayed(set, "topk", seed).regret);
  }
  EXPECT_GT(worst, 0);
}

TEST(Replay, TheLibrarysKernelsTakePart) {
  std::vector<MeasuredGemm> gemms = made_gemms(0);
  for (MeasuredGemm& gemm : gemms) gemm.library[1].ns = 0.1 * gemm.timed[0].ns;
  const ExhaustiveSet set = exhaustive_set(gemms);
  EXPECT_EQ(replayed(set, "auto").regret, 0);
  EXPECT_NEAR(replayed(set, "untuned").regret, 9, 2) << "without a search no row is the library's";
}

TEST(Replay, SetsThatAreNotExhaustiveAreLeftOut) {
  std::vector<MeasuredGemm> gemms = made_gemms(0);
  gemms[0].timed.resize(gemms[0].timed.size() / 2);
  for (size_t i = 0; i < gemms[1].timed.size(); i += 2) gemms[1].timed[i].to_the_end = false;
  const ExhaustiveSet set = exhaustive_set(gemms);
  EXPECT_EQ(set.left_out, 2U);
  ASSERT_EQ(set.gemms.size(), 1U);
  EXPECT_EQ(set.gemms.front().measured.problem, gemms[2].problem);
}

TEST(Replay, ARacesFiguresMayBeOverruled) {
  const ExhaustiveSet set = exhaustive_set(made_gemms(0));
  SweepOptions options;
  options.keep = 12;
  EXPECT_GT(replayed(set, "race", 1, options).candidates, replayed(set, "race").candidates);
  EXPECT_EQ(replayed(set, "exhaustive", 1, options).candidates,
            replayed(set, "exhaustive").candidates);
}

TEST(Replay, AnUnknownStrategyIsNamed) {
  const auto unknown = find_strategy("genetic", {});
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().code, ErrorCode::kInvalidArgument);
  EXPECT_NE(unknown.error().message.find("auto, halving, topk, race, exhaustive"),
            std::string::npos)
      << unknown.error().message;
}

}  // namespace
}  // namespace f8::tuner
