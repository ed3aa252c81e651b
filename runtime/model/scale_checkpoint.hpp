// Saves the state of DelayedScales from the device into a checkpoint and loads it back
// (recipes/scales/scale_state.hpp has the format). These calls synchronise their stream: they belong
// between steps.
#pragma once

#include <span>

#include "runtime/quantize/delayed_scales.hpp"

namespace f8::runtime {

// The size of every saved state of these scales.
[[nodiscard]] size_t saved_state_bytes(const DelayedScales& scales);
// Waits for the stream and writes saved_state_bytes() to `out`.
[[nodiscard]] Status save_state(const DelayedScales& scales, const void* state,
                                std::span<std::byte> out, Stream stream);
// Checks `in`, then replaces the device's state and waits until that is done. On an error of `in`
// the state is as it was; it must be of the same operands with the same length of history.
[[nodiscard]] Status load_state(const DelayedScales& scales, void* state,
                                std::span<const std::byte> in, Stream stream);

}  // namespace f8::runtime
