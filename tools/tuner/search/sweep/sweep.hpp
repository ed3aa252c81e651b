// The sweep: takes the trials of a run that are not terminal yet, measures them through a worker
// process, and writes each outcome to the database as soon as it is known. It may be stopped at any
// moment; a resume finds what is missing.
//
// For each GEMM all candidates are screened together, the best go to a final together, and the rest
// are recorded as pruned with their screening time. The winners and those close to them form whole
// linears; the fastest linear is measured against its bf16 baseline, and its row names the kernels
// that it took.
#pragma once

#include <functional>
#include <map>
#include <optional>
#include <string>

#include "tools/tuner/search/plan/sweep_plan.hpp"
#include "tools/tuner/worker/compile_ahead.hpp"
#include "tools/tuner/worker/worker.hpp"

namespace f8::tuner {

struct SweepProgress {
  int64_t trials = 0, done = 0;  // of this call: the trials that were missing
  std::map<tuning_db::TrialState, int64_t> states;
  double best_speedup = 0;
  std::string best_of;  // its problem
  std::string doing;    // what is being measured
  double elapsed_s = 0, eta_s = 0;
  size_t kernels_compiled = 0, kernels_wanted = 0;
  int worker_starts = 0;
};

// The result of a linear, of an MLP, or of an operation of attention: its forward or backward by itself has nothing in
// bf16.
struct LinearResult {
  Problem problem;
  tuning_db::TrialResult float8, bf16;
};

struct SweepHooks {
  // Called when a trial has its terminal state.
  std::function<void(const tuning_db::TrialKey&, const tuning_db::TrialResult&,
                     const SweepProgress&)>
      finished;
  std::function<void(const SweepProgress&)> tick;  // a few times a second
  std::function<int()> interrupts;  // signals so far; 1: end after this group, 2: now
  // The number in the plan of the linear to measure next. Unset: all, in the plan's order.
  std::function<std::optional<size_t>()> next{};
  // Called when a linear and its GEMMs are measured; null where nothing of the linear was missing.
  std::function<void(size_t linear, const LinearResult*)> measured{};
  // So many failures of the worker in a row are the device's, and end the sweep; 0: never.
  int failures_of_device = 0;
};

enum class SweepEnd { kDone, kBudget, kInterrupted, kDeviceLost };

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

  // The worker's tick: after a second signal it ends a measurement at once.
  [[nodiscard]] bool tick();

 private:
  using Pending = std::vector<const tuning_db::PendingTrial*>;
  struct Known {  // a terminal result of one candidate of a GEMM
    Candidate candidate;
    tuning_db::TrialResult result;
    std::string problem_key;
  };
  using KnownResults = std::map<std::string, Known>;  // by candidate_key()
  // A candidate that takes part in the tuning of a GEMM.
  struct Entrant {
    const tuning_db::PendingTrial* trial = nullptr;
    Candidate candidate;
    tuning_db::TrialResult result;  // what is known of it so far
  };
  struct GemmTuning {
    const PlannedGemm& gemm;
    KnownResults& known;
    std::vector<Entrant> entrants{};
    double best_ns = 0;               // of all known results
    std::vector<size_t> finalists{};  // indices of entrants, fastest first
  };
  struct LinearKernels {
    KernelShortlists shortlists;
    LinearChoices bf16;
    std::string missing;  // the GEMMs without a kernel that works
  };

  [[nodiscard]] Status measure_all(const SweepPlan& plan, double budget_s, SweepOutcome& outcome);
  [[nodiscard]] Result<bool> measure_gemms(const PlannedLinear& linear,
                                           const std::function<bool()>& should_end);
  [[nodiscard]] Status recall(const std::string& run_uuid, const SweepPlan& plan);
  [[nodiscard]] Result<std::vector<tuning_db::TrialResult>> measure(const InterleavedGroup& group);
  [[nodiscard]] Result<tuning_db::TrialResult> measure_alone(const InterleavedGroup& group,
                                                             size_t index);
  // Waits until these are compiled. A kernel that does not compile says so again when it is added.
  [[nodiscard]] Status wait_for(const std::vector<codegen::KernelSpec>& kernels);
  // Asks the worker, and once more where something killed it. An error where it is the device that
  // fails.
  [[nodiscard]] Result<WorkerReply> ask(const InterleavedGroup& group);
  [[nodiscard]] tuning_db::TrialResult blame(const Problem& problem, const Candidate& candidate,
                                             const WorkerFailure& failure);
  [[nodiscard]] Status finish(const tuning_db::PendingTrial& trial,
                              const tuning_db::TrialResult& result);
  [[nodiscard]] std::string blame_key(const Problem& problem, const Candidate& candidate) const;
  [[nodiscard]] uint64_t next_seed() { return request_.seed * 0x9e3779b97f4a7c15ULL + ++draws_; }
  [[nodiscard]] bool interrupted() const;

  // One GEMM: sweep_gemm.cpp.
  [[nodiscard]] Status tune_gemm(const PlannedGemm& gemm, bool bf16, const Pending& pending);
  [[nodiscard]] Status admit(GemmTuning& tuning, const Pending& pending);
  [[nodiscard]] Result<tuning_db::TrialResult> look_at(const PlannedGemm& gemm,
                                                       const Candidate& candidate);
  [[nodiscard]] Status screen(GemmTuning& tuning);
  void choose_finalists(GemmTuning& tuning) const;
  [[nodiscard]] Status prune(GemmTuning& tuning);
  [[nodiscard]] Status compare(GemmTuning& tuning);
  [[nodiscard]] Status end_race(GemmTuning& tuning);
  [[nodiscard]] Status settle(GemmTuning& tuning, const tuning_db::PendingTrial& trial,
                              const tuning_db::TrialResult& result);

  // One linear: sweep_linear.cpp.
  [[nodiscard]] Status measure_linear(const PlannedLinear& linear, const Pending& pending,
                                      SweepOutcome& outcome);
  [[nodiscard]] Result<LinearKernels> kernels_of(const PlannedLinear& linear) const;
  [[nodiscard]] std::vector<TimedKernel> timed_kernels(const PlannedGemm& gemm, bool bf16) const;
  [[nodiscard]] Result<LinearSearch> search(const PlannedLinear& linear,
                                            const LinearKernels& kernels);
  [[nodiscard]] Result<LinearChoices> search_baseline(const PlannedLinear& linear);
  struct PairOfTrials {  // null where one is not missing
    const tuning_db::PendingTrial* float8 = nullptr;
    const tuning_db::PendingTrial* bf16 = nullptr;
  };
  [[nodiscard]] static PairOfTrials trials_of(const Pending& pending);
  // The configurations of what is compared, in fp8 (none: `missing` says why) and in bf16 (none: fp8 is timed alone).
  struct Compared {
    std::optional<std::string> float8;
    std::optional<std::string> bf16;
    std::string missing{};
    std::function<Status(LinearResult&)> describe{};  // adds to what was measured
  };
  // Measures trials that are started.
  [[nodiscard]] Status compare_with_bf16(const PlannedLinear& linear, const Pending& pending,
                                         const Compared& compared, SweepOutcome& outcome);
  // It measures an MLP (sweep_mlp.cpp).
  [[nodiscard]] Status measure_mlp(const PlannedLinear& mlp, const Pending& pending,
                                   SweepOutcome& outcome);
  // It measures one operation of attention (sweep_attention.cpp).
  [[nodiscard]] Status measure_attention(const PlannedLinear& operation, const Pending& pending,
                                         SweepOutcome& outcome);
  [[nodiscard]] Status add_accuracy(const Problem& operation, tuning_db::TrialResult& result);
  // The accuracy of the operation's tensors on data of all kinds.
  [[nodiscard]] Result<std::vector<tuning_db::Accuracy>> accuracy_of(const Problem& operation);

  // A group of linears; its candidates and when it stops are to be set.
  [[nodiscard]] InterleavedGroup group_of(const PlannedLinear& linear);
  [[nodiscard]] Result<std::vector<tuning_db::TrialResult>> measure_again(InterleavedGroup group);

  tuning_db::Database& db_;
  Worker& worker_;
  CompileAhead& compiler_;
  SweepRequest request_;
  SweepHooks hooks_;
  std::vector<tuning_db::PendingTrial> trials_;
  std::map<std::string, Pending> pending_;      // by problem key
  std::map<std::string, KnownResults> known_;   // by GEMM identity
  std::map<std::string, int> worker_failures_;  // by the candidate that was running
  SweepProgress progress_;
  // The accuracy of all tensors is kept by the problem of the data that was compared.
  std::map<std::string, std::vector<tuning_db::Accuracy>> accuracy_;
  uint64_t draws_ = 0;
  int failures_in_a_row_ = 0;
  double start_s_ = 0;
};

// A worker that fails twice under a candidate quarantines it.
inline constexpr int kFailuresToQuarantine = 2;

// A candidate's key among those of one GEMM.
[[nodiscard]] std::string candidate_key(const Candidate& candidate);

}  // namespace f8::tuner
