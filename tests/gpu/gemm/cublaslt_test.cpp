// cuBLASLt as a provider against fp64: bf16 tensors as they are, fp8 copies, every gemm.
#include <algorithm>
#include <memory>
#include <random>

#include "tests/gpu/gemm_operands.hpp"

namespace f8::runtime::gpu {
namespace {

GemmChoice heuristic(int index) {
  GemmChoice choice;
  choice.provider = Provider::kCublasLt;
  choice.heuristic = index;
  return choice;
}

class CublasLtTest : public GpuTest {
 protected:
  void SetUp() override {
    GpuTest::SetUp();
    if (IsSkipped() || HasFatalFailure()) return;
    if (const auto version = cublaslt_version(); !version) {
      GTEST_SKIP() << version.error().message;
    }
  }
};

TEST_F(CublasLtTest, Fp8EveryGemmAndScaleMode) {
  const Shape shape{1000, 592, 272};
  for (const Gemm gemm : kGemms) {
    for (const auto scale : {codegen::ScaleMode::kTensor, codegen::ScaleMode::kAxis}) {
      for (const auto& [type_a, type_b] :
           {std::pair{Dtype::kE4m3, Dtype::kE4m3}, std::pair{Dtype::kE5m2, Dtype::kE4m3},
            std::pair{Dtype::kE4m3, Dtype::kE5m2}}) {
        for (const bool fast : {true, false}) {
          const GemmDesc desc{.gemm = gemm,
                              .shape = shape,
                              .a = type_a,
                              .b = type_b,
                              .d = Dtype::kBf16,
                              .scale = scale,
                              .fast = fast};
          const auto plan = GemmPlan::create(context_, desc, heuristic(0));
          F8_ASSERT_OK(plan);
          const DeviceBuffer workspace(context(), std::max<size_t>((*plan)->workspace_bytes(), 16));
          for (const int64_t m : {shape.m, int64_t{17}}) {
            SCOPED_TRACE(f8::format("{} {} {}.{} {} m={}", to_string(gemm), to_string(scale),
                                    to_string(type_a), to_string(type_b), fast ? "fast" : "precise",
                                    m));
            const Shape own = gemm_shape({m, shape.n, shape.k}, gemm);
            const GemmOperands x(context(), own, type_a, type_b, scale, 3);
            const DeviceBuffer d(context(), static_cast<size_t>(own.m * own.n) * 2);
            F8_ASSERT_OK((*plan)->run(x.call(d, m), workspace.as(), nullptr));
            EXPECT_LE(reference::relative_error(reference::matmul(x.a, x.b), d.bf16()),
                      fast ? kFastBound : kPreciseBound);
            EXPECT_TRUE(d.guards_are_whole());
            EXPECT_TRUE(workspace.guards_are_whole());
          }
        }
      }
    }
  }
}

// A plan is for the largest m, and cuBLASLt's suggestion was asked for that m alone.
TEST_F(CublasLtTest, ASuggestionServesEverySmallerM) {
  for (const Shape shape :
       {Shape{4096, 2048, 1536}, Shape{1500, 1408, 2048}, Shape{300, 4096, 1024}}) {
    for (const Gemm gemm : kGemms) {
      const Dtype type_a = gemm == Gemm::kOutput ? Dtype::kE4m3 : Dtype::kE5m2;
      const GemmDesc desc{.gemm = gemm, .shape = shape, .a = type_a, .fast = gemm == Gemm::kOutput};
      const auto library = GemmPlan::create(context_, desc, heuristic(0));
      F8_ASSERT_OK(library);
      const auto generated = GemmPlan::create(
          context_, desc,
          GemmChoice{parse_gemm_kernel(Provider::kGenerated, "128x128s4c1x1w2g8").value()});
      F8_ASSERT_OK(generated);
      const DeviceBuffer workspace(context(), std::max<size_t>((*library)->workspace_bytes(), 16));
      for (const int64_t m : {shape.m, shape.m / 2 + 1, shape.m / 3, int64_t{100}, int64_t{1}}) {
        SCOPED_TRACE(f8::format("{} {} m={}", to_string(gemm), to_string(shape), m));
        const Shape own = gemm_shape({m, shape.n, shape.k}, gemm);
        const GemmOperands x(context(), own, type_a, Dtype::kE4m3, codegen::ScaleMode::kTensor, 3);
        const DeviceBuffer d(context(), static_cast<size_t>(own.m * own.n) * 2);
        const DeviceBuffer expected(context(), static_cast<size_t>(own.m * own.n) * 2);
        F8_ASSERT_OK((*library)->run(x.call(d, m), workspace.as(), nullptr));
        F8_ASSERT_OK((*generated)->run(x.call(expected, m), nullptr, nullptr));
        const std::vector<double> reference = expected.bf16();
        EXPECT_LE(reference::relative_error(reference, d.bf16()), kFastBound);
        EXPECT_TRUE(workspace.guards_are_whole());
      }
    }
  }
}

// The K of grad_weight is m, and a library that splits K must not lose the end of it. Operands are
// integers, so that sums are exact in any order.
TEST_F(CublasLtTest, GradWeightOf16BitsIsExactAtEveryM) {
  const auto matrix_of = [](int64_t rows, int64_t cols, uint64_t seed) {
    reference::Matrix out{rows, cols, std::vector<float>(static_cast<size_t>(rows * cols))};
    std::mt19937_64 random(seed);
    std::uniform_int_distribution<int> integer(-4, 4);
    for (float& value : out.values) value = static_cast<float>(integer(random));
    return out;
  };
  constexpr int64_t kMost = 8192;
  std::vector<int64_t> sizes = {1, 2, 63, 127, 1000, 5000, kMost - 1, kMost};
  for (int64_t m = 64; m < kMost; m += 448) sizes.insert(sizes.end(), {m, m + 1, m + 2, m + 5});
  for (int64_t m = 512; m < kMost; m += 512) sizes.insert(sizes.end(), {m, m + 1, m + 2});
  std::ranges::sort(sizes);
  for (const auto& [n, k] : {std::pair{int64_t{400}, int64_t{528}}, {int64_t{640}, int64_t{64}}}) {
    const reference::Matrix dy = matrix_of(kMost, n, 1), x = matrix_of(kMost, k, 2);
    std::vector<std::pair<GemmPlanPtr, std::unique_ptr<DeviceBuffer>>> plans;
    std::vector<std::unique_ptr<DeviceBuffer>> operands;
    for (const Dtype type : {Dtype::kF16, Dtype::kBf16}) {
      for (const reference::Matrix& of : {dy, x}) {
        operands.push_back(
            std::make_unique<DeviceBuffer>(context(), reference::to_bytes(of, type)));
      }
      const GemmDesc desc{.gemm = Gemm::kGradWeight,
                          .shape = {kMost, n, k},
                          .a = type,
                          .b = type,
                          .d = Dtype::kF32,
                          .add = type == Dtype::kF16};
      const auto offered = cublaslt_suggestions(context(), desc);
      F8_ASSERT_OK(offered);
      for (size_t i = 0; i < offered->all.size(); ++i) {
        const auto plan = GemmPlan::create(context_, desc, heuristic(static_cast<int>(i)));
        F8_ASSERT_OK(plan);
        plans.emplace_back(*plan, std::make_unique<DeviceBuffer>(
                                      context(), std::max<size_t>((*plan)->workspace_bytes(), 16)));
      }
    }
    std::vector<float> sums(static_cast<size_t>(n * k));
    int64_t rows = 0;
    for (const int64_t m : sizes) {
      for (; rows < m; ++rows) {
        for (int64_t i = 0; i < n; ++i) {
          for (int64_t j = 0; j < k; ++j) {
            sums[static_cast<size_t>(i * k + j)] += dy.at(rows, i) * x.at(rows, j);
          }
        }
      }
      for (const auto& [plan, workspace] : plans) {
        const bool f16 = plan->desc().a == Dtype::kF16;
        const DeviceBuffer d(context(), std::vector<float>(sums.size()));
        const GemmCall call{.a = operands[f16 ? 0 : 2]->as(),
                            .b = operands[f16 ? 1 : 3]->as(),
                            .d = d.as(),
                            .m = m};
        F8_ASSERT_OK(plan->run(call, workspace->as(), nullptr));
        ASSERT_EQ(d.download<float>() == sums, true)
            << f8::format("{} n={} k={} m={}, {}", to_string(plan->desc().a), n, k, m,
                          config_text(plan->choice()));
      }
    }
  }
}

// The block-scaled GEMMs of cuBLASLt are right with our layout of scales: rows of a block of k side
// by side, rows of blocks padded to a multiple of 4. It offers something for whole blocks at least.
class CublasLtBlockTest : public CublasLtTest,
                          public ::testing::WithParamInterface<codegen::ScaleMode> {};
INSTANTIATE_TEST_SUITE_P(Modes, CublasLtBlockTest,
                         ::testing::Values(codegen::ScaleMode::kBlock1x128,
                                           codegen::ScaleMode::kBlock128x128),
                         [](const auto& suite) { return std::string(to_string(suite.param)); });

TEST_P(CublasLtBlockTest, WhatIsOfferedIsRight) {
  for (const Shape own : {Shape{1024, 1024, 1024}, Shape{1024, 1536, 640}, Shape{1000, 592, 768},
                          Shape{1000, 592, 272}, Shape{17, 592, 768}}) {
    for (const Dtype d_type : {Dtype::kBf16, Dtype::kF32}) {
      SCOPED_TRACE(f8::format("shape {} into {}", to_string(own), to_string(d_type)));
      const GemmDesc desc{.shape = own, .d = d_type, .scale = GetParam(), .fast = false};
      const auto offered = cublaslt_suggestions(context(), desc);
      F8_ASSERT_OK(offered);
      const auto plan = GemmPlan::create(context_, desc, heuristic(0));
      ASSERT_EQ(plan.has_value(), !offered->all.empty());
      ASSERT_TRUE(plan || own != (Shape{1024, 1024, 1024}) || d_type != Dtype::kBf16);
      if (!plan) {
        EXPECT_EQ(plan.error().code, ErrorCode::kUnsupported) << plan.error().message;
        continue;
      }
      const DeviceBuffer workspace(context(), std::max<size_t>((*plan)->workspace_bytes(), 16));
      const GemmOperands x(context(), own, desc.a, desc.b, desc.scale, 3);
      const DeviceBuffer d(context(), static_cast<size_t>(own.m * own.n) * size_bytes(d_type));
      F8_ASSERT_OK((*plan)->run(x.call(d, own.m), workspace.as(), nullptr));
      const int64_t step = 8;
      EXPECT_LE(reference::relative_error(reference::matmul(x.sampled_a(step), x.b),
                                          sampled_rows(result(d, d_type), own.n, step)),
                kPreciseBound);
      EXPECT_TRUE(d.guards_are_whole());
    }
  }
}

TEST_F(CublasLtTest, Bf16EveryGemm) {
  const Shape shape{300, 208, 592};
  for (const int64_t m : {shape.m, int64_t{17}}) {
    const auto x = reference::random_matrix(m, shape.k, 1);
    const auto w = reference::random_matrix(shape.n, shape.k, 2);
    const auto dy = reference::random_matrix(m, shape.n, 3);
    const auto device_x = to_device(context(), x);
    const auto device_w = to_device(context(), w);
    const auto device_dy = to_device(context(), dy);
    const auto check = [&](Gemm gemm, const DeviceBuffer& a, const DeviceBuffer& b,
                           const std::vector<double>& expected) {
      for (const Dtype d_type : {Dtype::kBf16, Dtype::kF32}) {
        SCOPED_TRACE(f8::format("{} m={} {}", to_string(gemm), m, to_string(d_type)));
        const GemmDesc desc{.gemm = gemm,
                            .shape = shape,
                            .a = Dtype::kBf16,
                            .b = Dtype::kBf16,
                            .d = d_type,
                            .scale = codegen::ScaleMode::kTensor,
                            .fast = false};
        const auto plan = GemmPlan::create(context_, desc, heuristic(0));
        F8_ASSERT_OK(plan);
        const DeviceBuffer workspace(context(), std::max<size_t>((*plan)->workspace_bytes(), 16));
        const DeviceBuffer d(context(), expected.size() * size_bytes(d_type));
        F8_ASSERT_OK(
            (*plan)->run({.a = a.as(), .b = b.as(), .d = d.as(), .m = m}, workspace.as(), nullptr));
        EXPECT_LE(reference::relative_error(expected, result(d, d_type)), kPreciseBound);
        EXPECT_TRUE(d.guards_are_whole());
      }
    };
    using reference::transpose;
    check(Gemm::kOutput, device_x, device_w, reference::matmul(x, w));
    check(Gemm::kGradInput, device_dy, device_w, reference::matmul(dy, transpose(w)));
    check(Gemm::kGradWeight, device_dy, device_x, reference::matmul(transpose(dy), transpose(x)));
  }
}

TEST_F(CublasLtTest, EveryHeuristicOffered) {
  const GemmDesc desc{.shape = {1024, 1024, 1024}, .fast = true};
  const auto offered = cublaslt_suggestions(context(), desc);
  F8_ASSERT_OK(offered);
  const int count = static_cast<int>(offered->all.size());
  ASSERT_GE(count, 1);
  const GemmOperands x(context(), desc.shape, desc.a, desc.b, desc.scale, 3);
  const auto expected = reference::matmul(x.sampled_a(16), x.b);
  for (int i = 0; i < count; ++i) {
    SCOPED_TRACE(f8::format("h{}", i));
    const auto plan = GemmPlan::create(context_, desc, heuristic(i));
    F8_ASSERT_OK(plan);
    const DeviceBuffer workspace(context(), std::max<size_t>((*plan)->workspace_bytes(), 16));
    const DeviceBuffer d(context(), size_t{1024} * 1024 * 2);
    F8_ASSERT_OK((*plan)->run(x.call(d, 1024), workspace.as(), nullptr));
    EXPECT_LE(reference::relative_error(expected, sampled_rows(d.bf16(), 1024, 16)), kFastBound);
  }
  EXPECT_FALSE(GemmPlan::create(context_, desc, heuristic(1000)));
}

// A library whose algorithms or tiles have other names would be ranked in its own order, unnoticed.
TEST_F(CublasLtTest, SuggestionsForAWeightGradientAreKnown) {
  for (const Shape shape : {Shape{1, 4096, 1024}, Shape{16, 4096, 14336}, Shape{700, 5760, 2880},
                            Shape{8192, 1024, 1024}}) {
    for (const Dtype type : {Dtype::kBf16, Dtype::kF16}) {
      SCOPED_TRACE(f8::format("{} of {}", to_string(shape), to_string(type)));
      const GemmDesc desc{
          .gemm = Gemm::kGradWeight, .shape = shape, .a = type, .b = type, .d = type};
      const auto offered = cublaslt_suggestions(context(), desc);
      F8_ASSERT_OK(offered);
      ASSERT_FALSE(offered->all.empty());
      if (shape.m == 1) {
        const auto& first = offered->all[static_cast<size_t>(offered->unmeasured)];
        EXPECT_EQ(first.algorithm, kVectorAlgorithm);
      } else {
        for (const Suggestion& suggestion : offered->all) {
          EXPECT_EQ(suggestion.algorithm, kTiledAlgorithm);
          EXPECT_TRUE(suggestion.is_ranked()) << "a tile or a cluster that is not known";
        }
      }
      const auto choice = GemmPlan::choose(context(), desc);
      F8_ASSERT_OK(choice);
      const auto plan = GemmPlan::create(context_, desc, *choice);
      F8_ASSERT_OK(plan);
      EXPECT_EQ(config_text((*plan)->choice()), f8::format("h{}", offered->unmeasured));
    }
  }
}

TEST_F(CublasLtTest, E5m2ByE5m2IsRefused) {
  const GemmDesc desc{.shape = {128, 128, 128}, .a = Dtype::kE5m2, .b = Dtype::kE5m2};
  const auto plan = GemmPlan::create(context_, desc, heuristic(0));
  ASSERT_FALSE(plan);
  EXPECT_EQ(plan.error().code, ErrorCode::kUnsupported) << plan.error().message;
}

}  // namespace
}  // namespace f8::runtime::gpu
