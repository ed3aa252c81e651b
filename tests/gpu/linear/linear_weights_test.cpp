// Weights that are cast once for several calls, one by one or those of a model at once.
#include <algorithm>
#include <memory>

#include "runtime/lists/weight_casts.hpp"
#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {
namespace {

class LinearWeightsTest : public RecipeTest {};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearWeightsTest, ::testing::ValuesIn(kRecipes),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(LinearWeightsTest, AWeightCacheGivesTheSame) {
  const auto linear = plan(describe(GetParam(), {300, 208, 592}));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, 300, 5);
  F8_ASSERT_OK(run(*linear, t));
  const Bits plain = results(t);
  const DeviceBuffer cache(context(), linear->weight_cache_bytes());
  const WeightCall weight{
      .w = t.device_w.as(), .cache = cache.as(), .scales = t.slots, .first_step = t.first_step};
  F8_ASSERT_OK(linear->cast_weight(weight, t.workspace.as(), nullptr));
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    t.poison_results();
    ForwardCall forward = t.forward();
    forward.w = nullptr;
    forward.weight_cache = cache.as();
    F8_ASSERT_OK(linear->forward(forward, t.workspace.as(), nullptr));
    BackwardCall backward = t.backward();
    backward.weight_cache = cache.as();
    F8_ASSERT_OK(linear->backward(backward, t.workspace.as(), nullptr));
    EXPECT_EQ(results(t), plain);
  }
  EXPECT_TRUE(cache.guards_are_whole());
  t.expect_whole_guards();
}

TEST_P(LinearWeightsTest, WeightsOfAModelAtOnce) {
  std::vector<std::shared_ptr<const Linear>> linears;
  std::vector<std::unique_ptr<Tensors>> tensors;
  std::vector<std::unique_ptr<DeviceBuffer>> caches;
  std::vector<WeightCall> calls;
  for (int64_t i = 0; i < 33; ++i) {
    const Shape shape{16, 16 * (1 + i * 7 % 30), 16 * (1 + i * 5 % 40)};
    linears.push_back(plan(describe(GetParam(), shape)));
    ASSERT_NE(linears.back(), nullptr);
    tensors.push_back(
        std::make_unique<Tensors>(context(), *linears.back(), 16, static_cast<uint64_t>(i)));
    caches.push_back(
        std::make_unique<DeviceBuffer>(context(), linears.back()->weight_cache_bytes()));
    const Tensors& t = *tensors.back();
    calls.push_back({.w = t.device_w.as(),
                     .cache = caches.back()->as(),
                     .scales = t.slots,
                     .first_step = t.first_step});
  }
  const auto casts = WeightCasts::plan(context_, linears);
  F8_ASSERT_OK(casts);
  const DeviceBuffer workspace(context(), std::max<size_t>(casts->workspace_bytes(), 16));
  for (int round = 0; round < 3; ++round) {
    F8_ASSERT_OK(casts->run(calls, workspace.as(), nullptr));
  }
  EXPECT_TRUE(workspace.guards_are_whole());
  for (size_t i = 0; i < linears.size(); ++i) {
    const auto together = caches[i]->download<uint8_t>();
    EXPECT_TRUE(caches[i]->guards_are_whole());
    caches[i]->poison();
    F8_ASSERT_OK(linears[i]->cast_weight(calls[i], tensors[i]->workspace.as(), nullptr));
    EXPECT_EQ(caches[i]->download<uint8_t>(), together) << to_string(linears[i]->desc().shape);
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
