// The C++ headers over experts, mixtures, attention and the optimizer, on an emulated device: calls have the bits of
// the C interface, refusals its words, and a handle lives as long as its last copy.
#include <optional>
#include <string>

#include "runtime/c_abi/common.hpp"
#include "tests/unit/runtime/c_abi/moe_fixture.hpp"

namespace float8::testing {
namespace {

constexpr float8_dtype kNoDtype = static_cast<float8_dtype>(3);

std::string bytes_of(const Memory& memory, size_t bytes) {
  return {static_cast<const char*>(memory.get()), bytes};
}

// Both descriptions have fields of the same names, which `change` spoils.
template <class Wrapper, class Desc, class CDesc, class Handle, class Change>
void expect_refused_as_in_c(const Context& context, Desc desc, CDesc c,
                            float8_status (*plan)(float8_context*, const CDesc*, Handle**),
                            const Change& change) {
  change(desc);
  change(c);
  Handle* none = nullptr;
  const float8_status status = plan(context.get(), &c, &none);
  ASSERT_NE(status, FLOAT8_OK);
  const std::string words = float8_last_error();
  const auto made = Wrapper::plan(context, desc);
  ASSERT_FALSE(made) << words;
  EXPECT_EQ(made.error().code, status);
  EXPECT_EQ(made.error().message, words);
}

// The status of a call in C++, and the same call in C.
template <class Handle, class Args>
void expect_refused_as_in_c(const Status& status,
                            float8_status (*call)(const Handle*, const Args*, float8_stream),
                            const Handle* handle, const Args& args) {
  EXPECT_NE(status.code(), FLOAT8_OK);
  EXPECT_EQ(status.code(), call(handle, &args, nullptr));
  EXPECT_EQ(status.message(), float8_last_error());
}

// A plan keeps its context alive, which ends with the plan's last copy and not before: its handle is
// destroyed. What was moved from has none.
template <class Wrapper, class Desc>
void expect_a_handle(const Desc& desc) {
  std::weak_ptr<f8::runtime::Context> context;
  std::optional<Wrapper> first;
  {
    const Context made = emulated();
    context = made.get()->context;
    first.emplace(Wrapper::plan(made, desc).value());
  }
  ASSERT_FALSE(context.expired());
  const auto* const handle = first->get();
  Wrapper second = std::move(*first);
  EXPECT_EQ(first->get(), nullptr);
  EXPECT_EQ(second.get(), handle);
  *first = second;
  EXPECT_EQ(first->get(), handle);
  second = std::move(*first);
  first.reset();
  EXPECT_FALSE(context.expired());
  EXPECT_EQ(second.get(), handle);
  second = Wrapper::plan(emulated(), desc).value();
  EXPECT_TRUE(context.expired());
}

constexpr GroupLayoutDesc kLayout{.m_max = 70, .experts = 3};

ExpertsDesc of_experts() {
  return {.m_max = 70, .n = 48, .k = 80, .experts = 3, .recipe = Recipe::rowwise()};
}

TEST(Wrappers, AreHandles) {
  expect_a_handle<GroupLayout>(kLayout);
  expect_a_handle<Experts>(of_experts());
  expect_a_handle<ExpertQuantizer>(ExpertQuantizerDesc{.n = 48, .k = 80, .experts = 3});
  expect_a_handle<Moe>(MoeDesc{.m_max = 70, .dim = 48, .hidden = 80, .experts = 3});
  expect_a_handle<MoeRoute>(MoeRouteDesc{.tokens_max = 8, .top_k = 2, .experts = 3});
  expect_a_handle<MoeCombine>(
      MoeCombineDesc{.tokens_max = 8, .cols = 16, .top_k = 2, .experts = 3});
  expect_a_handle<Attention>(AttentionDesc{.heads_q = 2, .heads_kv = 1, .head_dim = 64});
}

TEST(Wrappers, WhatWasMovedFromRefusesCalls) {
  const Context context = emulated();
  Experts experts = Experts::plan(context, of_experts()).value();
  const Experts kept = std::move(experts);
  expect_refused_as_in_c(experts.forward({}, nullptr), float8_experts_forward, experts.get(),
                         ExpertsForwardArgs());
  EXPECT_EQ(experts.saved_bytes(), 0U);
  GroupLayout layouts = GroupLayout::plan(context, kLayout).value();
  const GroupLayout kept_layouts = std::move(layouts);
  EXPECT_EQ(layouts.error(nullptr, nullptr).error().message, "plan is NULL");
}

class ExpertsWrapper : public ::testing::Test {
 protected:
  static constexpr int64_t kM = 70, kN = 48, kK = 80;
  static constexpr int32_t kExperts = 3;
  static float8_experts_desc in_c() {
    float8_experts_desc out{};
    out.struct_size = sizeof out;
    out.m_max = kM;
    out.n = kN;
    out.k = kK;
    out.experts = kExperts;
    out.recipe = "rowwise";
    return out;
  }
  // The results of a forward and of two backwards, the second of which adds to dw.
  struct Results {
    Memory y = memory(kM * kN * 2), dx = memory(kM * kK * 2), dw = memory(kExperts * kN * kK * 4);
    [[nodiscard]] std::string all() const {
      return bytes_of(y, kM * kN * 2) + bytes_of(dx, kM * kK * 2) +
             bytes_of(dw, kExperts * kN * kK * 4);
    }
  };

  void SetUp() override {
    layout_ = memory(layouts_.bytes());
    ASSERT_TRUE(layouts_.run({.offsets = offsets_.data(), .layout = {layout_.get()}}, nullptr));
  }
  // With m left out.
  ExpertsForwardArgs forward_args(const Results& to, const Memory& saved,
                                  const Memory& workspace) const {
    return {.x = {x_.get()},
            .w = {w_.get()},
            .y = {to.y.get()},
            .layout = {layout_.get()},
            .saved = {saved.get()},
            .workspace = {workspace.get()}};
  }
  ExpertsBackwardArgs backward_args(const Results& to, const Memory& saved,
                                    const Memory& workspace) const {
    return {.dy = {dy_.get()},
            .dx = {to.dx.get()},
            .dw = {to.dw.get()},
            .layout = {layout_.get()},
            .saved = {saved.get()},
            .workspace = {workspace.get()},
            .w = {w_.get()}};
  }

  Context context_ = emulated();
  GroupLayout layouts_ = GroupLayout::plan(context_, kLayout).value();
  std::vector<int32_t> offsets_ = {40, 40, 65};
  Memory x_ = random_bf16(kM * kK, 1), w_ = random_bf16(kExperts * kN * kK, 2);
  Memory dy_ = random_bf16(kM * kN, 3), layout_;
};

TEST_F(ExpertsWrapper, ALayoutIsThatOfC) {
  float8_group_layout_desc desc{};
  desc.struct_size = sizeof desc;
  desc.m_max = kM;
  desc.experts = kExperts;
  float8_group_layout_plan* plan = nullptr;
  ASSERT_EQ(float8_group_layout_plan_create(context_.get(), &desc, &plan), FLOAT8_OK);
  const size_t bytes = float8_group_layout_bytes(plan);
  ASSERT_EQ(layouts_.bytes(), bytes);
  const Memory layout = memory(bytes);
  GroupLayoutArgs args{.offsets = offsets_.data(), .m = kM, .layout = {layout.get()}};
  ASSERT_EQ(float8_group_layout(plan, &args, nullptr), FLOAT8_OK);
  EXPECT_EQ(bytes_of(layout_, bytes), bytes_of(layout, bytes));
  EXPECT_EQ(layouts_.error(layout_.get(), nullptr).value().code, FLOAT8_NO_GROUP_ERROR);
  offsets_[1] = 7;
  ASSERT_TRUE(layouts_.run({.offsets = offsets_.data(), .layout = {layout_.get()}}, nullptr));
  const GroupError error = layouts_.error(layout_.get(), nullptr).value();
  EXPECT_EQ(error.code, FLOAT8_FALLING_END);
  EXPECT_EQ(error.expert, 1);
  args.layout = {};
  expect_refused_as_in_c(layouts_.run({.offsets = offsets_.data()}, nullptr), float8_group_layout,
                         layouts_.get(), args);
  float8_group_layout_plan_destroy(plan);
  const auto refuses = [&](const auto& change) {
    expect_refused_as_in_c<GroupLayout>(context_, kLayout, desc, float8_group_layout_plan_create,
                                        change);
  };
  refuses([](auto& d) { d.m_max = 0; });
  refuses([](auto& d) { d.experts = 0; });
}

// Every field of the description is another one than that of a description without it.
TEST_F(ExpertsWrapper, CallsHaveTheBitsOfC) {
  static_cast<uint16_t*>(x_.get())[5] = 0x7c00;  // an infinity in f16
  float8_experts_desc of_c = in_c();
  of_c.tensor_dtype = FLOAT8_F16;
  of_c.grad_weight_dtype = FLOAT8_F32;
  of_c.accumulate_grad_weight = of_c.recompute_weight = 1;
  of_c.non_finite = FLOAT8_SATURATE;
  ExpertsDesc desc = of_experts();
  desc.tensor_dtype = FLOAT8_F16;
  desc.grad_weight_dtype = FLOAT8_F32;
  desc.accumulate_grad_weight = desc.recompute_weight = true;
  desc.non_finite = FLOAT8_SATURATE;
  const auto experts = Experts::plan(context_, desc).value();
  float8_experts* plan = nullptr;
  ASSERT_EQ(float8_experts_plan(context_.get(), &of_c, &plan), FLOAT8_OK) << float8_last_error();
  ASSERT_EQ(experts.saved_bytes(), float8_experts_saved_bytes(plan));
  ASSERT_EQ(experts.workspace_bytes(), float8_experts_workspace_bytes(plan));
  EXPECT_EQ(experts.m_max(), kM);
  const Memory saved = memory(experts.saved_bytes());
  const Memory workspace = memory(experts.workspace_bytes());
  const Results expected, got;
  ExpertsForwardArgs forward = forward_args(expected, saved, workspace);
  ExpertsBackwardArgs backward = backward_args(expected, saved, workspace);
  forward.m = backward.m = kM;
  ASSERT_EQ(float8_experts_forward(plan, &forward, nullptr), FLOAT8_OK) << float8_last_error();
  for (const int32_t accumulate : {0, 1}) {
    backward.dw.accumulate = accumulate;
    ASSERT_EQ(float8_experts_backward(plan, &backward, nullptr), FLOAT8_OK) << float8_last_error();
  }
  float8_experts_destroy(plan);
  ASSERT_TRUE(experts.forward(forward_args(got, saved, workspace), nullptr)) << float8_last_error();
  backward = backward_args(got, saved, workspace);
  for (const int32_t accumulate : {0, 1}) {
    backward.dw.accumulate = accumulate;
    ASSERT_TRUE(experts.backward(backward, nullptr)) << float8_last_error();
  }
  EXPECT_EQ(got.all(), expected.all());
  EXPECT_NE(got.all(), Results().all());
}

TEST_F(ExpertsWrapper, RefusesInTheWordsOfC) {
  const auto refuses = [&](const auto& change) {
    expect_refused_as_in_c<Experts>(context_, of_experts(), in_c(), float8_experts_plan, change);
  };
  refuses([](auto& d) { d.m_max = 0; });
  refuses([](auto& d) { d.n = 24; });
  refuses([](auto& d) { d.k = 81; });
  refuses([](auto& d) { d.experts = 0; });
  refuses([](auto& d) { d.tensor_dtype = kNoDtype; });
  refuses([](auto& d) { d.grad_weight_dtype = kNoDtype; });
  refuses([](auto& d) { d.sm_limit = -1; });
  float8_experts_desc blocks = in_c();
  blocks.recipe = "blockwise";
  ExpertsDesc of_blocks = of_experts();
  of_blocks.recipe = Recipe::blockwise();
  for (const bool of_x : {true, false}) {  // 80 and 48 columns cut blocks
    expect_refused_as_in_c<Experts>(context_, of_blocks, blocks, float8_experts_plan, [&](auto& d) {
      (of_x ? d.x_over_ranks : d.dy_over_ranks) = true;
    });
  }
  ExpertsDesc first_layer = of_experts();
  first_layer.needs_grad_input = false;
  const auto experts = Experts::plan(context_, first_layer).value();
  const Memory saved = memory(experts.saved_bytes());
  const Memory workspace = memory(experts.workspace_bytes());
  const Results to;
  ExpertsBackwardArgs backward = backward_args(to, saved, workspace);
  ExpertsForwardArgs forward = forward_args(to, saved, workspace);
  ASSERT_TRUE(experts.forward(forward, nullptr)) << float8_last_error();
  const Status status = experts.backward(backward, nullptr);
  backward.m = kM;
  expect_refused_as_in_c(status, float8_experts_backward, experts.get(), backward);
  ExpertsDesc unknown = of_experts();
  unknown.recipe = Recipe::named("no_such_recipe");
  EXPECT_EQ(Experts::plan(context_, unknown).error().code, FLOAT8_INVALID_ARGUMENT);
}

// A cast of the weights apart, which an expert linear takes in their place.
TEST_F(ExpertsWrapper, ACastOfTheWeightsIsThatOfCAndOfACall) {
  static_cast<uint16_t*>(w_.get())[9] = 0x7f80;  // an infinity
  for (const auto& recipe : {Recipe::tensorwise(), Recipe::rowwise(), Recipe::blockwise()}) {
    SCOPED_TRACE(recipe.name());
    float8_expert_quantizer_desc of_c{};
    of_c.struct_size = sizeof of_c;
    of_c.n = kN;
    of_c.k = kK;
    of_c.experts = kExperts;
    of_c.recipe = recipe.name().c_str();
    of_c.non_finite = FLOAT8_SATURATE;
    of_c.noop_flag = 1;
    float8_expert_quantizer* plan = nullptr;
    ASSERT_EQ(float8_expert_quantizer_plan(context_.get(), &of_c, &plan), FLOAT8_OK);
    ExpertQuantizerDesc desc{.n = kN, .k = kK, .experts = kExperts, .recipe = recipe};
    desc.non_finite = FLOAT8_SATURATE;
    desc.noop_flag = true;
    const auto quantizer = ExpertQuantizer::plan(context_, desc).value();
    ASSERT_EQ(quantizer.workspace_bytes(), float8_expert_quantizer_workspace_bytes(plan));
    const size_t q_bytes = quantizer.tensor_bytes(), qt_bytes = quantizer.transposed_bytes();
    const Memory tensors[] = {memory(q_bytes), memory(q_bytes)};
    const Memory transposed[] = {memory(qt_bytes), memory(qt_bytes)};
    const Memory scratch = memory(quantizer.workspace_bytes());
    uint32_t flags[2] = {};
    const auto args = [&](int i) {
      return ExpertQuantizeArgs{.w = {w_.get()},
                                .tensor = {tensors[i].get(), q_bytes},
                                .transposed = {transposed[i].get(), qt_bytes},
                                .workspace = {scratch.get()},
                                .noop_flag = &flags[i]};
    };
    const ExpertQuantizeArgs cast = args(1);
    ASSERT_EQ(float8_expert_quantize(plan, &cast, nullptr), FLOAT8_OK) << float8_last_error();
    ASSERT_TRUE(quantizer.run(args(0), nullptr)) << float8_last_error();
    EXPECT_EQ(flags[0], 1U);
    EXPECT_EQ(bytes_of(tensors[0], q_bytes), bytes_of(tensors[1], q_bytes));
    EXPECT_EQ(bytes_of(transposed[0], qt_bytes), bytes_of(transposed[1], qt_bytes));
    expect_refused_as_in_c(quantizer.run({}, nullptr), float8_expert_quantize, quantizer.get(),
                           ExpertQuantizeArgs());
    float8_expert_quantizer_destroy(plan);

    ExpertsDesc of_calls = of_experts();
    of_calls.recipe = recipe;
    of_calls.non_finite = FLOAT8_SATURATE;
    of_calls.recompute_weight = true;
    const auto experts = Experts::plan(context_, of_calls).value();
    const Memory workspace = memory(experts.workspace_bytes());
    const Tensor view = quantizer.view(tensors[0].get(), transposed[0].get());
    std::string results[2];
    for (const bool given : {false, true}) {
      const Memory saved = memory(experts.saved_bytes());
      const Results to;
      ExpertsForwardArgs forward = forward_args(to, saved, workspace);
      ExpertsBackwardArgs backward = backward_args(to, saved, workspace);
      if (given) forward.w = backward.w = {.fp8 = &view};
      ASSERT_TRUE(experts.forward(forward, nullptr)) << float8_last_error();
      ASSERT_TRUE(experts.backward(backward, nullptr)) << float8_last_error();
      results[given ? 1 : 0] = to.all();
    }
    EXPECT_EQ(results[1], results[0]);
  }
}

TEST_F(ExpertsWrapper, CastsOverRanksHaveTheMaximaOfC) {
  float8_expert_quantizer_desc of_c{};
  of_c.struct_size = sizeof of_c;
  of_c.n = kN;
  of_c.k = kK;
  of_c.experts = kExperts;
  of_c.recipe = "rowwise";
  of_c.dtype = FLOAT8_F16;
  of_c.over_ranks = 1;
  float8_expert_quantizer* plan = nullptr;
  ASSERT_EQ(float8_expert_quantizer_plan(context_.get(), &of_c, &plan), FLOAT8_OK);
  ExpertQuantizerDesc desc{.n = kN, .k = kK, .experts = kExperts, .recipe = Recipe::rowwise()};
  desc.dtype = FLOAT8_F16;
  desc.over_ranks = true;
  const auto quantizer = ExpertQuantizer::plan(context_, desc).value();
  const size_t words = quantizer.amax_words(), of_rows = quantizer.row_amax_words();
  EXPECT_EQ(words, static_cast<size_t>(kExperts * kK));
  EXPECT_EQ(of_rows, static_cast<size_t>(kExperts * kN));
  std::vector<uint32_t> amax[2] = {std::vector<uint32_t>(words), std::vector<uint32_t>(words)};
  std::vector<uint32_t> rows[2] = {std::vector<uint32_t>(of_rows), std::vector<uint32_t>(of_rows)};
  const ExpertQuantizeArgs args{
      .w = {w_.get()}, .amax = amax[0].data(), .row_amax = rows[0].data()};
  ASSERT_EQ(float8_expert_quantize_amax(plan, &args, nullptr), FLOAT8_OK) << float8_last_error();
  ASSERT_TRUE(quantizer.find_amax(
      {.w = {w_.get()}, .amax = amax[1].data(), .row_amax = rows[1].data()}, nullptr))
      << float8_last_error();
  EXPECT_EQ(amax[1], amax[0]);
  EXPECT_EQ(rows[1], rows[0]);
  float8_expert_quantizer_destroy(plan);
  const auto refuses = [&](const auto& change) {
    expect_refused_as_in_c<ExpertQuantizer>(context_, desc, of_c, float8_expert_quantizer_plan,
                                            change);
  };
  refuses([](auto& d) { d.k = 8; });
  refuses([](auto& d) { d.experts = 0; });
  refuses([](auto& d) { d.dtype = kNoDtype; });
  refuses([](auto& d) { d.two_tensors = true; });
  refuses([](auto& d) { d.noop_flag = true; });
  refuses([](auto& d) {
    d.f32_source = true;
    d.dtype = FLOAT8_F32;
  });
  refuses([](auto& d) {
    d.over_ranks = false;
    d.n = 24;
  });
}

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

class AttentionWrapper : public ::testing::TestWithParam<bool> {
 protected:
  static constexpr int64_t kHeadDim = 64, kTokens = 6;
  [[nodiscard]] static bool packed() { return GetParam(); }
  static float8_attention_desc in_c() {
    float8_attention_desc out{};
    out.struct_size = sizeof out;
    out.heads_q = 2;
    out.heads_kv = 1;
    out.head_dim = kHeadDim;
    out.scale = 0.25F;
    out.causal = 1;
    out.packed = packed() ? 1 : 0;
    out.window = 3;
    out.fp8_backward = 1;
    return out;
  }
  static AttentionDesc in_cpp() {
    AttentionDesc out{.heads_q = 2, .heads_kv = 1, .head_dim = kHeadDim, .scale = 0.25F};
    out.causal = out.fp8_backward = true;
    out.packed = packed();
    out.window = 3;
    return out;
  }
  static Heads heads(const Memory& of, int64_t count) {
    return {.data = of.get(),
            .batch_stride = kTokens * count * kHeadDim,
            .head_stride = kHeadDim,
            .token_stride = count * kHeadDim};
  }
  // What a forward, a dequantisation and a backward leave.
  struct Results {
    static constexpr size_t kQ = kTokens * 2 * kHeadDim * 2, kKv = kTokens * kHeadDim * 2;
    Memory o = memory(kQ), lse = memory(kTokens * 2 * 4), q = memory(kQ), k = memory(kKv),
           v = memory(kKv), dq = memory(kQ), dk = memory(kKv), dv = memory(kKv);
    [[nodiscard]] std::string all() const {
      return bytes_of(o, kQ) + bytes_of(lse, kTokens * 2 * 4) + bytes_of(q, kQ) + bytes_of(k, kKv) +
             bytes_of(v, kKv) + bytes_of(dq, kQ) + bytes_of(dk, kKv) + bytes_of(dv, kKv);
    }
  };
  AttentionForwardArgs forward_args(const Results& to) const {
    AttentionForwardArgs out{.sizes = sizes_,
                             .q = heads(q_, 2),
                             .k = heads(k_, 1),
                             .v = heads(v_, 1),
                             .o = to.o.get(),
                             .lse = static_cast<float*>(to.lse.get()),
                             .saved = {saved_.get()},
                             .workspace = {workspace_.get()}};
    if (packed()) out.cu_seqlens_q = out.cu_seqlens_kv = offsets_.data();
    return out;
  }
  AttentionDequantizeArgs dequantize_args(const Results& to) const {
    return {.sizes = sizes_,
            .saved = {saved_.get()},
            .q = heads(to.q, 2),
            .k = heads(to.k, 1),
            .v = heads(to.v, 1)};
  }
  AttentionBackwardArgs backward_args(const Results& to) const {
    return {.sizes = sizes_,
            .dout = heads(dout_, 2),
            .o = to.o.get(),
            .lse = static_cast<const float*>(to.lse.get()),
            .saved = {saved_.get()},
            .workspace = {workspace_.get()},
            .dq = heads(to.dq, 2),
            .dk = heads(to.dk, 1),
            .dv = heads(to.dv, 1)};
  }

  Context context_ = emulated();
  // Two packed sequences, or a batch of one.
  AttentionSizes sizes_{.batch = packed() ? 2 : 1, .tokens_q = kTokens, .tokens_kv = kTokens};
  std::vector<int32_t> offsets_ = {0, 4, kTokens};
  Memory q_ = random_bf16(kTokens * 2 * kHeadDim, 1), k_ = random_bf16(kTokens * kHeadDim, 2);
  Memory v_ = random_bf16(kTokens * kHeadDim, 3), dout_ = random_bf16(kTokens * 2 * kHeadDim, 4);
  Memory saved_, workspace_;
};
INSTANTIATE_TEST_SUITE_P(Cases, AttentionWrapper, ::testing::Bool(),
                         [](const auto& of) { return of.param ? "packed" : "batch"; });

TEST_P(AttentionWrapper, HasTheBitsOfC) {
  const float8_attention_desc desc = in_c();
  float8_attention* plan = nullptr;
  ASSERT_EQ(float8_attention_plan(context_.get(), &desc, &plan), FLOAT8_OK) << float8_last_error();
  const auto attention = Attention::plan(context_, in_cpp()).value();
  ASSERT_EQ(attention.saved_bytes(sizes_), float8_attention_saved_bytes(plan, &sizes_));
  ASSERT_EQ(attention.workspace_bytes(sizes_), float8_attention_workspace_bytes(plan, &sizes_));
  const size_t bytes = attention.backward_workspace_bytes(sizes_);
  ASSERT_EQ(bytes, float8_attention_backward_workspace_bytes(plan, &sizes_));
  saved_ = memory(attention.saved_bytes(sizes_));
  workspace_ = memory(std::max(bytes, attention.workspace_bytes(sizes_)));
  const Results expected, got;
  const AttentionForwardArgs forward = forward_args(expected);
  const AttentionDequantizeArgs dequantize = dequantize_args(expected);
  const AttentionBackwardArgs backward = backward_args(expected);
  ASSERT_EQ(float8_attention_forward(plan, &forward, nullptr), FLOAT8_OK) << float8_last_error();
  ASSERT_EQ(float8_attention_dequantize(plan, &dequantize, nullptr), FLOAT8_OK);
  ASSERT_EQ(float8_attention_backward(plan, &backward, nullptr), FLOAT8_OK) << float8_last_error();
  float8_attention_destroy(plan);
  ASSERT_TRUE(attention.forward(forward_args(got), nullptr)) << float8_last_error();
  ASSERT_TRUE(attention.dequantize(dequantize_args(got), nullptr)) << float8_last_error();
  ASSERT_TRUE(attention.backward(backward_args(got), nullptr)) << float8_last_error();
  EXPECT_EQ(got.all(), expected.all());
  EXPECT_NE(got.all(), Results().all());
}

TEST_P(AttentionWrapper, RefusesInTheWordsOfC) {
  const auto refuses = [&](const auto& change) {
    expect_refused_as_in_c<Attention>(context_, in_cpp(), in_c(), float8_attention_plan, change);
  };
  refuses([](auto& d) { d.heads_kv = 3; });
  refuses([](auto& d) { d.heads_q = 0; });
  refuses([](auto& d) { d.head_dim = 80; });
  refuses([](auto& d) { d.scale = -1; });
  refuses([](auto& d) { d.dtype = FLOAT8_F16; });
  refuses([](auto& d) { d.causal = false; });
  refuses([](auto& d) { d.window = -1; });
  const auto attention = Attention::plan(context_, in_cpp()).value();
  const AttentionForwardArgs forward;  // there is no key
  const AttentionDequantizeArgs dequantize;
  const AttentionBackwardArgs backward;
  expect_refused_as_in_c(attention.forward(forward, nullptr), float8_attention_forward,
                         attention.get(), forward);
  expect_refused_as_in_c(attention.dequantize(dequantize, nullptr), float8_attention_dequantize,
                         attention.get(), dequantize);
  expect_refused_as_in_c(attention.backward(backward, nullptr), float8_attention_backward,
                         attention.get(), backward);
}

TEST(OptimizerWrapper, AStepHasTheBitsOfC) {
  constexpr int64_t kRows = 16, kCols = 32, kElements = kRows * kCols;
  const Context context = emulated();
  std::string results[2];
  for (const bool in_c : {true, false}) {
    const Memory param = random_bf16(kElements, 1), grad = random_bf16(kElements, 2);
    const Memory first = memory(kElements * 2), second = memory(kElements * 2);
    const float step = 1;
    uint32_t amax = 0;
    const AdamwTensor tensor{.param = param.get(),
                             .grad = grad.get(),
                             .exp_avg = first.get(),
                             .exp_avg_sq = second.get(),
                             .step = &step,
                             .rows = kRows,
                             .cols = kCols,
                             .amax = &amax};
    const AdamwArgs args{.tensors = &tensor,
                         .count = 1,
                         .lr = 0.1,
                         .beta1 = 0.9,
                         .beta2 = 0.99,
                         .eps = 1e-8,
                         .weight_decay = 0.1};
    if (in_c) {
      ASSERT_EQ(float8_adamw(context.get(), &args, nullptr), FLOAT8_OK) << float8_last_error();
    } else {
      ASSERT_TRUE(context.adamw(args, nullptr)) << float8_last_error();
    }
    results[in_c ? 0 : 1] = bytes_of(param, kElements * 2) + bytes_of(first, kElements * 2) +
                            bytes_of(second, kElements * 2) + std::to_string(amax);
    EXPECT_NE(bytes_of(param, kElements * 2), bytes_of(random_bf16(kElements, 1), kElements * 2));
  }
  EXPECT_EQ(results[1], results[0]);
  const AdamwArgs none{.count = 1};
  const Status status = context.adamw(none, nullptr);
  EXPECT_EQ(status.code(), float8_adamw(context.get(), &none, nullptr));
  EXPECT_EQ(status.message(), float8_last_error());
}

}  // namespace
}  // namespace float8::testing
