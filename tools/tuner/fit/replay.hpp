// Replays the search of GEMMs on stored times: the very rungs of a sweep, on a backend that answers
// with the times of an exhaustive sweep, their noise, and a clock that runs as fast as they say. So
// a strategy's choice is known against the best there is, and what it would cost.
//
// The built-in cost model ranks the configurations, and winners of other layers (n, k) have a vote.
// Whole linears are not replayed: their times are stored for one choice of kernels alone.
#pragma once

#include <string>
#include <vector>

#include "tools/tuner/fit/regret.hpp"
#include "tools/tuner/search/plan/sweep_plan.hpp"

namespace f8::tuner {

// A way to search, as figures of the sweep's method.
struct Strategy {
  std::string name;
  SweepOptions options;
  bool measures = true;  // false: the choice without a search
};
// A strategy of apply_strategy(), or "untuned".
[[nodiscard]] Result<Strategy> find_strategy(std::string_view name, const SweepOptions& options);
inline constexpr std::string_view kUntuned = "untuned";

// A GEMM of which (nearly) every configuration of today's generator was measured to the end.
struct ExhaustiveGemm {
  MeasuredGemm measured;
  std::vector<runtime::NearbyWinner> nearby = {};  // of other layers
};
struct ExhaustiveSet {
  std::vector<ExhaustiveGemm> gemms;
  size_t left_out = 0;  // GEMMs with too few configurations
};
// A set is what was measured of at least this share of the configurations, so that it stays one when
// some join them.
inline constexpr double kExhaustiveShare = 0.7;
[[nodiscard]] ExhaustiveSet exhaustive_set(const std::vector<MeasuredGemm>& gemms);

struct ReplayedSearch {
  double regret = 0;  // the time of what was chosen over the best's, less one
  double gpu_s = 0;
  int candidates = 0;  // that were measured
};
[[nodiscard]] Result<ReplayedSearch> replay(const ExhaustiveGemm& gemm, const Strategy& strategy,
                                            uint64_t seed);

}  // namespace f8::tuner
