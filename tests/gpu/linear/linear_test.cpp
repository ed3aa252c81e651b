// The linear on the device: forward and backward under each recipe against the reference, and the
// same bits every time.
#include <algorithm>
#include <cmath>
#include <limits>

#include "tests/gpu/gemm_operands.hpp"
#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {
namespace {

class LinearTest : public RecipeTest {
 protected:
  static void expect_like_reference(const Linear& linear, const Tensors& t) {
    const Recipe& recipe = linear.desc().recipe;
    const auto expected = reference::linear(recipe, t.x, t.w, t.dy).value();
    const auto bound = [&](Gemm g) { return recipe.at(g).fast ? kFastBound : kPreciseBound; };
    const auto dw = result(t.dw, linear.desc().grad_weight_dtype);
    EXPECT_LE(reference::relative_error(expected.y, t.y.bf16()), bound(Gemm::kOutput));
    EXPECT_LE(reference::relative_error(expected.dx, t.dx.bf16()), bound(Gemm::kGradInput));
    EXPECT_LE(reference::relative_error(expected.dw, dw), bound(Gemm::kGradWeight));
    t.expect_whole_guards();
  }
};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearTest, ::testing::ValuesIn(kRecipes),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(LinearTest, LikeTheReference) {
  struct Case {
    Shape shape;
    int64_t m;
  };
  for (const auto& [shape, m] : {Case{{300, 208, 592}, 300},       // whole plan
                                 Case{{300, 208, 592}, 17},        // fewer rows than planned
                                 Case{{300, 208, 592}, 1},         //
                                 Case{{1, 16, 16}, 1},             // smallest
                                 Case{{1000, 2064, 48}, 1000},     // wide
                                 Case{{1000, 48, 2064}, 999},      // narrow
                                 Case{{4095, 128, 144}, 4095}}) {  // a long K for dw
    const uint64_t seed = static_cast<uint64_t>(shape.m + m);
    SCOPED_TRACE(
        f8::format("linear/{} {} called with m={} seed {}", GetParam(), to_string(shape), m, seed));
    const auto linear = plan(describe(GetParam(), shape));
    ASSERT_NE(linear, nullptr);
    Tensors t(context(), *linear, m, seed);
    F8_ASSERT_OK(linear->forward(t.forward(), nullptr));
    F8_ASSERT_OK(driver().check(driver().ctx_synchronize(), "cuCtxSynchronize"));
    t.workspace.poison();  // scratch: nothing of it may survive a call
    F8_ASSERT_OK(linear->backward(t.backward(), nullptr));
    expect_like_reference(*linear, t);
    if (HasFailure()) return;
  }
}

TEST_P(LinearTest, Fp32WeightGradient) {
  LinearDesc desc = describe(GetParam(), {300, 208, 592});
  desc.grad_weight_dtype = Dtype::kF32;
  const auto linear = plan(desc);
  ASSERT_NE(linear, nullptr);
  const Tensors t(context(), *linear, 300, 5);
  F8_ASSERT_OK(run(*linear, t));
  expect_like_reference(*linear, t);
}

TEST_P(LinearTest, OneGradientAlone) {
  const auto linear = plan(describe(GetParam(), {300, 208, 592}));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, 300, 5);
  F8_ASSERT_OK(run(*linear, t));
  const Bits both = results(t);
  t.poison_results();
  F8_ASSERT_OK(linear->forward(t.forward(), nullptr));
  BackwardCall call = t.backward();
  call.dw.data = nullptr;
  F8_ASSERT_OK(linear->backward(call, nullptr));
  EXPECT_EQ(t.dx.download<uint8_t>(), both[1]);
  EXPECT_TRUE(
      std::ranges::all_of(t.dw.download<uint8_t>(), [](uint8_t b) { return b == kPoison; }));
  t.dx.poison();
  call = t.backward();
  call.dx.data = nullptr;
  F8_ASSERT_OK(linear->backward(call, nullptr));
  EXPECT_EQ(t.dw.download<uint8_t>(), both[2]);
  EXPECT_TRUE(
      std::ranges::all_of(t.dx.download<uint8_t>(), [](uint8_t b) { return b == kPoison; }));
}

TEST_P(LinearTest, AForwardWithoutBackwardGivesTheSame) {
  const auto linear = plan(describe(GetParam(), {300, 208, 592}));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, 300, 5);
  F8_ASSERT_OK(linear->forward(t.forward(), nullptr));
  const auto y = t.y.download<uint8_t>();
  t.poison_results();
  ForwardCall call = t.forward();
  call.saved.data = nullptr;
  F8_ASSERT_OK(linear->forward(call, nullptr));
  EXPECT_EQ(t.y.download<uint8_t>(), y);
}

TEST_P(LinearTest, AnEmptyBatch) {
  const auto linear = plan(describe(GetParam(), {64, 48, 80}));
  ASSERT_NE(linear, nullptr);
  const Tensors t(context(), *linear, 64, 5);
  F8_ASSERT_OK(linear->forward({.m = 0}, nullptr));
  F8_ASSERT_OK(linear->backward({.m = 0, .dw = {t.dw.as()}}, nullptr));
  EXPECT_TRUE(std::ranges::all_of(t.dw.download<uint8_t>(), [](uint8_t b) { return b == 0; }));
  EXPECT_TRUE(t.dw.guards_are_whole());
}

// Back to back, without a pause in which an early start of the next kernel could hide.
TEST_P(LinearTest, SameBitsEveryTime) {
  const auto shape = by_device<Shape>({2048, 1024, 1024}, {256, 144, 128});
  const auto linear = plan(describe(GetParam(), shape));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, shape.m, 5);
  F8_ASSERT_OK(run(*linear, t));
  const Bits first = results(t);
  t.poison_results();
  for (int i = 0; i < repeats(20); ++i) F8_ASSERT_OK(run(*linear, t));
  EXPECT_EQ(results(t), first);
}

TEST_P(LinearTest, StepsAreTheSameWork) {
  const auto linear = plan(describe(GetParam(), {300, 208, 592}));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, 300, 5);
  F8_ASSERT_OK(run(*linear, t));
  const Bits whole = results(t);
  t.poison_results();
  for (const auto& step : linear->forward_steps(t.forward())) {
    F8_ASSERT_OK(step.launch(nullptr));
  }
  for (const auto& step : linear->backward_steps(t.backward())) {
    F8_ASSERT_OK(step.launch(nullptr));
  }
  EXPECT_EQ(results(t), whole);
}

// cuBLASLt does not mix a tensor's and rows' scales, and pads blocks otherwise, so the other recipes
// are not here.
class LinearByCublasLtTest : public LinearTest {};
INSTANTIATE_TEST_SUITE_P(Recipes, LinearByCublasLtTest,
                         ::testing::Values("tensorwise", "rowwise", "delayed"),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(LinearByCublasLtTest, IsLikeTheReference) {
  if (const auto version = cublaslt_version(); !kEmulated && !version) {
    GTEST_SKIP() << version.error().message;
  }
  LinearDesc desc = describe(GetParam(), {300, 208, 592});
  for (auto& choice : desc.choices)
    choice = GemmChoice{parse_gemm_kernel(Provider::kCublasLt, "h0").value()};
  const auto linear = plan(desc);
  ASSERT_NE(linear, nullptr);
  for (const int64_t m : {300, 17}) {
    SCOPED_TRACE(m);
    const Tensors t(context(), *linear, m, 5);
    F8_ASSERT_OK(run(*linear, t));
    expect_like_reference(*linear, t);
  }
}

TEST_P(LinearTest, NanInTheInputReachesTheOutput) {
  const auto linear = plan(describe(GetParam(), {300, 208, 592}));
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, 300, 5);
  t.x.values[17 * 592 + 3] = std::numeric_limits<float>::quiet_NaN();
  const auto bits = reference::to_bf16_bits(t.x);
  t.device_x.upload(bits.data(), bits.size() * 2);
  F8_ASSERT_OK(run(*linear, t));
  const auto y = t.y.bf16();
  const GemmSetting& output = linear->desc().recipe.at(Gemm::kOutput);
  const bool all = output.a.granularity == Granularity::kTensor;
  for (size_t i = 0; i < y.size(); ++i) ASSERT_EQ(std::isnan(y[i]), all || i / 208 == 17) << i;
}

TEST_P(LinearTest, BiasAndAccumulation) {
  for (const Dtype type : {Dtype::kBf16, Dtype::kF32}) {
    LinearDesc desc = describe(GetParam(), {300, 208, 592});
    desc.grad_weight_dtype = type;
    desc.bias = true;
    desc.accumulate_grad_weight = true;
    const auto linear = plan(desc);
    ASSERT_NE(linear, nullptr);
    const Tensors t(context(), *linear, 300, 5);
    F8_ASSERT_OK(run(*linear, t));
    auto expected = reference::linear(desc.recipe, t.x, t.w, t.dy).value();
    for (size_t i = 0; i < expected.y.size(); ++i) {
      expected.y[i] += static_cast<double>(t.bias.values[i % 208]);
    }
    EXPECT_LE(reference::relative_error(expected.y, t.y.bf16()), kFastBound);
    BackwardCall again = t.backward();
    again.dw.accumulate = true;
    F8_ASSERT_OK(linear->backward(again, nullptr));
    for (double& v : expected.dw) v *= 2;
    EXPECT_LE(reference::relative_error(expected.dw, result(t.dw, type)), 2 * kPreciseBound);
    t.expect_whole_guards();
  }
}

TEST_P(LinearTest, MisuseLeavesTheDeviceUsable) {
  const auto linear = plan(describe(GetParam(), {64, 48, 80}));
  ASSERT_NE(linear, nullptr);
  const Tensors t(context(), *linear, 64, 5);
  ForwardCall call = t.forward();
  call.x.data = nullptr;
  EXPECT_EQ(linear->forward(call, nullptr).error().code, ErrorCode::kInvalidArgument);
  call = t.forward();
  call.m = 65;
  EXPECT_EQ(linear->forward(call, nullptr).error().code, ErrorCode::kInvalidArgument);
  call = t.forward();
  call.y.data = t.y.as<uint8_t>() + 2;
  EXPECT_EQ(linear->forward(call, nullptr).error().code, ErrorCode::kInvalidArgument);
  EXPECT_EQ(linear->forward(with_workspace(t.forward(), nullptr), nullptr).error().code,
            ErrorCode::kInvalidArgument);
  F8_ASSERT_OK(run(*linear, t));
}

}  // namespace
}  // namespace f8::runtime::gpu
