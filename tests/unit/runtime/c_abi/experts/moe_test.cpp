// The MLP of experts through the public header: its results are those of two expert linears, bit for bit, and
// what it refuses.
#include "tests/unit/runtime/c_abi/experts/moe_fixture.hpp"

namespace {

using namespace float8::testing;

class MoeStep : public MoeAbi {
 protected:
  void expect_a_step_of_two_linears();
};
INSTANTIATE_TEST_SUITE_P(Cases, MoeStep, kMoeCases, ::testing::PrintToStringParamName());

// With delayed scaling a second step has the scales of the first one's amaxes, which are the same.
TEST_P(MoeStep, IsTwoExpertLinears) {
  ASSERT_NO_FATAL_FAILURE(plan());
  step_.first_step = 1;
  ASSERT_NO_FATAL_FAILURE(expect_a_step_of_two_linears());
  if (!is_delayed()) return;
  for (const State* state : {&scales_of_moe_, &scales_of_linears_}) {
    ASSERT_EQ(float8_scales_sync(state->scales, state->memory.get(), nullptr, nullptr), FLOAT8_OK);
  }
  EXPECT_EQ(std::memcmp(scales_of_moe_.memory.get(), scales_of_linears_.memory.get(),
                        scales_of_moe_.bytes),
            0);
  step_.first_step = 0;
  ASSERT_NO_FATAL_FAILURE(expect_a_step_of_two_linears());
}

void MoeStep::expect_a_step_of_two_linears() {
  const Step expected = by_experts();
  const Step got{memory(kRouted * kDim * 2), memory(kRouted * kDim * 2),
                 memory(kRowsOfW13 * kDim * 2), memory(kRowsOfW2 * kHidden * 2)};
  float8_moe_forward_args forward = forward_args(got.y);
  poison();
  ASSERT_EQ(float8_moe_forward(moe_, &forward, nullptr), FLOAT8_OK) << float8_last_error();
  expect_same(got.y, expected.y, kUsed * kDim, "y");
  poison();
  const float8_moe_backward_args backward = backward_args(got.dx, got.dw13, got.dw2);
  ASSERT_EQ(float8_moe_backward(moe_, &backward, nullptr), FLOAT8_OK) << float8_last_error();
  expect_same(got.dx, expected.dx, kUsed * kDim, "dx");
  expect_same(joined(got.dw13), expected.dw13, kRowsOfW13 * kDim, "dw13");
  expect_same(got.dw2, expected.dw2, kRowsOfW2 * kHidden, "dw2");
  // Each gradient alone, and a forward without a backward.
  const Step alone{memory(kRouted * kDim * 2), memory(kRouted * kDim * 2),
                   memory(kRowsOfW13 * kDim * 2), memory(kRowsOfW2 * kHidden * 2)};
  for (int wanted = 0; wanted < 4; ++wanted) {
    float8_moe_backward_args one = backward_args(alone.dx, alone.dw13, alone.dw2);
    if (wanted != 0) one.dx = {};
    if (wanted != 1) one.dw13 = {};
    if (wanted != 2) one.dw2 = {};
    if (wanted != 3) one.dw3 = {};
    poison();
    ASSERT_EQ(float8_moe_backward(moe_, &one, nullptr), FLOAT8_OK) << float8_last_error();
  }
  forward.saved = {};
  forward.y = {alone.y.get()};
  poison();
  ASSERT_EQ(float8_moe_forward(moe_, &forward, nullptr), FLOAT8_OK) << float8_last_error();
  expect_same(alone.y, expected.y, kUsed * kDim, "y alone");
  expect_same(alone.dx, expected.dx, kUsed * kDim, "dx alone");
  expect_same(joined(alone.dw13), expected.dw13, kRowsOfW13 * kDim, "dw13 alone");
  expect_same(alone.dw2, expected.dw2, kRowsOfW2 * kHidden, "dw2 alone");
}

// A frozen w13, w2 or both leave the other results as they are; backward then reads no x, and there is nothing of
// silu(gate) up between the calls.
TEST_P(MoeStep, LeavesOutTheGradientsOfFrozenWeights) {
  ASSERT_NO_FATAL_FAILURE(plan());
  step_.first_step = 1;
  const Step expected = by_experts();
  const size_t of_w2 = float8_moe_buffer_bytes(moe_, FLOAT8_MOE_SAVED_OF_W2);
  const size_t scratch = float8_moe_workspace_bytes(moe_);
  for (const auto& [w13, w2] : {std::pair(true, false), {false, true}, {true, true}}) {
    float8_moe_destroy(moe_);
    float8_moe_desc of = desc();
    of.no_grad_w13 = w13 ? 1 : 0;
    of.no_grad_w2 = w2 ? 1 : 0;
    ASSERT_EQ(float8_moe_plan(context_.get(), &of, &moe_), FLOAT8_OK) << float8_last_error();
    EXPECT_EQ(float8_moe_buffer_bytes(moe_, FLOAT8_MOE_GATE_UP_GRAD_QT) == 0, w13);
    const size_t copy = w2 ? kRouted * kHidden : 0;
    EXPECT_LE(float8_moe_buffer_bytes(moe_, FLOAT8_MOE_SAVED_OF_W2) + copy, of_w2);
    EXPECT_LE(float8_moe_workspace_bytes(moe_), scratch);
    const Step got{memory(kRouted * kDim * 2), memory(kRouted * kDim * 2),
                   memory(kRowsOfW13 * kDim * 2), memory(kRowsOfW2 * kHidden * 2)};
    const float8_moe_forward_args forward = forward_args(got.y);
    poison();
    ASSERT_EQ(float8_moe_forward(moe_, &forward, nullptr), FLOAT8_OK) << float8_last_error();
    float8_moe_backward_args backward = backward_args(got.dx, got.dw13, got.dw2);
    EXPECT_EQ(float8_moe_backward(moe_, &backward, nullptr), FLOAT8_INVALID_ARGUMENT);
    EXPECT_TRUE(says(w13 ? "float8_moe_desc.no_grad_w13" : "float8_moe_desc.no_grad_w2"));
    float8_moe_backward_args part = backward;
    part.part = FLOAT8_MOE_GRAD_GATE_UP;
    part.dx = part.dw13 = part.dw3 = part.dw2 = {};
    part.buffers.hidden_grad = {got.dw2.get()};
    part.buffers.gate_up_grad_qt = {got.dw13.get()};
    if (w13) {
      EXPECT_EQ(float8_moe_backward(moe_, &part, nullptr), FLOAT8_INVALID_ARGUMENT);
      EXPECT_TRUE(says("gate_up_grad_qt is given, the plan was made with float8_moe_desc.no_grad"));
    }
    if (w13) backward.x = {};
    if (w13) backward.dw13 = backward.dw3 = {};
    if (w2) backward.dw2 = {};
    poison();
    ASSERT_EQ(float8_moe_backward(moe_, &backward, nullptr), FLOAT8_OK) << float8_last_error();
    expect_same(got.y, expected.y, kUsed * kDim, "y");
    expect_same(got.dx, expected.dx, kUsed * kDim, "dx");
    if (!w13) expect_same(joined(got.dw13), expected.dw13, kRowsOfW13 * kDim, "dw13");
    if (!w2) expect_same(got.dw2, expected.dw2, kRowsOfW2 * kHidden, "dw2");
  }
}

class MoeRefusals : public MoeAbi {
 protected:
};
INSTANTIATE_TEST_SUITE_P(Cases, MoeRefusals, ::testing::Values(MoeCase{"rowwise", true, false}),
                         ::testing::PrintToStringParamName());

TEST_P(MoeRefusals, Descriptions) {
  float8_moe_desc bad = desc();
  bad.recipe = "rowwise_with_gw_hp";
  EXPECT_EQ(float8_moe_plan(context_.get(), &bad, &moe_), FLOAT8_UNSUPPORTED);
  EXPECT_TRUE(says("two float8_experts have it")) << float8_last_error();
  for (const int64_t size : {int64_t{0}, int64_t{-16}, int64_t{40}, int64_t{1} << 30}) {
    for (int64_t float8_moe_desc::*field : {&float8_moe_desc::dim, &float8_moe_desc::hidden}) {
      bad = desc();
      bad.*field = size;
      EXPECT_EQ(float8_moe_plan(context_.get(), &bad, &moe_), FLOAT8_INVALID_ARGUMENT);
      const std::string name = field == &float8_moe_desc::dim ? "dim" : "hidden";
      EXPECT_TRUE(says(name + " is " + std::to_string(size))) << float8_last_error();
      EXPECT_EQ(moe_, nullptr);
    }
  }
}

TEST_P(MoeRefusals, Calls) {
  ASSERT_NO_FATAL_FAILURE(plan());
  const Memory y = memory(kRouted * kDim * 2), dw13 = memory(kRowsOfW13 * kDim * 2);
  const Memory dx = memory(kRouted * kDim * 2), dw2 = memory(kRowsOfW2 * kHidden * 2);
  const auto refuses = [&](const auto& args, const auto& change, std::string_view words) {
    auto changed = args;
    change(changed);
    if constexpr (requires { changed.y; }) {
      EXPECT_EQ(float8_moe_forward(moe_, &changed, nullptr), FLOAT8_INVALID_ARGUMENT);
    } else {
      EXPECT_EQ(float8_moe_backward(moe_, &changed, nullptr), FLOAT8_INVALID_ARGUMENT);
    }
    EXPECT_TRUE(says(words)) << float8_last_error();
  };
  const float8_moe_forward_args forward = forward_args(y);
  const float8_moe_backward_args backward = backward_args(dx, dw13, dw2);
  refuses(
      forward, [](auto& a) { a.m = kRouted + 1; }, "m is 81, the plan was made for 0 to 80");
  refuses(
      forward,
      [](auto& a) {
        a.m = INT64_MAX;
        a.buffers.gate_up = {a.saved.data, size_t{1} << 20};
      },
      "m is 9223372036854775807, the plan was made");
  refuses(
      forward, [](auto& a) { a.tokens = -1; }, "tokens is -1");
  refuses(
      forward, [](auto& a) { a.index = nullptr; }, "index is NULL");
  refuses(
      forward, [](auto& a) { a.w2 = {}; }, "w2.data is NULL");
  refuses(
      forward, [](auto& a) { a.y.data = const_cast<void*>(a.x.data); }, "overlap");
  refuses(
      forward, [](auto& a) { a.saved.bytes = 1; }, "saved.bytes is 1");
  refuses(
      backward, [](auto& a) { a.score = nullptr; }, "score is NULL");
  refuses(
      backward, [](auto& a) { a.w13 = {}; }, "w13.data is NULL");
  refuses(
      backward, [](auto& a) { a.saved = {}; }, "saved.data is NULL");
  refuses(
      backward, [](auto& a) { a.dw2.data = a.dw13.data; }, "overlap");
  refuses(
      backward, [](auto& a) { a.reserved = 2; }, "reserved is 2; it must be 0");
  refuses(
      backward, [](auto& a) { a.dw3 = a.dw13; }, "set float8_moe_desc.w3_apart");
  refuses(
      backward, [](auto& a) { a.part = 5; }, "part is 5");
  refuses(
      backward, [](auto& a) { a.part = FLOAT8_MOE_GRAD_INPUT; }, "dw13 is given");
  refuses(
      backward, [](auto& a) { a.buffers.gate_up = {a.dx.data}; }, "buffers.gate_up is given");
  refuses(
      backward, [](auto& a) { a.buffers.hidden_grad = {a.dx.data}; },
      "which the call does not use; leave it empty");
  refuses(
      backward,
      [](auto& a) {
        a.part = FLOAT8_MOE_GRAD_WEIGHT;
        a.dx = a.dw2 = {};
      },
      "buffers.gate_up_grad_qt is NULL");
  refuses(
      backward, [](auto& a) { a.workspace.bytes = 1; }, "workspace.bytes is 1");
  // The linears of an MLP are for its scale state alone.
  EXPECT_EQ(float8_moe_linear(moe_, 2), nullptr);
  EXPECT_EQ(float8_moe_linear(nullptr, 0), nullptr);
  const float8_experts_forward_args alone{.m = kRouted};
  EXPECT_EQ(float8_experts_forward(float8_moe_linear(moe_, 0), &alone, nullptr),
            FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("call float8_moe_forward")) << float8_last_error();
}

// Weights that are given in fp8, of w1 and w3 with the rows of both.
class MoeGiven : public MoeAbi {
 protected:
  struct Copies {
    Memory tensor, transposed;
    float8::Tensor view;
  };
  // Casts a weight, as a linear with these slots of the scale state.
  Copies cast(int64_t n, int64_t k, const float8_matrix& w, const float8_matrix& second,
              const float8_scale_slots& slots) const {
    float8::ExpertQuantizerDesc desc{.n = n, .k = k, .experts = kExperts};
    desc.recipe = float8::Recipe::named(GetParam().recipe);
    desc.two_tensors = second.data != nullptr;
    const auto quantizer = float8::ExpertQuantizer::plan(context_, desc).value();
    Copies out{memory(quantizer.tensor_bytes()), memory(quantizer.transposed_bytes()), {}};
    const Memory scratch = memory(quantizer.workspace_bytes());
    EXPECT_TRUE(quantizer.run({.w = w,
                               .tensor = {out.tensor.get()},
                               .transposed = {out.transposed.get()},
                               .workspace = {scratch.get()},
                               .second_w = second,
                               .step = &step_,
                               .scales = slots},
                              nullptr))
        << float8_last_error();
    out.view = quantizer.view(out.tensor.get(), out.transposed.get());
    return out;
  }
};
INSTANTIATE_TEST_SUITE_P(
    Cases, MoeGiven,
    ::testing::Values(MoeCase{"tensorwise", true, true}, MoeCase{"rowwise", true, false},
                      MoeCase{"blockwise", true, false}, MoeCase{"delayed", true, true},
                      MoeCase{"tensorwise", true, false, true},
                      MoeCase{"rowwise", true, false, true}, MoeCase{"blockwise", true, true, true},
                      MoeCase{"delayed", true, false, true}),
    ::testing::PrintToStringParamName());

TEST_P(MoeGiven, HaveTheBitsOfTheMlpsOwnCasts) {
  ASSERT_NO_FATAL_FAILURE(plan());
  for (const bool first_step : {true, false}) {
    step_.first_step = first_step ? 1 : 0;
    const Step expected = by_experts();
    const Step got{memory(kRouted * kDim * 2), memory(kRouted * kDim * 2),
                   memory(kRowsOfW13 * kDim * 2), memory(kRowsOfW2 * kHidden * 2)};
    float8_moe_forward_args forward = forward_args(got.y);
    float8_moe_backward_args backward = backward_args(got.dx, got.dw13, got.dw2);
    const Copies w13 = cast(2 * kHidden, kDim, forward.w13, forward.w3, forward.w13_scales);
    const Copies w2 = cast(kDim, kHidden, forward.w2, {}, forward.w2_scales);
    forward.w13 = backward.w13 = {nullptr, 0, &w13.view};
    forward.w2 = backward.w2 = {nullptr, 0, &w2.view};
    forward.w3 = backward.w3 = {};
    poison();
    ASSERT_EQ(float8_moe_forward(moe_, &forward, nullptr), FLOAT8_OK) << float8_last_error();
    poison();
    ASSERT_EQ(float8_moe_backward(moe_, &backward, nullptr), FLOAT8_OK) << float8_last_error();
    expect_same(got.y, expected.y, kUsed * kDim, "y");
    expect_same(got.dx, expected.dx, kUsed * kDim, "dx");
    expect_same(joined(got.dw13), expected.dw13, kRowsOfW13 * kDim, "dw13");
    expect_same(got.dw2, expected.dw2, kRowsOfW2 * kHidden, "dw2");
    if (!is_delayed()) return;
    for (const State* state : {&scales_of_moe_, &scales_of_linears_}) {
      ASSERT_EQ(float8_scales_sync(state->scales, state->memory.get(), nullptr, nullptr),
                FLOAT8_OK);
    }
    EXPECT_EQ(std::memcmp(scales_of_moe_.memory.get(), scales_of_linears_.memory.get(),
                          scales_of_moe_.bytes),
              0);
  }
}

class MoePairRefusals : public MoeAbi {};
INSTANTIATE_TEST_SUITE_P(Cases, MoePairRefusals,
                         ::testing::Values(MoeCase{"delayed", true, false, true}),
                         ::testing::PrintToStringParamName());

TEST_P(MoePairRefusals, Calls) {
  ASSERT_NO_FATAL_FAILURE(plan());
  step_.first_step = 1;
  const Memory y = memory(kRouted * kDim * 2);
  float8_moe_forward_args forward = forward_args(y);
  forward.w3 = {};
  EXPECT_EQ(float8_moe_forward(moe_, &forward, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("w3.data is NULL")) << float8_last_error();
  forward = forward_args(y);
  forward.w2_scales = {};
  EXPECT_EQ(float8_moe_forward(moe_, &forward, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("w2_scales is empty")) << float8_last_error();
}

}  // namespace
