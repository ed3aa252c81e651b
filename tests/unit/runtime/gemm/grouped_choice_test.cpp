// Which configuration grouped GEMMs take.
#include <gtest/gtest.h>

#include "codegen/kernels/group_args.cuh"
#include "runtime/gemm/choose.hpp"
#include "runtime/gemm/grouped_winners.hpp"

namespace f8::runtime {
namespace {

using codegen::ScaleMode;

constexpr int kSmsOfH100 = 132;

GroupedDesc desc_of(Gemm gemm, Shape linear, int experts, ScaleMode scale, bool fast) {
  return {.gemm = {.gemm = gemm, .shape = linear, .scale = scale, .fast = fast},
          .layout = {.experts = experts, .m_max = static_cast<int32_t>(linear.m)}};
}

struct Model {
  Shape linear;
  int experts;
};
constexpr Model kModels[] = {{{65536, 768, 2048}, 128}, {{65536, 2048, 768}, 128},
                             {{65536, 2048, 7168}, 64}, {{16640, 8192, 5120}, 16},
                             {{32768, 7168, 2048}, 8},  {{32768, 2048, 7168}, 8}};

TEST(GroupedChoice, IsTheWinnerOfAMeasuredShape) {
  for (const auto& [linear, experts] : kModels) {
    for (const auto& [gemm, scale, fast] :
         {std::tuple{Gemm::kOutput, ScaleMode::kAxis, true},
          std::tuple{Gemm::kGradWeight, ScaleMode::kTensor, true},
          std::tuple{Gemm::kGradWeight, ScaleMode::kAxis, false}}) {
      const GroupedDesc desc = desc_of(gemm, linear, experts, scale, fast);
      const bool of_k = gemm == Gemm::kGradWeight;
      const auto chosen = choose_grouped(nullptr, desc, kSmsOfH100);
      ASSERT_TRUE(chosen.has_value());
      const int64_t rows = linear.m / experts;
      const Shape group = of_k ? Shape{linear.n, linear.k, rows} : Shape{rows, linear.n, linear.k};
      const auto winners = grouped_winners(
          of_k ? k_grouped_spec(desc.gemm, {}) : m_grouped_spec(desc.gemm, {}), group);
      const auto own = std::ranges::find(winners, 0.0, &NearbyWinner::octaves);
      ASSERT_NE(own, winners.end());
      EXPECT_EQ(key(*chosen), key(own->config)) << linear.m << ", " << linear.n << ", " << linear.k;
    }
  }
}

TEST(GroupedChoice, BlocksHaveNoWinners) {
  const GroupedDesc desc =
      desc_of(Gemm::kOutput, kModels[0].linear, kModels[0].experts, ScaleMode::kBlock1x128, false);
  EXPECT_TRUE(grouped_winners(m_grouped_spec(desc.gemm, {}), {512, 768, 2048}).empty());
}

}  // namespace
}  // namespace f8::runtime
