#include "tools/tuner/search/sweep/gemm_search.hpp"

#include <algorithm>
#include <set>

namespace f8::tuner {

InterleavedGroup screening_group(const Problem& gemm, const SweepOptions& options,
                                 size_t candidates, uint64_t seed) {
  const double all_s = options.screen_ms / 1e3 * static_cast<double>(candidates);
  return {.problem = gemm,
          .candidates = {},
          .purpose = Screening{.drop_above = options.screen_drop},
          .batch_us = options.batch_us,
          .stop = {.target = kAnyWidth, .min_s = all_s, .max_s = all_s, .min_blocks = 1},
          .warm_s = options.warm_s,
          .seed = seed,
          .conditions = options.conditions};
}

InterleavedGroup final_group(const Problem& gemm, const SweepOptions& options, size_t candidates,
                             uint64_t seed) {
  const double all_s = options.final_ms / 1e3 * static_cast<double>(candidates);
  return {
      .problem = gemm,
      .candidates = {},
      .purpose = Times{},
      .batch_us = options.batch_us,
      .stop = {.target = options.gemm_max_ci, .min_s = all_s / 2, .max_s = all_s, .min_blocks = 5},
      .warm_s = options.warm_s,
      .seed = seed,
      .conditions = options.conditions};
}

std::vector<size_t> choose_finalists(std::span<const ScreenedCandidate> screened,
                                     std::span<const runtime::GemmChoice> prior,
                                     const SweepOptions& options, double known_ns) {
  std::vector<size_t> ranked;
  for (size_t i = 0; i < screened.size(); ++i) {
    if (screened[i].ns) ranked.push_back(i);
  }
  if (ranked.empty()) return {};
  std::ranges::stable_sort(ranked, {}, [&](size_t i) { return *screened[i].ns; });
  double best_ns = *screened[ranked.front()].ns;
  if (known_ns > 0) best_ns = std::min(best_ns, known_ns);
  std::vector<size_t> finalists;
  std::set<Impl> kinds;
  for (const size_t i : ranked) {
    const Candidate& candidate = screened[i].candidate;
    const bool first_of_kind = kinds.insert(candidate.impl).second;
    const bool is_prior = *screened[i].ns <= best_ns * options.linear_within &&
                          std::ranges::any_of(prior, [&](const runtime::GemmChoice& choice) {
                            return to_candidate(choice) == candidate;
                          });
    const bool places_left = static_cast<int>(finalists.size()) < options.finalists;
    if (places_left || first_of_kind || is_prior) finalists.push_back(i);
  }
  return finalists;
}

}  // namespace f8::tuner
