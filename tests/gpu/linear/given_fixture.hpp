// Tests of linears that are given tensors in fp8: quantizers with their buffers, and calls with and
// without such tensors.
#pragma once

#include <memory>

#include "tests/gpu/linear_tensors.hpp"

namespace f8::runtime::gpu {

class TensorTest : public RecipeTest {
 protected:
  static constexpr int64_t kRows = 300;
  static constexpr Shape kShape{320, 208, 592};  // m is more than the rows

  std::unique_ptr<Quantized> quantized(Tensor operand, bool transposed = true,
                                       Shape shape = kShape) {
    QuantizerDesc desc;
    desc.operand = operand;
    desc.rows = operand == Tensor::kWeight ? shape.n : shape.m;
    desc.cols = operand == Tensor::kGradOutput ? shape.n : shape.k;
    desc.recipe = find_recipe(GetParam()).value();
    desc.qt = transposed;
    auto quantizer = Quantizer::plan(context_, desc);
    EXPECT_TRUE(quantizer) << (quantizer ? "" : quantizer.error().message);
    return quantizer ? std::make_unique<Quantized>(context(), *quantizer) : nullptr;
  }

  // Calls whose operands are given in fp8 give the bits of calls that cast them. dy itself is given
  // where something reads it.
  void expect_the_same(const LinearDesc& desc, bool give_x, bool give_w, bool give_dy = false) {
    SCOPED_TRACE(::testing::Message() << "x " << give_x << ", w " << give_w << ", dy " << give_dy);
    const auto linear = plan(desc);
    ASSERT_NE(linear, nullptr);
    Tensors t(context(), *linear, kRows, 5);
    F8_ASSERT_OK(run(*linear, t));
    const Bits plain = results(t);
    DeviceBuffer db(context(), static_cast<size_t>(kShape.n) * 2);
    const auto bias_gradient = [&](BackwardCall backward) {
      db.poison();
      if (desc.bias_grad) backward.db.data = db.as();
      const Status done = linear->backward(backward, nullptr);
      EXPECT_TRUE(done) << (done ? "" : done.error().message);
      return db.download<uint16_t>();
    };
    const auto plain_db = bias_gradient(t.backward());
    const auto x = quantized(Tensor::kInput);
    const auto w = quantized(Tensor::kWeight);
    ASSERT_TRUE(x && w);
    F8_ASSERT_OK(x->run(t.device_x, kRows, t.slots));
    F8_ASSERT_OK(w->run(t.device_w, kShape.n, t.slots));
    const float8_tensor x_tensor = x->view(kRows);
    const float8_tensor w_tensor = w->view(kShape.n);
    t.poison_results();
    const DeviceBuffer saved(context(), linear->saved_bytes(give_w, give_x));

    ForwardCall forward = t.forward();
    forward.saved.data = saved.as();
    if (give_x) forward.x.fp8 = &x_tensor;
    if (give_w) forward.w.fp8 = &w_tensor;
    // They need room for what they cast alone.
    DeviceBuffer forward_workspace(context(), linear->workspace_bytes(forward));
    forward_workspace.poison();
    forward.workspace.data = forward_workspace.as();
    F8_ASSERT_OK(linear->forward(forward, nullptr));
    BackwardCall backward = t.backward();
    backward.saved.data = saved.as();
    backward.x.fp8 = forward.x.fp8;
    backward.w.fp8 = forward.w.fp8;
    const auto dy = quantized(Tensor::kGradOutput);
    ASSERT_NE(dy, nullptr);
    F8_ASSERT_OK(dy->run(t.device_dy, kRows, t.slots));
    const float8_tensor dy_tensor = dy->view(kRows);
    if (give_dy) {
      const bool all_fp8 =
          desc.recipe.at(Gemm::kGradInput).is_fp8() && desc.recipe.at(Gemm::kGradWeight).is_fp8();
      backward.dy.fp8 = &dy_tensor;
      if (all_fp8 && !desc.bias_grad) backward.dy.data = nullptr;
    }
    DeviceBuffer backward_workspace(context(), linear->workspace_bytes(backward));
    backward_workspace.poison();
    backward.workspace.data = backward_workspace.as();
    EXPECT_EQ(bias_gradient(backward), plain_db);
    EXPECT_EQ(results(t), plain);
    EXPECT_TRUE(dy->tensor.guards_are_whole());
    EXPECT_TRUE(saved.guards_are_whole());
    EXPECT_TRUE(forward_workspace.guards_are_whole() && backward_workspace.guards_are_whole());
    EXPECT_TRUE(x->tensor.guards_are_whole());
    EXPECT_TRUE(x->workspace.guards_are_whole());
    t.expect_whole_guards();
  }
};

}  // namespace f8::runtime::gpu
