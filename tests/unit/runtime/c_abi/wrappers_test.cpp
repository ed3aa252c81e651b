// The C++ headers over experts and the optimizer, on an emulated device: calls have the bits of the C interface,
// refusals its words, and a handle lives as long as its last copy.
#include "tests/unit/runtime/c_abi/wrapper_checks.hpp"

namespace float8::testing {
namespace {

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
  // An m that is left out is the most that the plan was made for.
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
  ExpertsDesc frozen = of_experts();
  frozen.needs_grad_weight = false;
  EXPECT_FALSE(Experts::plan(context_, frozen).value().backward(backward, nullptr));
  EXPECT_TRUE(says("float8_experts_desc.no_grad_weight"));
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
