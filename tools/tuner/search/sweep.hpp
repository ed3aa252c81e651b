// The sweep: takes the cells of a run that have no terminal trial yet, measures them through a
// worker process, and writes each outcome to the database as soon as it is known. It may be stopped
// at any moment; a resume finds what is missing.
//
// For each GEMM all candidates are screened together, the best go to a final together, and the rest
// are recorded as pruned with their screening time. Of the winners and who came near them whole
// linears are formed; the fastest linear is measured against its bf16 twin, and its row names the
// kernels that it took.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>

#include "tools/tuner/search/sweep_plan.hpp"
#include "tools/tuner/worker/compile_ahead.hpp"
#include "tools/tuner/worker/worker.hpp"

namespace f8::tuner {

struct SweepProgress {
  int64_t cells = 0, done = 0;  // of this call: the cells that were missing
  std::map<tuning_db::TrialState, int64_t> states;
  double best_speedup = 0;
  std::string best_of;  // its problem
  std::string doing;    // what is being measured
  double elapsed_s = 0, eta_s = 0;
  size_t kernels_compiled = 0, kernels_wanted = 0;
  int worker_starts = 0;
};

struct SweepHooks {
  // A cell has got its terminal state.
  std::function<void(const tuning_db::Cell&, const tuning_db::TrialResult&, const SweepProgress&)>
      finished;
  std::function<void(const SweepProgress&)> tick;  // a few times a second
  std::function<int()> interrupts;  // signals so far; 1: end after this group, 2: now
};

enum class SweepEnd { kDone, kBudget, kInterrupted };

struct LinearResult {
  Problem problem;
  tuning_db::TrialResult float8, bf16;
};

struct SweepOutcome {
  SweepEnd end = SweepEnd::kDone;
  SweepProgress progress;
  std::vector<LinearResult> linears;  // measured in this call
};

class Sweep {
 public:
  Sweep(tuning_db::Database& db, Worker& worker, CompileAhead& compiler, SweepRequest request,
        SweepHooks hooks)
      : db_(db),
        worker_(worker),
        compiler_(compiler),
        request_(std::move(request)),
        hooks_(std::move(hooks)) {}

  // Measures what is missing of the run. budget_s 0: no limit. The run is ended in the database
  // whatever happens.
  [[nodiscard]] Result<SweepOutcome> run(const std::string& run_uuid, const SweepPlan& plan,
                                         double budget_s);

  // For the worker's tick: a second signal ends a measurement at once.
  [[nodiscard]] bool tick();

 private:
  using Pending = std::vector<const tuning_db::PendingTrial*>;
  struct Known {  // a terminal result of one subject on one product
    tuning_db::TrialResult result;
    std::string problem_key;
  };
  using Product = std::map<std::string, Known>;  // by impl and config

  [[nodiscard]] Status measure_all(const SweepPlan& plan, double budget_s, SweepOutcome& outcome);
  [[nodiscard]] Status recall(const std::string& run_uuid, const SweepPlan& plan);
  [[nodiscard]] Status tune(const PlannedGemm& gemm, bool bf16, const Pending& pending);
  [[nodiscard]] Status final(const PlannedGemm& gemm, bool bf16, const Pending& screened,
                             std::vector<tuning_db::TrialResult>& results);
  [[nodiscard]] Status pair(const PlannedLinear& linear, const Pending& pending,
                            SweepOutcome& outcome);
  [[nodiscard]] std::vector<TimedKernel> timed(const PlannedGemm& gemm, bool bf16) const;
  [[nodiscard]] Result<std::vector<tuning_db::TrialResult>> measure(GroupRequest request);
  [[nodiscard]] Status finish(const tuning_db::PendingTrial& trial,
                              const tuning_db::TrialResult& result);
  [[nodiscard]] std::string blame_key(const Problem& problem, const Subject& subject) const;
  [[nodiscard]] uint64_t next_seed() { return request_.seed * 0x9e3779b97f4a7c15ULL + ++draws_; }
  [[nodiscard]] bool interrupted() const;

  tuning_db::Database& db_;
  Worker& worker_;
  CompileAhead& compiler_;
  SweepRequest request_;
  SweepHooks hooks_;
  std::vector<tuning_db::PendingTrial> trials_;
  std::map<std::string, Pending> pending_;   // by problem key
  std::map<std::string, Product> products_;  // by identity
  std::map<std::string, int> deaths_;        // of workers, by the subject that was running
  SweepProgress progress_;
  uint64_t draws_ = 0;
  double start_s_ = 0;
};

}  // namespace f8::tuner
