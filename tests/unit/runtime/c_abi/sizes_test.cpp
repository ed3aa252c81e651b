// What needs neither a device nor a plan: sizes, layouts and whether a recipe is legal. They are those of
// plans.
#include <gtest/gtest.h>

#include <float8/float8.hpp>
#include <string>

#include "tests/unit/runtime/c_abi/emulated_memory.hpp"

namespace float8::testing {
namespace {

constexpr int64_t kM = 200, kN = 96, kK = 272;

float8_linear_desc linear_of(const char* recipe) {
  float8_linear_desc desc = LinearDesc{.m_max = kM, .n = kN, .k = kK}.c();
  desc.recipe = recipe;
  return desc;
}

float8_quantizer_desc quantizer_of(const char* recipe, float8_operand operand) {
  float8_quantizer_desc desc{};
  desc.struct_size = sizeof desc;
  desc.operand = operand;
  desc.rows_max = operand == FLOAT8_WEIGHT ? kN : kM;
  desc.cols = operand == FLOAT8_GRAD_OUTPUT ? kN : kK;
  desc.recipe = recipe;
  return desc;
}

class Sizes : public ::testing::TestWithParam<const char*> {
 protected:
  // The layout of a tensor of `rows` rows, and the plan that it is of; NULL where there is none.
  std::pair<float8_layout, float8_quantizer*> both(const float8_quantizer_desc& desc,
                                                   int64_t rows) const {
    float8_layout layout{};
    layout.struct_size = sizeof layout;
    const float8_status status = float8_tensor_layout(&desc, rows, &layout);
    float8_quantizer* quantizer = nullptr;
    EXPECT_EQ(status, float8_quantizer_plan(context_.get(), &desc, &quantizer))
        << float8_last_error();
    return {layout, quantizer};
  }

  Context context_ = emulated();
};

TEST_P(Sizes, OfWhatALinearSavesAreThePlans) {
  for (const bool recompute : {false, true}) {
    float8_linear_desc desc = linear_of(GetParam());
    desc.recompute = recompute;
    float8_saved_bytes sizes{sizeof sizes, 1, 1};
    ASSERT_EQ(float8_linear_sizes(&desc, &sizes), FLOAT8_OK) << float8_last_error();
    EXPECT_EQ(sizes.struct_size, sizeof sizes);
    float8_linear* linear = nullptr;
    ASSERT_EQ(float8_linear_plan(context_.get(), &desc, &linear), FLOAT8_OK);
    EXPECT_EQ(sizes.x + sizes.w, float8_linear_saved_bytes(linear));
    EXPECT_EQ(sizes.w, float8_linear_saved_bytes_with_tensors(linear, 1, 0));
    EXPECT_EQ(sizes.x, float8_linear_saved_bytes_with_tensors(linear, 0, 1));
    float8_linear_destroy(linear);
  }
}

TEST_P(Sizes, AndPlacesOfCopiesAreThePlans) {
  for (const float8_operand operand : {FLOAT8_INPUT, FLOAT8_WEIGHT, FLOAT8_GRAD_OUTPUT}) {
    for (const int copies :
         {FLOAT8_BOTH_COPIES, FLOAT8_Q_ALONE, FLOAT8_QT_ALONE, FLOAT8_Q_FOR_RECOMPUTE}) {
      SCOPED_TRACE(std::to_string(operand) + " " + std::to_string(copies));
      float8_quantizer_desc desc = quantizer_of(GetParam(), operand);
      desc.copies = copies;
      const int64_t rows = operand == FLOAT8_WEIGHT ? kN : kM - 7;
      const auto [layout, quantizer] = both(desc, rows);
      if (quantizer == nullptr) continue;
      EXPECT_EQ(layout.tensor_bytes, float8_quantizer_tensor_bytes(quantizer));
      EXPECT_EQ(layout.transposed_bytes, float8_quantizer_transposed_bytes(quantizer));
      const Memory tensor = memory(layout.tensor_bytes + 16);
      const Memory transposed = memory(layout.transposed_bytes + 16);
      float8_tensor view;
      ASSERT_EQ(float8_quantizer_view(quantizer, tensor.get(), transposed.get(), rows, &view),
                FLOAT8_OK);
      const auto* const in_tensor = static_cast<const std::byte*>(tensor.get());
      const auto* const in_transposed = static_cast<const std::byte*>(transposed.get());
      EXPECT_EQ(layout.ld_q, view.ld_q);
      EXPECT_EQ(layout.ld_qt, view.ld_qt);
      if (view.q != nullptr) {
        EXPECT_EQ(view.q, in_tensor);
        const auto* const base = layout.q_scale_apart != 0 ? in_transposed : in_tensor;
        EXPECT_EQ(static_cast<const void*>(view.q_inverse_scale), base + layout.q_inverse_scale);
      }
      if (view.qt != nullptr) {
        EXPECT_EQ(view.qt, in_transposed);
        EXPECT_EQ(static_cast<const void*>(view.qt_inverse_scale),
                  in_transposed + layout.qt_inverse_scale);
      }
      float8_quantizer_destroy(quantizer);
    }
  }
}

TEST_P(Sizes, OfMaximaOfShardsAreThePlans) {
  for (const int64_t whole_rows : {int64_t{0}, 2 * kM}) {
    float8_quantizer_desc desc = quantizer_of(GetParam(), FLOAT8_WEIGHT);
    desc.over_ranks = 1;
    desc.whole_rows = whole_rows;
    const auto [layout, quantizer] = both(desc, kN);
    if (quantizer == nullptr) continue;
    EXPECT_EQ(layout.amax_words, float8_quantizer_amax_words(quantizer));
    EXPECT_EQ(layout.row_amax_words, float8_quantizer_row_amax_words(quantizer));
    float8_quantizer_destroy(quantizer);
  }
}

TEST_P(Sizes, OfAScaleStateAreThePlans) {
  const float8_linear_desc desc = linear_of(GetParam()), other = linear_of("delayed");
  const float8_linear_desc* const descs[] = {&desc, &desc, &other};
  float8_linear *one = nullptr, *two = nullptr;
  ASSERT_EQ(float8_linear_plan(context_.get(), &desc, &one), FLOAT8_OK);
  ASSERT_EQ(float8_linear_plan(context_.get(), &other, &two), FLOAT8_OK);
  const float8_linear* const linears[] = {one, one, two};
  for (const int32_t history : {0, 1, 1024}) {
    float8_scales_desc of{};
    of.struct_size = sizeof of;
    of.linears = linears;
    of.count = 3;
    of.history = history;
    float8_scales* scales = nullptr;
    ASSERT_EQ(float8_scales_plan(context_.get(), &of, &scales), FLOAT8_OK) << float8_last_error();
    size_t bytes = 1;
    ASSERT_EQ(float8_scales_size(descs, 3, history, &bytes), FLOAT8_OK) << float8_last_error();
    EXPECT_EQ(bytes, float8_scales_bytes(scales));
    EXPECT_GT(bytes, 0U);
    float8_scales_destroy(scales);
  }
  float8_linear_destroy(one);
  float8_linear_destroy(two);
}

INSTANTIATE_TEST_SUITE_P(Recipes, Sizes,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed",
                                           "blockwise"));

TEST(SizesMisuse, IsOneClearError) {
  float8_linear_desc desc = LinearDesc{.m_max = 16, .n = 24, .k = 32}.c();
  desc.recipe = "rowwise";
  float8_saved_bytes sizes{sizeof sizes, 0, 0};
  EXPECT_EQ(float8_linear_sizes(&desc, &sizes), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_linear_sizes(nullptr, &sizes), FLOAT8_INVALID_ARGUMENT);
  desc.n = 32;
  EXPECT_EQ(float8_linear_sizes(&desc, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("float8_saved_bytes is NULL")) << float8_last_error();
  float8_quantizer_desc of{};
  of.struct_size = sizeof of;
  of.rows_max = 16;
  of.cols = 32;
  of.recipe = "rowwise";
  float8_layout layout{};
  layout.struct_size = sizeof layout;
  EXPECT_EQ(float8_tensor_layout(&of, 17, &layout), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("rows is 17")) << float8_last_error();
  size_t bytes = 0;
  EXPECT_EQ(float8_scales_size(nullptr, 0, 0, &bytes), FLOAT8_OK);
  EXPECT_EQ(bytes, 0U);
  EXPECT_EQ(float8_scales_size(nullptr, 1, 0, &bytes), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("linears is NULL")) << float8_last_error();
  const float8_linear_desc* none = nullptr;
  EXPECT_EQ(float8_scales_size(&none, 1, 0, &bytes), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_scales_size(nullptr, 0, 1025, &bytes), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_scales_size(nullptr, 0, 0, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("bytes is NULL")) << float8_last_error();
}

TEST(RecipeCheck, SaysWhyNot) {
  float8_recipe recipe{};
  recipe.struct_size = sizeof recipe;
  EXPECT_EQ(float8_recipe_check(&recipe), FLOAT8_OK) << float8_last_error();
  for (const char* name : {"tensorwise", "rowwise", "delayed", "blockwise", "bf16"}) {
    ASSERT_EQ(float8_recipe_named(name, &recipe), FLOAT8_OK);
    EXPECT_EQ(float8_recipe_check(&recipe), FLOAT8_OK) << name << ": " << float8_last_error();
  }
  recipe = {};
  recipe.struct_size = sizeof recipe;
  recipe.output.a.format = recipe.output.b.format = FLOAT8_E5M2;
  EXPECT_NE(float8_recipe_check(&recipe), FLOAT8_OK);
  EXPECT_TRUE(says("e5m2")) << float8_last_error();
  EXPECT_EQ(float8_recipe_check(nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("float8_recipe is NULL")) << float8_last_error();
}

}  // namespace
}  // namespace float8::testing
