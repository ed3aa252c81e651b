// Which configuration grouped GEMMs take.
#include <gtest/gtest.h>

#include "codegen/kernels/experts/group_args.cuh"
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
      EXPECT_EQ(key(chosen->config), key(own->config))
          << linear.m << ", " << linear.n << ", " << linear.k;
    }
  }
}

// A stage has as many bytes of K: the choice for 16 bits is that of fp8 with twice the K.
TEST(GroupedChoice, CountsKInBytes) {
  for (const auto& [linear, experts] : kModels) {
    for (const Gemm gemm : {Gemm::kOutput, Gemm::kGradInput}) {
      GroupedDesc desc = desc_of(gemm, linear, experts, ScaleMode::kTensor, false);
      desc.gemm.a = desc.gemm.b = Dtype::kBf16;
      const auto chosen = choose_grouped(nullptr, desc, kSmsOfH100);
      ASSERT_TRUE(chosen) << chosen.error().message;
      Shape twice = linear;
      (gemm == Gemm::kOutput ? twice.k : twice.n) *= 2;
      const auto fp8 = choose_grouped(
          nullptr, desc_of(gemm, twice, experts, ScaleMode::kTensor, true), kSmsOfH100);
      EXPECT_EQ(key(chosen->config), key(fp8->config)) << to_string(linear);
    }
  }
}

KernelChoice row_of(Gemm gemm, Shape shape, const Groups& groups, const char* config,
                    const char* recipe = "rowwise") {
  return {.problem = Problem::make(to_op(gemm), find_recipe(recipe).value(), shape, groups).value(),
          .kernel = parse_gemm_kernel(Provider::kGenerated, config).value(),
          .median_ns = 1000};
}

TEST(GroupedChoice, IsTheTablesRowOfAsManyExpertsAndThisShape) {
  const Shape shape = {4096, 1024, 2048};
  for (const auto& [gemm, fast] : {std::pair{Gemm::kOutput, true}, {Gemm::kGradWeight, false}}) {
    const GroupedDesc desc = desc_of(gemm, shape, 16, ScaleMode::kAxis, fast);
    TuningTable table;
    table.add(row_of(gemm, shape, {16, kZipf}, "64x128s6c1x1w1g8"));
    const auto zipf = choose_grouped(&table, desc, kSmsOfH100);
    ASSERT_TRUE(zipf) << zipf.error().message;
    EXPECT_EQ(key(zipf->config), "64x128s6c1x1w1g8");
    EXPECT_EQ(zipf->why, "the tuning table's row of this shape");
    table.add(row_of(gemm, shape, {16, kEven}, "64x256s4c1x1w1g8"));
    EXPECT_EQ(key(choose_grouped(&table, desc, kSmsOfH100)->config), "64x256s4c1x1w1g8")
        << "the most even routing";
    // A dense row, and one of another type, shape, recipe or number of experts, decide nothing.
    const std::string model = key(choose_grouped(nullptr, desc, kSmsOfH100)->config);
    ASSERT_NE(model, "64x128s6c1x1w1g8");
    TuningTable others;
    others.add(row_of(gemm, shape, {}, "64x128s6c1x1w1g8"));
    others.add(row_of(gemm, shape, {16, kEven}, "64x128s6c1x1w1g8", "blockwise"));
    EXPECT_EQ(key(choose_grouped(&others, desc, kSmsOfH100)->config), model);
    others.add(row_of(gemm, {4096, 1024, 4096}, {16, kEven}, "64x128s6c1x1w1g8"));
    others.add(row_of(gemm, shape, {32, kEven}, "64x128s6c1x1w1g8"));
    const auto near = choose_grouped(&others, desc, kSmsOfH100);
    EXPECT_EQ(near->neighbours, 2);
    EXPECT_EQ(near->why, "by the cost model and the 2 nearest rows of the tuning table");
    // Rows are measured with all SMs.
    GroupedDesc limited = desc;
    limited.gemm.sm_limit = 64;
    EXPECT_NE(choose_grouped(&table, limited, kSmsOfH100)->why, zipf->why);
    // The table's text keeps them.
    const auto read = parse_table(table.serialize());
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(read->choices(), table.choices());
  }
}

TEST(GroupedChoice, ATableWithAConfigurationThatGroupsCannotHaveIsRefused) {
  TuningTable table;
  table.add(row_of(Gemm::kOutput, {4096, 1024, 2048}, {16, kEven}, "128x128s6c2x1w2pg8"));
  const auto read = parse_table(table.serialize());
  ASSERT_FALSE(read) << "its clusters would share columns of ragged rows";
  EXPECT_EQ(read.error().code, ErrorCode::kCorrupt);
}

TEST(GroupedChoice, BlocksHaveNoWinners) {
  const GroupedDesc desc =
      desc_of(Gemm::kOutput, kModels[0].linear, kModels[0].experts, ScaleMode::kBlock1x128, false);
  EXPECT_TRUE(grouped_winners(m_grouped_spec(desc.gemm, {}), {512, 768, 2048}).empty());
}

}  // namespace
}  // namespace f8::runtime
