// The kernels of delayed scaling as loops over their arguments.
#include <algorithm>
#include <bit>
#include <cmath>
#include <span>
#include <utility>

#include "recipes/reference/reference.hpp"
#include "recipes/scales/delayed.hpp"
#include "recipes/scales/scale.hpp"
#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::emulation {
namespace {

// The scale of a first step over ranks, which is the dynamic one.
void first_scale(const DelayedSlot& slot, const DelayedOptions& options,
                 reference::DelayedState& state) {
  const uint32_t amax = std::exchange(state.amax, 0);
  if (reference::is_non_finite(amax)) {
    ++state.non_finite;
    if (options.non_finite == NonFinite::kSaturate) return;
  }
  if (amax != 0) state.scale = scale_from_amax(std::bit_cast<float>(amax), slot.dtype, slot.pow2);
}

}  // namespace

void emulate(const codegen::ScaleUpdateSpec&, const Call& call) {
  const auto& args = call.args<kernels::ScaleUpdateArgs>();
  const unsigned grid = call.launch.grid;
  if (grid != 1) return call.fault("scale update: grid {}", grid);
  const bool first = args.first != 0;
  const DelayedOptions options{
      .history = first ? 1 : args.length,
      .scale_from = args.most_recent != 0 ? ScaleFrom::kMostRecent : ScaleFrom::kMax,
      .margin = -std::ilogb(args.margin_factor),
      .non_finite = args.freeze != 0 ? NonFinite::kSaturate : NonFinite::kPropagate};
  std::vector<DelayedSlot> slots;
  std::vector<reference::DelayedState> states;
  for (int i = 0; i < args.count; ++i) {
    const uint32_t format = args.format[i];
    slots.push_back({.dtype = (format & kernels::kFormatE5m2) != 0 ? Dtype::kE5m2 : Dtype::kE4m3,
                     .pow2 = (format & kernels::kFormatPow2) != 0});
    auto& state =
        states.emplace_back(reference::DelayedState{.amax = args.amax[i],
                                                    .history = {},
                                                    .scale = args.scale[i * kernels::kScaleStride],
                                                    .non_finite = args.non_finite[i]});
    for (int age = 0; age < args.length && !first; ++age) {
      state.history.push_back(args.history[age * args.count + i]);
    }
  }
  if (first) {
    for (size_t i = 0; i < states.size(); ++i) first_scale(slots[i], options, states[i]);
  } else {
    const bool drop = args.drop != 0 || (args.found_inf != nullptr && *args.found_inf != 0);
    reference::scale_update(slots, options, states, drop);
  }
  for (int i = 0; i < args.count; ++i) {
    const reference::DelayedState& state = states[static_cast<size_t>(i)];
    args.amax[i] = state.amax;
    args.non_finite[i] = state.non_finite;
    for (int age = 0; age < args.length && !first; ++age) {
      args.history[age * args.count + i] = state.history[static_cast<size_t>(age)];
    }
    args.scale[i * kernels::kScaleStride] = state.scale;
    args.scale[i * kernels::kScaleStride + kernels::kInverse] = inverse_scale(state.scale);
  }
}

void emulate(const codegen::FoundInfSpec&, const Call& call) {
  const auto& args = call.args<kernels::FoundInfArgs>();
  const unsigned grid = call.launch.grid;
  if (static_cast<int>(grid) != (args.count + 255) / 256) {
    return call.fault("found inf: grid {} for {} slots", grid, args.count);
  }
  const std::span amaxes(args.amax, static_cast<size_t>(args.count));
  if (std::ranges::any_of(amaxes, reference::is_non_finite)) *args.found_inf = 1;
}

}  // namespace f8::runtime::emulation
