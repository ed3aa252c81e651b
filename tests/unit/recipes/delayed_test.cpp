#include "recipes/delayed.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>

namespace f8 {
namespace {

using reference::DelayedState;
using reference::is_non_finite;
using reference::scale_drop;
using reference::scale_update;

void step(float amax, const DelayedOptions& options, DelayedState& state,
          const DelayedSlot& slot = {}) {
  state.amax = std::bit_cast<uint32_t>(amax);
  scale_update(slot, options, state);
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

TEST(Delayed, WhatWasNeverCastKeepsItsScale) {
  DelayedState state;
  step(0, {}, state);
  EXPECT_EQ(state.scale, 1);
  step(2, {}, state);
  step(0, {}, state);
  EXPECT_EQ(state.scale, 224) << "still in the history";
  step(0, {.scale_from = ScaleFrom::kMostRecent}, state);
  EXPECT_EQ(state.scale, 224);
}

TEST(Delayed, NonFinitePolicies) {
  using Limits = std::numeric_limits<float>;
  for (const float bad : {Limits::quiet_NaN(), Limits::infinity()}) {
    DelayedState state;
    const DelayedOptions propagate{.history = 2};
    step(2, propagate, state);
    step(bad, propagate, state);
    EXPECT_TRUE(std::isnan(bad) ? std::isnan(state.scale) : state.scale == 0);
    step(4, propagate, state);
    step(4, propagate, state);
    EXPECT_EQ(state.scale, 112);
    EXPECT_EQ(state.non_finite, 1U);

    const DelayedOptions hold{.history = 2, .non_finite = NonFinite::kHold};
    step(2, hold, state);
    const DelayedState before = state;
    step(bad, hold, state);
    EXPECT_EQ(state.scale, before.scale);
    EXPECT_EQ(state.history, before.history);
    EXPECT_EQ(state.non_finite, 2U);
  }
}

TEST(Delayed, ADroppedStepLeavesNothing) {
  const DelayedOptions options{.history = 2};
  DelayedState state;
  step(2, options, state);
  const DelayedState before = state;
  state.amax = 0x7f800000;
  EXPECT_TRUE(is_non_finite(state.amax));
  EXPECT_FALSE(is_non_finite(0x7f7fffff));
  scale_drop(state);
  EXPECT_EQ(state.amax, 0U);
  EXPECT_EQ(state.history, before.history);
  EXPECT_EQ(state.scale, before.scale);
  EXPECT_EQ(state.non_finite, 0U);
}

// A first step over ranks leaves its scale in the state before the step is over.
TEST(Delayed, ADroppedFirstStepLeavesTheInitialScale) {
  for (const std::vector<uint32_t>& history : {std::vector<uint32_t>{}, {0, 0}}) {
    DelayedState state{.amax = 0x7f800000, .history = history, .scale = 0, .non_finite = 0};
    scale_drop(state);
    EXPECT_EQ(state.scale, 1);
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
