#include "recipes/delayed.hpp"

#include <algorithm>
#include <bit>
#include <cmath>

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

bool is_non_finite(uint32_t amax) {
  return amax >= 0x7f800000;
}

void scale_drop(DelayedState& state) {
  state.amax = 0;
  if (std::ranges::all_of(state.history, [](uint32_t amax) { return amax == 0; })) state.scale = 1;
}

void scale_update(const DelayedSlot& slot, const DelayedOptions& options, DelayedState& state) {
  const uint32_t amax = state.amax;
  state.amax = 0;
  if (is_non_finite(amax)) {
    ++state.non_finite;
    if (options.non_finite == NonFinite::kHold) return;
  }
  state.history.resize(static_cast<size_t>(options.history));
  std::shift_right(state.history.begin(), state.history.end(), 1);
  state.history.front() = amax;
  const uint32_t most = options.scale_from == ScaleFrom::kMostRecent
                            ? amax
                            : *std::ranges::max_element(state.history);
  if (most == 0) return;
  const float unbounded = scale_from_amax(std::bit_cast<float>(most), slot.dtype, false) *
                          std::ldexp(1.0F, -options.margin);
  state.scale = slot.pow2 ? power_of_two(unbounded) : unbounded;
}

}  // namespace reference
}  // namespace f8
