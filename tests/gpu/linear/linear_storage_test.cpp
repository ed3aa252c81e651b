// The storage between a linear's calls, on the device: nothing in fp8 (recomputing), or nothing of
// the weight but its fp8 copies, cast from fp32 masters.
#include "runtime/linear/plan/kernels.hpp"
#include "tests/gpu/gemm_operands.hpp"
#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {
namespace {

class LinearStorageTest : public RecipeTest {};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearStorageTest, ::testing::ValuesIn(kRecipes),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(LinearStorageTest, RecomputingGivesTheSame) {
  for (const Shape shape :
       {Shape{300, 208, 592}, by_device<Shape>({2100, 1040, 1168}, {4200, 16, 48})}) {
    SCOPED_TRACE(f8::format("{} {}", GetParam(), to_string(shape)));
    LinearDesc desc = describe(GetParam(), shape);
    const auto keeps = Linear::plan(context_, desc);
    F8_ASSERT_OK(keeps);
    desc.recompute = true;
    const auto recomputes = Linear::plan(context_, desc);
    F8_ASSERT_OK(recomputes);
    EXPECT_LT((*recomputes)->saved_bytes(), 1024U) << "scales of whole tensors alone";
    Bits bits[2];
    for (const bool again : {false, true}) {
      const Linear& linear = again ? **recomputes : **keeps;
      Tensors t(context(), linear, shape.m - 3, 5);
      F8_ASSERT_OK(linear.forward(t.forward(), nullptr));
      F8_ASSERT_OK(driver().check(driver().ctx_synchronize(), "cuCtxSynchronize"));
      t.workspace.poison();
      F8_ASSERT_OK(linear.backward(t.backward(), nullptr));
      bits[again] = results(t);
      t.expect_whole_guards();
      if (!again) continue;
      // The weight's copies are given, which leaves the input's to be cast.
      const Fp8Weight weight(context_, linear.desc());
      F8_ASSERT_OK(weight.run(t));
      t.poison_results();
      ForwardCall forward = t.forward();
      forward.w.fp8 = &weight.w_tensor;
      F8_ASSERT_OK(linear.forward(forward, nullptr));
      BackwardCall backward = t.backward();
      backward.w.fp8 = &weight.w_tensor;
      F8_ASSERT_OK(linear.backward(backward, nullptr));
      EXPECT_EQ(results(t), bits[again]);
    }
    EXPECT_EQ(bits[1], bits[0]);
  }
}

TEST_P(LinearStorageTest, MasterWeightsAreCastAtOnce) {
  const Recipe recipe = find_recipe(GetParam()).value();
  for (const Shape shape :
       {Shape{300, 208, 592}, by_device<Shape>({2100, 1040, 1168}, {4200, 16, 48})}) {
    SCOPED_TRACE(f8::format("{} {}", GetParam(), to_string(shape)));
    const LinearDesc desc = describe(GetParam(), shape);
    const auto linear = Linear::plan(context_, desc);
    F8_ASSERT_OK(linear);
    Tensors expected(context(), **linear, shape.m, 5);
    F8_ASSERT_OK((*linear)->forward(expected.forward(), nullptr));
    F8_ASSERT_OK((*linear)->backward(expected.backward(), nullptr));

    Tensors t(context(), **linear, shape.m, 5);
    const DeviceBuffer master(context(), reference::to_bytes(t.w, Dtype::kF32));
    QuantizerDesc of_master = weight_of(desc);
    of_master.dtype = Dtype::kF32;
    const Fp8Weight weight(context_, of_master);
    F8_ASSERT_OK(weight.run(master, shape.n, t.slots));
    ForwardCall forward = t.forward();
    forward.w.fp8 = &weight.w_tensor;
    if (recipe.at(Gemm::kOutput).is_fp8()) forward.w.data = nullptr;
    F8_ASSERT_OK((*linear)->forward(forward, nullptr));
    BackwardCall backward = t.backward();
    backward.w.fp8 = &weight.w_tensor;
    if (recipe.at(Gemm::kGradInput).is_fp8()) backward.w.data = nullptr;
    F8_ASSERT_OK((*linear)->backward(backward, nullptr));
    EXPECT_EQ(results(t), results(expected)) << "the masters are bf16, so the bits are the same";
    EXPECT_TRUE(weight.tensor.guards_are_whole());
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
