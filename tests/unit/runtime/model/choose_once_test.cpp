// A plan chooses each of its kernels once, and a table's configurations are read once, when the table
// is.
#include <gtest/gtest.h>

#include "base/text.hpp"
#include "runtime/gemm/choose.hpp"
#include "runtime/linear/plan/kernels.hpp"
#include "runtime/model/info.hpp"
#include "runtime/model/model_plan.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

constexpr Shape kPlanned = {64, 48, 32};

class ChooseOnce : public ::testing::Test {
 protected:
  [[nodiscard]] static std::shared_ptr<Context> emulated() {
    ContextOptions options;
    options.emulate = true;
    return Context::create(0, options).value();
  }
  template <class Run>
  [[nodiscard]] static uint64_t choices(const Run& run) {
    const uint64_t before = chosen_gemms();
    run();
    return chosen_gemms() - before;
  }
  template <class Run>
  [[nodiscard]] static uint64_t parsed(const Run& run) {
    const uint64_t before = parsed_gemm_kernels();
    run();
    return parsed_gemm_kernels() - before;
  }
  [[nodiscard]] uint64_t choices_of_plan(const LinearDesc& desc) const {
    return choices([&] { EXPECT_TRUE(Linear::plan(context_, desc)); });
  }

  std::shared_ptr<Context> context_ = emulated();
};

TEST_F(ChooseOnce, APlanChoosesEachOfItsGemms) {
  LinearDesc desc = testing::describe("rowwise", kPlanned);
  EXPECT_EQ(choices_of_plan(desc), 3U);
  desc.needs_grad_input = false;
  EXPECT_EQ(choices_of_plan(desc), 2U);
  desc.needs_grad_input = true;
  // A GEMM that adds to the gradient that is there is another one.
  desc.accumulate_grad_weight = desc.accumulate_grad_input = true;
  EXPECT_EQ(choices_of_plan(desc), 5U);
  desc.choices[1] = GemmChoice{parse_gemm_kernel(Provider::kGenerated, "64x64s4c1x1w1g8").value()};
  EXPECT_EQ(choices_of_plan(desc), 3U);
}

TEST_F(ChooseOnce, AModelChoosesThoseOfEachDistinctPlan) {
  ModelOptions options;
  options.recipe = find_recipe("tensorwise").value();
  options.tokens = 64;
  const std::vector<ModelLinear> linears = {
      {.name = "0.up", .in_features = 32, .out_features = 48},
      {.name = "1.up", .in_features = 32, .out_features = 48},
      {.name = "head", .in_features = 32, .out_features = 64}};
  EXPECT_EQ(choices([&] { EXPECT_EQ(plan_model(context_, linears, options)->distinct_plans, 2U); }),
            6U);
}

TEST_F(ChooseOnce, ATableIsParsedOnce) {
  TuningTable written;
  written.devices = {context_->device()};
  written.sources = {{"mine.f8db"}};
  for (const Recipe& recipe : builtin_recipes()) {
    for (const int64_t m : {32, 64, 128}) {
      const Problem problem = Problem::make(Op::kOutput, recipe, {m, 48, 32}).value();
      written.add({problem, {.config = parse_gemm_config("128x128s4c1x1w2g8").value()}, 1000});
    }
  }
  const std::string text = written.serialize();
  EXPECT_EQ(parsed([&] { context_->set_table(parse_table(text).value()); }),
            written.choices().size());
  EXPECT_EQ(parsed([&] {
              for (const Recipe& recipe : builtin_recipes()) {
                const LinearDesc desc = testing::describe(recipe.name.c_str(), kPlanned);
                const auto linear = Linear::plan(context_, desc).value();
                EXPECT_EQ(linear->choice(Gemm::kOutput).why,
                          "the tuning table's row of this shape");
                EXPECT_FALSE(describe(*linear).empty());
              }
              // Between the rows: by those near it.
              EXPECT_TRUE(Linear::plan(context_, testing::describe("rowwise", {96, 48, 32})));
            }),
            0U);
}

}  // namespace
}  // namespace f8::runtime
