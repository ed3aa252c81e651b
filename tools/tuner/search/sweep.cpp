#include "tools/tuner/search/sweep.hpp"

#include <algorithm>
#include <chrono>

namespace f8::tuner {
namespace {

using tuning_db::TrialResult;
using tuning_db::TrialState;

constexpr int kDeathsToQuarantine = 2;
constexpr double kShareNothing = 1e9;  // a target that no interval misses

double seconds() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

std::string subject_key(const Subject& subject) {
  return subject.impl + " " + subject.config;
}

Subject subject_of(const tuning_db::PendingTrial& trial) {
  const auto subject = to_subject(trial.cell.candidate);
  return subject ? *subject
                 : Subject{.impl = std::string(to_string(trial.cell.candidate.impl)), .config = ""};
}

}  // namespace

bool Sweep::interrupted() const {
  return hooks_.interrupts && hooks_.interrupts() > 0;
}

bool Sweep::tick() {
  progress_.elapsed_s = seconds() - start_s_;
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
  if (hooks_.finished) hooks_.finished(trial.cell, result, progress_);
  return {};
}

// What brought a worker down is remembered for the kernel, or for a library's algorithm, whose
// number means something else on every shape, for the problem.
std::string Sweep::blame_key(const Problem& problem, const Subject& subject) const {
  if (subject.impl == "generated") {
    if (const auto spec = gemm_spec(problem)) {
      codegen::GemmSpec kernel = *spec;
      if (const auto config = codegen::parse_gemm_config(subject.config)) kernel.config = *config;
      return codegen::key(kernel);
    }
  }
  return subject_key(subject) + " " + problem.key();
}

// Measures a group whatever it does to the worker: a loss costs the subject that was running, and
// the others are measured without it; where nobody alone was running, each is measured alone.
Result<std::vector<TrialResult>> Sweep::measure(GroupRequest request) {
  const std::vector<Subject> subjects = request.subjects;
  const int reference = request.reference;
  std::vector<TrialResult> results(subjects.size());
  std::vector<size_t> left;
  for (size_t i = 0; i < subjects.size(); ++i) left.push_back(i);
  const auto blame = [&](size_t index, const Loss& loss) {
    const int deaths = ++deaths_[blame_key(request.problem, subjects[index])];
    TrialResult& result = results[index];
    result = {};
    result.reason = loss.reason;
    if (deaths >= kDeathsToQuarantine) {
      result.state = TrialState::kQuarantined;
      result.reason = fmt::format("took down {} workers: {}", deaths, loss.reason);
    } else {
      result.state =
          loss.kind == Loss::Kind::kTimeout ? TrialState::kTimeout : TrialState::kLaunchError;
    }
  };
  while (!left.empty()) {
    request.subjects.clear();
    request.reference = -1;
    for (const size_t index : left) {
      if (static_cast<int>(index) == reference) {
        request.reference = static_cast<int>(request.subjects.size());
      }
      request.subjects.push_back(subjects[index]);
    }
    if (request.subjects.size() < 2) request.reference = -1;
    GroupReply reply = F8_TRY(worker_.measure(request));
    if (!reply.loss) {
      for (size_t i = 0; i < left.size(); ++i) results[left[i]] = std::move(reply.results[i]);
      break;
    }
    const bool alone = left.size() == 1;
    if (reply.loss->subject < 0 && !alone) {
      for (const size_t index : left) {
        request.subjects = {subjects[index]};
        request.reference = -1;
        GroupReply one = F8_TRY(worker_.measure(request));
        if (one.loss) {
          blame(index, *one.loss);
        } else {
          results[index] = std::move(one.results.front());
        }
      }
      break;
    }
    const auto guilty = static_cast<size_t>(alone ? 0 : reply.loss->subject);
    blame(left[guilty], *reply.loss);
    left.erase(left.begin() + static_cast<std::ptrdiff_t>(guilty));
  }
  return results;
}

// The terminal rows of the run, for what a resumed part builds on.
Status Sweep::recall(const std::string& run_uuid, const SweepPlan& plan) {
  for (const PlannedLinear& linear : plan.linears) {
    for (const PlannedGemm& gemm : linear.gemms) {
      for (const tuning_db::TrialRow& row : F8_TRY(db_.trials(gemm.problem))) {
        const auto subject = to_subject(row.candidate);
        if (!subject) continue;
        const TrialState state = row.result.state;
        if (row.run_uuid == run_uuid) {
          const bool bf16 = subject->impl == "bf16_cublaslt";
          products_[gemm_identity(gemm.problem, bf16)].try_emplace(
              subject_key(*subject),
              Known{.result = row.result, .problem_key = gemm.problem.key()});
          if (state == TrialState::kLaunchError || state == TrialState::kTimeout) {
            ++deaths_[blame_key(gemm.problem, *subject)];
          } else if (state == TrialState::kQuarantined) {
            deaths_[blame_key(gemm.problem, *subject)] += kDeathsToQuarantine;
          }
        }
      }
    }
  }
  return {};
}

Status Sweep::tune(const PlannedGemm& gemm, bool bf16, const Pending& pending) {
  Product& product = products_[gemm_identity(gemm.problem, bf16)];
  const auto settle = [&](const tuning_db::PendingTrial& trial, const TrialResult& result) {
    product.try_emplace(subject_key(subject_of(trial)),
                        Known{.result = result, .problem_key = gemm.problem.key()});
    return finish(trial, result);
  };
  std::vector<Subject> subjects;
  Pending todo;
  std::vector<TrialResult> before;  // what is known of a subject before it runs
  for (const tuning_db::PendingTrial* trial : pending) {
    const Subject subject = subject_of(*trial);
    if (const auto known = product.find(subject_key(subject)); known != product.end()) {
      TrialResult shared = known->second.result;
      if (known->second.problem_key != gemm.problem.key()) {
        shared.reason += fmt::format("{}the same product as {}", shared.reason.empty() ? "" : "; ",
                                     known->second.problem_key);
      }
      F8_TRY(finish(*trial, shared));
      continue;
    }
    TrialResult result;
    if (subject.impl == "generated") {
      const auto candidate = std::ranges::find_if(gemm.generated, [&](const Generated& g) {
        return codegen::key(g.spec.config) == subject.config;
      });
      if (candidate == gemm.generated.end()) {
        result.state = TrialState::kPruned;
        result.reason = "no longer among the generator's configurations";
        F8_TRY(settle(*trial, result));
        continue;
      }
      result.predicted_ns = candidate->predicted_ns;
      if (!candidate->pruned.empty()) {
        result.state = TrialState::kPruned;
        result.reason = candidate->pruned;
        F8_TRY(settle(*trial, result));
        continue;
      }
      const auto cubin = compiler_.wait(candidate->spec, [this] { return tick(); });
      if (!cubin) {
        if (cubin.error().code == ErrorCode::kInterrupted) return std::unexpected(cubin.error());
        result.state = TrialState::kCompileError;
        result.reason = cubin.error().message;
        F8_TRY(settle(*trial, result));
        continue;
      }
      result.compile_ms = (*cubin)->compile_ms;
      result.registers = (*cubin)->registers;
      result.spill_bytes = (*cubin)->spill_bytes;
    }
    const int deaths = deaths_[blame_key(gemm.problem, subject)];
    if (deaths >= kDeathsToQuarantine) {
      result.state = TrialState::kQuarantined;
      result.reason = fmt::format("not run: it took down {} workers before", deaths);
      F8_TRY(settle(*trial, result));
      continue;
    }
    subjects.push_back(subject);
    todo.push_back(trial);
    before.push_back(std::move(result));
  }
  if (todo.empty()) return {};

  const auto complete = [&](TrialResult result, const TrialResult& known) {
    result.predicted_ns = known.predicted_ns;
    if (known.compile_ms) result.compile_ms = known.compile_ms;
    if (!result.registers) result.registers = known.registers;
    if (!result.spill_bytes) result.spill_bytes = known.spill_bytes;
    return result;
  };
  const SweepKnobs& knobs = request_.knobs;
  progress_.doing = fmt::format("{}{}", gemm.problem.key(), bf16 ? " bf16" : "");
  (void)tick();
  GroupRequest screen{.problem = gemm.problem,
                      .subjects = subjects,
                      .reference = -1,
                      .batch_us = knobs.batch_us,
                      .stop = {.target = kShareNothing,
                               .min_s = knobs.screen_ms / 1e3 * static_cast<double>(todo.size()),
                               .max_s = knobs.screen_ms / 1e3 * static_cast<double>(todo.size()),
                               .min_blocks = 1},
                      .drop_above = knobs.screen_drop,
                      .warm_s = knobs.warm_s,
                      .seed = next_seed()};
  std::vector<TrialResult> results = F8_TRY(measure(screen));
  for (size_t i = 0; i < results.size(); ++i) results[i] = complete(results[i], before[i]);

  // The fastest of the screening go on, and with them the fastest of each kind, so that the row of
  // the library's best is as good as the one of ours.
  double best = 0;
  for (const auto& [key, known] : product) {
    if (!known.result.is_timed()) continue;
    best =
        best == 0 ? known.result.timing->median_ns : std::min(best, known.result.timing->median_ns);
  }
  std::vector<size_t> ranked;
  for (size_t i = 0; i < results.size(); ++i) {
    if (results[i].is_timed()) ranked.push_back(i);
  }
  std::ranges::stable_sort(ranked, {}, [&](size_t i) { return results[i].timing->median_ns; });
  if (!ranked.empty()) {
    const double fastest = results[ranked.front()].timing->median_ns;
    best = best == 0 ? fastest : std::min(best, fastest);
  }
  std::vector<size_t> finalists;
  std::set<std::string> kinds;
  for (const size_t i : ranked) {
    const bool first_of_kind = kinds.insert(subjects[i].impl).second;
    const bool prior = std::ranges::any_of(gemm.prior, [&](const runtime::GemmChoice& choice) {
      return to_subject(choice) == subjects[i] &&
             results[i].timing->median_ns <= best * knobs.linear_within;
    });
    if (static_cast<int>(finalists.size()) < knobs.finalists || first_of_kind || prior) {
      finalists.push_back(i);
    }
  }
  for (size_t i = 0; i < results.size(); ++i) {
    if (std::ranges::find(finalists, i) != finalists.end()) continue;
    TrialResult result = results[i];
    if (result.is_timed()) {
      result.state = TrialState::kPruned;
      result.screened_ns = result.timing->median_ns;
      result.reason = fmt::format("{:.3f}x the best", result.timing->median_ns / best);
      result.timing.reset();  // a screening's figures are not of the run's method
    }
    F8_TRY(settle(*todo[i], result));
  }
  if (finalists.empty()) return {};

  GroupRequest final_group = screen;
  final_group.subjects.clear();
  for (const size_t i : finalists) {
    F8_TRY(db_.start_trial(*todo[i]));
    final_group.subjects.push_back(subjects[i]);
  }
  final_group.stop = {.target = knobs.gemm_max_ci,
                      .min_s = knobs.final_ms / 2e3 * static_cast<double>(finalists.size()),
                      .max_s = knobs.final_ms / 1e3 * static_cast<double>(finalists.size()),
                      .min_blocks = 5};
  final_group.drop_above = 0;
  final_group.seed = next_seed();
  const std::vector<TrialResult> finals = F8_TRY(measure(final_group));
  for (size_t i = 0; i < finals.size(); ++i) {
    F8_TRY(settle(*todo[finalists[i]], complete(finals[i], before[finalists[i]])));
  }
  return {};
}

// What is known of a GEMM's kernels, fastest first; noisy ones only where there are no others.
std::vector<TimedKernel> Sweep::timed(const PlannedGemm& gemm, bool bf16) const {
  std::vector<TimedKernel> steady;
  std::vector<TimedKernel> noisy;
  const auto product = products_.find(gemm_identity(gemm.problem, bf16));
  if (product == products_.end()) return steady;
  for (const auto& [key, known] : product->second) {
    if (!known.result.is_timed() || key.starts_with("bf16_cublaslt") != bf16) continue;
    const size_t space = key.find(' ');
    const auto choice = to_choice({.impl = key.substr(0, space), .config = key.substr(space + 1)});
    if (!choice) continue;
    (known.result.state == TrialState::kOk ? steady : noisy)
        .push_back({.choice = *choice, .ns = known.result.timing->median_ns});
  }
  std::vector<TimedKernel>& kernels = steady.empty() ? noisy : steady;
  std::ranges::stable_sort(kernels, {}, &TimedKernel::ns);
  return kernels;
}

Status Sweep::pair(const PlannedLinear& linear, const Pending& pending, SweepOutcome& outcome) {
  const tuning_db::PendingTrial* float8 = nullptr;
  const tuning_db::PendingTrial* bf16 = nullptr;
  for (const tuning_db::PendingTrial* trial : pending) {
    (trial->cell.candidate.impl == tuning_db::Impl::kFloat8 ? float8 : bf16) = trial;
  }
  const SweepKnobs& knobs = request_.knobs;
  KernelFields fields;
  LinearChoices twin;
  std::string missing;
  for (const Gemm g : kGemms) {
    const auto i = static_cast<size_t>(g);
    const PlannedGemm& gemm = linear.gemms[i];
    const bool fp8 = F8_TRY(find_recipe(linear.problem.recipe)).at(g).is_fp8();
    const std::vector<TimedKernel> of_twin = timed(gemm, true);
    twin[i].provider = Provider::kCublasLt;  // and its first suggestion, where none was measured
    if (!of_twin.empty()) twin[i] = of_twin.front().choice;
    fields[i] = {.timed = fp8 ? timed(gemm, false) : of_twin, .prior = gemm.prior};
    if (fields[i].timed.empty()) {
      missing += fmt::format("{}{}", missing.empty() ? "" : ", ", to_string(g));
    }
  }
  progress_.doing = linear.problem.key();
  (void)tick();
  for (const tuning_db::PendingTrial* trial : {float8, bf16}) {
    if (trial != nullptr && (trial == bf16 || missing.empty())) F8_TRY(db_.start_trial(*trial));
  }
  std::vector<Subject> subjects;
  LinearSearch search;
  if (missing.empty()) {
    const GroupRequest group{.problem = linear.problem,
                             .subjects = {},
                             .batch_us = knobs.linear_batch_us,
                             .stop = {},
                             .warm_s = knobs.warm_s,
                             .seed = next_seed()};
    search = F8_TRY(search_linear(group, fields, knobs.linear_knobs(),
                                  [this](const GroupRequest& part) { return measure(part); }));
    subjects.push_back({.impl = "float8", .config = choices_text(search.choices)});
  }
  subjects.push_back({.impl = "bf16", .config = choices_text(twin)});

  GroupRequest request{.problem = linear.problem,
                       .subjects = subjects,
                       .reference = missing.empty() ? 1 : -1,
                       .batch_us = knobs.linear_batch_us,
                       .stop = {.target = knobs.max_ci,
                                .min_s = knobs.linear_min_ms / 1e3,
                                .max_s = knobs.linear_max_ms / 1e3,
                                .min_blocks = 6},
                       .drop_above = 0,
                       .warm_s = knobs.warm_s,
                       .seed = next_seed()};
  std::vector<TrialResult> results = F8_TRY(measure(request));
  for (int retry = 0; retry < knobs.retry_noisy; ++retry) {
    const bool noisy = std::ranges::any_of(
        results, [](const TrialResult& r) { return r.state == TrialState::kNoisy; });
    if (!noisy || interrupted()) break;
    request.stop.max_s *= 2;
    request.seed = next_seed();
    results = F8_TRY(measure(request));
  }
  LinearResult measured{.problem = linear.problem, .float8 = {}, .bf16 = results.back()};
  if (missing.empty()) {
    measured.float8 = results.front();
  } else {
    measured.float8.state = TrialState::kLaunchError;
    measured.float8.reason = fmt::format("no kernel works for {}", missing);
  }
  if (measured.float8.is_timed()) {
    if (search.timed > 1) {
      measured.float8.reason +=
          fmt::format("{}the fastest of {} linears, that of the fastest kernels takes {:.3f}x",
                      measured.float8.reason.empty() ? "" : "; ", search.timed, search.over_first);
    }
    measured.float8.kernels = linear_kernels(search.choices);
  }
  if (measured.bf16.is_timed()) measured.bf16.kernels = linear_kernels(twin);
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

Status Sweep::measure_all(const SweepPlan& plan, double budget_s, SweepOutcome& outcome) {
  // Kernels in the order in which they will be needed.
  for (const PlannedLinear& linear : plan.linears) {
    for (const PlannedGemm& gemm : linear.gemms) {
      if (!pending_.contains(gemm.problem.key())) continue;
      for (const Generated& candidate : gemm.generated) {
        if (candidate.pruned.empty()) compiler_.want(candidate.spec);
      }
    }
  }
  double left_s = plan.predicted_s;
  double done_s = 0;
  const auto should_end = [&] {
    if (interrupted()) {
      outcome.end = SweepEnd::kInterrupted;
      return true;
    }
    if (budget_s > 0 && seconds() - start_s_ >= budget_s) {
      outcome.end = SweepEnd::kBudget;
      return true;
    }
    return false;
  };
  for (const PlannedLinear& linear : plan.linears) {
    bool worked = false;
    for (const PlannedGemm& gemm : linear.gemms) {
      const auto found = pending_.find(gemm.problem.key());
      if (found == pending_.end()) continue;
      for (const bool bf16 : {true, false}) {
        Pending part;
        for (const tuning_db::PendingTrial* trial : found->second) {
          if ((trial->cell.candidate.impl == tuning_db::Impl::kBf16CublasLt) == bf16)
            part.push_back(trial);
        }
        if (part.empty()) continue;
        if (should_end()) return {};
        F8_TRY(tune(gemm, bf16, part));
        worked = true;
      }
    }
    if (const auto found = pending_.find(linear.problem.key()); found != pending_.end()) {
      if (should_end()) return {};
      F8_TRY(pair(linear, found->second, outcome));
      worked = true;
    }
    left_s -= linear.predicted_s;
    if (worked) done_s += linear.predicted_s;
    const double elapsed = seconds() - start_s_;
    progress_.eta_s = done_s > 0 ? left_s * elapsed / done_s : left_s;
  }
  return {};
}

Result<SweepOutcome> Sweep::run(const std::string& run_uuid, const SweepPlan& plan,
                                double budget_s) {
  start_s_ = seconds();
  trials_ = F8_TRY(db_.resume_run(run_uuid));
  pending_.clear();
  for (const tuning_db::PendingTrial& trial : trials_) {
    pending_[trial.cell.problem.key()].push_back(&trial);
  }
  progress_ = {};
  progress_.cells = static_cast<int64_t>(trials_.size());
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
