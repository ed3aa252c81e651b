// Running a sweep: what is measured when, interruptions, failures of the worker.
#include "tools/tuner/search/sweep/sweep.hpp"

#include <algorithm>
#include <numeric>
#include <optional>

#include "tools/tuner/clock.hpp"

namespace f8::tuner {
namespace {

using tuning_db::TrialResult;
using tuning_db::TrialState;

// The part of a group that `indices` name. Ratios need the reference and one more candidate.
InterleavedGroup part_of(const InterleavedGroup& group, const std::vector<size_t>& indices) {
  InterleavedGroup part = group;
  part.candidates.clear();
  const auto* ratios = std::get_if<Ratios>(&group.purpose);
  if (ratios != nullptr) part.purpose = Times{};
  for (const size_t index : indices) {
    if (ratios != nullptr && ratios->reference == static_cast<int>(index) && indices.size() > 1) {
      part.purpose = Ratios{.reference = static_cast<int>(part.candidates.size())};
    }
    part.candidates.push_back(group.candidates[index]);
  }
  return part;
}

}  // namespace

std::string candidate_key(const Candidate& candidate) {
  return impl_text(candidate) + " " + candidate.config;
}

bool Sweep::interrupted() const {
  return hooks_.interrupts && hooks_.interrupts() > 0;
}

bool Sweep::tick() {
  progress_.elapsed_s = steady_s() - start_s_;
  const CompileAhead::Count compiled = compiler_.count();
  progress_.kernels_compiled = compiled.done;
  progress_.kernels_wanted = compiled.wanted;
  progress_.worker_starts = worker_.starts();
  if (hooks_.tick) hooks_.tick(progress_);
  return hooks_.interrupts && hooks_.interrupts() > 1;
}

Status Sweep::finish(const tuning_db::PendingTrial& trial, const TrialResult& result) {
  F8_TRY(db_.finish_trial(trial, result));
  ++progress_.done;
  ++progress_.states[result.state];
  if (hooks_.finished) hooks_.finished(trial.key, result, progress_);
  return {};
}

// A worker's failure is remembered for the kernel, whatever the shape. A library's algorithm has a
// number that means something else on every shape, so there it is remembered for the problem.
std::string Sweep::blame_key(const Problem& problem, const Candidate& candidate) const {
  if (candidate.impl == Impl::kGenerated) {
    if (const auto spec = gemm_spec(problem)) {
      codegen::GemmSpec kernel = *spec;
      if (const auto config = parse_gemm_config(candidate.config)) kernel.config = *config;
      return codegen::key(kernel);
    }
  }
  return candidate_key(candidate) + " " + problem.key();
}

TrialResult Sweep::blame(const Problem& problem, const Candidate& candidate,
                         const WorkerFailure& failure) {
  const int failures = ++worker_failures_[blame_key(problem, candidate)];
  if (failures >= kFailuresToQuarantine) {
    return {.state = TrialState::kQuarantined,
            .reason = f8::format("took down {} workers: {}", failures, failure.reason)};
  }
  return {.state = failure.kind == WorkerFailure::Kind::kTimeout ? TrialState::kTimeout
                                                                 : TrialState::kLaunchError,
          .reason = failure.reason};
}

Status Sweep::wait_for(const std::vector<codegen::KernelSpec>& kernels) {
  for (const codegen::KernelSpec& spec : kernels) {
    const auto cubin = compiler_.wait(spec, [this] { return tick(); });
    if (!cubin && cubin.error().code == ErrorCode::kInterrupted) {
      return std::unexpected(cubin.error());
    }
  }
  return {};
}

Result<WorkerReply> Sweep::ask(const InterleavedGroup& group) {
  WorkerReply reply = F8_TRY(worker_.measure(group));
  if (reply.failure && reply.failure->kind == WorkerFailure::Kind::kKilled) {
    reply = F8_TRY(worker_.measure(group));
  }
  failures_in_a_row_ = reply.failure ? failures_in_a_row_ + 1 : 0;
  if (hooks_.failures_of_device > 0 && failures_in_a_row_ >= hooks_.failures_of_device) {
    return fail(ErrorCode::kEnvironment, "{} measurements in a row failed, the last one: {}",
                failures_in_a_row_, reply.failure->reason);
  }
  return reply;
}

Result<TrialResult> Sweep::measure_alone(const InterleavedGroup& group, size_t index) {
  WorkerReply reply = F8_TRY(ask(part_of(group, {index})));
  if (reply.failure) return blame(group.problem, group.candidates[index], *reply.failure);
  return std::move(reply.results.front());
}

// Measures a group whatever it does to the worker: a failure costs the candidate that was running,
// and the others are measured without it. Where none alone was running, each is measured alone.
Result<std::vector<TrialResult>> Sweep::measure(const InterleavedGroup& group) {
  std::vector<TrialResult> results(group.candidates.size());
  std::vector<size_t> left(group.candidates.size());
  std::iota(left.begin(), left.end(), size_t{0});
  while (!left.empty()) {
    WorkerReply reply = F8_TRY(ask(part_of(group, left)));
    if (!reply.failure) {
      for (size_t i = 0; i < left.size(); ++i) results[left[i]] = std::move(reply.results[i]);
      break;
    }
    const bool alone = left.size() == 1;
    if (reply.failure->candidate < 0 && !alone) {
      for (const size_t index : left) results[index] = F8_TRY(measure_alone(group, index));
      break;
    }
    const auto guilty =
        left.begin() + (alone ? 0 : static_cast<std::ptrdiff_t>(reply.failure->candidate));
    results[*guilty] = blame(group.problem, group.candidates[*guilty], *reply.failure);
    left.erase(guilty);
  }
  return results;
}

// Reads the terminal rows of the run, which a resumed part builds on.
Status Sweep::recall(const std::string& run_uuid, const SweepPlan& plan) {
  for (const PlannedLinear& linear : plan.linears) {
    for (const PlannedGemm& gemm : linear.gemms) {
      for (const tuning_db::TrialRow& row : F8_TRY(db_.trials(gemm.problem))) {
        const auto candidate = from_row(row.candidate);
        if (!candidate || row.run_uuid != run_uuid) continue;
        const bool bf16 = candidate->impl == Impl::kBf16CublasLt;
        known_[gemm_identity(gemm.problem, bf16)].try_emplace(
            candidate_key(*candidate), Known{*candidate, row.result, gemm.problem.key()});
        int& failures = worker_failures_[blame_key(gemm.problem, *candidate)];
        switch (row.result.state) {
          case TrialState::kLaunchError:
          case TrialState::kTimeout:
            ++failures;
            break;
          case TrialState::kQuarantined:
            failures += kFailuresToQuarantine;
            break;
          default:
            break;
        }
      }
    }
  }
  return {};
}

// Tunes the GEMMs of a linear, fp8 and bf16; whether there was anything to measure.
Result<bool> Sweep::measure_gemms(const PlannedLinear& linear,
                                  const std::function<bool()>& should_end) {
  bool worked = false;
  for (const PlannedGemm& gemm : linear.gemms) {
    const auto found = pending_.find(gemm.problem.key());
    if (found == pending_.end()) continue;
    for (const bool bf16 : {true, false}) {
      Pending part;
      for (const tuning_db::PendingTrial* trial : found->second) {
        const bool is_bf16 = trial->key.candidate.impl == tuning_db::Impl::kBf16CublasLt;
        if (is_bf16 == bf16) part.push_back(trial);
      }
      if (part.empty()) continue;
      if (should_end()) return worked;
      F8_TRY(tune_gemm(gemm, bf16, part));
      worked = true;
    }
  }
  return worked;
}

Status Sweep::measure_all(const SweepPlan& plan, double budget_s, SweepOutcome& outcome) {
  // Kernels are compiled in the order in which they will be needed.
  for (const PlannedLinear& linear : plan.linears) {
    if (pending_.contains(linear.problem.key())) {
      for (const codegen::KernelSpec& spec : linear.kernels) compiler_.want(spec);
    }
    for (const PlannedGemm& gemm : linear.gemms) {
      if (!pending_.contains(gemm.problem.key())) continue;
      for (const Generated& candidate : gemm.generated) {
        if (candidate.pruned.empty()) compiler_.want(candidate.spec);
      }
    }
  }
  const auto should_end = [&] {
    if (outcome.end == SweepEnd::kDone && interrupted()) outcome.end = SweepEnd::kInterrupted;
    if (outcome.end == SweepEnd::kDone && budget_s > 0 && steady_s() - start_s_ >= budget_s) {
      outcome.end = SweepEnd::kBudget;
    }
    return outcome.end != SweepEnd::kDone;
  };
  double left_s = plan.predicted_s;
  double done_s = 0;
  size_t in_order = 0;
  const auto next = [&]() -> std::optional<size_t> {
    if (hooks_.next) return hooks_.next();
    return in_order < plan.linears.size() ? std::optional(in_order++) : std::nullopt;
  };
  while (const std::optional<size_t> index = next()) {
    const PlannedLinear& linear = plan.linears[*index];
    const size_t measured_before = outcome.linears.size();
    bool worked = F8_TRY(measure_gemms(linear, should_end));
    if (outcome.end != SweepEnd::kDone) return {};
    if (const auto found = pending_.find(linear.problem.key()); found != pending_.end()) {
      if (should_end()) return {};
      F8_TRY(is_attention(linear.problem.op) ? measure_attention(linear, found->second, outcome)
             : linear.problem.op == Op::kMlp ? measure_mlp(linear, found->second, outcome)
                                             : measure_linear(linear, found->second, outcome));
      worked = true;
    }
    left_s -= linear.predicted_s;
    if (worked) done_s += linear.predicted_s;
    const double elapsed = steady_s() - start_s_;
    progress_.eta_s = done_s > 0 ? left_s * elapsed / done_s : left_s;
    if (hooks_.measured) {
      const bool added = outcome.linears.size() > measured_before;
      hooks_.measured(*index, added ? &outcome.linears.back() : nullptr);
    }
  }
  return {};
}

Result<SweepOutcome> Sweep::run(const std::string& run_uuid, const SweepPlan& plan,
                                double budget_s) {
  start_s_ = steady_s();
  trials_ = F8_TRY(db_.resume_run(run_uuid));
  pending_.clear();
  for (const tuning_db::PendingTrial& trial : trials_) {
    pending_[trial.key.problem.key()].push_back(&trial);
  }
  progress_ = {};
  progress_.trials = static_cast<int64_t>(trials_.size());
  progress_.eta_s = plan.predicted_s;
  SweepOutcome outcome;
  Status measured = recall(run_uuid, plan);
  if (measured) measured = measure_all(plan, budget_s, outcome);
  if (!measured && measured.error().code == ErrorCode::kInterrupted) {
    outcome.end = SweepEnd::kInterrupted;
    measured = {};
  }
  const char* state = !measured                        ? "crashed"
                      : outcome.end == SweepEnd::kDone ? "done"
                                                       : "interrupted";
  const Status ended = db_.end_run(run_uuid, state);
  if (!measured) return std::unexpected(measured.error());
  F8_TRY(Status(ended));
  (void)tick();
  outcome.progress = progress_;
  return outcome;
}

}  // namespace f8::tuner
