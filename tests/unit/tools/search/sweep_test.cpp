// The measurements and choices of a sweep.
#include <cstdio>

#include "runtime/gemm/choose.hpp"
#include "tests/unit/tools/search/sweep_fixture.hpp"

namespace f8::tuner {
namespace {

std::vector<tuning_db::PartKernel> all_of_library(const char* config) {
  return {{"output", Provider::kCublasLt, config},
          {"grad_input", Provider::kCublasLt, config},
          {"grad_weight", Provider::kCublasLt, config}};
}

TEST_F(SweepTest, EveryTrialGetsATerminalStateAndTheLinearARatio) {
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->end, SweepEnd::kDone);
  EXPECT_EQ(outcome->progress.done, outcome->progress.trials);
  const auto found = all_rows();
  EXPECT_EQ(found.size(), plan().trials.size());
  const auto linear = rows(problem(Op::kLinear), "float8");
  ASSERT_EQ(linear.size(), 1u);
  ASSERT_EQ(linear[0].result.state, TrialState::kOk) << linear[0].result.reason;
  ASSERT_TRUE(linear[0].result.ratio);
  EXPECT_NEAR(linear[0].result.ratio->ratio, 600.0 / 310, 0.02);
  const auto bf16 = rows(problem(Op::kLinear), "bf16");
  ASSERT_EQ(bf16.size(), 1u);
  EXPECT_EQ(linear[0].result.ratio->pair_uuid, bf16[0].uuid);
  EXPECT_EQ(open().runs().value().front().state, "done");
  // The fastest of the measured kernels and the fastest bf16 ones were taken.
  ASSERT_FALSE(linear[0].result.kernels.empty());
  EXPECT_TRUE(linear[0].result.kernels.front().config.ends_with("g16"));
  EXPECT_EQ(bf16[0].result.kernels, all_of_library("h1"));
}

// Grouped GEMMs and the whole expert linear with its baseline; a plan takes the kernels that the database
// has then.
TEST_F(SweepTest, ExpertsAreSweptAndChosenFromTheDatabase) {
  request_.shapes[0].groups = {16, kZipf};
  request_.recipes = {"rowwise_with_gw_hp"};
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->progress.done, outcome->progress.trials);
  EXPECT_TRUE(rows(problem(Op::kLinear, "rowwise_with_gw_hp")).empty()) << "nothing is dense";
  const Recipe recipe = find_recipe("rowwise_with_gw_hp").value();
  const auto of = [&](Op op) {
    return Problem::make(op, recipe, request_.shapes[0], request_.shapes[0].groups).value();
  };
  const auto whole = rows(of(Op::kLinear), "float8");
  ASSERT_EQ(whole.size(), 1u);
  ASSERT_EQ(whole[0].result.kernels.size(), 3u);
  EXPECT_TRUE(whole[0].result.ratio);
  EXPECT_EQ(rows(of(Op::kLinear), "bf16").size(), 1u);
  const Database db = open();
  const auto experts = db.linears("rowwise_with_gw_hp", tuning_db::Impl::kFloat8, Op::kExperts);
  ASSERT_EQ(experts->size(), 1u);
  EXPECT_TRUE(db.linears("rowwise_with_gw_hp")->empty());
  const TuningTable table = db.table().value();
  EXPECT_TRUE(table.speedups().empty()) << "those are of dense linears";
  ASSERT_EQ(table.choices().size(), 3u);
  for (const Gemm g : kGemms) {
    const Problem gemm = of(to_op(g));
    EXPECT_GE(rows(gemm, "generated").size(), 3u) << gemm.key();
    EXPECT_TRUE(rows(gemm, "cublaslt").empty()) << gemm.key();
    ASSERT_EQ(rows(gemm, "bf16_cublaslt").size(), 1u) << gemm.key();
    const auto chosen = runtime::choose_grouped(&table, grouped_desc(gemm).value(), 132);
    ASSERT_TRUE(chosen) << chosen.error().message;
    const auto* taken = find_kernel(whole[0].result.kernels, to_string(g));
    ASSERT_NE(taken, nullptr);
    EXPECT_EQ(key(chosen->config), taken->config) << gemm.key();
    EXPECT_EQ(chosen->why, "the tuning table's row of this shape");
  }
}

// Expert linears in bf16 are grouped GEMMs or calls for each expert, whichever are faster.
class SweptBaselineTest : public SweepTest, public ::testing::WithParamInterface<Provider> {};
INSTANTIATE_TEST_SUITE_P(Faster, SweptBaselineTest,
                         ::testing::Values(Provider::kGenerated, Provider::kCublasLt),
                         [](const auto& suite) { return std::string(to_string(suite.param)); });

TEST_P(SweptBaselineTest, OfExpertsIsTheFaster) {
  request_.shapes[0].groups = {16, kEven};
  machine_.ns = [](const Problem&, const Candidate& s, double) {
    if (s.impl != Impl::kBf16) return s.impl == Impl::kFloat8 ? 300e3 : 100e3;
    double sum = 0;
    const LinearChoices choices = parse_choices(s.config).value();
    for (const runtime::GemmChoice& choice : choices) {
      sum += choice.provider == GetParam() ? 150e3 : 200e3;
    }
    return sum;
  };
  ASSERT_TRUE(sweep_all());
  const Problem whole = Problem::make(Op::kLinear, find_recipe("tensorwise").value(),
                                      request_.shapes[0], request_.shapes[0].groups)
                            .value();
  const auto bf16 = rows(whole, "bf16");
  ASSERT_EQ(bf16.size(), 1u);
  ASSERT_EQ(bf16[0].result.kernels.size(), 3u);
  for (const auto& kernel : bf16[0].result.kernels) EXPECT_EQ(kernel.provider, GetParam());
  EXPECT_NEAR(bf16[0].result.timing->median_ns, 450e3, 10e3);
}

TEST_F(SweepTest, TheLibraryAlwaysTakesPartAndMayWin) {
  machine_.ns = [](const Problem&, const Candidate& s, double) {
    return s.impl == Impl::kCublasLt && s.config == "h1" ? 50e3 : 100e3;
  };
  ASSERT_TRUE(sweep_all());
  const auto measured = rows(problem(Op::kGradInput));
  ASSERT_FALSE(measured.empty());
  EXPECT_EQ(measured.front().candidate.impl, tuning_db::Impl::kCublasLt);
  EXPECT_EQ(measured.front().candidate.config, R"({"heuristic":1})");
  const auto linear = rows(problem(Op::kLinear), "float8");
  EXPECT_EQ(linear.at(0).result.kernels, all_of_library("h1"));
}

TEST_F(SweepTest, TheFastestLinearDecidesWhichKernelsCount) {
  // The library is 2 % slower by itself, and in a linear everything else with it is faster.
  machine_.ns = [](const Problem& p, const Candidate& s, double) {
    if (s.impl == Impl::kGenerated) return 100e3;
    if (s.impl == Impl::kCublasLt) return s.config == "h1" ? 102e3 : 150e3;
    if (s.impl != Impl::kFloat8) return 600e3;
    const auto choices = *parse_choices(s.config);
    return choices[0].provider == Provider::kCublasLt && p.op == Op::kLinear ? 280e3 : 320e3;
  };
  request_.options.keep = 2;  // else the library is behind more kernels than linears are made of
  ASSERT_TRUE(sweep_all());
  const auto linear = rows(problem(Op::kLinear), "float8").at(0);
  const auto kernels = linear.result.kernels;
  ASSERT_EQ(kernels.size(), 3u);
  EXPECT_EQ(kernels[0], all_of_library("h1")[0]);
  EXPECT_EQ(kernels[1].provider, Provider::kGenerated);
  EXPECT_TRUE(linear.result.reason.starts_with("the fastest of ")) << linear.result.reason;
  EXPECT_NEAR(linear.result.timing->median_ns, 280e3, 5e3);
  EXPECT_EQ(rows(problem(Op::kOutput)).at(0).candidate.impl, tuning_db::Impl::kGenerated)
      << "alone";
  const TuningTable table = open().table().value();
  const KernelChoice* chosen = table.find(problem(Op::kOutput));
  ASSERT_NE(chosen, nullptr);
  EXPECT_EQ(chosen->kernel.provider, Provider::kCublasLt);
  EXPECT_EQ(config_text(chosen->kernel), "h1");
  EXPECT_NEAR(chosen->median_ns, 102e3, 2e3);
}

TEST_F(SweepTest, WhatIsChosenWithoutASearchTakesPart) {
  // The table has the model's last choice of all, which no search would look at.
  const Problem output = problem(Op::kOutput);
  const std::string last = key(generated_candidates(output, h100(), 1).value().back().spec.config);
  request_.prior.add(KernelChoice{output, {.config = parse_gemm_config(last).value()}, 1e3});
  machine_.ns = [last](const Problem&, const Candidate& s, double) {
    return s.impl == Impl::kGenerated ? (s.config == last ? 99e3 : 98e3)
           : s.impl == Impl::kFloat8  ? (s.config.find(last) != std::string::npos ? 300e3 : 330e3)
                                      : 500e3;
  };
  ASSERT_TRUE(sweep_all());
  const auto kernels = rows(problem(Op::kLinear), "float8").at(0).result.kernels;
  ASSERT_FALSE(kernels.empty());
  EXPECT_EQ(kernels[0].config, last);
  const auto own = rows(output, "generated");
  EXPECT_TRUE(std::ranges::any_of(own, [&](const TrialRow& row) {
    return row.candidate.config.find(last) != std::string::npos && row.result.timing;
  }));
}

TEST_F(SweepTest, EveryRecipeGetsALinear) {
  request_.recipes.clear();
  for (const Recipe& recipe : builtin_recipes()) request_.recipes.push_back(recipe.name);
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  EXPECT_EQ(outcome->progress.done, outcome->progress.trials);
  ASSERT_EQ(outcome->linears.size(), request_.recipes.size());
  const TuningTable table = open().table().value();
  for (const LinearResult& linear : outcome->linears) {
    const Recipe recipe = find_recipe(linear.problem.recipe).value();
    EXPECT_EQ(linear.float8.state, TrialState::kOk) << recipe.name << linear.float8.reason;
    const auto& kernels = linear.float8.kernels;
    ASSERT_EQ(kernels.size(), kGemms.size()) << recipe.name;
    for (const Gemm gemm : kGemms) {
      const tuning_db::PartKernel& kernel = *find_kernel(kernels, to_string(gemm));
      if (!recipe.at(gemm).is_fp8()) {
        EXPECT_EQ(to_string(kernel), "cublaslt:h1");
      }
      const Problem own = problem(to_op(gemm), recipe.name.c_str());
      const KernelChoice* chosen = table.find(own);
      ASSERT_NE(chosen, nullptr) << own.key();
      EXPECT_EQ(config_text(chosen->kernel), kernel.config) << own.key();
    }
  }
}

TEST_F(SweepTest, BothKindsReachTheFinal) {
  ASSERT_TRUE(sweep_all());
  for (const char* impl : {"generated", "cublaslt"}) {
    const auto of_kind = rows(problem(Op::kOutput), impl);
    EXPECT_TRUE(std::ranges::any_of(of_kind, [](const TrialRow& row) {
      return row.result.state == TrialState::kOk && row.result.timing;
    })) << impl;
  }
  // A candidate that lost the screening keeps its figure, but not as a measurement of this method.
  const auto lost = rows(problem(Op::kOutput), "cublaslt");
  const auto pruned = std::ranges::find_if(
      lost, [](const TrialRow& row) { return row.result.state == TrialState::kPruned; });
  ASSERT_NE(pruned, lost.end());
  ASSERT_TRUE(pruned->result.screened_ns);
  EXPECT_NEAR(*pruned->result.screened_ns, 150e3, 1500);  // h2's time, measured with noise
  EXPECT_FALSE(pruned->result.timing);
}

TEST_F(SweepTest, AWrongKernelNeverWins) {
  machine_.ns = [](const Problem&, const Candidate& s, double) {
    return s.impl == Impl::kGenerated ? 1e3 : 100e3;
  };
  machine_.misbehaviour = [](const Problem&, const Candidate& s) {
    return s.impl == Impl::kGenerated ? Misbehaviour::kWrong : Misbehaviour::kNone;
  };
  ASSERT_TRUE(sweep_all());
  for (const TrialRow& row : rows(problem(Op::kOutput), "generated")) {
    EXPECT_EQ(row.result.state, TrialState::kWrong);
    EXPECT_FALSE(row.result.timing);
  }
  const auto linear = rows(problem(Op::kLinear), "float8");
  ASSERT_FALSE(linear.at(0).result.kernels.empty());
  for (const tuning_db::PartKernel& kernel : linear.at(0).result.kernels) {
    EXPECT_EQ(kernel.provider, Provider::kCublasLt);
  }
}

TEST_F(SweepTest, WithoutAnyKernelTheLinearSaysWhichGemmHasNone) {
  machine_.misbehaviour = [](const Problem& p, const Candidate& s) {
    return p.op == Op::kGradWeight && s.impl != Impl::kBf16CublasLt ? Misbehaviour::kWrong
                                                                    : Misbehaviour::kNone;
  };
  ASSERT_TRUE(sweep_all());
  const auto linear = rows(problem(Op::kLinear), "float8");
  EXPECT_EQ(linear.at(0).result.state, TrialState::kLaunchError);
  EXPECT_EQ(linear.at(0).result.reason, "no kernel works for grad_weight");
  EXPECT_EQ(rows(problem(Op::kLinear), "bf16").at(0).result.state, TrialState::kOk);
}

TEST_F(SweepTest, OneGemmIsMeasuredOnce) {
  request_.recipes = {"tensorwise", "rowwise"};
  ASSERT_TRUE(sweep_all());
  const auto first = rows(problem(Op::kOutput, "tensorwise"), "bf16_cublaslt");
  const auto second = rows(problem(Op::kOutput, "rowwise"), "bf16_cublaslt");
  ASSERT_EQ(first.size(), second.size());
  int shared = 0;
  for (const TrialRow& row : second) {
    shared += row.result.reason.find("the same GEMM as output/tensorwise") != std::string::npos;
  }
  EXPECT_EQ(static_cast<size_t>(shared), second.size());
  for (const TrialRow& row : second) {
    const auto again = std::ranges::find_if(
        first, [&](const TrialRow& r) { return r.candidate.config == row.candidate.config; });
    ASSERT_NE(again, first.end());
    ASSERT_EQ(row.result.timing.has_value(), again->result.timing.has_value());
    if (row.result.timing) {
      EXPECT_EQ(row.result.timing->median_ns, again->result.timing->median_ns);
    }
  }
}

TEST_F(SweepTest, ANoisyLinearIsTriedAgainAndSaysSo) {
  machine_.block_noise = 0.0;
  machine_.noise = 0.4;
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome);
  const auto linear = rows(problem(Op::kLinear), "float8");
  EXPECT_EQ(linear.at(0).result.state, TrialState::kNoisy);
  EXPECT_NE(linear.at(0).result.reason.find("half-width"), std::string::npos);
  EXPECT_TRUE(open().linears("tensorwise").value().empty()) << "noisy rows decide nothing";
}

TEST_F(SweepTest, ARaceEndsWithTheScreening) {
  int finals = 0;
  request_.options.race = true;
  ASSERT_NE(sweep_method(request_.options).key(), sweep_method({}).key());
  ASSERT_TRUE(sweep_all());
  const auto output = rows(problem(Op::kOutput));
  for (const TrialRow& row : output) {
    if (row.result.state != TrialState::kOk) continue;
    EXPECT_TRUE(row.result.timing) << row.candidate.config;
    ++finals;
  }
  EXPECT_GE(finals, request_.options.finalists);
  EXPECT_EQ(output.front().candidate.impl, tuning_db::Impl::kGenerated);
  EXPECT_EQ(open().linears("tensorwise").value().size(), request_.shapes.size());
}

// Nobody is screened where all would go on.
TEST_F(SweepTest, AStrategyMayDoWithoutAScreening) {
  ASSERT_TRUE(apply_strategy("topk", request_.options));
  ASSERT_TRUE(sweep_all());
  for (const TrialRow& row : rows(problem(Op::kOutput))) {
    EXPECT_FALSE(row.result.screened_ns) << row.candidate.config;
    EXPECT_EQ(row.result.state, TrialState::kOk) << row.candidate.config;
  }
}

TEST_F(SweepTest, HotTimesAreKeptAndDecideNothing) {
  machine_.hot_factor = 0.5;
  ASSERT_TRUE(sweep_all());
  const auto decided = open().linears("tensorwise").value();
  ASSERT_EQ(decided.size(), request_.shapes.size());
  const double cold_ns = rows(problem(Op::kLinear), "float8").at(0).result.timing->median_ns;

  request_.options.conditions.l2 = L2State::kHot;
  ASSERT_NE(sweep_method(request_.options).key(), sweep_method({}).key());
  ASSERT_TRUE(sweep_all());
  const auto both = rows(problem(Op::kLinear), "float8");
  ASSERT_EQ(both.size(), 2u);
  const auto hot =
      std::ranges::find_if(both, [](const TrialRow& row) { return row.fidelity == "screen"; });
  ASSERT_NE(hot, both.end());
  EXPECT_NEAR(hot->result.timing->median_ns / cold_ns, 0.5, 0.02);
  const auto after = open().linears("tensorwise").value();
  ASSERT_EQ(after.size(), decided.size());
  EXPECT_EQ(after[0].uuid, decided[0].uuid) << "a hot row took the cold one's place";
}

TEST_F(SweepTest, TheMethodOfALockedClockIsAnother) {
  SweepOptions options;
  const auto steady = sweep_method(options);
  options.conditions.clock = ClockPolicy::kLocked;
  const auto locked = sweep_method(options);
  EXPECT_NE(locked.key(), steady.key());
  EXPECT_EQ(locked.fidelity, "final");
}

}  // namespace
}  // namespace f8::tuner
