// A grouped GEMM of two problems gives, bit for bit, what each gives in a launch of its own.
#include <algorithm>

#include "tests/gpu/gemm_operands.hpp"

namespace f8::runtime::gpu {
namespace {

using codegen::ScaleMode;

struct PairCase {
  const char* config;
  ScaleMode scale;
  bool fast;
};

class GroupedGemmTest : public GpuTestWith<PairCase> {
 protected:
  // Both gradients of a linear planned for `planned`, called with m.
  void check(Shape planned, int64_t m) {
    const auto& [config, scale, fast] = GetParam();
    const GemmChoice choice = GemmChoice{parse_gemm_kernel(Provider::kGenerated, config).value()};
    GemmDesc descs[2];
    for (int i = 0; i < 2; ++i) {
      descs[i] = {.gemm = i == 0 ? Gemm::kGradInput : Gemm::kGradWeight,
                  .shape = planned,
                  .scale = scale,
                  .fast = fast};
    }
    ASSERT_TRUE(GroupedGemm::fits(descs[0], choice, descs[1], choice));
    const auto pair = GroupedGemm::create(context_, descs[0], descs[1], choice);
    F8_ASSERT_OK(pair);
    std::vector<std::unique_ptr<GemmOperands>> operands;
    std::vector<std::unique_ptr<DeviceBuffer>> alone;
    std::vector<std::unique_ptr<DeviceBuffer>> together;
    for (uint64_t i = 0; i < 2; ++i) {
      const Shape own = gemm_shape({m, planned.n, planned.k}, descs[i].gemm);
      const auto bytes = static_cast<size_t>(own.m * own.n) * 2;
      operands.push_back(std::make_unique<GemmOperands>(context(), own, descs[i].a, descs[i].b,
                                                        scale, 13 + 2 * i));
      alone.push_back(std::make_unique<DeviceBuffer>(context(), bytes));
      together.push_back(std::make_unique<DeviceBuffer>(context(), bytes));
      const auto single = GemmPlan::create(context_, descs[i], choice);
      F8_ASSERT_OK(single);
      F8_ASSERT_OK((*single)->run(operands[i]->call(*alone[i], m), nullptr, nullptr));
    }
    const GemmCall first = operands[0]->call(*together[0], m);
    const GemmCall second = operands[1]->call(*together[1], m);
    for (int round = 0; round < 3; ++round) {
      for (auto& d : together) d->poison();
      F8_ASSERT_OK((*pair)->run(first, second, nullptr));
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(together[i]->download<uint8_t>(), alone[i]->download<uint8_t>())
            << to_string(descs[i].gemm) << ", round " << round;
        EXPECT_TRUE(together[i]->guards_are_whole());
      }
    }
    const int64_t step = std::max<int64_t>(1, m * planned.n * planned.k / 60'000'000);
    for (size_t i = 0; i < 2; ++i) {
      EXPECT_LE(
          reference::relative_error(reference::matmul(operands[i]->sampled_a(step), operands[i]->b),
                                    sampled_rows(together[i]->bf16(), operands[i]->shape.n, step)),
          fast ? kFastBound : kPreciseBound);
    }
  }
};
INSTANTIATE_TEST_SUITE_P(
    Configurations, GroupedGemmTest,
    ::testing::Values(PairCase{"128x256s4c2x1w2g8", ScaleMode::kTensor, false},
                      PairCase{"128x256s4c1x2w2g16", ScaleMode::kAxis, false},
                      PairCase{"128x256s4c1x1w2g8", ScaleMode::kTensor, true},
                      PairCase{"256x128s4c2x1w2g8", ScaleMode::kAxis, true},
                      PairCase{"128x128s5c1x1w2pg8", ScaleMode::kAxis, false},
                      PairCase{"128x128s5c2x1w2pg8", ScaleMode::kTensor, true},
                      PairCase{"64x64s6c1x1w1g8", ScaleMode::kTensor, false},
                      PairCase{"128x128s5c1x1k2w2g8", ScaleMode::kTensor, true},
                      PairCase{"64x256s4c1x1k4w1g8", ScaleMode::kAxis, false},
                      PairCase{"128x192s5c2x1w2g8", ScaleMode::kBlock1x128, false}),
    [](const auto& suite) {
      return f8::format("{}_{}_{}", suite.param.config, to_string(suite.param.scale),
                        suite.param.fast ? "fast" : "precise");
    });

// GEMMs of like and of very different size, fewer tiles than SMs and many more, a first GEMM
// whose last wave is full, nearly full or nearly empty; the longer K on either side.
TEST_P(GroupedGemmTest, EachIsItself) {
  for (const auto& [shape, m] :
       {std::pair{Shape{300, 208, 592}, int64_t{300}}, std::pair{Shape{300, 208, 592}, int64_t{1}},
        std::pair{Shape{1, 16, 16}, int64_t{1}}, std::pair{Shape{4096, 1024, 512}, int64_t{4096}},
        std::pair{Shape{4096, 512, 1024}, int64_t{3000}},
        std::pair{Shape{512, 2112, 2048}, int64_t{512}},
        std::pair{Shape{2112, 2048, 272}, int64_t{2111}},
        std::pair{Shape{4224, 128, 4224}, int64_t{129}}}) {
    SCOPED_TRACE(f8::format("planned for {}, called with m={}", to_string(shape), m));
    check(shape, m);
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
