// The C++ headers over mixtures and their routing, on an emulated device: calls have the bits of the C interface, and
// refusals its words.
#include "tests/unit/runtime/c_abi/wrapper_checks.hpp"

namespace float8::testing {
namespace {

class MoeWrapper : public MoeAbi {
 protected:
  MoeDesc in_cpp() const {
    MoeDesc out{.m_max = kRouted, .dim = kDim, .hidden = kHidden, .experts = kExperts};
    out.recipe = Recipe::named(GetParam().recipe);
    out.accumulate_grad_weight = true;
    out.non_finite = non_finite_;
    out.recompute_weight = GetParam().recompute_weight;
    out.rows_in_place = in_place();
    out.w3_apart = GetParam().w3_apart;
    return out;
  }
};
INSTANTIATE_TEST_SUITE_P(Cases, MoeWrapper,
                         ::testing::Values(MoeCase{"rowwise", true, false},
                                           MoeCase{"delayed", true, true},
                                           MoeCase{"blockwise", false, false, true}),
                         ::testing::PrintToStringParamName());

// m is left out, and where rows are in place the tokens too.
TEST_P(MoeWrapper, AStepHasTheBitsOfC) {
  // An infinity, which a scale state would not record.
  if (!is_delayed()) static_cast<uint16_t*>(x_.get())[7] = 0x7f80;
  non_finite_ = FLOAT8_SATURATE;
  step_.first_step = 1;
  ASSERT_NO_FATAL_FAILURE(plan());
  const auto moe = Moe::plan(context_, in_cpp()).value();
  ASSERT_EQ(moe.saved_bytes(), float8_moe_saved_bytes(moe_));
  ASSERT_EQ(moe.workspace_bytes(), float8_moe_workspace_bytes(moe_));
  for (int32_t call = 0; call <= FLOAT8_MOE_EVALUATE; ++call) {
    EXPECT_EQ(moe.call_bytes(call), float8_moe_call_bytes(moe_, call)) << call;
  }
  for (int buffer = 0; buffer <= FLOAT8_MOE_GATE_UP_GRAD_QT; ++buffer) {
    EXPECT_EQ(moe.buffer_bytes(static_cast<float8_moe_buffer>(buffer)),
              float8_moe_buffer_bytes(moe_, buffer));
  }
  Memory state;
  ScaleSlots slots[2] = {};
  std::optional<Scales> scales;
  if (is_delayed()) {
    scales.emplace(Scales::plan(context_, {}, {.experts = {moe.linear(0), moe.linear(1)}}).value());
    state = memory(scales->bytes());
    ASSERT_TRUE(scales->init(state.get(), nullptr));
    for (size_t i = 0; i < 2; ++i) slots[i] = scales->slots(state.get(), i).value();
  }
  Step expected{memory(kRouted * kDim * 2), memory(kRouted * kDim * 2),
                memory(kRowsOfW13 * kDim * 2), memory(kRowsOfW2 * kHidden * 2)};
  Step got{memory(kRouted * kDim * 2), memory(kRouted * kDim * 2), memory(kRowsOfW13 * kDim * 2),
           memory(kRowsOfW2 * kHidden * 2)};
  MoeForwardArgs forward = forward_args(expected.y);
  ASSERT_EQ(float8_moe_forward(moe_, &forward, nullptr), FLOAT8_OK) << float8_last_error();
  MoeBackwardArgs backward = backward_args(expected.dx, expected.dw13, expected.dw2);
  for (const int32_t accumulate : {0, 1}) {
    backward.dw13.accumulate = backward.dw2.accumulate = backward.dw3.accumulate = accumulate;
    ASSERT_EQ(float8_moe_backward(moe_, &backward, nullptr), FLOAT8_OK) << float8_last_error();
  }

  forward = forward_args(got.y);
  backward = backward_args(got.dx, got.dw13, got.dw2);
  forward.m = backward.m = -1;
  if (in_place()) forward.tokens = backward.tokens = -1;
  forward.w13_scales = backward.w13_scales = slots[0];
  forward.w2_scales = backward.w2_scales = slots[1];
  ASSERT_TRUE(moe.forward(forward, nullptr)) << float8_last_error();
  for (const int32_t accumulate : {0, 1}) {
    backward.dw13.accumulate = backward.dw2.accumulate = backward.dw3.accumulate = accumulate;
    ASSERT_TRUE(moe.backward(backward, nullptr)) << float8_last_error();
  }
  expect_same(got.y, expected.y, kRouted * kDim, "y");
  expect_same(got.dx, expected.dx, kRouted * kDim, "dx");
  expect_same(got.dw13, expected.dw13, kRowsOfW13 * kDim, "dw13");
  expect_same(got.dw2, expected.dw2, kRowsOfW2 * kHidden, "dw2");
  if (!scales) return;
  ASSERT_TRUE(scales->sync(state.get(), nullptr, nullptr));
  ASSERT_EQ(
      float8_scales_sync(scales_of_moe_.scales, scales_of_moe_.memory.get(), nullptr, nullptr),
      FLOAT8_OK);
  EXPECT_EQ(bytes_of(state, scales->bytes()),
            bytes_of(scales_of_moe_.memory, scales_of_moe_.bytes));
  EXPECT_EQ(scales->first_steps(state.get(), nullptr).value(), std::vector<int32_t>(2));
}

TEST_P(MoeWrapper, RefusesInTheWordsOfC) {
  const auto refuses = [&](const auto& change) {
    expect_refused_as_in_c<Moe>(context_, in_cpp(), desc(), float8_moe_plan, change);
  };
  refuses([](auto& d) { d.m_max = 0; });
  refuses([](auto& d) { d.dim = 8; });
  refuses([](auto& d) { d.hidden = 40; });
  refuses([](auto& d) { d.experts = 0; });
  refuses([](auto& d) { d.tensor_dtype = kNoDtype; });
  refuses([](auto& d) { d.grad_weight_dtype = kNoDtype; });
  refuses([](auto& d) { d.sm_limit = -1; });
  const auto moe = Moe::plan(context_, in_cpp()).value();
  EXPECT_EQ(moe.linear(2), nullptr);
  MoeDesc frozen = in_cpp();
  frozen.needs_grad_w13 = frozen.needs_grad_w2 = false;
  const auto of_frozen = Moe::plan(context_, frozen).value();
  EXPECT_EQ(of_frozen.buffer_bytes(FLOAT8_MOE_GATE_UP_GRAD_QT), 0U);
  EXPECT_LT(of_frozen.buffer_bytes(FLOAT8_MOE_SAVED_OF_W2),
            moe.buffer_bytes(FLOAT8_MOE_SAVED_OF_W2));
  MoeForwardArgs forward;
  const Status status = moe.forward(forward, nullptr);
  forward.m = kRouted;
  if (in_place()) forward.tokens = kRouted;
  expect_refused_as_in_c(status, float8_moe_forward, moe.get(), forward);
  MoeBackwardArgs backward;
  backward.m = kRouted + 1;
  expect_refused_as_in_c(moe.backward(backward, nullptr), float8_moe_backward, moe.get(), backward);
}

// A routing, its sums and their gradient; the tokens are left out.
struct RoutingWrapper : ::testing::Test {
  static constexpr int64_t kTokens = 21, kCols = 16;
  static constexpr int32_t kTopK = 2, kExperts = 4;
  static constexpr size_t kPairs = kTokens * kTopK;
  Context context_ = emulated();
  float8_moe_route_desc in_c() const {
    float8_moe_route_desc out{};
    out.struct_size = sizeof out;
    out.tokens_max = kTokens;
    out.top_k = kTopK;
    out.experts = kExperts;
    out.long_ids = 1;
    return out;
  }
  float8_moe_combine_desc sums_in_c() const {
    float8_moe_combine_desc out{};
    out.struct_size = sizeof out;
    out.tokens_max = kTokens;
    out.cols = kCols;
    out.top_k = kTopK;
    out.experts = kExperts;
    out.out_dtype = FLOAT8_F32;
    return out;
  }
  MoeRouteDesc in_cpp() const {
    return {.tokens_max = kTokens, .top_k = kTopK, .experts = kExperts, .long_ids = true};
  }
  MoeCombineDesc sums_in_cpp() const {
    MoeCombineDesc out{.tokens_max = kTokens, .cols = kCols, .top_k = kTopK, .experts = kExperts};
    out.out_dtype = FLOAT8_F32;
    return out;
  }
};

TEST_F(RoutingWrapper, HasTheBitsOfC) {
  std::vector<int64_t> ids(kPairs);
  std::vector<float> scores(kPairs);
  for (size_t i = 0; i < kPairs; ++i) {
    ids[i] = static_cast<int64_t>(i * 7 % 5);
    scores[i] = 0.5F + static_cast<float>(i);
  }
  const Memory y = random_bf16(kPairs * kCols, 1);
  const std::vector<float> dout(kTokens * kCols, 0.75F);
  struct Routed {
    std::vector<int32_t> index = std::vector<int32_t>(kPairs), position = index,
                         offsets = std::vector<int32_t>(kExperts);
    std::vector<float> row_scores = std::vector<float>(kPairs), dscores = row_scores,
                       out = std::vector<float>(kTokens * kCols);
    bool operator==(const Routed&) const = default;
  } of_c, of_cpp;
  const auto route = MoeRoute::plan(context_, in_cpp()).value();
  const auto combine = MoeCombine::plan(context_, sums_in_cpp()).value();
  const Memory workspace = memory(route.workspace_bytes());
  const auto routing = [&](Routed& to) {
    return MoeRouteArgs{.topk_ids = ids.data(),
                        .index = to.index.data(),
                        .position = to.position.data(),
                        .offsets = to.offsets.data(),
                        .scores = scores.data(),
                        .row_scores = to.row_scores.data(),
                        .workspace = {workspace.get()}};
  };
  const auto sums = [&](Routed& to) {
    return MoeCombineArgs{.y = y.get(),
                          .scores = scores.data(),
                          .position = to.position.data(),
                          .offsets = to.offsets.data(),
                          .out = to.out.data()};
  };
  const auto gradient = [&](Routed& to) {
    return MoeScoreGradientArgs{.dout = dout.data(),
                                .y = y.get(),
                                .position = to.position.data(),
                                .offsets = to.offsets.data(),
                                .dscores = to.dscores.data()};
  };
  float8_moe_route_plan* plan = nullptr;
  float8_moe_combine_plan* plan_of_sums = nullptr;
  const float8_moe_route_desc desc = in_c();
  const float8_moe_combine_desc desc_of_sums = sums_in_c();
  ASSERT_EQ(float8_moe_route_plan_create(context_.get(), &desc, &plan), FLOAT8_OK);
  ASSERT_EQ(float8_moe_combine_plan_create(context_.get(), &desc_of_sums, &plan_of_sums),
            FLOAT8_OK);
  ASSERT_EQ(route.workspace_bytes(), float8_moe_route_workspace_bytes(plan));
  MoeRouteArgs first = routing(of_c);
  MoeCombineArgs second = sums(of_c);
  MoeScoreGradientArgs third = gradient(of_c);
  first.tokens = second.tokens = third.tokens = kTokens;
  ASSERT_EQ(float8_moe_route(plan, &first, nullptr), FLOAT8_OK) << float8_last_error();
  ASSERT_EQ(float8_moe_combine(plan_of_sums, &second, nullptr), FLOAT8_OK) << float8_last_error();
  ASSERT_EQ(float8_moe_score_gradient(plan_of_sums, &third, nullptr), FLOAT8_OK);
  float8_moe_route_plan_destroy(plan);
  float8_moe_combine_plan_destroy(plan_of_sums);

  ASSERT_TRUE(route.run(routing(of_cpp), nullptr)) << float8_last_error();
  ASSERT_TRUE(combine.run(sums(of_cpp), nullptr)) << float8_last_error();
  ASSERT_TRUE(combine.score_gradient(gradient(of_cpp), nullptr)) << float8_last_error();
  EXPECT_EQ(of_cpp, of_c);
  EXPECT_NE(of_cpp, Routed());
}

TEST_F(RoutingWrapper, RefusesInTheWordsOfC) {
  const auto routes = [&](const auto& change) {
    expect_refused_as_in_c<MoeRoute>(context_, in_cpp(), in_c(), float8_moe_route_plan_create,
                                     change);
  };
  const auto combines = [&](const auto& change) {
    expect_refused_as_in_c<MoeCombine>(context_, sums_in_cpp(), sums_in_c(),
                                       float8_moe_combine_plan_create, change);
  };
  routes([](auto& d) { d.tokens_max = 0; });
  routes([](auto& d) { d.top_k = 0; });
  routes([](auto& d) { d.experts = 0; });
  combines([](auto& d) { d.cols = 7; });
  combines([](auto& d) { d.y_dtype = kNoDtype; });
  combines([](auto& d) { d.out_dtype = kNoDtype; });
  const auto route = MoeRoute::plan(context_, in_cpp()).value();
  const auto combine = MoeCombine::plan(context_, sums_in_cpp()).value();
  MoeRouteArgs first;
  MoeCombineArgs second;
  MoeScoreGradientArgs third;
  const Status refused[] = {route.run(first, nullptr), combine.run(second, nullptr),
                            combine.score_gradient(third, nullptr)};
  first.tokens = second.tokens = third.tokens = kTokens;
  expect_refused_as_in_c(refused[0], float8_moe_route, route.get(), first);
  expect_refused_as_in_c(refused[1], float8_moe_combine, combine.get(), second);
  expect_refused_as_in_c(refused[2], float8_moe_score_gradient, combine.get(), third);
}

}  // namespace
}  // namespace float8::testing
