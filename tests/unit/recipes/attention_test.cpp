// Attention's keys, counts and lists.
#include "recipes/attention.hpp"

#include <gtest/gtest.h>

namespace f8 {
namespace {

constexpr std::string_view kKey = "attention/fp8_forward/e4m3.e4m3.bf16/s8192b1h32g8d128causal1";

std::string why(const auto& result) {
  return result ? "no error" : result.error().message;
}

TEST(Attention, HasAKeyThatRoundTrips) {
  const AttentionShape shape{.tokens = 8192, .heads_q = 32, .heads_kv = 8};
  const auto problem = attention_problem(Op::kAttention, AttentionRecipe::kFp8Forward, shape);
  ASSERT_TRUE(problem) << why(problem);
  EXPECT_EQ(problem->key(), kKey);
  const auto parsed = Problem::parse(kKey);
  ASSERT_TRUE(parsed) << why(parsed);
  EXPECT_EQ(*parsed, *problem);
  EXPECT_EQ(attention_shape(*parsed), shape);
  EXPECT_FALSE(is_gemm(problem->op));
  EXPECT_FALSE(is_grouped(problem->op));
  EXPECT_EQ(problem->groups(), Groups{});
}

TEST(Attention, HasTwoRecipes) {
  const AttentionShape shape{.tokens = 128, .heads_q = 4, .heads_kv = 2};
  for (const Op op : {Op::kAttention, Op::kAttentionForward, Op::kAttentionBackward}) {
    EXPECT_TRUE(is_attention(op));
    const auto problem = attention_problem(op, AttentionRecipe::kFp8, shape);
    ASSERT_TRUE(problem) << why(problem);
    EXPECT_EQ(problem->key(),
              f8::format("{}/fp8/e4m3.e4m3.bf16/s128b1h4g2d128causal1", to_string(op)));
    EXPECT_EQ(attention_recipe(Problem::parse(problem->key()).value()), AttentionRecipe::kFp8);
  }
  for (const AttentionRecipe recipe : kAttentionRecipes) {
    EXPECT_EQ(parse_attention_recipe(to_string(recipe)).value(), recipe);
  }
  for (const char* bad : {"", "bf16", "FP8", "fp8_backward", "rowwise"}) {
    const std::string reason = why(parse_attention_recipe(bad));
    for (const std::string_view name : kAttentionRecipeNames) {
      EXPECT_NE(reason.find(name), std::string::npos) << reason;
    }
  }
}

TEST(Attention, CountsWhatAMaskLeaves) {
  AttentionShape shape{.tokens = 256, .batch = 2, .heads_q = 4, .heads_kv = 2, .causal = false};
  const double product = 2.0 * 2 * 4 * 256 * 256 * 128;
  const auto problem = [&](Op op) {
    return attention_problem(op, AttentionRecipe::kFp8, shape).value();
  };
  const auto flops = [&](Op op) { return problem(op).flops(); };
  EXPECT_EQ(flops(Op::kAttention), 7 * product);
  EXPECT_EQ(flops(Op::kAttentionForward), 2 * product);
  EXPECT_EQ(flops(Op::kAttentionBackward), 2.5 * flops(Op::kAttentionForward));
  shape.causal = true;
  EXPECT_EQ(flops(Op::kAttention), 3.5 * product);
  EXPECT_EQ(flops(Op::kAttentionForward), product);
  const double forward = 2.0 * 2 * (4 + 4 + 2 + 2) / 2 * 2 * 256 * 128;  // q, o, k, v
  EXPECT_EQ(problem(Op::kAttentionForward).bytes(), forward);
  EXPECT_EQ(problem(Op::kAttentionBackward).bytes(), 2 * forward);
  EXPECT_EQ(problem(Op::kAttention).bytes(), 2 * forward);
}

TEST(Attention, BadKeysAreRefusedWithTheReason) {
  const struct {
    const char* key;
    const char* reason;
  } kCases[] = {
      {"attention/fp8_forward/e4m3.e4m3.bf16/s128b1h4g2d96causal1", "64, 128 and 256"},
      {"attention/fp8_forward/e4m3.e4m3.bf16/s128b1h4g3d128causal1", "a multiple"},
      {"attention/fp8_forward/e4m3.e4m3.bf16/s128b1h4g2d128causal2", "causal (the mask) is 2"},
      {"attention/fp8_forward/e4m3.e4m3.bf16/s0b1h4g2d128causal1", "s (tokens) is 0"},
      {"attention/fp8_forward/e4m3.e4m3.bf16/s-8b1h4g2d128causal1", "s is not a plain number"},
      {"attention/fp8_forward/e4m3.e4m3.bf16/s128b1h4g2d128", "no 'causal' where due"},
      {"attention/fp4/e4m3.e4m3.bf16/s128b1h4g2d128causal1", "fp8_forward and fp8"},
      {"attention_backward/fp8_forward/e4m3.e4m3.bf16/s128b1h4g2d128causal1", "is in bf16"},
      {"attention/fp8+fast/e4m3.e4m3.bf16/s128b1h4g2d128causal1", "newer float8"},
      {"attention/fp8_forward+fast/e4m3.e4m3.bf16/s128b1h4g2d128causal1", "newer float8"},
      {"attention/fp8_forward/e4m3.e4m3.f32/s128b1h4g2d128causal1", "newer float8"},
  };
  for (const auto& [key, reason] : kCases) {
    EXPECT_NE(why(Problem::parse(key)).find(reason), std::string::npos)
        << key << ": " << why(Problem::parse(key));
  }
  EXPECT_NE(why(Problem::make(Op::kAttention, *find_recipe("rowwise"), Dims{128, 1, 4, 2, 128, 1}))
                .find("fp8_forward and fp8"),
            std::string::npos);
}

TEST(Attention, ListsNameShapesAndMasks) {
  const auto shapes =
      parse_attention_shapes("s8192b1h32g8d128;s128b2h4g4d64;s8192b1h32g8d128").value();
  ASSERT_EQ(shapes.size(), 2u) << "a shape that is named twice counts once";
  EXPECT_EQ(
      shapes[1],
      (AttentionShape{.tokens = 128, .batch = 2, .heads_q = 4, .heads_kv = 4, .head_dim = 64}));
  for (const char* bad : {"", ";", "s128", "s128b1h4g2d128causal1", "s128b1h4g2d96",
                          "s128b1h4g3d64", "s-1b1h4g4d64", "128,4,4,64"}) {
    EXPECT_FALSE(parse_attention_shapes(bad)) << bad;
  }
  EXPECT_EQ(parse_attention_masks("causal,full").value(), (std::vector{true, false}));
  EXPECT_EQ(parse_attention_masks("full").value(), std::vector{false});
  for (const char* bad : {"", "causal,", "window1024", "Causal"}) {
    EXPECT_NE(why(parse_attention_masks(bad)).find("causal and full"), std::string::npos) << bad;
  }
}

}  // namespace
}  // namespace f8
