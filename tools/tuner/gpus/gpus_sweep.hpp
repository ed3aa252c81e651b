// One sweep on several GPUs. Each has a worker process, a thread and a database of its own, a shard
// next to the database that the sweep fills; the dispatcher assigns the linears. A GPU whose worker
// cannot be started again, or under which measurement after measurement fails, is lost: the others
// take over what it did not finish.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "tools/tuner/gpus/dispatcher.hpp"
#include "tools/tuner/search/sweep/sweep.hpp"

namespace f8::tuner {

inline constexpr int kFailuresOfDevice = 6;

struct Gpu {
  // `interrupts` counts the signals, as SweepHooks has it.
  Gpu(int number, Spawn spawn, WorkerOptions options, std::function<int()> interrupts);
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  int index;  // CUDA's
  Sweep* sweep = nullptr;
  Worker worker;
  std::optional<tuning_db::Database> shard;
  std::string run_uuid;  // in the shard
};

// Started GPUs are of one device class, and each is there once.
[[nodiscard]] Status check_one_class(const std::vector<std::unique_ptr<Gpu>>& gpus);

struct GpuProgress {
  int index = 0;
  SweepProgress progress;
  std::string lost;  // why; empty: it is well
};

struct GpusProgress {
  SweepProgress total;
  std::vector<GpuProgress> gpus;
};

struct GpusHooks {  // called from one thread at a time
  std::function<void(int gpu, const tuning_db::TrialKey&, const tuning_db::TrialResult&,
                     const SweepProgress& total)>
      finished;
  std::function<void(const GpusProgress&)> tick;
  std::function<int()> interrupts;  // may be called from any thread
};

struct GpusOutcome {
  SweepOutcome total;
  std::vector<GpuProgress> gpus;
};

class GpusSweep {
 public:
  // `wanted`: the linears to measure, by problem key; each GPU's run has planned them.
  GpusSweep(std::vector<std::unique_ptr<Gpu>>& gpus, CompileAhead& compiler, SweepRequest request,
            const SweepPlan& plan, const std::set<std::string>& wanted, GpusHooks hooks);
  // budget_s 0: no limit.
  [[nodiscard]] GpusOutcome run(double budget_s);

 private:
  void measure(size_t gpu);
  [[nodiscard]] SweepHooks hooks_of(size_t gpu);
  void finished(size_t gpu, const tuning_db::TrialKey& trial, const tuning_db::TrialResult& result);
  void measured(size_t gpu, size_t linear, const LinearResult* result);
  void tick(size_t gpu, const SweepProgress& progress);
  [[nodiscard]] bool interrupted() const { return hooks_.interrupts && hooks_.interrupts() > 0; }

  std::vector<std::unique_ptr<Gpu>>& gpus_;
  CompileAhead& compiler_;
  SweepRequest request_;
  const SweepPlan& plan_;
  GpusHooks hooks_;
  Dispatcher dispatcher_;
  double start_s_ = 0, budget_s_ = 0;
  std::vector<int64_t> trials_;  // by linear

  std::mutex mutex_;               // of the rest
  std::vector<int64_t> finished_;  // by GPU: the trials of the linear that it measures
  GpusProgress progress_;
  std::vector<LinearResult> linears_;
};

}  // namespace f8::tuner
