// Delayed scaling: an operand is cast with the scale that earlier steps left, and its own amax is
// recorded for later ones. After backward, once the ranks agree on the amaxes, the history of every
// operand moves on by one step and gives the scale of the next step:
//
//   history := amax history[0 .. length-2]                          newest first
//   scale   := scale_from_amax(max history | amax) * 2^-margin      then pow2, if the slot has it
//
// The maximum of a history counts as at most lone_growth() times its second largest amax. So a step
// with an absurd but finite gradient does not take all that others see to 0 for as long as the history
// has it; what is there to stay is there twice.
//
// A history has what was seen: an amax of 0 (nothing was cast, or zeros alone) is not recorded. An
// operand whose history is empty has no scale yet, and its linear is cast as in a first step, by the
// amaxes of the tensors at hand. So is one with an operand that is younger than others and still grows
// from zero, such as a weight under Adam: it is t times as large after t steps.
//
// An amax that is not finite never enters a history, and a policy decides what becomes of its step.
// Under `propagate`, whose casts let a trainer see it, the step counts for no operand of the model:
// all histories and scales stay as they are. `saturate` freezes the history and scale of that operand
// alone. A trainer may also drop a step itself (found_inf). A dropped step leaves a state without a
// history at scale 1: a first step over ranks may have left its own scale there.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "base/error.hpp"
#include "recipes/dtype.hpp"
#include "recipes/scales/scale.hpp"

namespace f8 {

enum class ScaleFrom : uint8_t { kMax, kMostRecent };

struct DelayedOptions {
  int history = 16;  // amaxes kept, 1 to 1024
  ScaleFrom scale_from = ScaleFrom::kMax;
  int margin = 0;  // the scale is divided by 2^margin, 0 to 16
  NonFinite non_finite = NonFinite::kPropagate;
  bool operator==(const DelayedOptions&) const = default;
};
[[nodiscard]] Status validate(const DelayedOptions& options);

// The format that a history's scale is for.
struct DelayedSlot {
  Dtype dtype = Dtype::kE4m3;
  bool pow2 = false;
  bool operator==(const DelayedSlot&) const = default;
};

namespace reference {

// One operand's state. An amax is the bits of |x| as fp32, so that the order of amaxes is that of
// integers.
struct DelayedState {
  uint32_t amax = 0;              // of this step
  std::vector<uint32_t> history;  // options.history of them
  float scale = 1;
  uint32_t non_finite = 0;  // steps whose amax was not finite
};

[[nodiscard]] bool is_non_finite(uint32_t amax);
// By how much one step alone raises the amax that a scale is for: half of the format's range, in octaves.
[[nodiscard]] float lone_growth(Dtype format);
// Tells whether a linear with operands of these histories has a first step now. So it has with an
// amax that is not finite, which older versions recorded: they took it for a scale.
[[nodiscard]] bool is_first_step(std::span<const std::vector<uint32_t>> histories);
// Ends a step of all operands of a model. `drop`: the trainer drops it.
void scale_update(std::span<const DelayedSlot> slots, const DelayedOptions& options,
                  std::span<DelayedState> states, bool drop = false);

}  // namespace reference
}  // namespace f8
