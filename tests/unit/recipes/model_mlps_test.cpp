// Which linears of a model are an MLP.
#include "recipes/model/model_mlps.hpp"

#include <gtest/gtest.h>

namespace f8 {
namespace {

using Layers = std::vector<NamedLinear>;
using Indices = std::vector<size_t>;

TEST(ModelMlps, AreFoundByModulesAndSizes) {
  const Layers layers = {
      {"layers.0.attention.wq", 64, 64},     {"layers.0.attention.wk", 64, 64},
      {"layers.0.attention.wv", 64, 64},     {"layers.0.attention.wo", 64, 64},
      {"layers.0.feed_forward.w1", 64, 192}, {"layers.0.feed_forward.w2", 192, 64},
      {"layers.0.feed_forward.w3", 64, 192}, {"layers.1.mlp.fc1", 64, 128},
      {"layers.1.mlp.fc2", 128, 64},         {"output", 64, 1024}};
  const std::vector<ModelMlp> mlps = mlps_of(layers);
  ASSERT_EQ(mlps.size(), 2U);
  EXPECT_EQ(mlps[0].linears, (Indices{4, 6, 5})) << "down is last, whatever the names' order";
  EXPECT_TRUE(mlps[0].gate);
  EXPECT_EQ(mlps[0].features, 64);
  EXPECT_EQ(mlps[0].hidden, 192);
  EXPECT_EQ(mlps[1].linears, (Indices{7, 8}));
  EXPECT_FALSE(mlps[1].gate);
}

TEST(ModelMlps, OfEqualSizesAreThoseOfKnownNames) {
  const auto three = [](const char* first, const char* second, const char* third) {
    Layers layers;
    for (const char* name : {first, second, third}) layers.push_back({name, 64, 64});
    return mlps_of(layers).size();
  };
  EXPECT_EQ(three("a.mlp.gate_proj", "a.mlp.up_proj", "a.mlp.down_proj"), 1U);
  EXPECT_EQ(three("a.attention.q_proj", "a.attention.k_proj", "a.attention.v_proj"), 0U);
  EXPECT_EQ(mlps_of(Layers{{"a.mlp.fc1", 64, 64}, {"a.mlp.fc2", 64, 64}}).size(), 1U);
  EXPECT_EQ(mlps_of(Layers{{"a.attention.wq", 64, 64}, {"a.attention.wo", 64, 64}}).size(), 0U);
}

TEST(ModelMlps, OneLinearMayMakeGateAndUp) {
  for (const char* name : {"a.mlp.gate_up_proj", "a.mlp.Wi"}) {
    const auto mlps = mlps_of(Layers{{name, 64, 512}, {"a.mlp.down", 256, 64}});
    ASSERT_EQ(mlps.size(), 1U) << name;
    EXPECT_EQ(mlps[0].linears, (Indices{0, 1}));
    EXPECT_TRUE(mlps[0].gate);
    EXPECT_EQ(mlps[0].features, 64);
    EXPECT_EQ(mlps[0].hidden, 256);
  }
  EXPECT_TRUE(mlps_of(Layers{{"a.qkv_proj", 256, 512}, {"a.o_proj", 256, 256}}).empty())
      << "it may be an attention with half as many heads of keys";
}

TEST(ModelMlps, OthersAreNone) {
  const auto count = [](const Layers& layers) { return mlps_of(layers).size(); };
  EXPECT_EQ(count({}), 0U);
  EXPECT_EQ(count({{"w1", 64, 192}, {"w2", 192, 64}}), 0U) << "they are in no module";
  EXPECT_EQ(count({{"a.gate_up_proj", 64, 384}, {"a.down_proj", 192, 64}}), 0U);
  EXPECT_EQ(count({{"a.qkv", 64, 192}, {"a.proj", 64, 64}}), 0U);
  EXPECT_EQ(count({{"a.w1", 64, 192, 8, 0.25}, {"a.w2", 192, 64, 8, 1}}), 0U);
  NamedLinear experts{"a.experts", 64, 192};
  experts.groups = {.experts = 8};
  EXPECT_EQ(count({experts, {"a.w2", 192, 64}}), 0U);
  EXPECT_EQ(count({{"a.w0", 64, 8}, {"a.w1", 64, 192}, {"a.w3", 64, 192}, {"a.w2", 192, 64}}), 0U);
}

}  // namespace
}  // namespace f8
