// A backward that is given dy in fp8.
#include <algorithm>

#include "tests/gpu/linear/given_fixture.hpp"

namespace f8::runtime::gpu {
namespace {

class GradOutputTest : public TensorTest {};
INSTANTIATE_TEST_SUITE_P(Recipes, GradOutputTest, ::testing::ValuesIn(kRecipes),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(GradOutputTest, AGivenGradOutputGivesTheSame) {
  LinearDesc desc = describe(GetParam(), kShape);
  expect_the_same(desc, false, false, true);
  expect_the_same(desc, true, true, true);
  desc.bias_grad = true;
  expect_the_same(desc, false, false, true);
  desc.bias_grad = false;
  desc.recompute = true;
  expect_the_same(desc, true, true, true);
  expect_the_same(desc, true, false, true);  // w is cast again
  desc.bias_grad = true;
  expect_the_same(desc, true, false, true);
}

// Each gradient reads its own copy of dy, adds where it is asked to, and is 0 of an empty batch.
TEST_P(GradOutputTest, AGivenGradOutputOfOneGradient) {
  LinearDesc desc = describe(GetParam(), kShape);
  desc.accumulate_grad_input = desc.accumulate_grad_weight = true;
  const auto linear = plan(desc);
  ASSERT_NE(linear, nullptr);
  Tensors t(context(), *linear, kRows, 17);
  const auto dy = quantized(Tensor::kGradOutput);
  ASSERT_NE(dy, nullptr);
  F8_ASSERT_OK(linear->forward(t.forward(), nullptr));
  F8_ASSERT_OK(dy->run(t.device_dy, kRows, t.slots));
  const float8_tensor whole = dy->view(kRows);
  for (const bool add : {false, true}) {
    for (const bool dx : {true, false}) {
      SCOPED_TRACE(::testing::Message() << "dx " << dx << ", add " << add);
      const auto run_with = [&](const float8_tensor* tensor) {
        t.poison_results();
        BackwardCall backward = t.backward();
        (dx ? backward.dw : backward.dx) = {};
        // The first call leaves what the second one adds to.
        EXPECT_TRUE(linear->backward(backward, nullptr));
        backward.dw.accumulate = dx || !add ? 0 : 1;
        backward.dx.accumulate = dx && add ? 1 : 0;
        backward.dy.fp8 = tensor;
        const Status done = linear->backward(backward, nullptr);
        EXPECT_TRUE(done) << (done ? "" : done.error().message);
        return results(t);
      };
      float8_tensor half = whole;
      (dx ? half.qt : half.q) = nullptr;
      EXPECT_EQ(run_with(&half), run_with(nullptr));
    }
  }
  BackwardCall empty = t.backward();
  const float8_tensor none = dy->view(0);
  empty.m = 0;
  empty.saved.data = nullptr;
  empty.dy.fp8 = &none;
  t.poison_results();
  F8_ASSERT_OK(linear->backward(with_workspace(empty, t.workspace.as()), nullptr));
  const auto zeros = t.dw.download<uint8_t>();
  EXPECT_TRUE(std::ranges::all_of(zeros, [](uint8_t byte) { return byte == 0; }));
}

TEST_P(GradOutputTest, AGradOutputThatDoesNotFitIsNamed) {
  LinearDesc desc = describe(GetParam(), kShape);
  desc.bias_grad = true;
  const auto linear = plan(desc);
  desc.recompute = true;
  const auto recomputes = plan(desc);
  ASSERT_TRUE(linear && recomputes);
  const Tensors t(context(), *linear, kRows, 19);
  const auto dy = quantized(Tensor::kGradOutput);
  ASSERT_NE(dy, nullptr);
  const float8_tensor good = dy->view(kRows);
  const auto refused = [&](const Linear& by, const float8_tensor& view, std::string_view words,
                           auto change) {
    BackwardCall backward = t.backward();
    backward.dy.fp8 = &view;
    change(backward);
    const Status status = by.backward(backward, nullptr);
    ASSERT_FALSE(status) << words;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(status.error().message.find(words), std::string::npos) << status.error().message;
  };
  const auto as_it_is = [](BackwardCall&) {};
  refused(*linear, dy->view(kRows - 1), "dy.fp8 is a tensor of 299 x 208", as_it_is);
  float8_tensor view = good;
  view.q = nullptr;
  refused(*linear, view, "dy.fp8.q is NULL", as_it_is);
  view = good;
  view.q_setting.format ^= 1;
  refused(*linear, view, "dy.fp8.q_setting is", as_it_is);
  view = good;
  view.q = t.dx.as();
  refused(*linear, view, "overlap", as_it_is);
  const DeviceBuffer db(context(), static_cast<size_t>(kShape.n) * 2);
  refused(*linear, good, "dy.data is NULL; beside dy.fp8", [&](BackwardCall& c) {
    c.dy.data = nullptr;
    c.db.data = db.as();
  });
  if (desc.recipe.at(Gemm::kGradWeight).is_fp8()) {
    refused(*recomputes, good, "give x in fp8 too", as_it_is);
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
