#include "runtime/gemm/cost_model.hpp"

#include <gtest/gtest.h>

#include <array>

namespace f8::runtime {
namespace {

constexpr int kSms = 132;

GemmConfig cheapest(Shape shape, const codegen::GemmSpec& spec = {}) {
  const auto config = cheapest_config(spec, shape, kSms);
  EXPECT_TRUE(config) << config.error().message;
  return *config;
}

// The part of the result that a CTA computes; cluster split-K makes it smaller too.
int area(const GemmConfig& config) {
  return config.tile_m * config.tile_n / config.split_k;
}

TEST(CostModel, LargeProblemsGetLargeTiles) {
  EXPECT_GE(area(cheapest({8192, 8192, 8192})), 128 * 192);
  EXPECT_GE(area(cheapest({4096, 4096, 4096})), 128 * 128);
}

TEST(CostModel, SmallProblemsGetSmallTiles) {
  const GemmConfig config = cheapest({64, 1024, 4096});
  EXPECT_EQ(config.tile_m, 64);
  EXPECT_LE(area(config), 64 * 128);
  EXPECT_LT(area(cheapest({512, 512, 4096})), 128 * 256);
}

// One tile more than the SMs costs a whole wave; the model must see it.
TEST(CostModel, ALonelyLastWaveCosts) {
  codegen::GemmSpec spec;
  spec.config = parse_gemm_config("128x128s4c1x1w2g8").value();
  const double full = predicted_clocks(spec, {128 * 132, 128, 4096}, kSms);
  const double more = predicted_clocks(spec, {128 * 133, 128, 4096}, kSms);
  EXPECT_GT(more, 1.8 * full);
}

TEST(CostModel, PreciseIsNeverCheaper) {
  codegen::GemmSpec fast;
  for (const auto& config : codegen::gemm_candidates(fast)) {
    fast.config = config;
    codegen::GemmSpec precise = fast;
    precise.fast = false;
    for (const Shape shape : {Shape{128, 4096, 4096}, Shape{8192, 8192, 8192}}) {
      EXPECT_GE(predicted_clocks(precise, shape, kSms), predicted_clocks(fast, shape, kSms))
          << key(config);
    }
  }
}

TEST(CostModel, LegalForEveryShapeAndSpec) {
  for (const Dtype d : {Dtype::kBf16, Dtype::kF32}) {
    for (const bool fast : {true, false}) {
      for (const auto scale : {codegen::ScaleMode::kTensor, codegen::ScaleMode::kAxis}) {
        codegen::GemmSpec spec{.a = Dtype::kE5m2,
                               .b = Dtype::kE4m3,
                               .d = d,
                               .scale = scale,
                               .fast = fast,
                               .config = {}};
        for (const int64_t m : {1, 17, 1000, 4095, 131072}) {
          for (const int64_t n : {16, 48, 2064, 131072}) {
            for (const int64_t k : {1, 16, 2064, 65536}) {
              spec.config = cheapest({m, n, k}, spec);
              EXPECT_TRUE(codegen::validate(spec)) << codegen::key(spec);
              EXPECT_GT(predicted_clocks(spec, {m, n, k}, kSms), 0);
            }
          }
        }
      }
    }
  }
}

TEST(CostModel, SameAnswerEveryTime) {
  const Shape shape{3000, 4096, 1024};
  const GemmConfig first = cheapest(shape);
  for (int i = 0; i < 3; ++i) EXPECT_EQ(cheapest(shape), first);
}

TEST(CostModel, ASmallerDeviceIsServedByClustersThatItHolds) {
  for (const Shape shape : {Shape{4096, 4096, 4096}, {64, 512, 8192}, {512, 512, 4096}}) {
    for (const int sms : {1, 2, 3}) {
      const auto config = cheapest_config({}, shape, sms).value();
      EXPECT_LE(config.cluster_m * config.cluster_n * config.split_k, sms);
    }
  }
}

TEST(CostModel, TheLibrarysTermsAreLinesWithBends) {
  const Shape shape{1 << 10, 1 << 12, 1 << 9};
  // A quarter of the tensor cores' rate.
  const double clocks = 4.0 * (1 << 10) * (1 << 12) * (1 << 9) / 4096 / kSms;
  const std::array<double, CostModel::kLibraryTerms> expected = {1,  -1, 3, 1, 0, 0,  1, 3, 1, 0,
                                                                 -3, 1,  0, 0, 0, -1, 0, 0, 0};
  const auto terms = library_terms(shape, kSms, clocks);
  for (size_t i = 0; i < terms.size(); ++i) EXPECT_NEAR(terms[i], expected[i], 1e-9) << i;
}

TEST(CostModel, TheLibraryIsTakenWhereItIsExpectedAhead) {
  CostModel model;
  const codegen::GemmSpec tensor;
  const Shape shape{4096, 4096, 4096};
  const double ideal = 4096.0 * 4096 * 4096 / 4096 / kSms;
  EXPECT_FALSE(prefers_library(tensor, shape, kSms, 2 * ideal, model)) << "nothing is fitted";
  const auto prefers = [&](double lag, double efficiency, const codegen::GemmSpec& spec) {
    model.library = {lag};
    return prefers_library(spec, shape, kSms, ideal / efficiency, model);
  };
  EXPECT_TRUE(prefers(0.015, 0.5, tensor));
  EXPECT_FALSE(prefers(0.025, 0.5, tensor));
  EXPECT_FALSE(prefers(0.015, 0.8, tensor)) << "large GEMMs are alike";
  EXPECT_TRUE(prefers(-0.005, 0.8, tensor));
  codegen::GemmSpec axis;
  axis.scale = codegen::ScaleMode::kAxis;
  EXPECT_FALSE(prefers(-0.3, 0.5, axis));
}

}  // namespace
}  // namespace f8::runtime
