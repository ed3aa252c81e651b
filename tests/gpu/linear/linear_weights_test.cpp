// Weights that are cast once for several calls, one by one or those of a model at once.
#include <algorithm>
#include <memory>

#include "runtime/lists/quantizer_list.hpp"
#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {
namespace {

class LinearWeightsTest : public RecipeTest {};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearWeightsTest, ::testing::ValuesIn(kRecipes),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(LinearWeightsTest, AWeightInFp8GivesTheSame) {
  const auto linear = plan(describe(GetParam(), {300, 208, 592}));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, 300, 5);
  F8_ASSERT_OK(run(*linear, t));
  const Bits plain = results(t);
  const Fp8Weight weight(context_, linear->desc());
  F8_ASSERT_OK(weight.run(t));
  for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
    t.poison_results();
    ForwardCall forward = t.forward();
    forward.w.data = nullptr;
    forward.w.fp8 = &weight.w_tensor;
    F8_ASSERT_OK(linear->forward(forward, nullptr));
    BackwardCall backward = t.backward();
    backward.w.fp8 = &weight.w_tensor;
    F8_ASSERT_OK(linear->backward(backward, nullptr));
    EXPECT_EQ(results(t), plain);
  }
  EXPECT_TRUE(weight.tensor.guards_are_whole());
  t.expect_whole_guards();
}

TEST_P(LinearWeightsTest, WeightsOfAModelAtOnce) {
  std::vector<std::unique_ptr<Tensors>> tensors;
  std::vector<std::unique_ptr<Fp8Weight>> weights;
  std::vector<std::shared_ptr<const Quantizer>> quantizers;
  std::vector<QuantizeCall> calls;
  for (int64_t i = 0; i < 33; ++i) {
    const Shape shape{16, 16 * (1 + i * 7 % 30), 16 * (1 + i * 5 % 40)};
    const auto linear = plan(describe(GetParam(), shape));
    ASSERT_NE(linear, nullptr);
    tensors.push_back(std::make_unique<Tensors>(context(), *linear, 16, static_cast<uint64_t>(i)));
    weights.push_back(std::make_unique<Fp8Weight>(context_, linear->desc()));
    quantizers.push_back(weights.back()->quantizer);
    calls.push_back(weights.back()->call(*tensors.back()));
    calls.back().step = nullptr;  // the list's
  }
  const auto casts = QuantizerList::plan(context_, quantizers);
  F8_ASSERT_OK(casts);
  const DeviceBuffer workspace(context(), std::max<size_t>(casts->workspace_bytes(), 16));
  for (int round = 0; round < 3; ++round) {
    F8_ASSERT_OK(casts->run(listed(calls, workspace.as(), &kFirstOfSteps), nullptr));
  }
  EXPECT_TRUE(workspace.guards_are_whole());
  for (size_t i = 0; i < weights.size(); ++i) {
    Fp8Weight& weight = *weights[i];
    const auto together = weight.tensor.download<uint8_t>();
    EXPECT_TRUE(weight.tensor.guards_are_whole());
    weight.tensor.poison();
    F8_ASSERT_OK(weight.run(*tensors[i]));
    EXPECT_EQ(weight.tensor.download<uint8_t>(), together) << i;
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
