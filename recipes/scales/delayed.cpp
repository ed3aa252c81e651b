#include "recipes/scales/delayed.hpp"

#include <algorithm>
#include <bit>
#include <cmath>
#include <utility>

namespace f8 {

Status validate(const DelayedOptions& options) {
  if (options.history < 1 || options.history > 1024) {
    return fail(ErrorCode::kInvalidArgument, "delayed scaling: a history of {} amaxes; 1 to 1024",
                options.history);
  }
  if (options.margin < 0 || options.margin > 16) {
    return fail(ErrorCode::kInvalidArgument, "delayed scaling: margin {}; 0 to 16", options.margin);
  }
  return {};
}

namespace reference {
namespace {

constexpr float kGrows = 1.0625F;  // an operand that was this much smaller a step ago

bool counts(uint32_t amax) {
  return amax != 0 && !is_non_finite(amax);
}

// The amax that a scale is for; 0 where there is none.
uint32_t amax_of(const std::vector<uint32_t>& history, ScaleFrom from, Dtype format) {
  uint32_t most = 0;
  uint32_t second = 0;
  for (const uint32_t amax : history) {
    if (!counts(amax)) continue;
    if (from == ScaleFrom::kMostRecent) return amax;
    second = std::max(second, std::min(most, amax));
    most = std::max(most, amax);
  }
  if (second == 0) return most;
  const float bound = std::bit_cast<float>(second) * lone_growth(format);
  return std::min(most, std::bit_cast<uint32_t>(bound));
}

}  // namespace

bool is_non_finite(uint32_t amax) {
  return amax >= 0x7f800000;
}

float lone_growth(Dtype format) {
  return format == Dtype::kE5m2 ? 0x1p16F : 0x1p8F;
}

bool is_first_step(std::span<const std::vector<uint32_t>> histories) {
  const auto age = [](const std::vector<uint32_t>& history) {
    return std::ranges::count_if(history, counts);
  };
  std::ptrdiff_t oldest = 0;
  for (const auto& history : histories) oldest = std::max(oldest, age(history));
  return std::ranges::any_of(histories, [&](const std::vector<uint32_t>& history) {
    const std::ptrdiff_t own = age(history);
    if (own == 0 || std::ranges::any_of(history, is_non_finite)) return true;
    if (own < 2) return own < oldest;
    const auto newest = std::bit_cast<float>(history[0]);
    return own < oldest && newest > kGrows * std::bit_cast<float>(history[1]);
  });
}

void scale_update(std::span<const DelayedSlot> slots, const DelayedOptions& options,
                  std::span<DelayedState> states, bool drop) {
  const auto bad = [](const DelayedState& state) { return is_non_finite(state.amax); };
  const bool dropped =
      drop || (options.non_finite == NonFinite::kPropagate && std::ranges::any_of(states, bad));
  for (size_t i = 0; i < states.size(); ++i) {
    DelayedState& state = states[i];
    if (bad(state) && !drop) ++state.non_finite;
    const uint32_t amax = std::exchange(state.amax, 0);
    state.history.resize(static_cast<size_t>(options.history));
    if (counts(amax) && !dropped) {
      std::shift_right(state.history.begin(), state.history.end(), 1);
      state.history.front() = amax;
    }
    const uint32_t most = amax_of(state.history, options.scale_from, slots[i].dtype);
    if (most != 0) {
      const float unbounded = scale_from_amax(std::bit_cast<float>(most), slots[i].dtype, false) *
                              std::ldexp(1.0F, -options.margin);
      state.scale = slots[i].pow2 ? power_of_two(unbounded) : unbounded;
    } else if (dropped) {
      state.scale = 1;
    }
  }
}

}  // namespace reference
}  // namespace f8
