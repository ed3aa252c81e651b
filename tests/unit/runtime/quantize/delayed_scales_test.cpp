// Delayed scaling over several steps: the state on the device against the reference, step by step,
// and resumed from a copy.
#include "runtime/quantize/delayed_scales.hpp"

#include <bit>
#include <cstring>

#include "recipes/scales/scale.hpp"
#include "tests/unit/runtime/linear_fixture.hpp"

namespace f8::runtime {
namespace {

using testing::describe;
using testing::FakeCuda;
using testing::Fixture;
using testing::says;

float amax_of(const reference::Matrix& x) {
  return reference::amax(x, reference::AmaxOver::kTensor)[0];
}

// Tensors of a step, larger and smaller than those of the last one.
reference::Matrix at_step(reference::Matrix x, int step) {
  for (float& v : x.values) v *= std::ldexp(1.0F, step % 3 * 2 - step);
  return x;
}

class DelayedSteps : public ::testing::TestWithParam<DelayedOptions> {};
INSTANTIATE_TEST_SUITE_P(
    Options, DelayedSteps,
    ::testing::Values(DelayedOptions{.history = 3},
                      DelayedOptions{.history = 1, .scale_from = ScaleFrom::kMostRecent},
                      DelayedOptions{
                          .history = 16, .scale_from = ScaleFrom::kMostRecent, .margin = 2}),
    [](const auto& suite) { return "h" + std::to_string(suite.param.history); });

TEST_P(DelayedSteps, LikeTheReference) {
  FakeCuda cuda;
  Fixture s(cuda, describe("delayed", {40, 32, 48}), 40);
  s.delayed = DelayedScales::plan(s.context, s.linear->scale_slots(), GetParam()).value();
  s.state = testing::Buffer(s.delayed->bytes());
  ASSERT_TRUE(s.delayed->init(s.state.data(), nullptr));
  s.slots = s.delayed->slots(s.state.data(), 0);
  const std::vector<DelayedSlot>& slots = s.linear->scale_slots();
  ASSERT_EQ(slots.size(), 3U);
  std::array<reference::DelayedState, 3> states;
  const auto xs = s.xm;
  const auto ws = s.wm;
  const auto dys = s.dym;
  std::vector<uint8_t> copy;
  std::vector<double> after_copy;
  for (int step = 0; step < 6; ++step) {
    if (step == 4) copy.assign(s.state.data(), s.state.data() + s.delayed->bytes());
    s.xm = at_step(xs, step);
    s.wm = at_step(ws, step + 1);
    s.dym = at_step(dys, step + 2);
    s.x = testing::Buffer(s.xm);
    s.w = testing::Buffer(s.wm);
    s.dy = testing::Buffer(s.dym);
    s.first_step = step == 0;
    ASSERT_TRUE(s.linear->forward(s.forward(), nullptr));
    ASSERT_TRUE(s.linear->backward(s.backward(), nullptr));

    // The amax that would have given the scale of this step; the first one is its own.
    reference::DelayedAmax scaled_by;
    if (step > 0) {
      const auto of = [&](size_t slot) {
        return static_cast<float>(static_cast<double>(max_finite(slots[slot].dtype)) /
                                  static_cast<double>(states[slot].scale));
      };
      scaled_by = {.x = of(0), .w = of(1), .dy = of(2)};
    }
    const auto expected = s.expected(scaled_by);
    // A scale computed back from an amax may differ in its last bit, and with it few elements.
    const double bound = step == 0 ? 2.5e-3 : 4e-3;
    EXPECT_LT(reference::relative_error(expected.y, s.y.bf16()), bound) << step;
    EXPECT_LT(reference::relative_error(expected.dx, s.dx.bf16()), bound) << step;
    EXPECT_LT(reference::relative_error(expected.dw, s.dw.bf16()), bound) << step;

    const float amax[] = {amax_of(s.xm), amax_of(s.wm), amax_of(s.dym)};
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(std::bit_cast<float>(s.slots.amax[i]), amax[i]) << step << " slot " << i;
      states[i].amax = std::bit_cast<uint32_t>(amax[i]);
    }
    reference::scale_update(slots, GetParam(), states);
    ASSERT_TRUE(s.delayed->update(s.state.data(), nullptr));
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(s.slots.scale[i * 8], states[i].scale) << step << " slot " << i;
      EXPECT_EQ(s.slots.scale[i * 8 + 4], inverse_scale(states[i].scale));
      EXPECT_EQ(s.slots.amax[i], 0U);
    }
  }
  after_copy = s.y.bf16();
  const std::vector<uint8_t> last(s.state.data(), s.state.data() + s.delayed->bytes());

  // Steps 4 and 5 again, from the copy.
  std::memcpy(s.state.data(), copy.data(), copy.size());
  for (int step = 4; step < 6; ++step) {
    s.x = testing::Buffer(at_step(xs, step));
    s.w = testing::Buffer(at_step(ws, step + 1));
    s.dy = testing::Buffer(at_step(dys, step + 2));
    ASSERT_TRUE(s.linear->forward(s.forward(), nullptr));
    ASSERT_TRUE(s.linear->backward(s.backward(), nullptr));
    ASSERT_TRUE(s.delayed->update(s.state.data(), nullptr));
  }
  EXPECT_EQ(s.y.bf16(), after_copy);
  EXPECT_EQ(std::memcmp(s.state.data(), last.data(), last.size()), 0);
  EXPECT_TRUE(s.guards_are_whole());
  EXPECT_TRUE(cuda.faults.empty()) << cuda.faults.front();
}

// Two linears in one state: each finds its own slots, one launch updates both.
TEST(DelayedScales, ManyLinearsShareAState) {
  FakeCuda cuda;
  const auto context = cuda.context();
  const DelayedSlot e4m3{Dtype::kE4m3, false};
  const DelayedSlot pow2{Dtype::kE5m2, true};
  std::vector<DelayedSlot> slots(700, e4m3);
  slots.back() = pow2;
  const auto scales = DelayedScales::plan(context, slots).value();
  testing::Buffer state(scales.bytes());
  ASSERT_TRUE(scales.init(state.data(), nullptr));
  EXPECT_EQ(scales.count(), 700U);
  for (size_t i = 0; i < slots.size(); ++i) {
    EXPECT_EQ(scales.slots(state.data(), i).scale[0], 1.0F);
    EXPECT_EQ(scales.slots(state.data(), i).scale[4], 1.0F);
    if (i != 5)
      *scales.slots(state.data(), i).amax = std::bit_cast<uint32_t>(1.0F + static_cast<float>(i));
  }
  EXPECT_EQ(scales.amaxes(state.data()) + 3, scales.slots(state.data(), 3).amax);
  const size_t before = cuda.launches.size();
  ASSERT_TRUE(scales.update(state.data(), nullptr));
  ASSERT_EQ(cuda.launches.size(), before + 1);
  EXPECT_EQ(cuda.launches.back().grid, 1U);
  for (size_t i = 0; i < slots.size(); ++i) {
    const float expected =
        i == 5 ? 1.0F  // nothing was cast
               : scale_from_amax(1.0F + static_cast<float>(i), slots[i].dtype, slots[i].pow2);
    EXPECT_EQ(scales.slots(state.data(), i).scale[0], expected) << i;
    EXPECT_EQ(scales.slots(state.data(), i).scale[4], inverse_scale(expected)) << i;
  }
  EXPECT_TRUE(state.guard_is_whole());
  EXPECT_TRUE(cuda.faults.empty()) << cuda.faults.front();
}

TEST(DelayedScales, NonFiniteAmaxesFollowThePolicy) {
  FakeCuda cuda;
  const auto context = cuda.context();
  const std::vector<DelayedSlot> slots(2);
  for (const NonFinite policy : {NonFinite::kPropagate, NonFinite::kSaturate}) {
    const auto scales =
        DelayedScales::plan(context, slots, {.history = 2, .non_finite = policy}).value();
    testing::Buffer state(scales.bytes());
    ASSERT_TRUE(scales.init(state.data(), nullptr));
    std::vector<reference::DelayedState> expected(2);
    for (const uint32_t amax :
         {0x7f800000U, 0x40000000U, 0x7fc00000U, 0x3f800000U, 0x7f800000U, 0x3f800000U}) {
      const uint32_t of_other = 0x40800000;
      for (size_t i = 0; i < 2; ++i) {
        *scales.slots(state.data(), i).amax = expected[i].amax = i == 0 ? amax : of_other;
      }
      ASSERT_TRUE(scales.update(state.data(), nullptr));
      reference::scale_update(slots, scales.options(), expected);
      const auto histories = scales.histories(state.data(), nullptr).value();
      for (size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(scales.slots(state.data(), i).scale[0], expected[i].scale);
        EXPECT_EQ(histories[i], expected[i].history);
      }
    }
    EXPECT_EQ(expected[0].non_finite, 3U);
    EXPECT_EQ(expected[0].scale, 448.0F);
    EXPECT_EQ(expected[1].scale, 112.0F);
  }
}

// Updates under a flag on the device, step by step like the reference.
TEST(DelayedScales, AFlagDropsAStep) {
  FakeCuda cuda;
  const std::vector<DelayedSlot> slots = {{Dtype::kE4m3, false}, {Dtype::kE5m2, true}};
  const auto scales = DelayedScales::plan(cuda.context(), slots, {.history = 3}).value();
  testing::Buffer state(scales.bytes());
  ASSERT_TRUE(scales.init(state.data(), nullptr));
  std::array<reference::DelayedState, 2> expected;
  struct Step {
    uint32_t amax[2];
    float found_inf;
  };
  for (const Step& step : {Step{{0x7f800000, 0x3f800000}, 1}, Step{{0x40000000, 0x41000000}, 0},
                           Step{{0x7fc00000, 0x7f800000}, 2}, Step{{0x40400000, 0}, 1},
                           Step{{0x3f800000, 0x3f000000}, 0}}) {
    float found = 0;
    for (size_t i = 0; i < 2; ++i) {
      *scales.slots(state.data(), i).amax = expected[i].amax = step.amax[i];
    }
    ASSERT_TRUE(scales.find_inf(state.data(), &found, nullptr));
    EXPECT_EQ(found, step.amax[0] >= 0x7f800000 || step.amax[1] >= 0x7f800000 ? 1.0F : 0.0F);
    ASSERT_TRUE(scales.update(state.data(), nullptr, &step.found_inf));
    reference::scale_update(slots, scales.options(), expected, step.found_inf != 0);
    for (size_t i = 0; i < 2; ++i) {
      const ScaleSlots slot = scales.slots(state.data(), i);
      EXPECT_EQ(*slot.amax, 0U);
      EXPECT_EQ(slot.scale[0], expected[i].scale);
      EXPECT_EQ(slot.scale[4], inverse_scale(expected[i].scale));
    }
  }
  // The infinity and the NaN were in steps that were dropped.
  EXPECT_EQ(expected[0].non_finite, 0U);
  EXPECT_EQ(scales.slots(state.data(), 0).scale[0], 224.0F);
  EXPECT_TRUE(state.guard_is_whole());
  EXPECT_TRUE(cuda.faults.empty()) << cuda.faults.front();
}

TEST(DelayedScales, MisuseIsOneClearError) {
  FakeCuda cuda;
  const auto context = cuda.context();
  const std::vector<DelayedSlot> slots(2);
  const auto refused = [](const auto& result, std::string_view part) {
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
    EXPECT_TRUE(says(result.error(), part)) << result.error().message;
  };
  refused(DelayedScales::plan(context, slots, {.history = 0}), "history of 0");
  refused(DelayedScales::plan(context, slots, {.margin = -1}), "margin -1");
  const std::vector<DelayedSlot> bad{{Dtype::kBf16, false}};
  refused(DelayedScales::plan(context, bad), "bf16");
  const auto scales = DelayedScales::plan(context, slots).value();
  refused(scales.init(nullptr, nullptr), "state is NULL");
  testing::Buffer state(scales.bytes() + 8);
  refused(scales.update(state.data() + 4, nullptr), "aligned");
}

}  // namespace
}  // namespace f8::runtime
