#include "tools/tuner/backend/weight_list.hpp"

#include <gtest/gtest.h>

namespace f8::tuner {
namespace {

std::vector<std::pair<int64_t, int64_t>> pairs(std::string_view text) {
  std::vector<std::pair<int64_t, int64_t>> sizes;
  const auto weights = parse_weight_list(text);
  EXPECT_TRUE(weights) << weights.error().message;
  if (!weights) return sizes;
  for (const runtime::MatrixSize& weight : *weights) sizes.emplace_back(weight.rows, weight.cols);
  return sizes;
}

std::string message(std::string_view text) {
  const auto weights = parse_weight_list(text);
  return weights ? std::string() : weights.error().message;
}

TEST(WeightList, KeepsTheOrderAndWhatStandsThereTwice) {
  using Pairs = std::vector<std::pair<int64_t, int64_t>>;
  EXPECT_EQ(pairs("64,32"), (Pairs{{64, 32}}));
  EXPECT_EQ(pairs("64,32;16,48*2;64,32"), (Pairs{{64, 32}, {16, 48}, {16, 48}, {64, 32}}));
  EXPECT_EQ(pairs("16,16*10000").size(), kMaxWeights);
}

TEST(WeightList, WhatIsNoneIsSaidWithTheWeight) {
  for (const char* text : {"", ";", "64", "64,32;", "64,32,16", "64x32", "*2"}) {
    EXPECT_NE(message(text).find("is not N,K"), std::string::npos) << text << ": " << message(text);
  }
  EXPECT_TRUE(message("a,32").starts_with("weight 'a,32': n is not a number"));
  EXPECT_TRUE(message("64,-32").starts_with("weight '64,-32': k is not a number"));
  EXPECT_TRUE(message("64,32 ").starts_with("weight '64,32 ': k is not a number"));
  EXPECT_TRUE(message("64,99999999999999999999").starts_with("weight"));
  EXPECT_TRUE(message("64,32;64,17").starts_with("weight '64,17': k (in_features) is 17"));
  EXPECT_TRUE(message("0,32").starts_with("weight '0,32': n (out_features) is 0"));
  for (const char* count : {"", "0", "-1", "1.5", "x", "10001", "99999999999999999999"}) {
    const std::string text = f8::format("16,16*{}", count);
    EXPECT_TRUE(message(text).starts_with(f8::format("weight '{}': a count is from 1", text)))
        << message(text);
  }
  EXPECT_NE(message("16,16*9999;16,16*2").find("up to 10000"), std::string::npos);
}

TEST(WeightList, BytesAreThoseOfTheRecipesPasses) {
  const auto bytes = [](const char* recipe) {
    return cast_bytes(find_recipe(recipe).value(), {{16, 32}, {64, 48}}).value();
  };
  constexpr double kElements = 16 * 32 + 64 * 48;
  EXPECT_EQ(bytes("tensorwise"), kElements * (2 + 2 + 1 + 1));
  EXPECT_EQ(bytes("rowwise"), kElements * (2 + 2 + 1 + 1));
  EXPECT_EQ(bytes("delayed"), kElements * (2 + 1 + 1));
  EXPECT_EQ(bytes("blockwise"), kElements * (2 + 1 + 1));
}

}  // namespace
}  // namespace f8::tuner
