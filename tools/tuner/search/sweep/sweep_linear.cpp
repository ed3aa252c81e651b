// The measurement of one linear: its kernels are looked for among those of its GEMMs, then it is
// compared with its bf16 baseline.
#include <algorithm>

#include "tools/tuner/search/sweep/sweep.hpp"

namespace f8::tuner {
namespace {

using tuning_db::TrialResult;
using tuning_db::TrialState;

// Says which kernels a linear took, and how they were found.
void describe(LinearResult& linear, const LinearSearch& search, const LinearChoices& bf16) {
  if (linear.float8.is_timed()) {
    if (search.timed > 1) {
      linear.float8.reason +=
          f8::format("{}the fastest of {} linears, that of the fastest kernels takes {:.3f}x",
                     linear.float8.reason.empty() ? "" : "; ", search.timed, search.over_first);
      if (search.over_untuned) {
        linear.float8.reason += f8::format(", that of no search {:.3f}x", *search.over_untuned);
      }
    }
    linear.float8.kernels = part_kernels(search.choices);
  }
  if (linear.bf16.is_timed()) linear.bf16.kernels = part_kernels(bf16);
}

}  // namespace

// The timed kernels of a GEMM, fastest first; noisy ones only if there are no others.
std::vector<TimedKernel> Sweep::timed_kernels(const PlannedGemm& gemm, bool bf16) const {
  std::vector<TimedKernel> steady;
  std::vector<TimedKernel> noisy;
  const auto known = known_.find(gemm_identity(gemm.problem, bf16));
  if (known == known_.end()) return steady;
  for (const auto& [key, one] : known->second) {
    if (!one.result.is_timed() || (one.candidate.impl == Impl::kBf16CublasLt) != bf16) continue;
    const auto choice = to_choice(one.candidate);
    if (!choice) continue;
    (one.result.state == TrialState::kOk ? steady : noisy)
        .push_back({.choice = *choice, .ns = one.result.timing->median_ns});
  }
  std::vector<TimedKernel>& kernels = steady.empty() ? noisy : steady;
  std::ranges::stable_sort(kernels, {}, &TimedKernel::ns);
  return kernels;
}

Result<Sweep::LinearKernels> Sweep::kernels_of(const PlannedLinear& linear) const {
  const Recipe recipe = F8_TRY(find_recipe(linear.problem.recipe));
  LinearKernels kernels;
  for (const Gemm g : kGemms) {
    const auto i = static_cast<size_t>(g);
    const PlannedGemm& gemm = linear.gemms[i];
    const std::vector<TimedKernel> bf16 = timed_kernels(gemm, true);
    kernels.bf16[i].provider =
        Provider::kCublasLt;  // its first suggestion, where none was measured
    if (!bf16.empty()) kernels.bf16[i] = bf16.front().choice;
    const bool generated = recipe.at(g).is_fp8() || is_grouped(gemm.problem.op);
    kernels.shortlists[i] = {.timed = generated ? timed_kernels(gemm, false) : bf16,
                             .prior = gemm.prior};
    if (kernels.shortlists[i].timed.empty()) {
      kernels.missing += f8::format("{}{}", kernels.missing.empty() ? "" : ", ", to_string(g));
    }
  }
  return kernels;
}

InterleavedGroup Sweep::group_of(const PlannedLinear& linear) {
  return {.problem = linear.problem,
          .candidates = {},
          .purpose = {},
          .batch_us = request_.options.linear_batch_us,
          .stop = {},
          .warm_s = request_.options.warm_s,
          .seed = next_seed(),
          .conditions = request_.options.conditions};
}

Result<LinearSearch> Sweep::search(const PlannedLinear& linear, const LinearKernels& kernels) {
  return search_linear(group_of(linear), kernels.shortlists, request_.options.linear_search(),
                       [this](const InterleavedGroup& group) { return measure(group); });
}

Result<LinearChoices> Sweep::search_baseline(const PlannedLinear& linear) {
  for (const codegen::KernelSpec& spec : linear.baseline->specs) compiler_.want(spec);
  F8_TRY(wait_for(linear.baseline->specs));
  return search_expert_baseline(*linear.baseline, group_of(linear),
                                request_.options.linear_search(),
                                [this](const InterleavedGroup& group) { return measure(group); });
}

// Measures a noisy group again, each time twice as long.
Result<std::vector<TrialResult>> Sweep::measure_again(InterleavedGroup group) {
  std::vector<TrialResult> results = F8_TRY(measure(group));
  for (int retry = 0; retry < request_.options.retry_noisy; ++retry) {
    const bool noisy = std::ranges::any_of(
        results, [](const TrialResult& r) { return r.state == TrialState::kNoisy; });
    if (!noisy || interrupted()) break;
    group.stop.max_s *= 2;
    group.seed = next_seed();
    results = F8_TRY(measure(group));
  }
  return results;
}

Sweep::PairOfTrials Sweep::trials_of(const Pending& pending) {
  PairOfTrials pair;
  for (const tuning_db::PendingTrial* trial : pending) {
    (trial->key.candidate.impl == tuning_db::Impl::kFloat8 ? pair.float8 : pair.bf16) = trial;
  }
  return pair;
}

Status Sweep::compare_with_bf16(const PlannedLinear& linear, const Pending& pending,
                                const Compared& compared, SweepOutcome& outcome) {
  const SweepOptions& options = request_.options;
  InterleavedGroup group = group_of(linear);
  group.stop = {.target = options.max_ci,
                .min_s = options.linear_min_ms / 1e3,
                .max_s = options.linear_max_ms / 1e3,
                .min_blocks = kLinearBlocks};
  if (compared.float8) {
    group.candidates.push_back({.impl = Impl::kFloat8, .config = *compared.float8});
    if (compared.bf16) group.purpose = Ratios{.reference = 1};
  }
  if (compared.bf16) group.candidates.push_back({.impl = Impl::kBf16, .config = *compared.bf16});
  group.seed = next_seed();
  const std::vector<TrialResult> results = F8_TRY(measure_again(std::move(group)));

  LinearResult measured{.problem = linear.problem, .float8 = {}, .bf16 = {}};
  if (compared.bf16) measured.bf16 = results.back();
  if (compared.float8) {
    measured.float8 = results.front();
  } else {
    measured.float8.state = TrialState::kLaunchError;
    measured.float8.reason = compared.missing;
  }
  F8_TRY(compared.describe(measured));
  const auto [float8, bf16] = trials_of(pending);
  if (measured.float8.ratio) {
    if (bf16 != nullptr) measured.float8.ratio->pair_uuid = bf16->uuid;
    if (measured.float8.ratio->ratio > progress_.best_speedup) {
      progress_.best_speedup = measured.float8.ratio->ratio;
      progress_.best_of = linear.problem.key();
    }
  }
  if (bf16 != nullptr) F8_TRY(finish(*bf16, measured.bf16));
  if (float8 != nullptr) F8_TRY(finish(*float8, measured.float8));
  outcome.linears.push_back(std::move(measured));
  return {};
}

Status Sweep::measure_linear(const PlannedLinear& linear, const Pending& pending,
                             SweepOutcome& outcome) {
  LinearKernels kernels = F8_TRY(kernels_of(linear));
  progress_.doing = linear.problem.key();
  (void)tick();
  const auto [float8, bf16] = trials_of(pending);
  if (float8 != nullptr && kernels.missing.empty()) F8_TRY(db_.start_trial(*float8));
  if (bf16 != nullptr) F8_TRY(db_.start_trial(*bf16));
  if (linear.baseline) kernels.bf16 = F8_TRY(search_baseline(linear));
  LinearSearch found;
  Compared compared{.float8 = {}, .bf16 = choices_text(kernels.bf16), .describe = {}};
  if (kernels.missing.empty()) {
    found = F8_TRY(search(linear, kernels));
    compared.float8 = choices_text(found.choices);
  } else {
    compared.missing = f8::format("no kernel works for {}", kernels.missing);
  }
  compared.describe = [&](LinearResult& measured) {
    describe(measured, found, kernels.bf16);
    return Status();
  };
  return compare_with_bf16(linear, pending, compared, outcome);
}

}  // namespace f8::tuner
