// The tuning of one GEMM: all candidates are screened together, then the best are compared.
#include <algorithm>
#include <numeric>
#include <optional>

#include "tools/tuner/search/sweep/gemm_search.hpp"
#include "tools/tuner/search/sweep/sweep.hpp"

namespace f8::tuner {
namespace {

using tuning_db::TrialResult;
using tuning_db::TrialState;

Candidate candidate_of(const tuning_db::PendingTrial& trial) {
  const auto candidate = from_row(trial.key.candidate);
  if (candidate) return *candidate;
  // Another version's configuration: look_at() finds none like it.
  return parse_candidate(to_string(trial.key.candidate.impl), "").value();
}

// A measured result with what was known of the candidate before it ran.
TrialResult complete(TrialResult result, const TrialResult& before) {
  result.predicted_ns = before.predicted_ns;
  if (before.compile_ms) result.compile_ms = before.compile_ms;
  if (!result.registers) result.registers = before.registers;
  if (!result.spill_bytes) result.spill_bytes = before.spill_bytes;
  return result;
}

}  // namespace

Status Sweep::tune_gemm(const PlannedGemm& gemm, bool bf16, const Pending& pending) {
  GemmTuning tuning{.gemm = gemm, .known = known_[gemm_identity(gemm.problem, bf16)]};
  F8_TRY(admit(tuning, pending));
  if (tuning.entrants.empty()) return {};
  progress_.doing = f8::format("{}{}", gemm.problem.key(), bf16 ? " bf16" : "");
  (void)tick();
  if (is_screened(tuning.entrants.size(), request_.options)) {
    F8_TRY(screen(tuning));
    choose_finalists(tuning);
    F8_TRY(prune(tuning));
  } else {
    tuning.finalists.resize(tuning.entrants.size());
    std::iota(tuning.finalists.begin(), tuning.finalists.end(), size_t{0});
  }
  return request_.options.race ? end_race(tuning) : compare(tuning);
}

// Records the finalists with the screening's times.
Status Sweep::end_race(GemmTuning& tuning) {
  for (const size_t i : tuning.finalists) {
    const Entrant& finalist = tuning.entrants[i];
    F8_TRY(db_.start_trial(*finalist.trial));
    F8_TRY(settle(tuning, *finalist.trial, finalist.result));
  }
  return {};
}

Status Sweep::settle(GemmTuning& tuning, const tuning_db::PendingTrial& trial,
                     const TrialResult& result) {
  const Candidate candidate = candidate_of(trial);
  tuning.known.try_emplace(candidate_key(candidate),
                           Known{candidate, result, tuning.gemm.problem.key()});
  return finish(trial, result);
}

// Lets in the candidates that must be measured. The others get their terminal state here.
Status Sweep::admit(GemmTuning& tuning, const Pending& pending) {
  const std::string problem_key = tuning.gemm.problem.key();
  for (const tuning_db::PendingTrial* trial : pending) {
    const Candidate candidate = candidate_of(*trial);
    const auto found = tuning.known.find(candidate_key(candidate));
    if (found != tuning.known.end()) {
      TrialResult shared = found->second.result;
      if (found->second.problem_key != problem_key) {
        shared.reason += f8::format("{}the same GEMM as {}", shared.reason.empty() ? "" : "; ",
                                    found->second.problem_key);
      }
      F8_TRY(finish(*trial, shared));
      continue;
    }
    TrialResult result = F8_TRY(look_at(tuning.gemm, candidate));
    if (result.state != TrialState::kPlanned) {
      F8_TRY(settle(tuning, *trial, result));
      continue;
    }
    tuning.entrants.push_back({trial, candidate, std::move(result)});
  }
  return {};
}

// The result of a candidate before it runs. Another state than kPlanned says why it does not run.
Result<TrialResult> Sweep::look_at(const PlannedGemm& gemm, const Candidate& candidate) {
  TrialResult result{.state = TrialState::kPlanned};
  const auto excluded = [&](TrialState state, std::string reason) {
    result.state = state;
    result.reason = std::move(reason);
    return result;
  };
  if (candidate.impl == Impl::kGenerated) {
    const auto planned = std::ranges::find_if(
        gemm.generated, [&](const Generated& g) { return key(g.spec.config) == candidate.config; });
    if (planned == gemm.generated.end()) {
      return excluded(TrialState::kPruned, "no longer among the generator's configurations");
    }
    result.predicted_ns = planned->predicted_ns;
    if (!planned->pruned.empty()) return excluded(TrialState::kPruned, planned->pruned);
    const auto cubin = compiler_.wait(planned->spec, [this] { return tick(); });
    if (!cubin) {
      if (cubin.error().code == ErrorCode::kInterrupted) return std::unexpected(cubin.error());
      return excluded(TrialState::kCompileError, cubin.error().message);
    }
    result.compile_ms = (*cubin)->compile_ms;
    result.registers = (*cubin)->registers;
    result.spill_bytes = (*cubin)->spill_bytes;
  }
  const int failures = worker_failures_[blame_key(gemm.problem, candidate)];
  if (failures >= kFailuresToQuarantine) {
    return excluded(TrialState::kQuarantined,
                    f8::format("not run: it took down {} workers before", failures));
  }
  return result;
}

Status Sweep::screen(GemmTuning& tuning) {
  InterleavedGroup group =
      screening_group(tuning.gemm.problem, request_.options, tuning.entrants.size(), next_seed());
  for (const Entrant& entrant : tuning.entrants) group.candidates.push_back(entrant.candidate);
  const std::vector<TrialResult> results = F8_TRY(measure(group));
  for (size_t i = 0; i < results.size(); ++i) {
    TrialResult& result = tuning.entrants[i].result;
    result = complete(results[i], result);
  }
  return {};
}

void Sweep::choose_finalists(GemmTuning& tuning) const {
  std::vector<ScreenedCandidate> screened;
  double known_ns = 0;
  const auto take = [&](double ns) { known_ns = known_ns > 0 ? std::min(known_ns, ns) : ns; };
  for (const auto& [key, known] : tuning.known) {
    if (known.result.is_timed()) take(known.result.timing->median_ns);
  }
  for (const Entrant& entrant : tuning.entrants) {
    std::optional<double> ns;
    if (entrant.result.is_timed()) ns = entrant.result.timing->median_ns;
    screened.push_back({entrant.candidate, ns});
  }
  tuning.finalists =
      tuner::choose_finalists(screened, tuning.gemm.prior, request_.options, known_ns);
  if (tuning.finalists.empty()) return;
  take(*screened[tuning.finalists.front()].ns);
  tuning.best_ns = known_ns;
}

// Records the candidates that leave after the screening.
Status Sweep::prune(GemmTuning& tuning) {
  for (size_t i = 0; i < tuning.entrants.size(); ++i) {
    if (std::ranges::find(tuning.finalists, i) != tuning.finalists.end()) continue;
    TrialResult result = tuning.entrants[i].result;
    if (result.is_timed()) {
      result.state = TrialState::kPruned;
      result.screened_ns = result.timing->median_ns;
      result.reason = f8::format("{:.3f}x the best", *result.screened_ns / tuning.best_ns);
      result.timing.reset();  // a screening's figures are not of the run's method
    }
    F8_TRY(settle(tuning, *tuning.entrants[i].trial, result));
  }
  return {};
}

// Measures the finalists against each other.
Status Sweep::compare(GemmTuning& tuning) {
  if (tuning.finalists.empty()) return {};
  InterleavedGroup group =
      final_group(tuning.gemm.problem, request_.options, tuning.finalists.size(), next_seed());
  for (const size_t i : tuning.finalists) {
    F8_TRY(db_.start_trial(*tuning.entrants[i].trial));
    group.candidates.push_back(tuning.entrants[i].candidate);
  }
  const std::vector<TrialResult> results = F8_TRY(measure(group));
  for (size_t i = 0; i < results.size(); ++i) {
    const Entrant& finalist = tuning.entrants[tuning.finalists[i]];
    F8_TRY(settle(tuning, *finalist.trial, complete(results[i], finalist.result)));
  }
  return {};
}

}  // namespace f8::tuner
