// The two rungs of a GEMM's search: a screening of all candidates together, and a final among the
// best. A sweep measures them on a device, a replay on stored times.
#pragma once

#include <optional>
#include <span>
#include <vector>

#include "tools/tuner/search/plan/sweep_plan.hpp"

namespace f8::tuner {

// Whether so many candidates are screened. Where all of them would go on, the final is enough.
[[nodiscard]] inline bool is_screened(size_t candidates, const SweepOptions& options) {
  return options.race || candidates > static_cast<size_t>(options.finalists);
}
// Both without candidates; the times depend on how many there will be.
[[nodiscard]] InterleavedGroup screening_group(const Problem& gemm, const SweepOptions& options,
                                               size_t candidates, uint64_t seed);
[[nodiscard]] InterleavedGroup final_group(const Problem& gemm, const SweepOptions& options,
                                           size_t candidates, uint64_t seed);

struct ScreenedCandidate {
  Candidate candidate;
  std::optional<double> ns;  // none: it could not be timed
};
// The indices of those that go on, fastest first: the fastest, the fastest of each kind, so that
// the row of the library's best is as good as the one of ours, and of `prior`, which a plan takes
// without a search, what is within reach of the best. `known_ns` is the fastest that was measured
// before; 0: nothing was.
[[nodiscard]] std::vector<size_t> choose_finalists(std::span<const ScreenedCandidate> screened,
                                                   std::span<const runtime::GemmChoice> prior,
                                                   const SweepOptions& options, double known_ns);

}  // namespace f8::tuner
