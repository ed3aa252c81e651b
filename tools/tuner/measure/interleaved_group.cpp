#include "tools/tuner/measure/interleaved_group.hpp"

namespace f8::tuner {

Stop should_stop(const StopRule& rule, double elapsed_s, int blocks, double relative_half_width) {
  const bool enough_blocks = blocks >= rule.min_blocks;
  const bool narrow = relative_half_width <= rule.target;
  if (enough_blocks && narrow && elapsed_s >= rule.min_s) return {.stop = true};
  if (elapsed_s < rule.max_s) return {};
  // The time is spent: a criterion that was not reached by now makes the result noisy.
  if (enough_blocks && narrow) return {.stop = true};
  if (!narrow) {
    return {.stop = true,
            .noisy = true,
            .unmet = f8::format("half-width {:.2f} % > {:.2f} % after {:.2f} s and {} blocks",
                                100 * relative_half_width, 100 * rule.target, elapsed_s, blocks)};
  }
  return {.stop = true,
          .noisy = true,
          .unmet = f8::format("{} blocks < {} after {:.2f} s", blocks, rule.min_blocks, elapsed_s)};
}

std::string_view rotation_text(const Conditions& conditions) {
  return conditions.l2 == L2State::kHot ? "one operand set, which stays in L2 as far as it fits"
                                        : ">= 2 x L2 and >= 2 operand sets";
}

std::string_view clock_text(const Conditions& conditions) {
  return conditions.clock == ClockPolicy::kLocked
             ? "locked: a measurement in which the SM clock moves is noisy"
             : "steady: a power cap is kept, thermal and hardware slowdowns are dropped";
}

std::string_view fidelity_of(const Conditions& conditions) {
  return conditions.l2 == L2State::kHot ? "screen" : "final";
}

}  // namespace f8::tuner
