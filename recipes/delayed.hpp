// Delayed scaling: an operand is cast with the scale that earlier steps left, and its own amax is
// recorded for later ones. After backward, once the ranks agree on the amaxes, the history of every
// operand moves on by one step and gives the scale of the next step:
//
//   history := amax history[0 .. length-2]                          newest first
//   scale   := scale_from_amax(max history | amax) * 2^-margin      then pow2, if the slot has it
//
// If all amaxes are 0 (nothing was cast), the scale stays as it is. A policy decides what an amax
// that is not finite does: `propagate` lets it into the history, so that the scale is NaN or 0 and
// a trainer's check sees it; `hold` freezes history and scale.
//
// A trainer may also drop a step, for example one whose amaxes are not finite (found_inf). Then the
// amax becomes 0 and history, count and scale stay as they are. A state without a history has scale
// 1: a first step over ranks may have left its own scale there.
#pragma once

#include <cstdint>
#include <vector>

#include "base/error.hpp"
#include "recipes/dtype.hpp"
#include "recipes/scale.hpp"

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
void scale_update(const DelayedSlot& slot, const DelayedOptions& options, DelayedState& state);
// Ends a step that is dropped.
void scale_drop(DelayedState& state);

}  // namespace reference
}  // namespace f8
