// Expert linears through the public header, on an emulated device: what is refused, and in which
// words.
#include <gtest/gtest.h>

#include <string_view>
#include <vector>

#include "tests/unit/runtime/c_abi/emulated_memory.hpp"

namespace {

using float8::testing::emulated;
using float8::testing::Memory;
using float8::testing::memory;
using float8::testing::random_bf16;
using float8::testing::says;

class GroupLayoutAbi : public ::testing::Test {
 protected:
  float8_group_layout_plan* plan(int64_t m_max, int32_t experts) {
    const float8_group_layout_desc desc{
        .struct_size = sizeof desc, .m_max = m_max, .experts = experts, .reserved = 0};
    float8_group_layout_plan* out = nullptr;
    status_ = float8_group_layout_plan_create(context_.get(), &desc, &out);
    return out;
  }
  float8::Context context_ = emulated();
  float8_status status_ = FLOAT8_OK;
};

TEST_F(GroupLayoutAbi, BytesFollowFromTheDescription) {
  float8_group_layout_plan* layouts = plan(1000, 6);
  ASSERT_NE(layouts, nullptr);
  // The header, five arrays, and tables of 64, 128, 192 and 256 rows.
  EXPECT_EQ(float8_group_layout_bytes(layouts),
            4 * (16 + 5 * 8 + 4 * (15 + 6 + 7 + 6 + 5 + 6 + 3 + 6)));
  float8_group_layout_plan_destroy(layouts);
  EXPECT_EQ(float8_group_layout_bytes(nullptr), 0U);
  float8_group_layout_plan_destroy(nullptr);
}

TEST_F(GroupLayoutAbi, RefusesSizes) {
  EXPECT_EQ(plan(0, 1), nullptr);
  EXPECT_EQ(status_, FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("m_max is 0"));
  EXPECT_EQ(plan(int64_t{1} << 31, 1), nullptr);
  EXPECT_EQ(plan(1, 0), nullptr);
  EXPECT_EQ(plan(1, FLOAT8_MAX_EXPERTS + 1), nullptr);
  EXPECT_TRUE(says("experts is 1025; it is 1 to 1024"));
}

TEST_F(GroupLayoutAbi, RefusesCalls) {
  float8_group_layout_plan* layouts = plan(100, 2);
  const size_t bytes = float8_group_layout_bytes(layouts);
  const Memory layout = memory(bytes);
  const std::vector<int32_t> offsets = {40, 90};
  const auto call = [&](float8_group_layout_args args) {
    return float8_group_layout(layouts, &args, nullptr);
  };
  EXPECT_EQ(call({.offsets = offsets.data(), .m = 100, .layout = {layout.get(), bytes}}),
            FLOAT8_OK);
  EXPECT_EQ(call({.offsets = offsets.data(), .m = 101, .layout = {layout.get()}}),
            FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("m is 101; the plan was made for 0 to 100"));
  EXPECT_EQ(call({.m = 100, .layout = {layout.get()}}), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("offsets is NULL"));
  EXPECT_EQ(call({.offsets = offsets.data(), .m = 100}), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("layout is NULL"));
  EXPECT_EQ(call({.offsets = offsets.data(), .m = 100, .layout = {layout.get(), bytes - 1}}),
            FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("bytes are needed"));
  EXPECT_EQ(call({.offsets = offsets.data(),
                  .m = 100,
                  .layout = {static_cast<char*>(layout.get()) + 4, 0}}),
            FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("not aligned to 16 bytes"));
  float8_group_error error;
  EXPECT_EQ(float8_group_layout_error(layouts, nullptr, nullptr, &error), FLOAT8_INVALID_ARGUMENT);
  EXPECT_EQ(float8_group_layout_error(layouts, layout.get(), nullptr, &error), FLOAT8_OK);
  EXPECT_EQ(error.code, FLOAT8_NO_GROUP_ERROR);
  EXPECT_EQ(error.expert, -1);
  float8_group_layout_plan_destroy(layouts);
}

// An expert linear and a linear on the same emulated device, with memory of one call.
class ExpertsAbi : public GroupLayoutAbi {
 protected:
  static constexpr int64_t kM = 70, kN = 48, kK = 80;
  static float8_experts_desc desc(const char* recipe) {
    float8_experts_desc out{};
    out.struct_size = sizeof out;
    out.m_max = kM;
    out.n = kN;
    out.k = kK;
    out.experts = 2;
    out.recipe = recipe;
    return out;
  }
  float8_experts* plan_experts(const float8_experts_desc& of) {
    float8_experts* out = nullptr;
    status_ = float8_experts_plan(context_.get(), &of, &out);
    return out;
  }
  // The tensors of a step, whose first expert has 40 rows and whose second has 25, and its calls.
  struct Operands {
    Memory x = random_bf16(kM * kK, 1), w = random_bf16(2 * kN * kK, 2);
    Memory dy = random_bf16(kM * kN, 3), y = memory(kM * kN * 2), dx = memory(kM * kK * 2);
    Memory layout, saved, workspace;
    float8_experts_forward_args forward{};
    float8_experts_backward_args backward{};
  };
  Operands operands_of(const float8_experts* experts) {
    float8_group_layout_plan* layouts = plan(kM, 2);
    Operands of{.layout = memory(float8_group_layout_bytes(layouts)),
                .saved = memory(float8_experts_saved_bytes(experts)),
                .workspace = memory(float8_experts_workspace_bytes(experts))};
    const std::vector<int32_t> offsets = {40, 65};
    const float8_group_layout_args routing{
        .offsets = offsets.data(), .m = kM, .layout = {of.layout.get()}};
    EXPECT_EQ(float8_group_layout(layouts, &routing, nullptr), FLOAT8_OK);
    float8_group_layout_plan_destroy(layouts);
    of.forward = {.m = kM,
                  .x = {of.x.get()},
                  .w = {of.w.get()},
                  .y = {of.y.get()},
                  .layout = {of.layout.get()},
                  .saved = {of.saved.get()},
                  .workspace = {of.workspace.get()}};
    of.backward = {.m = kM,
                   .dy = {of.dy.get()},
                   .dx = {of.dx.get()},
                   .layout = {of.layout.get()},
                   .saved = {of.saved.get()},
                   .workspace = {of.workspace.get()}};
    return of;
  }
};

TEST_F(ExpertsAbi, RefusesDescriptions) {
  for (const char* recipe : {"bf16", "rowwise_with_gw_hp"}) {
    float8_experts_desc of_f32 = desc(recipe);
    of_f32.tensor_dtype = FLOAT8_F32;
    EXPECT_EQ(plan_experts(of_f32), nullptr);
    EXPECT_EQ(status_, FLOAT8_UNSUPPORTED);
    EXPECT_TRUE(says("f32 tensors: expert linears multiply tensors of bf16 and f16"));
  }
  float8_experts_desc bad = desc("rowwise");
  bad.k = 81;
  EXPECT_EQ(plan_experts(bad), nullptr);
  EXPECT_EQ(status_, FLOAT8_INVALID_ARGUMENT);
  bad = desc("rowwise");
  bad.experts = 0;
  EXPECT_EQ(plan_experts(bad), nullptr);
  EXPECT_TRUE(says("experts is 0; it is 1 to 1024"));
}

TEST_F(ExpertsAbi, RefusesCalls) {
  float8_experts* experts = plan_experts(desc("rowwise"));
  ASSERT_NE(experts, nullptr);
  const Operands operands = operands_of(experts);
  const float8_experts_forward_args& forward = operands.forward;
  const float8_experts_backward_args& backward = operands.backward;
  EXPECT_EQ(float8_experts_forward(experts, &forward, nullptr), FLOAT8_OK) << float8_last_error();
  EXPECT_EQ(float8_experts_backward(experts, &backward, nullptr), FLOAT8_OK);
  const auto refuses = [&](const auto& args, const auto& change, std::string_view words) {
    auto changed = args;
    change(changed);
    if constexpr (requires { changed.y; }) {
      EXPECT_EQ(float8_experts_forward(experts, &changed, nullptr), FLOAT8_INVALID_ARGUMENT);
    } else {
      EXPECT_EQ(float8_experts_backward(experts, &changed, nullptr), FLOAT8_INVALID_ARGUMENT);
    }
    EXPECT_TRUE(says(words)) << float8_last_error();
  };
  refuses(
      forward, [](auto& a) { a.m = kM + 1; }, "m is 71, the plan was made for 0 to 70");
  refuses(
      forward, [](auto& a) { a.x.data = nullptr; }, "x.data is NULL");
  refuses(
      forward, [](auto& a) { a.layout = {}; }, "layout.data is NULL");
  refuses(
      forward, [](auto& a) { a.layout.bytes = 16; }, "layout.bytes is 16");
  refuses(
      forward, [](auto& a) { a.workspace.bytes = 1; }, "workspace.bytes is 1");
  refuses(
      forward, [](auto& a) { a.y.accumulate = 1; }, "y.accumulate is set");
  refuses(
      forward, [](auto& a) { a.y.data = const_cast<void*>(a.x.data); }, "overlap");
  refuses(
      forward, [](auto& a) { a.reserved = 2; }, "reserved is 2; it must be 0");
  refuses(
      backward,
      [&](auto& a) {
        a.dw = {operands.w.get(), 0, 1};
      },
      "set float8_experts_desc.accumulate_grad_weight");
  refuses(
      backward, [](auto& a) { a.dy.data = nullptr; }, "dy.data is NULL");
  refuses(
      backward, [](auto& a) { a.saved = {}; }, "saved.data is NULL");
  float8_experts_destroy(experts);
}

// Without a copy of the weights between the calls, backward has to be given them.
TEST_F(ExpertsAbi, ARecomputedWeightIsNotSaved) {
  float8_experts_desc again = desc("rowwise");
  float8_experts* const keeps = plan_experts(again);
  again.recompute_weight = 1;
  float8_experts* const experts = plan_experts(again);
  ASSERT_NE(experts, nullptr);
  EXPECT_LE(float8_experts_saved_bytes(experts) + 2 * kN * kK, float8_experts_saved_bytes(keeps));
  const Operands operands = operands_of(experts);
  EXPECT_EQ(float8_experts_backward(experts, &operands.backward, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("w.data is NULL, the plan was made with float8_experts_desc.recompute_weight"));
  float8_experts_destroy(experts);
  float8_experts_destroy(keeps);
}

// Frozen weights leave y and dx as they are. What forward saves is for the gradient of the weights alone, but for
// their own copy.
TEST_F(ExpertsAbi, FrozenWeightsHaveNoGradient) {
  for (const char* recipe : {"tensorwise", "rowwise", "rowwise_with_gw_hp", "blockwise"}) {
    float8_experts_desc of = desc(recipe);
    float8_experts* const trained = plan_experts(of);
    of.no_grad_weight = 1;
    float8_experts* const frozen = plan_experts(of);
    ASSERT_NE(frozen, nullptr) << float8_last_error();
    of.recompute_weight = 1;
    float8_experts* const keeps_nothing = plan_experts(of);
    EXPECT_EQ(float8_experts_saved_bytes(keeps_nothing), 0U) << recipe;
    const bool reads_x = std::string_view(recipe) == "rowwise_with_gw_hp";
    EXPECT_LE(float8_experts_saved_bytes(frozen) + (reads_x ? 0 : kM * kK),
              float8_experts_saved_bytes(trained));
    EXPECT_LE(float8_experts_workspace_bytes(frozen), float8_experts_workspace_bytes(trained));
    Operands expected = operands_of(trained), got = operands_of(frozen);
    const Memory dw = memory(2 * kN * kK * 2);
    got.backward.dw = {dw.get()};
    EXPECT_EQ(float8_experts_backward(frozen, &got.backward, nullptr), FLOAT8_INVALID_ARGUMENT);
    EXPECT_TRUE(says("dw is given, the plan was made with float8_experts_desc.no_grad_weight"));
    expected.backward.dw = {dw.get()};
    got.backward.dw = {};
    for (const auto& [plan, step] : {std::pair(trained, &expected), {frozen, &got}}) {
      if (reads_x && plan == trained) step->backward.x = step->forward.x;
      ASSERT_EQ(float8_experts_forward(plan, &step->forward, nullptr), FLOAT8_OK);
      ASSERT_EQ(float8_experts_backward(plan, &step->backward, nullptr), FLOAT8_OK)
          << float8_last_error();
    }
    EXPECT_EQ(std::memcmp(got.y.get(), expected.y.get(), 65 * kN * 2), 0) << recipe;
    EXPECT_EQ(std::memcmp(got.dx.get(), expected.dx.get(), 65 * kK * 2), 0) << recipe;
    for (float8_experts* each : {trained, frozen, keeps_nothing}) float8_experts_destroy(each);
  }
}

// A scale state has the slots of linears and behind them those of expert linears, and ends their steps.
TEST_F(ExpertsAbi, DelayedScalesAreThoseOfALinear) {
  float8_experts* const experts = plan_experts(desc("delayed"));
  ASSERT_NE(experts, nullptr) << float8_last_error();
  float8_linear_desc of_linear{};
  of_linear.struct_size = sizeof of_linear;
  of_linear.m_max = kM;
  of_linear.n = kN;
  of_linear.k = kK;
  of_linear.recipe = "delayed";
  float8_linear* linear = nullptr;
  ASSERT_EQ(float8_linear_plan(context_.get(), &of_linear, &linear), FLOAT8_OK);
  float8_scales_desc of_scales{};
  of_scales.struct_size = sizeof of_scales;
  of_scales.linears = &linear;
  of_scales.count = 1;
  of_scales.experts_count = 1;
  float8_scales* scales = nullptr;
  EXPECT_EQ(float8_scales_plan(context_.get(), &of_scales, &scales), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("float8_scales_desc.experts is NULL"));
  const float8_experts* none = nullptr;
  of_scales.experts = &none;
  EXPECT_EQ(float8_scales_plan(context_.get(), &of_scales, &scales), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("float8_scales_desc.experts[0] is NULL"));
  of_scales.experts = &experts;
  ASSERT_EQ(float8_scales_plan(context_.get(), &of_scales, &scales), FLOAT8_OK);
  const float8_linear_desc* const two[] = {&of_linear, &of_linear};
  size_t bytes = 0;
  ASSERT_EQ(float8_scales_size(two, 2, 0, &bytes), FLOAT8_OK);
  EXPECT_EQ(bytes, float8_scales_bytes(scales));
  const Memory state = memory(bytes);
  ASSERT_EQ(float8_scales_init(scales, state.get(), nullptr), FLOAT8_OK);
  float8_scale_slots slots, beyond;
  ASSERT_EQ(float8_scales_slots(scales, state.get(), 1, &slots), FLOAT8_OK);
  EXPECT_EQ(slots.opaque[0], static_cast<uint32_t*>(state.get()) + 3);
  EXPECT_EQ(float8_scales_slots(scales, state.get(), 2, &beyond), FLOAT8_INVALID_ARGUMENT);

  float8_step step{.first_step = 1};
  Operands operands = operands_of(experts);
  float8_experts_forward_args& forward = operands.forward;
  float8_experts_backward_args& backward = operands.backward;
  forward.step = backward.step = &step;
  backward.scales = slots;
  EXPECT_EQ(float8_experts_forward(experts, &forward, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("float8_experts_forward_args.scales is empty; recipe delayed has delayed"));
  forward.scales = slots;
  step.first_step = 0;
  EXPECT_EQ(float8_experts_forward(experts, &forward, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("first_step is 0, the scale state was initialised and has not seen a step"));
  step.first_step = 1;
  step.ranks = reinterpret_cast<float8_nccl_comm>(state.get());
  EXPECT_EQ(float8_experts_forward(experts, &forward, nullptr), FLOAT8_UNSUPPORTED);
  EXPECT_TRUE(says("float8_step.ranks is given in a first step"));
  step.ranks = nullptr;
  ASSERT_EQ(float8_experts_forward(experts, &forward, nullptr), FLOAT8_OK) << float8_last_error();
  ASSERT_EQ(float8_experts_backward(experts, &backward, nullptr), FLOAT8_OK);
  ASSERT_EQ(float8_scales_sync(scales, state.get(), nullptr, nullptr), FLOAT8_OK);
  int32_t first[2] = {};
  ASSERT_EQ(float8_scales_first_steps(scales, state.get(), first, 2, nullptr), FLOAT8_OK);
  EXPECT_EQ(first[0], 1);
  EXPECT_EQ(first[1], 0);
  step.first_step = 0;
  EXPECT_EQ(float8_experts_forward(experts, &forward, nullptr), FLOAT8_OK) << float8_last_error();
  EXPECT_EQ(float8_experts_backward(experts, &backward, nullptr), FLOAT8_OK);
  float8_scales_destroy(scales);
  float8_linear_destroy(linear);
  float8_experts_destroy(experts);
}

// A call is given the maxima of the whole tensor if ranks have other columns of it.
TEST_F(ExpertsAbi, OverRanksMaximaAreGiven) {
  float8_experts_desc over = desc("blockwise");
  over.dy_over_ranks = 1;
  EXPECT_EQ(plan_experts(over), nullptr);
  EXPECT_EQ(status_, FLOAT8_UNSUPPORTED);
  EXPECT_TRUE(says("which 48 columns cut: ranks have whole 128s"));
  over.n = 128;
  float8_experts* const in_blocks = plan_experts(over);
  EXPECT_NE(in_blocks, nullptr) << float8_last_error();
  float8_experts_destroy(in_blocks);
  const struct {
    const char *recipe, *words;
  } cases[] = {{"rowwise", "x_row_amax is NULL"}, {"tensorwise", "x_amax is NULL"}};
  for (const auto& [recipe, words] : cases) {
    over = desc(recipe);
    over.x_over_ranks = over.dy_over_ranks = 1;
    float8_experts* const experts = plan_experts(over);
    ASSERT_NE(experts, nullptr) << float8_last_error();
    const std::vector<uint32_t> maxima(kM, 0x41000000);
    Operands operands = operands_of(experts);
    float8_experts_forward_args& forward = operands.forward;
    float8_experts_backward_args& backward = operands.backward;
    EXPECT_EQ(float8_experts_forward(experts, &forward, nullptr), FLOAT8_INVALID_ARGUMENT);
    EXPECT_TRUE(says(words)) << float8_last_error();
    forward.x_amax = forward.x_row_amax = maxima.data();
    EXPECT_EQ(float8_experts_forward(experts, &forward, nullptr), FLOAT8_OK) << float8_last_error();
    EXPECT_EQ(float8_experts_backward(experts, &backward, nullptr), FLOAT8_INVALID_ARGUMENT);
    backward.dy_amax = backward.dy_row_amax = maxima.data();
    EXPECT_EQ(float8_experts_backward(experts, &backward, nullptr), FLOAT8_OK);
    float8_experts_destroy(experts);
  }
}

// A grad_weight in high precision reads x again.
TEST_F(ExpertsAbi, GradWeightInHighPrecisionReadsX) {
  float8_experts_desc recipe = desc("rowwise_with_gw_hp");
  recipe.recompute_weight = 1;
  float8_experts* const experts = plan_experts(recipe);
  ASSERT_NE(experts, nullptr) << float8_last_error();
  EXPECT_EQ(float8_experts_saved_bytes(experts), 0U);
  const Operands operands = operands_of(experts);
  const Memory dw = memory(2 * kN * kK * 2);
  float8_experts_backward_args backward = operands.backward;
  backward.saved = {};
  backward.dx = {};
  backward.dw = {dw.get()};
  EXPECT_EQ(float8_experts_backward(experts, &backward, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("x.data is NULL, and recipe rowwise_with_gw_hp has grad_weight in high"));
  backward.x.data = operands.x.get();
  EXPECT_EQ(float8_experts_backward(experts, &backward, nullptr), FLOAT8_OK) << float8_last_error();
  float8_experts_destroy(experts);
}

// GEMMs in high precision read x and w again, and save nothing; there is no weight in fp8.
TEST_F(ExpertsAbi, HighPrecisionReadsTheTensors) {
  float8_experts* const experts = plan_experts(desc("bf16"));
  ASSERT_NE(experts, nullptr) << float8_last_error();
  EXPECT_EQ(float8_experts_saved_bytes(experts), 0U);
  Operands operands = operands_of(experts);
  float8_experts_forward_args& forward = operands.forward;
  float8_experts_backward_args& backward = operands.backward;
  forward.saved = backward.saved = {};
  EXPECT_EQ(float8_experts_forward(experts, &forward, nullptr), FLOAT8_OK) << float8_last_error();
  float8_tensor in_fp8{};
  forward.w.fp8 = &in_fp8;
  EXPECT_EQ(float8_experts_forward(experts, &forward, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("w.fp8 is given, and recipe bf16 multiplies w as it is; give data"));
  EXPECT_EQ(float8_experts_backward(experts, &backward, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("w.data is NULL, and recipe bf16 has grad_input in high precision"));
  backward.w.data = operands.w.get();
  EXPECT_EQ(float8_experts_backward(experts, &backward, nullptr), FLOAT8_OK) << float8_last_error();
  float8_experts_destroy(experts);
}

TEST_F(ExpertsAbi, NullHasNoBytes) {
  EXPECT_EQ(float8_experts_workspace_bytes(nullptr), 0U);
  EXPECT_EQ(float8_experts_saved_bytes(nullptr), 0U);
  float8_experts_destroy(nullptr);
  EXPECT_EQ(float8_experts_forward(nullptr, nullptr, nullptr), FLOAT8_INVALID_ARGUMENT);
}

}  // namespace
