#include "tools/tuner/search/gemm_candidates.hpp"

#include <algorithm>

#include "runtime/gemm/choose.hpp"
#include "tools/tuner/search/device_profile.hpp"

namespace f8::tuner {

std::vector<Generated> in_order(const codegen::GemmSpec& family, Shape own,
                                std::span<const GemmConfig> configs,
                                const runtime::DeviceInfo& device, int keep,
                                std::span<const runtime::GemmChoice> also,
                                const runtime::CostModel& model) {
  const double ghz = profile_of(device).settled * std::max(device.sm_clock_max_mhz, 1) / 1e3;
  std::vector<Generated> candidates;
  for (const GemmConfig& config : configs) {
    codegen::GemmSpec spec = family;
    spec.config = config;
    const double clocks = runtime::predicted_clocks(spec, own, device.sm_count, model);
    candidates.push_back({.spec = spec, .predicted_ns = clocks / ghz, .pruned = {}});
  }
  std::ranges::stable_sort(candidates, [&](const Generated& x, const Generated& y) {
    if (x.predicted_ns != y.predicted_ns) return x.predicted_ns < y.predicted_ns;
    return key(x.spec.config) < key(y.spec.config);
  });
  int kept = 0;
  for (Generated& candidate : candidates) {
    const bool forced = std::ranges::any_of(also, [&](const runtime::GemmChoice& choice) {
      return choice.provider == Provider::kGenerated && choice.config == candidate.spec.config;
    });
    if (forced || kept < keep) {
      ++kept;
      continue;
    }
    candidate.pruned =
        f8::format("predicted {:.1f} us, {:.2f}x the best bound; the first {} are measured",
                   candidate.predicted_ns / 1e3,
                   candidate.predicted_ns / candidates.front().predicted_ns, keep);
  }
  std::ranges::stable_partition(candidates, [](const Generated& c) { return c.pruned.empty(); });
  return candidates;
}

Result<std::vector<Generated>> generated_candidates(const Problem& problem,
                                                    const runtime::DeviceInfo& device, int keep,
                                                    std::span<const runtime::GemmChoice> also,
                                                    const Epilogue& epilogue) {
  const codegen::GemmSpec family = F8_TRY(gemm_spec(problem, epilogue));
  const Shape own = is_grouped(problem.op) ? runtime::grouped_shape(F8_TRY(grouped_desc(problem)))
                                           : gemm_shape(problem.shape(), to_gemm(problem.op));
  return in_order(family, own, codegen::gemm_candidates(family), device, keep, also);
}

Result<std::vector<runtime::GemmChoice>> prior_choices(const Problem& problem,
                                                       const runtime::DeviceInfo& device,
                                                       const TuningTable& table, int unmeasured) {
  const Recipe recipe = F8_TRY(find_recipe(problem.recipe));
  const bool experts = is_grouped(problem.op);
  const bool bf16 = !experts && !recipe.at(to_gemm(problem.op)).is_fp8();
  const runtime::GemmDesc desc = F8_TRY(gemm_desc(problem, bf16));
  std::vector<runtime::GemmChoice> choices;
  for (const TuningTable* known : {static_cast<const TuningTable*>(nullptr), &table}) {
    runtime::GemmChoice choice;
    if (experts) {
      const runtime::GroupedDesc of_groups = F8_TRY(grouped_desc(problem));
      choice = F8_TRY(runtime::choose_grouped(known, of_groups, device.sm_count));
    } else {
      choice = F8_TRY(runtime::choose_gemm(known, desc, device.sm_count));
    }
    if (choice.heuristic == kRankedFirst) choice.heuristic = unmeasured;
    const auto same = [&](const runtime::GemmChoice& other) {
      return to_candidate(other) == to_candidate(choice);
    };
    if (std::ranges::none_of(choices, same)) choices.push_back(choice);
  }
  return choices;
}

}  // namespace f8::tuner
