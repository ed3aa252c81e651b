#include "recipes/recipe.hpp"

#include <gtest/gtest.h>

#include <functional>

namespace f8 {
namespace {

Recipe recipe(std::string_view name) {
  const auto found = find_recipe(name);
  EXPECT_TRUE(found) << name;
  return found.value_or(Recipe{});
}

// "e4m3/axis/pow2 e4m3/tensor fast": a row of the numerics table as text.
std::string describe(const GemmSetting& g) {
  const auto cast = [](const CastSetting& c) -> std::string {
    constexpr const char* kScaling[] = {"disabled", "dynamic", "delayed"};
    constexpr const char* kGranularity[] = {"tensor", "axis", "1x128", "128x128"};
    return f8::format("{}.{}.{}{}", to_string(c.dtype), kScaling[static_cast<int>(c.scaling)],
                      kGranularity[static_cast<int>(c.granularity)], c.pow2 ? ".pow2" : "");
  };
  return cast(g.a) + " " + cast(g.b) + (g.fast ? " fast" : "");
}

TEST(Recipe, BuiltinsAreTheTableOfTheContract) {
  const auto check = [](std::string_view name, std::string_view output, std::string_view grad_input,
                        std::string_view grad_weight) {
    const Recipe r = recipe(name);
    EXPECT_EQ(describe(r.at(Gemm::kOutput)), output) << name;
    EXPECT_EQ(describe(r.at(Gemm::kGradInput)), grad_input) << name;
    EXPECT_EQ(describe(r.at(Gemm::kGradWeight)), grad_weight) << name;
    EXPECT_TRUE(r.validate()) << name;
  };
  check("tensorwise", "e4m3.dynamic.tensor e4m3.dynamic.tensor fast",
        "e5m2.dynamic.tensor e4m3.dynamic.tensor", "e5m2.dynamic.tensor e4m3.dynamic.tensor");
  const std::string axes = "e4m3.dynamic.axis.pow2 e4m3.dynamic.axis.pow2";
  check("rowwise", axes + " fast", axes, axes);
  check("rowwise_with_gw_hp", axes + " fast", "e4m3.dynamic.axis.pow2 e4m3.dynamic.tensor.pow2",
        "bf16.disabled.tensor bf16.disabled.tensor");
  check("delayed", "e4m3.delayed.tensor e4m3.delayed.tensor fast",
        "e5m2.delayed.tensor e4m3.delayed.tensor", "e5m2.delayed.tensor e4m3.delayed.tensor");
  const std::string blocks = "e4m3.dynamic.1x128.pow2 e4m3.dynamic.128x128.pow2";
  check("blockwise", blocks, blocks, "e4m3.dynamic.1x128.pow2 e4m3.dynamic.1x128.pow2");
  EXPECT_EQ(builtin_recipes().size(), 5U);
}

TEST(Recipe, UnknownNameIsRefusedWithTheNames) {
  for (const char* name : {"", "Rowwise", "rowwise ", "row", "bf16"}) {
    const auto found = find_recipe(name);
    ASSERT_FALSE(found) << name;
    EXPECT_EQ(found.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(found.error().message.find(
                  "one of tensorwise, rowwise, rowwise_with_gw_hp, delayed, blockwise"),
              std::string::npos)
        << found.error().message;
  }
}

TEST(Recipe, AnyCombinationThatMakesSenseIsLegal) {
  Recipe r = recipe("rowwise");
  r.name = "mine";
  r.gemms[0].b.granularity = Granularity::kTensor;  // axis with tensor
  r.gemms[1].a.dtype = Dtype::kE5m2;                // e5m2 with e4m3
  r.gemms[1].a.pow2 = false;                        // scales of two kinds
  r.gemms[2] = recipe("tensorwise").gemms[0];       // GEMMs of two recipes
  r.gemms[2].a.scaling = Scaling::kDelayed;         // delayed with dynamic
  EXPECT_TRUE(r.validate());
}

// One change to a legal recipe, and what the message must name.
struct BadRecipe {
  const char* what;
  const char* base;
  std::function<void(Recipe&)> change;
  std::vector<const char*> message;
};

class RecipeErrors : public ::testing::TestWithParam<BadRecipe> {};

TEST_P(RecipeErrors, NameTheGemmAndTheOperand) {
  Recipe r = recipe(GetParam().base);
  GetParam().change(r);
  const Status valid = r.validate();
  ASSERT_FALSE(valid);
  EXPECT_EQ(valid.error().code, ErrorCode::kInvalidArgument);
  for (const char* part : GetParam().message) {
    EXPECT_NE(valid.error().message.find(part), std::string::npos) << valid.error().message;
  }
}

INSTANTIATE_TEST_SUITE_P(
    All, RecipeErrors,
    ::testing::Values(
        BadRecipe{"one_disabled",
                  "tensorwise",
                  [](Recipe& r) {
                    r.gemms[1].b = {Scaling::kDisabled, Granularity::kTensor, Dtype::kBf16, false};
                  },
                  {"GEMM grad_input", "operand a is fp8 and operand b is not"}},
        BadRecipe{"other_disabled",
                  "rowwise",
                  [](Recipe& r) {
                    r.gemms[0].a = {Scaling::kDisabled, Granularity::kTensor, Dtype::kBf16, false};
                  },
                  {"GEMM output", "operand b is fp8 and operand a is not"}},
        BadRecipe{"both_e5m2",
                  "tensorwise",
                  [](Recipe& r) { r.gemms[2].b.dtype = Dtype::kE5m2; },
                  {"GEMM grad_weight", "both e5m2"}},
        BadRecipe{"bf16_but_scaled",
                  "rowwise",
                  [](Recipe& r) { r.gemms[0].b.dtype = Dtype::kBf16; },
                  {"GEMM output operand b", "bf16", "disable the scaling"}},
        BadRecipe{"disabled_but_fp8",
                  "rowwise_with_gw_hp",
                  [](Recipe& r) { r.gemms[2].a.dtype = Dtype::kE4m3; },
                  {"GEMM grad_weight operand a", "disabled", "e4m3"}},
        BadRecipe{"disabled_types_differ",
                  "rowwise_with_gw_hp",
                  [](Recipe& r) { r.gemms[2].a.dtype = Dtype::kF16; },
                  {"GEMM grad_weight", "f16", "bf16"}},
        BadRecipe{"disabled_and_fast",
                  "rowwise_with_gw_hp",
                  [](Recipe& r) { r.gemms[2].fast = true; },
                  {"GEMM grad_weight", "fast"}},
        BadRecipe{"delayed_axis",
                  "delayed",
                  [](Recipe& r) { r.gemms[0].a.granularity = Granularity::kAxis; },
                  {"GEMM output operand a", "delayed", "axis"}},
        BadRecipe{"block_with_tensor",
                  "blockwise",
                  [](Recipe& r) { r.gemms[1].b.granularity = Granularity::kTensor; },
                  {"GEMM grad_input", "operand a has granularity block1x128 and operand b tensor"}},
        BadRecipe{"axis_with_block",
                  "rowwise",
                  [](Recipe& r) { r.gemms[0].b.granularity = Granularity::kBlock128x128; },
                  {"GEMM output", "operand b has granularity block128x128 and operand a axis"}},
        BadRecipe{"square_a",
                  "blockwise",
                  [](Recipe& r) { r.gemms[0].a.granularity = Granularity::kBlock128x128; },
                  {"GEMM output operand a", "128x128"}},
        BadRecipe{"block_fast",
                  "blockwise",
                  [](Recipe& r) { r.gemms[0].fast = true; },
                  {"GEMM output", "fast"}},
        BadRecipe{"name_empty", "rowwise", [](Recipe& r) { r.name = ""; }, {"recipe name ''"}},
        BadRecipe{
            "name_of_a_key", "rowwise", [](Recipe& r) { r.name = "a/b"; }, {"recipe name 'a/b'"}}),
    [](const auto& bad) { return bad.param.what; });

TEST(Gemm, NamesRoundTripAndOthersAreRefused) {
  for (const Gemm g : kGemms) {
    const auto parsed = parse_gemm(to_string(g));
    ASSERT_TRUE(parsed);
    EXPECT_EQ(*parsed, g);
  }
  EXPECT_FALSE(parse_gemm("linear"));
  EXPECT_FALSE(parse_gemm(""));
}

}  // namespace
}  // namespace f8
