#include "tools/tuner/search/gemm_candidates.hpp"

#include <gtest/gtest.h>

#include <set>

#include "runtime/gemm/choose.hpp"
#include "runtime/gemm/cost_model.hpp"
#include "tools/tuner/search/plan/sweep_plan.hpp"

namespace f8::tuner {
namespace {

Problem make(Op op, const char* recipe, Shape shape) {
  return Problem::make(op, *find_recipe(recipe), shape).value();
}

TEST(Search, KeepsTheBestByTheModelAndSaysWhyOfTheOthers) {
  const Problem problem = make(Op::kOutput, "tensorwise", {8192, 8192, 8192});
  const auto candidates = generated_candidates(problem, h100(), 5).value();
  EXPECT_EQ(candidates.size(), codegen::gemm_candidates(gemm_spec(problem).value()).size());
  std::set<std::string> distinct;
  size_t kept = 0;
  for (size_t i = 0; i < candidates.size(); ++i) {
    distinct.insert(key(candidates[i].spec.config));
    if (candidates[i].pruned.empty()) {
      EXPECT_EQ(kept, i) << "what is measured comes first";
      ++kept;
    } else {
      EXPECT_NE(candidates[i].pruned.find("x the best bound"), std::string::npos);
    }
  }
  EXPECT_EQ(kept, 5u);
  EXPECT_EQ(distinct.size(), candidates.size());
}

// A GEMM that was tuned without an epilogue is planned with one.
TEST(Search, BuiltInChoicesFitEveryEpilogue) {
  const TuningTable table = tuning_db::Database::builtin().value().table().value();
  ASSERT_GT(table.choices().size(), 100u);
  int fitted = 0;
  for (const KernelChoice& choice : table.choices()) {
    if (choice.problem.op == Op::kLinear || choice.kernel.provider != Provider::kGenerated)
      continue;
    if (is_grouped(choice.problem.op)) {  // they have no epilogues
      codegen::GemmSpec spec = gemm_spec(choice.problem).value();
      spec.config = choice.kernel.config;
      EXPECT_TRUE(codegen::validate(spec)) << choice.problem.key();
      continue;
    }
    for (const char* text : {"plain", "bias", "amax", "add", "bias+amax", "bias+amax+add"}) {
      Epilogue epilogue;
      if (std::string_view(text) != "plain") epilogue = parse_epilogue(text).value();
      const auto desc = gemm_desc(choice.problem, false, epilogue).value();
      const auto chosen = runtime::choose_gemm(&table, desc, h100().sm_count);
      ASSERT_TRUE(chosen) << chosen.error().message;
      EXPECT_TRUE(codegen::validate(runtime::gemm_spec(desc, chosen->config)))
          << choice.problem.key() << " " << config_text(choice.kernel) << " " << text;
      fitted += config_text(*chosen) != config_text(choice.kernel);
    }
  }
  EXPECT_GT(fitted, 0);
}

TEST(Search, TheFamilyFollowsTheRecipe) {
  const auto precise = gemm_spec(make(Op::kGradInput, "tensorwise", {256, 256, 256})).value();
  EXPECT_EQ(precise.a, Dtype::kE5m2);
  EXPECT_FALSE(precise.fast);
  EXPECT_EQ(precise.scale, codegen::ScaleMode::kTensor);
  EXPECT_EQ(gemm_spec(make(Op::kOutput, "rowwise", {256, 256, 256}))->scale,
            codegen::ScaleMode::kAxis);
  EXPECT_EQ(gemm_spec(make(Op::kOutput, "blockwise", {256, 256, 256}))->scale,
            codegen::ScaleMode::kBlock128x128);
  EXPECT_EQ(gemm_spec(make(Op::kGradWeight, "blockwise", {256, 256, 256}))->scale,
            codegen::ScaleMode::kBlock1x128);
  EXPECT_EQ(gemm_spec(make(Op::kOutput, "delayed", {256, 256, 256}))->scale,
            codegen::ScaleMode::kTensor);
  EXPECT_EQ(gemm_spec(make(Op::kGradWeight, "rowwise_with_gw_hp", {256, 256, 256})).error().code,
            ErrorCode::kUnsupported);
  EXPECT_FALSE(gemm_spec(make(Op::kLinear, "rowwise", {256, 256, 256})));
}

TEST(Search, IdentityIsTheProductNotItsPlace) {
  // Both are the GEMM m=512, n=256, k=1024 of e5m2 and e4m3, once as grad_input, once as
  // grad_weight.
  const Problem gi = make(Op::kGradInput, "tensorwise", {512, 1024, 256});
  const Problem gw = make(Op::kGradWeight, "tensorwise", {1024, 512, 256});
  EXPECT_EQ(gemm_identity(gi, false), gemm_identity(gw, false));
  EXPECT_NE(gemm_identity(gi, true), gemm_identity(gw, true)) << "bf16 operands lie differently";
  EXPECT_NE(gemm_identity(gi, false),
            gemm_identity(make(Op::kGradInput, "rowwise", gi.shape()), false));
  EXPECT_NE(gemm_identity(make(Op::kGradInput, "rowwise", gi.shape()), false),
            gemm_identity(make(Op::kGradInput, "rowwise_with_gw_hp", gi.shape()), false))
      << "one scale for one of the operands";
  EXPECT_EQ(gemm_identity(make(Op::kOutput, "tensorwise", gi.shape()), false),
            gemm_identity(make(Op::kOutput, "delayed", gi.shape()), false));
  EXPECT_EQ(gemm_identity(gi, true),
            gemm_identity(make(Op::kGradInput, "rowwise", gi.shape()), true));
}

TEST(Search, CandidatesGoToTheDatabaseAndBack) {
  for (const Candidate& candidate :
       {Candidate{.impl = Impl::kGenerated, .config = "128x256s4c2x1w2g8"},
        Candidate{.impl = Impl::kCublasLt, .config = "h3"},
        Candidate{.impl = Impl::kBf16CublasLt, .config = "h0"},
        Candidate{.impl = Impl::kFloat8, .config = ""},
        Candidate{.impl = Impl::kBf16, .config = ""}}) {
    EXPECT_EQ(from_row(to_row(candidate, "hash")).value(), candidate);
  }
  EXPECT_EQ(to_row({.impl = Impl::kCublasLt, .config = "h3"}, "").config, R"({"heuristic":3})");
  EXPECT_FALSE(
      from_row({.impl = tuning_db::Impl::kCublasLt, .config = "not json", .source_hash = ""}));
  EXPECT_FALSE(from_row(
      {.impl = tuning_db::Impl::kGenerated, .config = R"({"heuristic":"x"})", .source_hash = ""}));
}

TEST(Search, ChoicesOfALinearReadBack) {
  LinearChoices choices;
  choices[0].config = parse_gemm_config("128x256s4c2x1w2g8").value();
  choices[1].provider = Provider::kCublasLt;
  choices[1].heuristic = 5;
  const std::string text = choices_text(choices);
  EXPECT_EQ(choices_text(parse_choices(text).value()), text);
  for (const char* bad : {"", "generated:128x256s4c2x1w2g8", "cublaslt:h0,cublaslt:h0",
                          "cublaslt:h0,cublaslt:h0,cublaslt:h0,cublaslt:h0",
                          "other:h0,cublaslt:h0,cublaslt:h0", "cublaslt,cublaslt,cublaslt"}) {
    EXPECT_FALSE(parse_choices(bad)) << bad;
  }
}

SweepRequest request_of(std::vector<SweptShape> shapes) {
  SweepRequest request;
  request.shapes = std::move(shapes);
  request.recipes = {"tensorwise", "rowwise"};
  return request;
}

TEST(SweepPlan, IsTheSameEveryTime) {
  const SweepRequest request = request_of({{8192, 4096, 4096}, {2048, 1024, 4096}});
  const AskSuggestions eight = [](const Problem&, bool) -> Result<Suggested> {
    return Suggested{.count = 8};
  };
  const SweepPlan a = plan_sweep(request, h100(), eight).value();
  const SweepPlan b = plan_sweep(request, h100(), eight).value();
  ASSERT_EQ(a.trials.size(), b.trials.size());
  std::set<std::string> distinct;
  for (size_t i = 0; i < a.trials.size(); ++i) {
    EXPECT_EQ(a.trials[i].problem, b.trials[i].problem);
    EXPECT_EQ(a.trials[i].candidate.key(), b.trials[i].candidate.key());
    distinct.insert(a.trials[i].problem.key() + a.trials[i].candidate.key());
  }
  EXPECT_EQ(distinct.size(), a.trials.size());
  EXPECT_EQ(a.linears.size(), 4u);
  EXPECT_GT(a.predicted_s, 0);
  EXPECT_EQ(a.linears.front().problem.shape().m, 2048) << "small before large";
}

TEST(SweepPlan, RespectsWhatTheLibraryOffers) {
  const SweepRequest request = request_of({{256, 256, 256}});
  const AskSuggestions three_in_bf16 = [](const Problem&, bool bf16) -> Result<Suggested> {
    return Suggested{.count = bf16 ? 3 : 0};
  };
  const SweepPlan plan = plan_sweep(request, h100(), three_in_bf16).value();
  for (const tuning_db::TrialKey& trial : plan.trials)
    EXPECT_NE(trial.candidate.impl, tuning_db::Impl::kCublasLt);
  const auto failing = plan_sweep(request, h100(), [](const Problem&, bool) -> Result<Suggested> {
    return fail(ErrorCode::kCuda, "lost");
  });
  EXPECT_FALSE(failing);
}

// A sweep measures what a plan takes without a search, however late cuBLASLt lists it.
TEST(SweepPlan, MeasuresTheSuggestionThatRanksFirst) {
  SweepRequest request = request_of({{256, 256, 256}});
  request.recipes = {"rowwise_with_gw_hp"};
  request.options.heuristics = 4;
  const AskSuggestions sixth = [](const Problem& gemm, bool bf16) -> Result<Suggested> {
    const bool ranked = bf16 && gemm.op == Op::kGradWeight;
    return Suggested{.count = 8, .unmeasured = ranked ? 6 : 0};
  };
  const SweepPlan plan = plan_sweep(request, h100(), sixth).value();
  const auto& gemms = plan.linears.front().gemms;
  const PlannedGemm& output = gemms[static_cast<size_t>(Gemm::kOutput)];
  const PlannedGemm& grad_weight = gemms[static_cast<size_t>(Gemm::kGradWeight)];
  EXPECT_EQ(output.fp8_suggestions, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(output.bf16_suggestions, (std::vector<int>{0, 1, 2, 3}));
  EXPECT_EQ(grad_weight.bf16_suggestions, (std::vector<int>{0, 1, 2, 3, 6}));
  EXPECT_EQ(config_text(grad_weight.prior.back()), "h6");
}

TEST(SweepPlan, TheMethodIsItsFigures) {
  SweepOptions options;
  const auto key = sweep_method(options).key();
  EXPECT_EQ(sweep_method(SweepOptions{}).key(), key);
  options.max_ci = 0.01;
  EXPECT_NE(sweep_method(options).key(), key);
}

// Every built-in recipe can be planned; a GEMM that a recipe keeps in bf16 has bf16 candidates
// alone.
TEST(Plan, TakesEveryRecipe) {
  SweepRequest request;
  request.shapes = {{256, 512, 256}};
  for (const Recipe& recipe : builtin_recipes()) request.recipes.push_back(recipe.name);
  const auto plan = plan_sweep(request, h100(), [](const Problem&, bool) -> Result<Suggested> {
    return Suggested{2, 1};
  });
  ASSERT_TRUE(plan) << plan.error().message;
  ASSERT_EQ(plan->linears.size(), request.recipes.size());
  for (const PlannedLinear& linear : plan->linears) {
    const Recipe recipe = find_recipe(linear.problem.recipe).value();
    for (const Gemm g : kGemms) {
      const PlannedGemm& gemm = linear.gemms[static_cast<size_t>(g)];
      EXPECT_EQ(gemm.generated.empty(), !recipe.at(g).is_fp8()) << gemm.problem.key();
      ASSERT_FALSE(gemm.prior.empty()) << gemm.problem.key();
      if (!recipe.at(g).is_fp8()) {
        EXPECT_EQ(config_text(gemm.prior.back()), g == Gemm::kGradWeight ? "h1" : "h0");
      }
      EXPECT_EQ(gemm.bf16_suggestions, (std::vector<int>{0, 1}));
    }
  }
}

}  // namespace
}  // namespace f8::tuner
