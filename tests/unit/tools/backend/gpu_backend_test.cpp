// The real backend without a GPU: a wrong stride, scale or reference shows.
#include <cmath>

#include "tests/unit/tools/backend/gpu_backend_fixture.hpp"
#include "tools/tuner/measure/measurer.hpp"

namespace f8::tuner {
namespace {

using testing::g_fakes;
using testing::GpuBackendTest;

TEST_F(GpuBackendTest, EveryGemmOfEveryProviderIsRight) {
  for (const Recipe& recipe : builtin_recipes()) {
    for (const Op op : {Op::kOutput, Op::kGradInput, Op::kGradWeight}) {
      const bool fp8 = recipe.at(to_gemm(op)).is_fp8();
      for (const Shape shape :
           {Shape{64, 48, 80}, Shape{17, 32, 48}, Shape{1, 16, 16}, Shape{150, 272, 144}}) {
        const Problem p = problem(op, recipe.name.c_str(), shape);
        ASSERT_TRUE(backend_->open(p));
        std::vector<Candidate> candidates = {{.impl = Impl::kBf16CublasLt, .config = "h2"}};
        if (fp8) {
          candidates.push_back(generated(p));
          candidates.push_back({.impl = Impl::kCublasLtTensorwise, .config = "h0"});
          // The fake library reads one scale or one for each row, and no library mixes them.
          const runtime::GemmDesc desc = gemm_desc(p, false).value();
          if (!is_block(desc.scale) && !desc.scalar_a && !desc.scalar_b) {
            candidates.push_back({.impl = Impl::kCublasLt, .config = "h1"});
          }
        }
        for (const Candidate& candidate : candidates) {
          const auto built = backend_->add(candidate);
          ASSERT_TRUE(built) << p.key() << " " << impl_text(candidate) << " "
                             << built.error().message;
          const auto check = backend_->verify(built->id);
          ASSERT_TRUE(check) << p.key() << " " << impl_text(candidate) << " "
                             << check.error().message;
          EXPECT_TRUE(check->right)
              << p.key() << " " << impl_text(candidate) << ": " << check->what;
          EXPECT_LT(check->rel_err, 4e-3) << p.key() << " " << impl_text(candidate);
          // The tolerance is one rounding of a product of two fp8 elements and powers of two.
          const bool exact = fp8 && candidate.impl != Impl::kBf16CublasLt &&
                             gemm_desc(p, false).value().pow2 &&
                             gemm_shape(shape, to_gemm(op)).k == 1;
          if (!exact) {
            EXPECT_GT(check->rel_err, 0) << "bf16 results are never exact";
          }
        }
      }
    }
  }
  EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
}

// Tests every recipe with its weight cast in each forward and with copies that exist already.
TEST_F(GpuBackendTest, LinearsAreRightAndTheirStepsAreTheirLaunches) {
  for (const Recipe& recipe : builtin_recipes()) {
    const Problem p = problem(Op::kLinear, recipe.name.c_str(), {64, 48, 80});
    ASSERT_TRUE(backend_->open(p));
    LinearChoices choices;
    for (const Gemm gemm : kGemms) {
      auto& choice = choices[static_cast<size_t>(gemm)];
      if (!recipe.at(gemm).is_fp8()) {
        choice.provider = Provider::kCublasLt;
        continue;
      }
      choice.config =
          parse_gemm_config(generated(problem(to_op(gemm), recipe.name.c_str(), p.shape())).config)
              .value();
    }
    const auto bf16 =
        backend_->add({.impl = Impl::kBf16, .config = "cublaslt:h0,cublaslt:h1,cublaslt:h2"});
    ASSERT_TRUE(bf16) << bf16.error().message;
    const auto bf16_choices = backend_->verify(bf16->id);
    ASSERT_TRUE(bf16_choices) << bf16_choices.error().message;
    EXPECT_TRUE(bf16_choices->right) << bf16_choices->what;
    EXPECT_LT(bf16_choices->rel_err, 4e-3);
    EXPECT_FALSE(backend_->add_steps(bf16->id));
    size_t steps_with_casts = 0;
    for (const Impl impl : {Impl::kFloat8, Impl::kFloat8Reused}) {
      const auto float8 = backend_->add({.impl = impl, .config = choices_text(choices)});
      ASSERT_TRUE(float8) << recipe.name << " " << to_string(impl) << " " << float8.error().message;
      const auto check = backend_->verify(float8->id);
      ASSERT_TRUE(check) << recipe.name << " " << to_string(impl) << " " << check.error().message;
      EXPECT_TRUE(check->right) << recipe.name << " " << to_string(impl) << ": " << check->what;
      EXPECT_GT(check->sqnr_db, 18) << recipe.name;
      EXPECT_LT(check->sqnr_db, 45) << "that is no fp8";
      const auto steps = backend_->add_steps(float8->id);
      ASSERT_TRUE(steps);
      int gemms = 0;
      double bytes = 0;
      for (const auto& step : *steps) {
        gemms += step.name.starts_with("gemm ") ? 1 : 0;
        bytes += step.bytes;
        ASSERT_TRUE(backend_->estimate_ns(step.id)) << recipe.name << " " << step.name;
      }
      EXPECT_GE(gemms, 2) << recipe.name;
      EXPECT_LE(gemms, 3) << recipe.name;
      EXPECT_GT(bytes, 0) << recipe.name;
      if (impl == Impl::kFloat8) {
        steps_with_casts = steps->size();
      } else {
        EXPECT_LE(steps->size(), steps_with_casts) << recipe.name;
      }
    }
  }
  EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
}

// An expert linear and each of its GEMMs, by every routing, beside the baseline.
TEST_F(GpuBackendTest, ExpertsAreRightAndTheirStepsAreTheirLaunches) {
  for (const Recipe& recipe : builtin_recipes()) {
    if (!recipe.at(Gemm::kOutput).is_fp8()) continue;
    for (const Groups& groups : {Groups{5, kEven}, Groups{5, kZipf}, Groups{5, kOneExpert}}) {
      for (const Op op : {Op::kLinear, Op::kOutput, Op::kGradInput, Op::kGradWeight}) {
        const Problem p = Problem::make(op, recipe, {333, 48, 80}, groups).value();
        ASSERT_TRUE(backend_->open(p)) << p.key();
        const bool whole = op == Op::kLinear;
        const std::string grouped = "generated:128x128s6c1x2w2pg8";
        std::vector<Candidate> candidates = {
            {.impl = Impl::kBf16},
            {.impl = Impl::kFloat8},
            {.impl = Impl::kBf16, .config = grouped + "," + grouped + "," + grouped},
            {.impl = Impl::kBf16, .config = "cublaslt:h0," + grouped + ",cublaslt:h0"}};
        if (!whole) {
          candidates = {
              {.impl = Impl::kBf16CublasLt, .config = "h0"}, generated(p), generated(p, 4)};
        }
        for (const Candidate& candidate : candidates) {
          const std::string what = p.key() + " " + impl_text(candidate) + " " + candidate.config;
          const auto built = backend_->add(candidate);
          ASSERT_TRUE(built) << what << " " << built.error().message;
          const auto check = backend_->verify(built->id);
          ASSERT_TRUE(check) << what << " " << check.error().message;
          EXPECT_TRUE(check->right) << what << ": " << check->what;
          const bool bf16 = candidate.impl == Impl::kBf16 || candidate.impl == Impl::kBf16CublasLt;
          const bool high_precision = !recipe.at(to_gemm(op)).is_fp8();
          if (bf16 || (high_precision && !whole)) {
            EXPECT_LT(check->rel_err, 4e-3) << what;
          } else {
            EXPECT_GT(check->sqnr_db, 18) << what;
            EXPECT_LT(check->sqnr_db, 45) << what << ": that is no fp8";
          }
        }
        if (!whole) continue;
        EXPECT_FALSE(backend_->add_steps(0));
        const auto steps = backend_->add_steps(1);
        ASSERT_TRUE(steps) << steps.error().message;
        std::vector<std::string> names;
        for (const auto& step : *steps) names.push_back(step.name);
        EXPECT_EQ(names,
                  (std::vector<std::string>{"layout", "cast x", "cast w", "gemm output", "cast dy",
                                            "gemm grad_input", "gemm grad_weight"}));
        for (const auto& step : *steps) EXPECT_TRUE(backend_->estimate_ns(step.id)) << step.name;
      }
    }
  }
  EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
}

TEST_F(GpuBackendTest, AGroupedGemmThatWritesNothingIsWrong) {
  for (const Op op : {Op::kOutput, Op::kGradInput, Op::kGradWeight}) {
    const Problem p =
        Problem::make(op, find_recipe("rowwise").value(), {333, 48, 80}, {5, kZipf}).value();
    ASSERT_TRUE(backend_->open(p));
    const auto built = backend_->add(generated(p));
    ASSERT_TRUE(built) << built.error().message;
    cuda_.emulate = false;
    const auto check = backend_->verify(built->id);
    ASSERT_TRUE(check);
    EXPECT_FALSE(check->right) << p.key();
    EXPECT_NE(check->what.find("is not finite: not written"), std::string::npos) << check->what;
    cuda_.emulate = true;
  }
}

TEST_F(GpuBackendTest, WhatExpertsHaveNotIsRefused) {
  const Problem p =
      Problem::make(Op::kOutput, find_recipe("rowwise").value(), {64, 48, 80}, {4, kEven}).value();
  ASSERT_TRUE(backend_->open(p));
  EXPECT_FALSE(backend_->add({.impl = Impl::kCublasLt, .config = "h0"}));
  EXPECT_FALSE(backend_->add({.impl = Impl::kFloat8}));
  EXPECT_EQ(backend_->suggestions(p, false)->count, 0);
  EXPECT_EQ(backend_->suggestions(p, true)->count, 1);
  Problem other = p;
  other.fast = !p.fast;
  const auto opened = backend_->open(other);
  ASSERT_FALSE(opened);
  EXPECT_NE(opened.error().message.find(p.key()), std::string::npos) << opened.error().message;
}

// Tests every epilogue with every type of result.
TEST_F(GpuBackendTest, EpiloguesAreRight) {
  for (const Dtype type : {Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    for (const Op op : {Op::kOutput, Op::kGradWeight}) {
      for (const char* recipe : {"tensorwise", "rowwise", "blockwise"}) {
        Problem p = problem(op, recipe, {150, 272, 144});
        p.d = type;
        ASSERT_TRUE(backend_->open(p));
        for (const char* text : {"bias", "amax", "add", "bias+amax", "bias+amax+add"}) {
          Candidate candidate = generated(p);
          candidate.epilogue = parse_epilogue(text).value();
          const auto built = backend_->add(candidate);
          ASSERT_TRUE(built) << p.key() << " " << text << " " << built.error().message;
          const auto check = backend_->verify(built->id);
          ASSERT_TRUE(check) << p.key() << " " << text << " " << check.error().message;
          EXPECT_TRUE(check->right) << p.key() << " " << text << ": " << check->what;
          EXPECT_LT(check->rel_err, 4e-3) << p.key() << " " << text;
        }
      }
    }
  }
  EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
}

TEST_F(GpuBackendTest, AnAmaxOfSomethingElseIsWrong) {
  const Problem p = problem(Op::kOutput, "tensorwise", {64, 48, 80});
  ASSERT_TRUE(backend_->open(p));
  Candidate candidate = generated(p);
  candidate.epilogue.amax = true;
  const auto built = backend_->add(candidate);
  ASSERT_TRUE(built) << built.error().message;
  ASSERT_TRUE(backend_->verify(built->id)->right);
  // Copies to the host: sampled rows, then all rows for their maximum, then the amax.
  int wrong_amax = 0;
  for (int copy = 1; copy <= 80; ++copy) {
    g_fakes.change_copy = copy;
    const auto check = backend_->verify(built->id);
    ASSERT_TRUE(check);
    wrong_amax += check->what.starts_with("the amax is ") ? 1 : 0;
  }
  EXPECT_GE(wrong_amax, 1);
  g_fakes.change_copy = 0;
}

TEST_F(GpuBackendTest, AKernelThatWritesNothingIsWrong) {
  const Problem p = problem(Op::kOutput, "tensorwise", {64, 48, 80});
  ASSERT_TRUE(backend_->open(p));
  const auto built = backend_->add(generated(p));
  ASSERT_TRUE(built);
  cuda_.emulate = false;
  const auto check = backend_->verify(built->id);
  ASSERT_TRUE(check);
  EXPECT_FALSE(check->right);
  EXPECT_NE(check->what.find("d[0][0] is not finite: not written"), std::string::npos)
      << check->what;
}

// The scales are those that a kernel sees that reads one for all rows or for all blocks, so every
// element but those of the first rows is off.
TEST_F(GpuBackendTest, ScalesDifferSoThatAWrongOneShows) {
  for (const char* recipe : {"rowwise", "blockwise"}) {
    const Problem p = problem(Op::kOutput, recipe, {64, 272, 272});
    g_fakes.one_scale = true;
    ASSERT_TRUE(backend_->open(p));
    ASSERT_TRUE(backend_->add(generated(p)));
    const auto check = backend_->verify(0);
    ASSERT_TRUE(check);
    EXPECT_FALSE(check->right) << recipe;
    EXPECT_NE(check->what.find("relative error"), std::string::npos) << check->what;
    g_fakes.one_scale = false;
    ASSERT_TRUE(backend_->open(p));
    ASSERT_TRUE(backend_->add(generated(p)));
    EXPECT_TRUE(backend_->verify(0)->right) << recipe;
  }
}

TEST_F(GpuBackendTest, BatchesGoThroughEverySetEqually) {
  const Problem p = problem(Op::kOutput, "tensorwise", {64, 48, 80});
  ASSERT_TRUE(backend_->open(p));
  EXPECT_EQ(backend_->sets(), 3);
  const auto built = backend_->add(generated(p));
  ASSERT_TRUE(built);
  ASSERT_TRUE(backend_->set_batch(built->id, 4));
  EXPECT_EQ(g_fakes.launches_of_graph,
            (std::vector<size_t>{6}));  // rounded up to a multiple of the sets
  const auto times = backend_->time(std::array{built->id, built->id});
  ASSERT_TRUE(times);
  ASSERT_EQ(times->size(), 2u);
  EXPECT_NEAR((*times)[0], 10e3, 1);  // a hundredth of a millisecond a launch
  EXPECT_NEAR((*times)[1], 10e3, 1);

  // The batches take the sets in turn if a batch is one launch.
  const auto large = backend_->add(generated(p, 1));
  ASSERT_TRUE(large);
  ASSERT_TRUE(backend_->set_batch(large->id, 1));
  EXPECT_EQ(g_fakes.launches_of_graph, (std::vector<size_t>{6, 1, 1, 1}));
  EXPECT_EQ(g_fakes.graphs, 4);
}

TEST_F(GpuBackendTest, HotLaunchesRepeatOneSet) {
  const Problem p = problem(Op::kOutput, "tensorwise", {64, 48, 80});
  ASSERT_TRUE(backend_->open(p, L2State::kHot));
  EXPECT_EQ(backend_->sets(), 1);
  const auto built = backend_->add(generated(p));
  ASSERT_TRUE(built);
  EXPECT_TRUE(backend_->verify(built->id)->right);
  ASSERT_TRUE(backend_->set_batch(built->id, 4));
  ASSERT_TRUE(backend_->set_batch(built->id, 1));
  EXPECT_EQ(g_fakes.launches_of_graph, (std::vector<size_t>{4, 1}))
      << "there are no sets to take turns";
  ASSERT_TRUE(backend_->open(problem(Op::kLinear, "tensorwise", {64, 48, 80}), L2State::kHot));
  EXPECT_EQ(backend_->sets(), 1);
  ASSERT_TRUE(backend_->open(p));
  EXPECT_EQ(backend_->sets(), 3) << "the next problem is cold again";
}

TEST_F(GpuBackendTest, ARefusedCallConcernsItsCandidateALostDeviceAll) {
  const Problem p = problem(Op::kOutput, "tensorwise", {64, 48, 80});
  ASSERT_TRUE(backend_->open(p));
  const auto built = backend_->add(generated(p));
  ASSERT_TRUE(built);
  cuda_.launch_result = CUDA_ERROR_INVALID_VALUE;
  const auto refused = backend_->verify(built->id);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().code, ErrorCode::kCuda) << refused.error().message;
  cuda_.launch_result = CUDA_SUCCESS;
  g_fakes.sync_result = CUDA_ERROR_ILLEGAL_ADDRESS;
  const auto lost = backend_->verify(built->id);
  ASSERT_FALSE(lost);
  EXPECT_EQ(lost.error().code, ErrorCode::kCuda);
  EXPECT_NE(lost.error().message.find("restart the process"), std::string::npos)
      << lost.error().message;
  g_fakes.sync_result = CUDA_SUCCESS;
}

TEST_F(GpuBackendTest, AFailedCaptureLeavesNothingBehind) {
  const Problem p = problem(Op::kOutput, "tensorwise", {64, 48, 80});
  ASSERT_TRUE(backend_->open(p));
  const auto built = backend_->add(generated(p));
  ASSERT_TRUE(built);
  cuda_.launch_result = CUDA_ERROR_INVALID_VALUE;
  EXPECT_FALSE(backend_->set_batch(built->id, 3));
  EXPECT_EQ(g_fakes.launches_of_graph.size(), 1u) << "the capture was not ended";
  EXPECT_EQ(g_fakes.graphs, 0);
}

TEST_F(GpuBackendTest, WhatDoesNotFitSaysHowMuchItTakes) {
  const Status opened = backend_->open(problem(Op::kLinear, "tensorwise", {65536, 8192, 8192}));
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().code, ErrorCode::kOutOfMemory);
  EXPECT_NE(opened.error().message.find("GiB"), std::string::npos) << opened.error().message;
  // The next problem is not affected.
  EXPECT_TRUE(backend_->open(problem(Op::kOutput, "tensorwise", {64, 48, 80})));
}

TEST_F(GpuBackendTest, WhatCannotBeIsUnsupportedNotACrash) {
  const Problem kept = problem(Op::kGradWeight, "rowwise_with_gw_hp", {64, 48, 80});
  ASSERT_TRUE(backend_->open(kept));
  const auto built = backend_->add({.impl = Impl::kCublasLt, .config = "h0"});
  ASSERT_FALSE(built) << "this GEMM is not fp8";
  EXPECT_EQ(built.error().code, ErrorCode::kUnsupported);
  EXPECT_TRUE(backend_->add({.impl = Impl::kBf16CublasLt, .config = "h0"}));
  const Problem p = problem(Op::kOutput, "tensorwise", {64, 48, 80});
  ASSERT_TRUE(backend_->open(p));
  EXPECT_FALSE(backend_->add({.impl = Impl::kCublasLt, .config = "h99"}));
  EXPECT_FALSE(backend_->add({.impl = Impl::kGenerated, .config = "nonsense"}));
  EXPECT_FALSE(backend_->add({.impl = Impl::kFloat8, .config = ""})) << "no linear is open";
  EXPECT_EQ(backend_->suggestions(p, false).value().count, 8);
}

TEST_F(GpuBackendTest, AGroupRunsFromEndToEnd) {
  const Problem p = problem(Op::kGradInput, "rowwise", {64, 48, 80});
  Measurer measurer(*backend_);
  const auto outcomes =
      measurer.run({.problem = p,
                    .candidates = {generated(p),
                                   generated(p, 2),
                                   {.impl = Impl::kCublasLt, .config = "h0"},
                                   {.impl = Impl::kBf16CublasLt, .config = "h0"}},
                    .purpose = Ratios{.reference = 3},
                    .batch_us = 50,
                    .stop = {.target = 0.01, .min_s = 0, .max_s = 5, .min_blocks = 4},
                    .warm_s = 0.01,
                    .seed = 1});
  ASSERT_TRUE(outcomes) << outcomes.error().message;
  for (const CandidateOutcome& outcome : *outcomes) {
    EXPECT_EQ(outcome.result.state, tuning_db::TrialState::kOk) << outcome.result.reason;
    EXPECT_NEAR(outcome.result.timing->median_ns, 10e3, 1);
  }
  EXPECT_NEAR(outcomes->front().result.ratio->ratio, 1, 1e-6);
}

TEST(Pattern, IsTheRecipesCastOfUniformValues) {
  const CastSetting tensor{.scaling = Scaling::kDynamic,
                           .granularity = Granularity::kTensor,
                           .dtype = Dtype::kE4m3,
                           .pow2 = false};
  const Pattern bf16 = Pattern::make(nullptr, 3);
  const Pattern fp8 = Pattern::make(&tensor, 3);
  ASSERT_EQ(bf16.values.size(), kPatternElements);
  ASSERT_EQ(fp8.bytes.size(), kPatternElements);
  float largest = 0;
  double sum = 0;
  for (size_t i = 0; i < kPatternElements; ++i) {
    largest = std::max(largest, std::abs(fp8.values[i]));
    sum += bf16.values[i];
    const float back = fp8.values[i] * fp8.inv_scale;
    ASSERT_NEAR(back, bf16.values[i], 0.0626 * std::abs(bf16.values[i]) + 1e-4) << i;
  }
  EXPECT_EQ(largest, 448) << "the cast uses the whole range";
  EXPECT_LT(std::abs(sum / kPatternElements), 0.01) << "not uniform around zero";
}

}  // namespace
}  // namespace f8::tuner
