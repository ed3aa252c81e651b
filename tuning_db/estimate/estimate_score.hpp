// Estimates against measurements of shapes that the estimator did not know: how often the interval
// holds the truth, whether the verdict is the truth's, and what wrong verdicts cost.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "tuning_db/estimate/estimator.hpp"

namespace f8::tuning_db {

// A measured linear, and what was estimated for its shape without it.
struct ScoredEstimate {
  LinearSpeedup truth;
  Estimate estimate;
  [[nodiscard]] bool is_held() const {
    return estimate.lo <= truth.speedup && truth.speedup <= estimate.hi;
  }
};

// Leaves out each (n, k) of the first device's rows in turn, with all its m, and estimates its
// linears from the others. device: only rows of devices of this name; empty: all. An estimator takes
// a time that grows with rows and layers, and each layer needs its own, so that of a large table a
// sample is left out, evenly through its order: as many as `effort` allows, rows times layers, and at
// least kLeastLeftOut.
inline constexpr size_t kLeastLeftOut = 5;
inline constexpr size_t kLeaveOutEffort = 20'000'000;  // some seconds
[[nodiscard]] std::vector<ScoredEstimate> leave_layers_out(const TuningTable& table,
                                                           std::string_view recipe,
                                                           std::string_view device = {},
                                                           size_t effort = kLeaveOutEffort);
// Estimates the linears of the table's devices of this name (empty: of its first one) from the rows
// of all others.
[[nodiscard]] std::vector<ScoredEstimate> leave_device_out(const TuningTable& table,
                                                           std::string_view recipe,
                                                           std::string_view device = {});
// Estimates the linears of `truth` that the table has no row of, or none by their toolchain.
[[nodiscard]] std::vector<ScoredEstimate> estimate_unknown(const TuningTable& table,
                                                           const TuningTable& truth,
                                                           std::string_view recipe,
                                                           std::string_view device = {});

// What a set of decisions loses to the right ones: the time of all linears, forward and backward,
// over the time with each of them as it is faster, less one.
struct DecisionRegrets {
  double measured = 0;  // of the verdicts: convert where the interval's lower end pays
  double torchao = 0;   // of torchao's rule; where it has none, of converting all
  double convert_all = 0;
  double keep_all = 0;
};

struct EstimateScore {
  size_t shapes = 0;
  size_t held = 0;        // whose interval holds the measured speedup
  size_t decided = 0;     // whose interval is on one side of 1 + margin
  size_t right = 0;       // of the decided ones, whose verdict is the measured speedup's
  double bias = 0;        // mean of log(estimate / truth)
  double rms = 0;         // root of the mean of its square
  double half_width = 0;  // mean of log(hi / lo) / 2
  DecisionRegrets regrets;
};
[[nodiscard]] EstimateScore score_estimates(std::span<const ScoredEstimate> estimates,
                                            double margin);

}  // namespace f8::tuning_db
