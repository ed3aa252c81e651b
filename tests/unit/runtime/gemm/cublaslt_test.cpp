#include <cstdlib>

#include "recipes/reference/reference.hpp"
#include "runtime/gemm/gemm.hpp"
#include "runtime/linear/linear.hpp"
#include "tests/fp8_rows.hpp"
#include "tests/unit/runtime/fake_cublaslt.hpp"
#include "tests/unit/runtime/fake_cuda.hpp"

namespace f8::runtime {
namespace {

using reference::AmaxOver;
using testing::FakeCublasLt;
using testing::FakeCuda;

GemmChoice heuristic(int index) {
  GemmChoice choice;
  choice.provider = Provider::kCublasLt;
  choice.heuristic = index;
  return choice;
}

class CublasLtTest : public ::testing::Test {
 protected:
  [[nodiscard]] void* workspace() {
    return reinterpret_cast<void*>((reinterpret_cast<uintptr_t>(workspace_.data()) + 255) / 256 *
                                   256);
  }
  FakeCuda cuda_;
  FakeCublasLt library_;
  std::shared_ptr<Context> context_ = cuda_.context();
  std::vector<uint8_t> workspace_ = std::vector<uint8_t>((1 << 20) + 256);
};

// Every gemm, scale mode and m up to the planned one; the K of grad_weight is no multiple
// of 16.
TEST_F(CublasLtTest, Fp8DescribesTheGemm) {
  for (const Gemm gemm : kGemms) {
    for (const auto scale : {codegen::ScaleMode::kTensor, codegen::ScaleMode::kAxis}) {
      for (const auto& [type_a, type_b] :
           {std::pair{Dtype::kE4m3, Dtype::kE4m3}, std::pair{Dtype::kE5m2, Dtype::kE4m3},
            std::pair{Dtype::kE4m3, Dtype::kE5m2}}) {
        const bool axis = scale == codegen::ScaleMode::kAxis;
        const GemmDesc desc{.gemm = gemm,
                            .shape = {40, 48, 32},
                            .a = type_a,
                            .b = type_b,
                            .d = Dtype::kF32,
                            .scale = scale,
                            .fast = axis};
        const auto plan = GemmPlan::create(context_, desc, heuristic(2));
        ASSERT_TRUE(plan) << plan.error().message;
        EXPECT_EQ((*plan)->workspace_bytes(), size_t{1} << 20);
        for (const int64_t m : {40, 19, 1}) {
          const Shape own = gemm_shape({m, 48, 32}, gemm);
          const auto over = axis ? AmaxOver::kRow : AmaxOver::kTensor;
          const auto a =
              reference::cast(reference::random_matrix(own.m, own.k, 1), over, type_a, true);
          const auto b =
              reference::cast(reference::random_matrix(own.n, own.k, 2), over, type_b, true);
          const auto bits_a = fp8_rows(a);
          const auto bits_b = fp8_rows(b);
          std::vector<float> d(static_cast<size_t>(own.m * own.n), -1);
          const Status status = (*plan)->run(
              {bits_a.data(), bits_b.data(), d.data(), a.inv_scales.data(), b.inv_scales.data(), m},
              workspace(), nullptr);
          ASSERT_TRUE(status) << status.error().message;
          EXPECT_LT(reference::relative_error(reference::matmul(a, b),
                                              std::vector<double>(d.begin(), d.end())),
                    1e-6)
              << to_string(gemm) << " m=" << m;
          EXPECT_EQ(library_.last_algo, 2);
          EXPECT_EQ(library_.last_fast, axis);
          EXPECT_EQ(library_.last_workspace_bytes, size_t{1} << 20);
        }
      }
    }
  }
  EXPECT_EQ(library_.handles, 1) << "one handle a context";
  EXPECT_EQ(library_.asked_workspace, uint64_t{32} << 20);
}

// bf16 operands are the tensors themselves.
TEST_F(CublasLtTest, Bf16DescribesTheGemm) {
  const Shape shape{40, 48, 32};
  const int64_t m = 19;
  const auto x = reference::random_matrix(m, shape.k, 1);
  const auto w = reference::random_matrix(shape.n, shape.k, 2);
  const auto dy = reference::random_matrix(m, shape.n, 3);
  Recipe high = find_recipe("tensorwise").value();
  for (auto& gemm : high.gemms) {
    gemm.fast = false;
    for (CastSetting* setting : {&gemm.a, &gemm.b}) {
      setting->scaling = Scaling::kDisabled;
      setting->dtype = Dtype::kBf16;
    }
  }
  const auto expected = reference::linear(high, x, w, dy);
  ASSERT_TRUE(expected) << expected.error().message;
  const auto bits_x = reference::to_bf16_bits(x);
  const auto bits_w = reference::to_bf16_bits(w);
  const auto bits_dy = reference::to_bf16_bits(dy);
  const auto run = [&](Gemm gemm, const auto& a, const auto& b, const std::vector<double>& want) {
    const GemmDesc desc{
        .gemm = gemm, .shape = shape, .a = Dtype::kBf16, .b = Dtype::kBf16, .d = Dtype::kF32};
    const auto plan = GemmPlan::create(context_, desc, heuristic(0));
    ASSERT_TRUE(plan) << plan.error().message;
    std::vector<float> d(want.size(), -1);
    const Status status =
        (*plan)->run({.a = a.data(), .b = b.data(), .d = d.data(), .m = m}, workspace(), nullptr);
    ASSERT_TRUE(status) << status.error().message;
    EXPECT_LT(reference::relative_error(want, std::vector<double>(d.begin(), d.end())), 1e-6)
        << to_string(gemm);
  };
  run(Gemm::kOutput, bits_x, bits_w, expected->y);
  run(Gemm::kGradInput, bits_dy, bits_w, expected->dx);
  run(Gemm::kGradWeight, bits_dy, bits_x, expected->dw);
}

// Tiles and clusters are read in cuBLASLt's column-major order; d is row-major.
TEST_F(CublasLtTest, TheRankedSuggestionIsFoundByItsAttributes) {
  const auto attributes = [](cublasLtMatmulTile_t tile, cublasLtClusterShape_t cluster) {
    return FakeCublasLt::Attributes{.id = kTiledAlgorithm,
                                    .tile = static_cast<uint32_t>(tile),
                                    .cluster = static_cast<uint16_t>(cluster)};
  };
  const GemmDesc desc{
      .gemm = Gemm::kGradWeight, .shape = {64, 4096, 4096}, .a = Dtype::kBf16, .b = Dtype::kBf16};
  library_.offers = 4;
  library_.attributes = {attributes(CUBLASLT_MATMUL_TILE_64x64, CUBLASLT_CLUSTER_SHAPE_1x2x1),
                         attributes(CUBLASLT_MATMUL_TILE_320x128, CUBLASLT_CLUSTER_SHAPE_2x1x1),
                         attributes(CUBLASLT_MATMUL_TILE_8x64, CUBLASLT_CLUSTER_SHAPE_1x1x1)};
  const Suggestions found = cublaslt_suggestions(*context_, desc).value();
  ASSERT_EQ(found.all.size(), 4);
  EXPECT_EQ(found.all[1], (Suggestion{.algorithm = kTiledAlgorithm,
                                      .tile_m = 128,
                                      .tile_n = 320,
                                      .cluster_m = 1,
                                      .cluster_n = 2}));
  EXPECT_EQ(found.all[2].tile_m, 0) << "a tile that no suggestion had where the model was fitted";
  EXPECT_EQ(found.unmeasured, 1);
  const GemmChoice choice = GemmPlan::choose(*context_, desc).value();
  EXPECT_EQ(config_text(choice), "ranked first");
  const auto plan = GemmPlan::create(context_, desc, choice);
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_EQ(config_text((*plan)->choice()), "h1");
  // Other GEMMs are not ranked.
  GemmDesc other = desc;
  other.gemm = Gemm::kOutput;
  EXPECT_EQ(cublaslt_suggestions(*context_, other).value().unmeasured, 0);
  EXPECT_EQ(config_text(GemmPlan::choose(*context_, other).value()), "h0");
  // cuBLASLt's own order counts where suggestions say nothing, or nothing that is known.
  library_.attribute_result = CUBLAS_STATUS_NOT_SUPPORTED;
  EXPECT_EQ(config_text(GemmPlan::create(context_, desc, choice).value()->choice()), "h0");
  EXPECT_EQ(cublaslt_suggestions(*context_, desc).value().all.size(), 4);
  library_.attribute_result = CUBLAS_STATUS_SUCCESS;
  library_.attributes.clear();
  EXPECT_EQ(config_text(GemmPlan::create(context_, desc, choice).value()->choice()), "h0");
  // The product of two vectors.
  library_.attributes = {{.id = 24, .tile = CUBLASLT_MATMUL_TILE_64x64}, {.id = kVectorAlgorithm}};
  EXPECT_EQ(config_text(GemmPlan::create(context_, desc, choice).value()->choice()), "h1");
}

TEST_F(CublasLtTest, CountsWhatIsOffered) {
  const GemmDesc desc{.gemm = Gemm::kOutput, .shape = {64, 64, 64}};
  const auto count = [&] { return cublaslt_suggestions(*context_, desc).value().all.size(); };
  EXPECT_EQ(count(), 8);
  library_.offers = 2;
  EXPECT_EQ(count(), 2);
  library_.heuristic_result = CUBLAS_STATUS_NOT_SUPPORTED;
  EXPECT_EQ(count(), 0);
  library_.heuristic_result = CUBLAS_STATUS_ALLOC_FAILED;
  EXPECT_EQ(cublaslt_suggestions(*context_, desc).error().code, ErrorCode::kOutOfMemory);
  EXPECT_EQ(cublaslt_version().value(), "13.1.0");
}

TEST_F(CublasLtTest, RefusesWhatTheLibraryDoesNotOffer) {
  GemmDesc desc{.gemm = Gemm::kOutput, .shape = {64, 64, 64}};
  library_.offers = 2;
  const auto beyond = GemmPlan::create(context_, desc, heuristic(2));
  ASSERT_FALSE(beyond);
  EXPECT_EQ(beyond.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(beyond.error().message.find("h0 to h1"), std::string::npos) << beyond.error().message;
  desc.a = desc.b = Dtype::kE5m2;
  const auto both = GemmPlan::create(context_, desc, heuristic(0));
  ASSERT_FALSE(both);
  EXPECT_EQ(both.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(both.error().message.find("e5m2 by e5m2"), std::string::npos) << both.error().message;
}

TEST_F(CublasLtTest, FailuresSayWhichCall) {
  const GemmDesc desc{.gemm = Gemm::kOutput, .shape = {64, 64, 64}};
  library_.create_result = CUBLAS_STATUS_ALLOC_FAILED;
  EXPECT_EQ(GemmPlan::create(context_, desc, heuristic(0)).error().code, ErrorCode::kOutOfMemory);
  library_.create_result = CUBLAS_STATUS_SUCCESS;
  const auto plan = GemmPlan::create(context_, desc, heuristic(0)).value();
  alignas(16) static uint8_t bytes[64];
  const float* scale = reinterpret_cast<const float*>(bytes);
  GemmCall call{bytes, bytes, bytes, scale, scale, 32};
  const Status no_workspace = plan->run(call, nullptr, nullptr);
  ASSERT_FALSE(no_workspace);
  EXPECT_NE(no_workspace.error().message.find("workspace is null"), std::string::npos);
  GemmCall misaligned = call;
  misaligned.inv_scale_b = scale + 1;
  const Status scales = plan->run(misaligned, workspace(), nullptr);
  ASSERT_FALSE(scales);
  EXPECT_EQ(scales.error().code, ErrorCode::kInvalidArgument);
  library_.matmul_result = CUBLAS_STATUS_NOT_SUPPORTED;
  const Status refused = plan->run(call, workspace(), nullptr);
  ASSERT_FALSE(refused);
  EXPECT_EQ(refused.error().code, ErrorCode::kUnsupported);
  EXPECT_NE(refused.error().message.find("planned for m=64, called with m=32"), std::string::npos)
      << refused.error().message;
}

// The cost model's choice, of which it knows that a generated kernel can do it too.
TEST_F(CublasLtTest, WhatItCannotDoIsGenerated) {
  const GemmDesc desc{.shape = {64, 48, 32}};
  GemmChoice choice = heuristic(0);
  choice.otherwise = parse_gemm_config("64x128s6c1x1w2pg4").value();
  EXPECT_EQ(GemmPlan::create(context_, desc, choice).value()->choice().provider,
            Provider::kCublasLt);
  library_.heuristic_result = CUBLAS_STATUS_NOT_SUPPORTED;
  const auto plan = GemmPlan::create(context_, desc, choice);
  ASSERT_TRUE(plan) << plan.error().message;
  EXPECT_EQ((*plan)->choice().provider, Provider::kGenerated);
  EXPECT_EQ(config_text((*plan)->choice()), "64x128s6c1x1w2pg4");
  EXPECT_NE((*plan)->choice().why.find("cuBLASLt cannot"), std::string::npos);
  choice.otherwise.reset();
  EXPECT_EQ(GemmPlan::create(context_, desc, choice).error().code, ErrorCode::kUnsupported);
}

// A linear whose matmuls are cuBLASLt's reads what the cast kernels left, and sizes its workspace.
TEST_F(CublasLtTest, ServesALinear) {
  LinearDesc desc;
  desc.shape = {40, 48, 32};
  desc.recipe = find_recipe("rowwise").value();
  desc.choices.fill(heuristic(1));
  const auto linear = Linear::plan(context_, desc);
  ASSERT_TRUE(linear) << linear.error().message;
  EXPECT_GE((*linear)->workspace_bytes(), size_t{1} << 20);
  const int64_t m = 19;
  const auto x = reference::random_matrix(m, 32, 1);
  const auto w = reference::random_matrix(48, 32, 2);
  const auto dy = reference::random_matrix(m, 48, 3);
  const auto expected = reference::linear(desc.recipe, x, w, dy).value();
  auto bits_x = reference::to_bf16_bits(x);
  auto bits_w = reference::to_bf16_bits(w);
  auto bits_dy = reference::to_bf16_bits(dy);
  std::vector<uint16_t> y(expected.y.size());
  std::vector<uint16_t> dx(expected.dx.size());
  std::vector<uint16_t> dw(expected.dw.size());
  std::vector<float> saved((*linear)->saved_bytes() / 4);
  std::vector<float> scratch((*linear)->workspace_bytes() / 4);
  ASSERT_TRUE((*linear)->forward({.m = m,
                                  .x = {bits_x.data()},
                                  .w = {bits_w.data()},
                                  .y = {y.data()},
                                  .saved = {saved.data()},
                                  .workspace = {scratch.data()}},
                                 nullptr));
  ASSERT_TRUE((*linear)->backward({.m = m,
                                   .dy = {bits_dy.data()},
                                   .dx = {dx.data()},
                                   .dw = {dw.data()},
                                   .saved = {saved.data()},
                                   .workspace = {scratch.data()}},
                                  nullptr));
  EXPECT_EQ(library_.matmuls, 3);
  const auto error = [](const std::vector<double>& want, std::span<const uint16_t> bits) {
    return reference::relative_error(want, reference::to_doubles(reference::from_bf16_bits(
                                               1, static_cast<int64_t>(bits.size()), bits)));
  };
  EXPECT_LT(error(expected.y, y), 2.5e-3);
  EXPECT_LT(error(expected.dx, dx), 2.5e-3);
  EXPECT_LT(error(expected.dw, dw), 2.5e-3);
}

// A static object of before the library's first use is destroyed after it.
struct Outlives {
  ~Outlives() {
    const auto library = cublaslt();
    std::_Exit(!library && library.error().message.find("ending") != std::string::npos ? 0 : 1);
  }
};

TEST(CublasLtDeathTest, IsNotToBeHadAtTheEndOfTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  const auto end = [] {
    static const Outlives outlives;
    static_cast<void>(cublaslt());
    std::exit(2);
  };
  EXPECT_EXIT(end(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace f8::runtime
