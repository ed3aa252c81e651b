// Groups of linears of one x: the bits of the linears one by one, with an x that is cast once.
#include "runtime/lists/linear_group.hpp"

#include <array>

#include "runtime/linear/quantizer.hpp"
#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {
namespace {

class GroupTest : public RecipeTest {
 protected:
  static constexpr size_t kLinears = 3;
  static constexpr std::array<int64_t, kLinears> kN = {208, 64, 80};
  static constexpr int64_t kMost = 320, kK = 592;

  struct Group {
    std::vector<std::shared_ptr<const Linear>> linears;
    std::shared_ptr<const LinearGroup> plan;
    std::shared_ptr<const Quantizer> x;
  };
  Group group(bool bias) {
    Group out;
    for (const int64_t n : kN) {
      LinearDesc desc = describe(GetParam(), {kMost, n, kK});
      desc.accumulate_grad_input = true;
      desc.bias_grad = bias;
      desc.bias_grad_dtype = Dtype::kF32;
      out.linears.push_back(plan(desc));
    }
    out.plan = LinearGroup::plan(context_, out.linears).value();
    QuantizerDesc of_x;
    of_x.rows = kMost;
    of_x.cols = kK;
    of_x.recipe = find_recipe(GetParam()).value();
    out.x = Quantizer::plan(context_, of_x).value();
    return out;
  }
  static GroupedLinearCall member(const Tensors& t, const DeviceBuffer& db,
                                  const float8_tensor* w_tensor) {
    GroupedLinearCall call;
    call.w.data = t.device_w.as();
    call.y.data = t.y.as();
    call.dy.data = t.device_dy.as();
    call.dw.data = t.dw.as();
    if (db.bytes() > 0) call.db.data = db.as();
    call.w.fp8 = w_tensor;
    call.scales = t.slots;
    return call;
  }

  void expect_the_same(int64_t m, bool give_w, bool bias) {
    SCOPED_TRACE(::testing::Message() << "m " << m << ", w " << give_w << ", bias " << bias);
    const Group of = group(bias);
    std::vector<std::unique_ptr<Tensors>> tensors;
    std::vector<std::unique_ptr<Fp8Weight>> weights;
    std::vector<std::unique_ptr<DeviceBuffer>> biases;
    for (size_t i = 0; i < kLinears; ++i) {
      const Linear& linear = *of.linears[i];
      Tensors& t = *tensors.emplace_back(std::make_unique<Tensors>(context(), linear, m, 20 + i));
      biases.push_back(
          std::make_unique<DeviceBuffer>(context(), bias ? static_cast<size_t>(kN[i]) * 4 : 0));
      weights.push_back(std::make_unique<Fp8Weight>(context_, linear.desc()));
      F8_ASSERT_OK(weights.back()->run(t));
    }
    const Tensors& first = *tensors.front();
    const auto given = [&](size_t i) { return give_w ? &weights[i]->w_tensor : nullptr; };
    DeviceBuffer dx(context(), static_cast<size_t>(m * kK) * 2);
    const auto results_of_all = [&] {
      Bits all = {dx.download<uint8_t>()};
      for (size_t i = 0; i < kLinears; ++i) {
        all.push_back(tensors[i]->y.download<uint8_t>());
        all.push_back(tensors[i]->dw.download<uint8_t>());
        all.push_back(biases[i]->download<uint8_t>());
        tensors[i]->expect_whole_guards();
        tensors[i]->poison_results();
        biases[i]->poison();
      }
      EXPECT_TRUE(dx.guards_are_whole());
      dx.poison();
      return all;
    };

    const DeviceBuffer tensor(context(), of.x->tensor_bytes());
    const DeviceBuffer scratch(context(), of.x->workspace_bytes());
    F8_ASSERT_OK(of.x->run({.rows = m,
                            .x = {first.device_x.as()},
                            .tensor = {tensor.as()},
                            .workspace = {scratch.as()},
                            .step = &kFirstOfSteps,
                            .scales = first.slots},
                           nullptr));
    const float8_tensor x = of.x->view(tensor.as(), nullptr, m).value();
    for (size_t i = 0; i < kLinears; ++i) {
      ForwardCall forward = tensors[i]->forward();
      forward.x.data = first.device_x.as();
      forward.x.fp8 = &x;
      forward.w.fp8 = given(i);
      F8_ASSERT_OK(of.linears[i]->forward(forward, nullptr));
      BackwardCall backward = tensors[i]->backward();
      backward.x.data = first.device_x.as();
      backward.x.fp8 = &x;
      backward.w.fp8 = given(i);
      backward.dx.data = dx.as();
      backward.dx.accumulate = i > 0 ? 1 : 0;
      if (bias) backward.db.data = biases[i]->as();
      F8_ASSERT_OK(of.linears[i]->backward(backward, nullptr));
    }
    const Bits one_by_one = results_of_all();

    const DeviceBuffer workspace(context(), of.plan->workspace_bytes());
    const DeviceBuffer saved(context(), of.plan->saved_bytes(give_w));
    std::array<GroupedLinearCall, kLinears> members;
    for (size_t i = 0; i < kLinears; ++i) members[i] = member(*tensors[i], *biases[i], given(i));
    LinearGroupCall call;
    call.x.data = first.device_x.as();
    call.saved.data = saved.as();
    call.dx.data = dx.as();
    call.m = m;
    call.linears = members.data();
    call.count = kLinears;
    call.step = &kFirstOfSteps;
    F8_ASSERT_OK(of.plan->forward(with_workspace(call, workspace.as()), nullptr));
    F8_ASSERT_OK(of.plan->backward(with_workspace(call, workspace.as()), nullptr));
    EXPECT_EQ(results_of_all(), one_by_one);
    EXPECT_TRUE(workspace.guards_are_whole());
    EXPECT_TRUE(saved.guards_are_whole());
  }
};
INSTANTIATE_TEST_SUITE_P(Recipes, GroupTest, ::testing::ValuesIn(kRecipes),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(GroupTest, HasTheBitsOfItsLinearsOneByOne) {
  for (const int64_t m : {int64_t{1}, int64_t{300}, kMost}) expect_the_same(m, false, false);
}

TEST_P(GroupTest, TakesWeightsInFp8) {
  expect_the_same(300, true, false);
}

TEST_P(GroupTest, FindsTheGradientsOfBiases) {
  expect_the_same(300, false, true);
}

}  // namespace
}  // namespace f8::runtime::gpu
