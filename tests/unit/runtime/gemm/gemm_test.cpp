#include "runtime/gemm/gemm.hpp"

#include <algorithm>
#include <array>

#include "recipes/reference/reference.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/gemm/cost_model.hpp"
#include "tests/fp8_rows.hpp"
#include "tests/unit/runtime/fake_cuda.hpp"

namespace f8::runtime {
namespace {

using testing::FakeCuda;
using testing::says;

GemmChoice generated(std::string_view config) {
  return GemmChoice{parse_gemm_kernel(Provider::kGenerated, config).value()};
}

KernelChoice row(Gemm gemm, Shape shape, Provider provider, std::string config) {
  KernelChoice choice;
  choice.problem = Problem::make(to_op(gemm), find_recipe("tensorwise").value(), shape).value();
  choice.kernel = parse_gemm_kernel(provider, config).value();
  choice.median_ns = 1000;
  return choice;
}

TEST(GemmChoice, TextRoundTrips) {
  for (const char* text : {"128x256s4c2x1w2g8", "64x128s6c1x1w2pg4"}) {
    const auto choice = parse_gemm_kernel(Provider::kGenerated, text);
    ASSERT_TRUE(choice) << choice.error().message;
    EXPECT_EQ(config_text(*choice), text);
  }
  EXPECT_EQ(config_text(GemmChoice{parse_gemm_kernel(Provider::kCublasLt, "h3").value()}), "h3");
}

TEST(GemmChoice, BadTextIsRefused) {
  for (const char* text : {"", "h", "3", "h-1", "h3x", "hh3", "h99999999999999"}) {
    EXPECT_FALSE(parse_gemm_kernel(Provider::kCublasLt, text)) << text;
  }
  EXPECT_FALSE(parse_gemm_kernel(Provider::kGenerated, "h0"));
}

class GemmTest : public ::testing::Test {
 protected:
  FakeCuda cuda_;
  std::shared_ptr<Context> context_ = cuda_.context();
  GemmDesc desc_{.gemm = Gemm::kOutput, .shape = {8192, 4096, 4096}, .fast = true};
  // Nothing is computed, so any memory may be every operand.
  alignas(16) uint8_t bytes_[64] = {};
  const float* scale_ = reinterpret_cast<const float*>(bytes_);
  [[nodiscard]] GemmCall call_of(int64_t m) { return {bytes_, bytes_, bytes_, scale_, scale_, m}; }
};

TEST_F(GemmTest, ChoosesByTheTable) {
  TuningTable table;
  table.add(row(Gemm::kOutput, desc_.shape, Provider::kGenerated, "128x128s4c1x1w2g8"));
  context_->set_table(table);
  const GemmChoice choice = GemmPlan::choose(*context_, desc_).value();
  EXPECT_EQ(choice.provider, Provider::kGenerated);
  EXPECT_EQ(config_text(choice), "128x128s4c1x1w2g8");
}

TEST_F(GemmTest, AHeuristicIsGoodForItsOwnShapeAlone) {
  TuningTable table;
  table.add(row(Gemm::kOutput, desc_.shape, Provider::kCublasLt, "h5"));
  context_->set_table(table);
  EXPECT_EQ(config_text(GemmPlan::choose(*context_, desc_).value()), "h5");
  desc_.shape.m = 4096;
  const GemmChoice neighbour = GemmPlan::choose(*context_, desc_).value();
  EXPECT_EQ(neighbour.provider, Provider::kGenerated);
  EXPECT_EQ(neighbour.neighbours, 0);
}

TEST_F(GemmTest, KernelsOfNearbyShapesHaveAVote) {
  const auto choose = [&](const TuningTable& table) {
    context_->set_table(table);
    return GemmPlan::choose(*context_, desc_).value();
  };
  const std::string alone = config_text(choose({}));
  // The second best by the model, and one that does not suit the shape.
  const codegen::GemmSpec spec = gemm_spec(desc_, {});
  const auto clocks = [&](const GemmConfig& config) {
    return predicted_clocks(gemm_spec(desc_, config), gemm_shape(desc_.shape, desc_.gemm), 132);
  };
  auto candidates = codegen::gemm_candidates(spec);
  std::ranges::sort(candidates, {}, clocks);
  const auto other =
      *std::ranges::find_if(candidates, [&](const auto& config) { return key(config) != alone; });
  const std::string worst = key(candidates.back());
  ASSERT_LT(clocks(other), 1.1 * clocks(candidates.front()));
  ASSERT_GT(clocks(candidates.back()), 1.2 * clocks(candidates.front()));

  Shape near = desc_.shape;
  near.m += near.m / 8;
  const auto table_of = [&](const std::string& config, Shape shape) {
    TuningTable table;
    table.add(row(Gemm::kOutput, shape, Provider::kGenerated, config.c_str()));
    return table;
  };
  const GemmChoice voted = choose(table_of(key(other), near));
  EXPECT_EQ(config_text(voted), key(other));
  EXPECT_EQ(voted.neighbours, 1);
  EXPECT_NE(voted.why.find("the 1 nearest rows"), std::string::npos) << voted.why;
  EXPECT_EQ(config_text(choose(table_of(worst, near))), alone);
  // Two of three votes decide between candidates that the model takes for alike.
  TuningTable three = table_of(key(other), near);
  near.m += near.m / 8;
  three.add(row(Gemm::kOutput, near, Provider::kGenerated, key(other).c_str()));
  near.m += near.m / 8;
  three.add(row(Gemm::kOutput, near, Provider::kGenerated, alone.c_str()));
  EXPECT_EQ(config_text(choose(three)), key(other));
  EXPECT_EQ(choose(three).neighbours, 3);
}

// A few tokens of a large layer: cuBLASLt reads the weight faster.
TEST_F(GemmTest, TheLibraryIsTakenWhereItIsExpectedAhead) {
  desc_.shape = {16, 8192, 8192};
  const GemmChoice library = GemmPlan::choose(*context_, desc_).value();
  EXPECT_EQ(library.provider, Provider::kCublasLt);
  EXPECT_EQ(config_text(library), "h0");
  ASSERT_TRUE(library.otherwise);
  EXPECT_NE(library.why.find("cuBLASLt's first suggestion"), std::string::npos) << library.why;
  const auto provider = [&](auto set) {
    GemmDesc desc = desc_;
    set(desc);
    return GemmPlan::choose(*context_, desc).value().provider;
  };
  EXPECT_EQ(provider([](GemmDesc& d) { d.sm_limit = 64; }), Provider::kGenerated);
  EXPECT_EQ(provider([](GemmDesc& d) { d.amax = true; }), Provider::kGenerated);
  EXPECT_EQ(provider([](GemmDesc& d) { d.scale = codegen::ScaleMode::kAxis; }),
            Provider::kGenerated);
  EXPECT_EQ(provider([](GemmDesc& d) { d.shape = {8192, 8192, 8192}; }), Provider::kGenerated);
  // Shards change no choice, and a plan for them is refused as for a row of the table.
  desc_.shards = true;
  const GemmChoice same = GemmPlan::choose(*context_, desc_).value();
  EXPECT_EQ(same.provider, Provider::kCublasLt);
  EXPECT_EQ(GemmPlan::create(context_, desc_, same).error().code, ErrorCode::kUnsupported);
}

TEST_F(GemmTest, ATableOfAnotherGemmIsNotUsed) {
  TuningTable table;
  table.add(row(Gemm::kGradInput, desc_.shape, Provider::kCublasLt, "h5"));
  context_->set_table(table);
  EXPECT_EQ(GemmPlan::choose(*context_, desc_).value().provider, Provider::kGenerated);
}

TEST_F(GemmTest, RecipesWithTheSameProductsShareTheirRows) {
  const auto of = [](const char* recipe, Gemm gemm, Shape shape, Provider provider,
                     const char* config) {
    return KernelChoice{Problem::make(to_op(gemm), find_recipe(recipe).value(), shape).value(),
                        parse_gemm_kernel(provider, config).value(), 1e3};
  };
  const auto choose = [&](const TuningTable& table) {
    context_->set_table(table);
    return config_text(GemmPlan::choose(*context_, desc_).value());
  };
  // Delayed scaling's GEMM is tensorwise's; an exact row of either is better than a near one.
  TuningTable table;
  table.add(of("delayed", Gemm::kOutput, desc_.shape, Provider::kGenerated, "128x128s4c1x1w2g8"));
  EXPECT_EQ(choose(table), "128x128s4c1x1w2g8");
  table.add(of("tensorwise", Gemm::kOutput, {4096, 4096, 4096}, Provider::kGenerated,
               "128x192s4c1x1w2g8"));
  EXPECT_EQ(choose(table), "128x128s4c1x1w2g8");
  table.add(
      of("tensorwise", Gemm::kOutput, desc_.shape, Provider::kGenerated, "128x256s4c1x1w2g8"));
  EXPECT_EQ(choose(table), "128x256s4c1x1w2g8");

  // One scale for one operand: cuBLASLt cannot, whatever it was for rows of both.
  table = {};
  desc_ = {.gemm = Gemm::kGradInput,
           .shape = desc_.shape,
           .scale = codegen::ScaleMode::kAxis,
           .scalar_b = true};
  table.add(of("rowwise", Gemm::kGradInput, desc_.shape, Provider::kCublasLt, "h3"));
  context_->set_table(table);
  EXPECT_EQ(GemmPlan::choose(*context_, desc_).value().provider, Provider::kGenerated);

  // A GEMM in bf16 has a best suggestion too.
  desc_ = {.gemm = Gemm::kGradWeight, .shape = desc_.shape, .a = Dtype::kBf16, .b = Dtype::kBf16};
  EXPECT_EQ(choose(table), "ranked first");
  table.add(of("rowwise_with_gw_hp", Gemm::kGradWeight, desc_.shape, Provider::kCublasLt, "h4"));
  EXPECT_EQ(choose(table), "h4");
}

// Types that take the same time share choices; a suggestion of the library is for one type alone.
TEST_F(GemmTest, Fp16ResultsAreChosenAsBf16OnesWhereTheTableHasNoneOfTheirOwn) {
  desc_.d = Dtype::kF16;
  TuningTable table;
  table.add(row(Gemm::kOutput, desc_.shape, Provider::kGenerated, "128x128s4c1x1w2g8"));
  context_->set_table(table);
  EXPECT_EQ(config_text(GemmPlan::choose(*context_, desc_).value()), "128x128s4c1x1w2g8");
  KernelChoice own = row(Gemm::kOutput, desc_.shape, Provider::kGenerated, "128x256s4c1x1w2g8");
  own.problem.d = Dtype::kF16;
  table.add(own);
  context_->set_table(table);
  EXPECT_EQ(config_text(GemmPlan::choose(*context_, desc_).value()), "128x256s4c1x1w2g8");
  TuningTable library;
  library.add(row(Gemm::kOutput, desc_.shape, Provider::kCublasLt, "h5"));
  context_->set_table(library);
  EXPECT_EQ(config_text(GemmPlan::choose(*context_, desc_).value()), "h0");
}

// cuBLASLt adds biases of 16 bits to what it made of fp8 operands.
TEST_F(GemmTest, AnFp32BiasIsNotLeftToTheLibrary) {
  desc_.d = Dtype::kF32;
  KernelChoice library = row(Gemm::kOutput, desc_.shape, Provider::kCublasLt, "h5");
  library.problem.d = Dtype::kF32;
  TuningTable table;
  table.add(library);
  context_->set_table(table);
  EXPECT_EQ(GemmPlan::choose(*context_, desc_).value().provider, Provider::kCublasLt);
  desc_.bias = true;
  EXPECT_EQ(GemmPlan::choose(*context_, desc_).value().provider, Provider::kGenerated);
}

// A row's kernel had no bias, whose vector takes the room of a stage, and no amax.
TEST_F(GemmTest, ARowIsFittedToTheEpilogue) {
  desc_.scale = codegen::ScaleMode::kAxis;
  desc_.fast = true;
  const auto choose = [&](const char* config) {
    KernelChoice rowwise = row(Gemm::kOutput, desc_.shape, Provider::kGenerated, config);
    rowwise.problem.recipe = "rowwise";
    TuningTable table;
    table.add(rowwise);
    context_->set_table(table);
    const auto choice = GemmPlan::choose(*context_, desc_);
    EXPECT_TRUE(choice && GemmPlan::create(context_, desc_, *choice));
    return choice.value();
  };
  EXPECT_EQ(config_text(choose("128x128s6c1x2w2pg16")), "128x128s6c1x2w2pg16");
  EXPECT_EQ(config_text(choose("128x192s4c1x2w2pg16")), "128x192s4c1x2w2pg16");
  desc_.bias = true;
  EXPECT_EQ(config_text(choose("128x128s6c1x2w2pg16")), "128x128s5c1x2w2pg16");
  desc_.amax = true;
  const GemmChoice other = choose("128x192s4c1x2w2pg16");
  EXPECT_NE(other.config.tile_n, 192);
  EXPECT_NE(other.why.find("no room"), std::string::npos) << other.why;
}

TEST_F(GemmTest, Bf16GoesToCublasLt) {
  desc_.a = desc_.b = Dtype::kBf16;
  EXPECT_EQ(GemmPlan::choose(*context_, desc_).value().provider, Provider::kCublasLt);
  const auto plan = GemmPlan::create(context_, desc_, generated("128x128s4c1x1w2g8"));
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().code, ErrorCode::kUnsupported);
}

TEST_F(GemmTest, RefusesWhatNoProviderDoes) {
  const GemmChoice choice = generated("128x128s4c1x1w2g8");
  GemmDesc mixed = desc_;
  mixed.b = Dtype::kBf16;
  EXPECT_EQ(GemmPlan::create(context_, mixed, choice).error().code, ErrorCode::kUnsupported);
  GemmDesc half = desc_;
  half.d = Dtype::kE4m3;
  EXPECT_EQ(GemmPlan::create(context_, half, choice).error().code, ErrorCode::kUnsupported);
  GemmDesc odd = desc_;
  odd.shape.k = 17;
  EXPECT_EQ(GemmPlan::create(context_, odd, choice).error().code, ErrorCode::kInvalidArgument);
}

// The grid is no larger than what runs at once, no larger than the work, and whole clusters.
TEST_F(GemmTest, GridIsPersistent) {
  cuda_.emulate = false;
  cuda_.active_clusters = 60;
  const GemmCall call = call_of(8192);
  struct Case {
    Shape shape;
    int64_t m;
    unsigned grid;
  };
  for (const auto& [shape, m, grid] :
       {Case{{8192, 4096, 4096}, 8192, 120}, Case{{8192, 256, 4096}, 8192, 64},
        Case{{8192, 256, 4096}, 129, 2}, Case{{8192, 512, 4096}, 257, 8},
        Case{{8192, 16, 4096}, 1, 2}}) {
    desc_.shape = shape;
    const auto plan = GemmPlan::create(context_, desc_, generated("128x256s4c2x1w2g8")).value();
    GemmCall smaller = call;
    smaller.m = m;
    ASSERT_TRUE(plan->run(smaller, nullptr, nullptr));
    EXPECT_EQ(cuda_.launches.back().grid, grid) << to_string(shape) << " m=" << m;
    EXPECT_EQ(cuda_.launches.back().cluster, 2U);
    EXPECT_EQ(cuda_.launches.back().threads, 384U);
    EXPECT_TRUE(cuda_.launches.back().programmatic);
  }
  EXPECT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
}

// The remap is a permutation of the clusters of a grid; it is the probed one where the grid
// starts at its predecessor's end.
TEST_F(GemmTest, TheRemapIsAPermutationOfTheGrid) {
  cuda_.emulate = false;
  desc_.shape = {8192, 4096, 4096};
  const auto remap_of = [&](int64_t m, const char* config) {
    const auto plan = GemmPlan::create(context_, desc_, generated(config)).value();
    ClusterRemap reversed = identity_remap();
    std::reverse(reversed.begin(), reversed.begin() + 66);
    if (context_->state().cluster_remap) context_->state().cluster_remap = reversed;
    EXPECT_TRUE(plan->run(call_of(m), nullptr, nullptr));
    return std::to_array(cuda_.launches.back().gemm.cluster_remap);
  };
  const auto of_all = remap_of(8192, "128x128s6c1x2w2pg16");
  EXPECT_EQ(cuda_.launches.back().grid, 132U);
  for (int i = 0; i < 66; ++i) EXPECT_EQ(of_all[static_cast<size_t>(i)], 65 - i);
  const auto of_few = remap_of(256, "64x128s8c1x2w1g16");
  EXPECT_EQ(cuda_.launches.back().grid, 128U);
  for (int i = 0; i < 64; ++i) EXPECT_EQ(of_few[static_cast<size_t>(i)], 63 - i);
  // Clusters of a grid that starts early go where SMs become free.
  const auto of_early = remap_of(128, "128x128s6c1x2w2pg16");
  EXPECT_TRUE(cuda_.launches.back().programmatic);
  EXPECT_TRUE(std::ranges::is_sorted(of_early));
  // A device on which fewer clusters fit than there are pairs of SMs.
  cuda_.active_clusters = 60;
  const auto of_fitting = remap_of(8192, "128x128s5c1x2w2pg8");
  EXPECT_EQ(cuda_.launches.back().grid, 120U);
  for (int i = 0; i < 60; ++i) EXPECT_EQ(of_fitting[static_cast<size_t>(i)], 59 - i);
}

// An early start gains a microsecond, but its neighbours lie far apart (docs/kernels.md).
TEST_F(GemmTest, LongProductsOfSmallTilesStartAtTheEnd) {
  cuda_.emulate = false;
  struct Case {
    Shape shape;
    const char* config;
    bool early;
  };
  for (const auto& [shape, config, early] :
       {Case{{2048, 2048, 1024}, "128x128s6c1x1w2pg8", true},
        Case{{4096, 2048, 1024}, "128x128s6c1x1w2pg8", false},
        Case{{2048, 4096, 1024}, "128x128s6c1x2w2pg16", true},
        Case{{4096, 4096, 1024}, "128x128s6c1x2w2pg16", false},
        Case{{8192, 8192, 1024}, "128x256s3c2x1w2g16", true},
        Case{{1024, 1024, 2048}, "64x128s8c1x1w1g4", true},
        Case{{1024, 1024, 4096}, "64x128s8c1x1w1g4", false},
        Case{{1024, 1024, 2048}, "64x128s8c1x2w1g16", true},
        Case{{1024, 1024, 4096}, "64x128s8c1x2w1g16", false},
        Case{{2048, 1024, 1024}, "64x128s8c1x1w1g4", true},
        Case{{1024, 1024, 4096}, "128x128s5c1x1k2w2g4", true},
        Case{{1024, 1024, 8192}, "128x128s5c1x1k2w2g4", false}}) {
    desc_.shape = shape;
    const auto plan = GemmPlan::create(context_, desc_, generated(config)).value();
    ASSERT_TRUE(plan->run(call_of(shape.m), nullptr, nullptr));
    EXPECT_EQ(cuda_.launches.back().programmatic, early) << to_string(shape) << " " << config;
  }
}

TEST_F(GemmTest, ProgrammaticLaunchIsAnOption) {
  cuda_.emulate = false;
  const auto context = cuda_.context({.cache_dir = {}, .programmatic_launch = false});
  const auto plan = GemmPlan::create(context, desc_, generated("128x128s4c1x1w2g8")).value();
  ASSERT_TRUE(plan->run(call_of(128), nullptr, nullptr));
  EXPECT_FALSE(cuda_.launches.back().programmatic);
}

TEST_F(GemmTest, MisuseIsOneClearError) {
  const GemmCall good = call_of(128);
  const auto plan = GemmPlan::create(context_, desc_, generated("128x128s4c1x1w2g8")).value();
  const auto refused = [&](auto change, std::string_view part) {
    GemmCall call = good;
    change(call);
    const Status status = plan->run(call, nullptr, nullptr);
    ASSERT_FALSE(status) << part;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(says(status.error(), part)) << status.error().message;
  };
  refused([](GemmCall& c) { c.a = nullptr; }, "a is null");
  refused([](GemmCall& c) { c.b = nullptr; }, "b is null");
  refused([](GemmCall& c) { c.d = nullptr; }, "d is null");
  refused([](GemmCall& c) { c.inv_scale_a = nullptr; }, "inv_scale_a");
  refused([](GemmCall& c) { c.inv_scale_b = nullptr; }, "inv_scale_b");
  refused([this](GemmCall& c) { c.a = bytes_ + 8; }, "a is not aligned");
  refused([this](GemmCall& c) { c.b = bytes_ + 1; }, "b is not aligned");
  refused([this](GemmCall& c) { c.d = bytes_ + 2; }, "d is not aligned");
  refused([](GemmCall& c) { c.m = -1; }, "m is -1");
  refused([](GemmCall& c) { c.m = 8193; }, "8192");
  EXPECT_TRUE(cuda_.launches.empty());
}

// The copy engine brings them, 16 bytes at least.
TEST_F(GemmTest, BlockScalesAreAligned) {
  for (const auto mode : {codegen::ScaleMode::kBlock1x128, codegen::ScaleMode::kBlock128x128}) {
    GemmDesc desc = desc_;
    desc.scale = mode;
    desc.fast = false;
    const auto plan = GemmPlan::create(context_, desc, generated("128x128s4c1x1w2g8")).value();
    for (const GemmCall& call : {GemmCall{bytes_, bytes_, bytes_, scale_ + 1, scale_, 128},
                                 GemmCall{bytes_, bytes_, bytes_, scale_, scale_ + 3, 128}}) {
      const Status status = plan->run(call, nullptr, nullptr);
      ASSERT_FALSE(status);
      EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
      EXPECT_TRUE(says(status.error(), "inv_scale_b is not aligned")) << status.error().message;
    }
  }
  EXPECT_TRUE(cuda_.launches.empty());
}

TEST_F(GemmTest, DriverErrorsComeBackWithTheKernel) {
  const GemmCall call = call_of(128);
  const auto plan = GemmPlan::create(context_, desc_, generated("128x128s4c1x1w2g8")).value();
  cuda_.launch_result = CUDA_ERROR_ILLEGAL_ADDRESS;
  const Status launch = plan->run(call, nullptr, nullptr);
  ASSERT_FALSE(launch);
  EXPECT_EQ(launch.error().code, ErrorCode::kCuda);
  EXPECT_TRUE(says(launch.error(), "restart the process"));
  EXPECT_TRUE(says(launch.error(), "gemm/e4m3.e4m3.bf16/tensor/fast/128x128s4c1x1w2"));
  cuda_.encode_result = CUDA_ERROR_INVALID_VALUE;
  const Status encode = plan->run(call, nullptr, nullptr);
  ASSERT_FALSE(encode);
  EXPECT_TRUE(says(encode.error(), "operand a")) << encode.error().message;
}

// The tensor maps and arguments describe the GEMM, for each gemm and an m below the plan's.
TEST_F(GemmTest, MapsAndArgumentsDescribeTheGemm) {
  for (const Gemm gemm : kGemms) {
    for (const auto scale : {codegen::ScaleMode::kTensor, codegen::ScaleMode::kAxis}) {
      const bool axis = scale == codegen::ScaleMode::kAxis;
      desc_ = {
          .gemm = gemm, .shape = {40, 48, 32}, .a = Dtype::kE5m2, .d = Dtype::kF32, .scale = scale};
      const int64_t m = 19;
      const Shape own = gemm_shape({m, 48, 32}, gemm);
      const auto over = axis ? reference::AmaxOver::kRow : reference::AmaxOver::kTensor;
      const auto a =
          reference::cast(reference::random_matrix(own.m, own.k, 1), over, Dtype::kE5m2, true);
      const auto b =
          reference::cast(reference::random_matrix(own.n, own.k, 2), over, Dtype::kE4m3, true);
      const auto expected = reference::matmul(a, b);
      const auto bits_a = fp8_rows(a);
      const auto bits_b = fp8_rows(b);
      std::vector<float> d(static_cast<size_t>(own.m * own.n), -1);
      const auto plan = GemmPlan::create(context_, desc_, generated("64x64s4c1x1w1g8"));
      ASSERT_TRUE(plan) << plan.error().message;
      ASSERT_TRUE((*plan)->run(
          {bits_a.data(), bits_b.data(), d.data(), a.inv_scales.data(), b.inv_scales.data(), m},
          nullptr, nullptr));
      ASSERT_TRUE(cuda_.faults.empty()) << cuda_.faults.front();
      EXPECT_LT(reference::relative_error(expected, std::vector<double>(d.begin(), d.end())), 1e-6)
          << to_string(gemm);
    }
  }
}

TEST_F(GemmTest, AnEmptyBatchHasAZeroWeightGradient) {
  desc_ = {.gemm = Gemm::kGradWeight, .shape = {64, 32, 16}};
  const auto plan = GemmPlan::create(context_, desc_, generated("64x64s4c1x1w1g8")).value();
  std::vector<uint16_t> d(32 * 16 + 1, 0xffff);
  ASSERT_TRUE(plan->run({.d = d.data(), .m = 0}, nullptr, nullptr));
  EXPECT_EQ(std::count(d.begin(), d.end(), 0), 32 * 16);
  EXPECT_EQ(d.back(), 0xffff);
  EXPECT_TRUE(cuda_.launches.empty());
  desc_.gemm = Gemm::kOutput;
  const auto output = GemmPlan::create(context_, desc_, generated("64x64s4c1x1w1g8")).value();
  EXPECT_TRUE(output->run({.m = 0}, nullptr, nullptr));
}

}  // namespace
}  // namespace f8::runtime
