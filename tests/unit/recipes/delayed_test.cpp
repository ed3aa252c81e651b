#include "recipes/scales/delayed.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <limits>
#include <vector>

namespace f8 {
namespace {

using reference::DelayedState;
using reference::is_non_finite;
using reference::scale_update;
using Limits = std::numeric_limits<float>;

void step(float amax, const DelayedOptions& options, DelayedState& state,
          const DelayedSlot& slot = {}, bool drop = false) {
  state.amax = std::bit_cast<uint32_t>(amax);
  scale_update({&slot, 1}, options, {&state, 1}, drop);
  EXPECT_EQ(state.amax, 0U);
}

TEST(Delayed, TheLargestOfTheHistory) {
  const DelayedOptions options{.history = 3};
  DelayedState state;
  const float amaxes[] = {2, 8, 4, 4, 1, 1, 1};
  const float expected[] = {224, 56, 56, 56, 112, 112, 448};
  for (size_t i = 0; i < std::size(amaxes); ++i) {
    step(amaxes[i], options, state);
    EXPECT_EQ(state.scale, expected[i]) << i;
  }
  EXPECT_EQ(state.history.size(), 3U);
}

TEST(Delayed, TheMostRecent) {
  const DelayedOptions options{.history = 2, .scale_from = ScaleFrom::kMostRecent};
  DelayedState state;
  step(8, options, state);
  step(2, options, state);
  EXPECT_EQ(state.scale, 224);
  EXPECT_EQ(std::bit_cast<float>(state.history[0]), 2);
  EXPECT_EQ(std::bit_cast<float>(state.history[1]), 8);
}

TEST(Delayed, MarginThenPowerOfTwo) {
  DelayedState state;
  step(2, {.margin = 3}, state);
  EXPECT_EQ(state.scale, 28);
  step(2, {.margin = 3}, state, {Dtype::kE4m3, true});
  EXPECT_EQ(state.scale, 16);
  step(2, {}, state, {Dtype::kE5m2, false});
  EXPECT_EQ(state.scale, 28672);
}

// An operand that saw nothing, or zeros alone, has no scale; zeros take no place in a history.
TEST(Delayed, ZerosAreNotRecorded) {
  const DelayedOptions options{.history = 2};
  DelayedState state;
  step(0, options, state);
  EXPECT_EQ(state.scale, 1);
  EXPECT_TRUE(reference::is_first_step({&state.history, 1}));
  step(8, options, state);
  EXPECT_FALSE(reference::is_first_step({&state.history, 1}));
  for (int i = 0; i < 3; ++i) step(0, options, state);
  EXPECT_EQ(state.scale, 56);
  step(0, {.history = 2, .scale_from = ScaleFrom::kMostRecent}, state);
  EXPECT_EQ(state.scale, 56);
  step(2, options, state);
  EXPECT_EQ(state.scale, 56) << "8 is still in the history";
  step(2, options, state);
  EXPECT_EQ(state.scale, 224);
}

// A step that is not finite costs itself alone: the scale is that of the history without it.
TEST(Delayed, AnAmaxThatIsNotFiniteIsNotRecorded) {
  for (const NonFinite policy : {NonFinite::kPropagate, NonFinite::kSaturate}) {
    for (const float bad : {Limits::quiet_NaN(), Limits::infinity()}) {
      const DelayedOptions options{.history = 2, .non_finite = policy};
      DelayedState state;
      step(2, options, state);
      step(1, options, state);
      const DelayedState before = state;
      for (uint32_t i = 1; i < 4; ++i) {
        step(bad, options, state);
        EXPECT_EQ(state.scale, before.scale);
        EXPECT_EQ(state.history, before.history);
        EXPECT_EQ(state.non_finite, i);
      }
    }
  }
}

// Under kPropagate one operand drops the step for all, under kSaturate for itself.
TEST(Delayed, OneOperandDropsTheStepOfAll) {
  const DelayedSlot slots[3];
  const auto ended = [&](const DelayedOptions& options) {
    std::vector<DelayedState> states(3);
    const auto set = [&](float a, float b, float c) {
      const float amaxes[] = {a, b, c};
      for (size_t i = 0; i < 3; ++i) states[i].amax = std::bit_cast<uint32_t>(amaxes[i]);
      scale_update(slots, options, states);
    };
    set(2, 4, 8);
    set(1e38F, Limits::infinity(), 1);
    return states;
  };
  const auto dropped = ended({.history = 2});
  EXPECT_EQ(dropped[0].scale, 224) << "an absurd amax of the same step";
  EXPECT_EQ(dropped[1].scale, 112);
  EXPECT_EQ(dropped[2].scale, 56);
  EXPECT_EQ(dropped[2].history[1], 0U);
  EXPECT_EQ(dropped[0].non_finite + dropped[2].non_finite, 0U);
  EXPECT_EQ(dropped[1].non_finite, 1U);
  const auto held = ended({.history = 2, .non_finite = NonFinite::kSaturate});
  EXPECT_EQ(held[0].scale, 0.875F) << "a lone outlier";
  EXPECT_EQ(held[1].scale, 112);
  EXPECT_EQ(std::bit_cast<float>(held[2].history[0]), 1);
}

TEST(Delayed, ABadFirstStepLeavesTheInitialState) {
  DelayedState state;
  step(Limits::quiet_NaN(), {.history = 2}, state);
  EXPECT_EQ(state.scale, 1);
  EXPECT_TRUE(reference::is_first_step({&state.history, 1}));
}

// Older versions recorded what is not finite; such a history heals at once.
TEST(Delayed, AHistoryOfAnOlderVersionHeals) {
  for (const ScaleFrom from : {ScaleFrom::kMax, ScaleFrom::kMostRecent}) {
    const DelayedOptions options{.history = 3, .scale_from = from};
    DelayedState state{.amax = 0x7fc00000,
                       .history = {0x7f800000, 0x40000000, 0},
                       .scale = Limits::quiet_NaN(),
                       .non_finite = 0};
    step(Limits::quiet_NaN(), options, state);
    EXPECT_EQ(state.scale, 224);
    EXPECT_TRUE(reference::is_first_step({&state.history, 1})) << "a loaded scale may be NaN";
    state.amax = 0;
    for (int i = 0; i < 3; ++i) step(1, options, state);
    EXPECT_FALSE(reference::is_first_step({&state.history, 1}));
  }
}

// An absurd step that is finite raises the amax by what the format can bear, as long as it is alone.
TEST(Delayed, ALoneOutlierIsBounded) {
  for (const auto& [format, bound] :
       {std::pair{Dtype::kE4m3, 0x1p8F}, std::pair{Dtype::kE5m2, 0x1p16F}}) {
    const DelayedSlot slot{format, false};
    const DelayedOptions options{.history = 4};
    const auto scale_of = [&](float amax) { return scale_from_amax(amax, format, false); };
    EXPECT_EQ(reference::lone_growth(format), bound);
    DelayedState state;
    step(2, options, state, slot);
    step(1e38F, options, state, slot);
    EXPECT_EQ(state.scale, scale_of(2 * bound));
    EXPECT_EQ(std::bit_cast<float>(state.history[0]), 1e38F) << "the history has what was seen";
    step(1, options, state, slot);
    EXPECT_EQ(state.scale, scale_of(2 * bound));
    step(4e37F, options, state, slot);
    EXPECT_EQ(state.scale, scale_of(1e38F)) << "seen twice";
    for (int i = 0; i < 3; ++i) step(1, options, state, slot);
    EXPECT_EQ(state.scale, scale_of(bound));
    step(1, options, state, slot);
    EXPECT_EQ(state.scale, scale_of(1));
    step(bound, options, state, slot);
    EXPECT_EQ(state.scale, scale_of(bound)) << "not beyond it";
    step(1e38F, {.history = 4, .scale_from = ScaleFrom::kMostRecent}, state, slot);
    EXPECT_EQ(state.scale, scale_of(1e38F));
  }
}

// A weight that grows from zero, beside operands that have been there from the beginning.
TEST(Delayed, AnOperandThatGrowsFromZero) {
  const auto first = [](std::initializer_list<float> young, size_t age_of_others) {
    std::vector<std::vector<uint32_t>> histories(2, std::vector<uint32_t>(16));
    size_t i = 0;
    for (const float amax : young) histories[0][i++] = std::bit_cast<uint32_t>(amax);
    std::fill_n(histories[1].begin(), age_of_others, std::bit_cast<uint32_t>(1.0F));
    return reference::is_first_step(histories);
  };
  EXPECT_TRUE(first({}, 1));
  EXPECT_TRUE(first({1}, 2)) << "how it grows is not known";
  EXPECT_TRUE(first({2, 1}, 3));
  EXPECT_TRUE(first({3, 2, 1}, 4));
  EXPECT_FALSE(first({3, 3, 2, 1}, 5));
  EXPECT_FALSE(first({1}, 1)) << "an ordinary second step";
  EXPECT_FALSE(first({2, 1}, 2)) << "as old as the others";
}

TEST(Delayed, ADroppedStepLeavesNothing) {
  const DelayedOptions options{.history = 2};
  DelayedState state;
  step(2, options, state);
  const DelayedState before = state;
  EXPECT_TRUE(is_non_finite(0x7f800000));
  EXPECT_FALSE(is_non_finite(0x7f7fffff));
  for (const float amax : {Limits::infinity(), 8.0F}) {
    step(amax, options, state, {}, true);
    EXPECT_EQ(state.history, before.history);
    EXPECT_EQ(state.scale, before.scale);
    EXPECT_EQ(state.non_finite, 0U);
  }
}

// A first step over ranks leaves its scale in the state before the step is over.
TEST(Delayed, ADroppedFirstStepLeavesTheInitialScale) {
  for (const std::vector<uint32_t>& history : {std::vector<uint32_t>{}, {0, 0}}) {
    for (const bool drop : {false, true}) {
      DelayedState state{.amax = 0, .history = history, .scale = 0, .non_finite = 0};
      step(Limits::infinity(), {.history = 2}, state, {}, drop);
      EXPECT_EQ(state.scale, 1);
    }
  }
}

TEST(Delayed, OptionsAreChecked) {
  EXPECT_TRUE(validate(DelayedOptions{}));
  EXPECT_TRUE(validate(DelayedOptions{.history = 1024, .margin = 16}));
  for (const DelayedOptions& bad : {DelayedOptions{.history = 0}, DelayedOptions{.history = 1025},
                                    DelayedOptions{.margin = -1}, DelayedOptions{.margin = 17}}) {
    const Status status = validate(bad);
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
  }
}

}  // namespace
}  // namespace f8
