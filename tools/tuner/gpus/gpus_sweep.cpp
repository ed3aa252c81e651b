#include "tools/tuner/gpus/gpus_sweep.hpp"

#include <algorithm>
#include <map>
#include <thread>

#include "tools/tuner/clock.hpp"

namespace f8::tuner {
namespace {

using tuning_db::TrialKey;
using tuning_db::TrialResult;

// How many trials each linear of the plan has, those of its GEMMs included.
std::vector<int64_t> trials_by_linear(const SweepPlan& plan) {
  std::map<std::string, std::set<std::string>> candidates;  // by problem
  for (const TrialKey& trial : plan.trials) {
    candidates[trial.problem.key()].insert(trial.candidate.key());
  }
  std::vector<int64_t> trials;
  for (const PlannedLinear& linear : plan.linears) {
    size_t count = candidates[linear.problem.key()].size();
    for (const PlannedGemm& gemm : linear.gemms) count += candidates[gemm.problem.key()].size();
    trials.push_back(static_cast<int64_t>(count));
  }
  return trials;
}

}  // namespace

Gpu::Gpu(int number, Spawn spawn, WorkerOptions options, std::function<int()> interrupts)
    : index(number), worker(std::move(spawn), [&] {
        options.tick = [this, interrupts = std::move(interrupts)] {
          return sweep != nullptr ? sweep->tick() : interrupts && interrupts() > 0;
        };
        return options;
      }()) {}

Status check_one_class(const std::vector<std::unique_ptr<Gpu>>& gpus) {
  const auto text = [](const Gpu& gpu) {
    const runtime::DeviceInfo& device = gpu.worker.device();
    return f8::format("GPU {} ({}, {} W)", gpu.index, device.name, device.power_limit_w);
  };
  for (size_t i = 1; i < gpus.size(); ++i) {
    const runtime::DeviceInfo& device = gpus[i]->worker.device();
    if (tuning_db::key(device) != tuning_db::key(gpus[0]->worker.device())) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} is of another device class than {}, and a sweep is of one class: sweep each "
                  "class by itself",
                  text(*gpus[i]), text(*gpus[0]));
    }
    for (size_t j = 0; j < i; ++j) {
      if (device.uuid != gpus[j]->worker.device().uuid) continue;
      return fail(ErrorCode::kInvalidArgument, "GPU {} and GPU {} are one device", gpus[j]->index,
                  gpus[i]->index);
    }
  }
  return {};
}

GpusSweep::GpusSweep(std::vector<std::unique_ptr<Gpu>>& gpus, CompileAhead& compiler,
                     SweepRequest request, const SweepPlan& plan,
                     const std::set<std::string>& wanted, GpusHooks hooks)
    : gpus_(gpus),
      compiler_(compiler),
      request_(std::move(request)),
      plan_(plan),
      hooks_(std::move(hooks)),
      dispatcher_(plan, wanted, gpus.size()),
      trials_(trials_by_linear(plan)),
      finished_(gpus.size()) {
  for (const auto& gpu : gpus) {
    progress_.gpus.push_back({.index = gpu->index, .progress = {}, .lost = {}});
  }
}

GpusOutcome GpusSweep::run(double budget_s) {
  start_s_ = steady_s();
  budget_s_ = budget_s;
  // Kernels are compiled in the order in which they will be needed, each once for all GPUs.
  for (const size_t linear : dispatcher_.order()) {
    progress_.total.trials += trials_[linear];
    for (const codegen::KernelSpec& spec : plan_.linears[linear].kernels) compiler_.want(spec);
    for (const PlannedGemm& gemm : plan_.linears[linear].gemms) {
      for (const Generated& candidate : gemm.generated) {
        if (candidate.pruned.empty()) compiler_.want(candidate.spec);
      }
    }
  }
  {
    std::vector<std::jthread> threads;
    for (size_t gpu = 0; gpu < gpus_.size(); ++gpu)
      threads.emplace_back([this, gpu] { measure(gpu); });
  }
  GpusOutcome outcome;
  const bool over = budget_s > 0 && steady_s() - start_s_ >= budget_s;
  outcome.total.end = dispatcher_.left().linears == 0 ? SweepEnd::kDone
                      : interrupted()                 ? SweepEnd::kInterrupted
                      : over                          ? SweepEnd::kBudget
                                                      : SweepEnd::kDeviceLost;
  progress_.total.elapsed_s = steady_s() - start_s_;
  outcome.total.progress = progress_.total;
  outcome.total.linears = std::move(linears_);
  outcome.gpus = std::move(progress_.gpus);
  return outcome;
}

void GpusSweep::measure(size_t gpu) {
  Gpu& own = *gpus_[gpu];
  Sweep sweep(*own.shard, own.worker, compiler_, request_, hooks_of(gpu));
  own.sweep = &sweep;
  const Result<SweepOutcome> outcome = sweep.run(own.run_uuid, plan_, budget_s_);
  own.sweep = nullptr;
  if (outcome) return;
  own.worker.stop();
  const std::vector<size_t> again = dispatcher_.lose(gpu);
  const std::lock_guard lock(mutex_);
  for (const size_t linear : again) {
    progress_.total.trials += trials_[linear];
    std::erase_if(linears_, [&](const LinearResult& result) {
      return result.problem.key() == plan_.linears[linear].problem.key();
    });
  }
  progress_.gpus[gpu].lost = outcome.error().message;
  progress_.total.trials += finished_[gpu];  // another GPU measures them
  finished_[gpu] = 0;
}

SweepHooks GpusSweep::hooks_of(size_t gpu) {
  return {.finished = [this, gpu](const TrialKey& trial, const TrialResult& result,
                                  const SweepProgress&) { finished(gpu, trial, result); },
          .tick = [this, gpu](const SweepProgress& progress) { tick(gpu, progress); },
          .interrupts = hooks_.interrupts,
          .next =
              [this, gpu] {
                return dispatcher_.next(gpu, [this] {
                  return interrupted() || (budget_s_ > 0 && steady_s() - start_s_ >= budget_s_);
                });
              },
          .measured = [this, gpu](size_t linear,
                                  const LinearResult* result) { measured(gpu, linear, result); },
          .failures_of_device = kFailuresOfDevice};
}

void GpusSweep::finished(size_t gpu, const TrialKey& trial, const TrialResult& result) {
  const std::lock_guard lock(mutex_);
  ++finished_[gpu];
  ++progress_.total.done;
  ++progress_.total.states[result.state];
  if (hooks_.finished) hooks_.finished(gpus_[gpu]->index, trial, result, progress_.total);
}

void GpusSweep::measured(size_t gpu, size_t linear, const LinearResult* result) {
  const bool failed = result != nullptr && !result->float8.is_timed();
  dispatcher_.measured(gpu, failed);
  const std::lock_guard lock(mutex_);
  // A run that is resumed may have had some of them.
  progress_.total.trials += finished_[gpu] - trials_[linear];
  finished_[gpu] = 0;
  if (result == nullptr) return;
  linears_.push_back(*result);
  if (result->float8.ratio && result->float8.ratio->ratio > progress_.total.best_speedup) {
    progress_.total.best_speedup = result->float8.ratio->ratio;
    progress_.total.best_of = result->problem.key();
  }
}

void GpusSweep::tick(size_t gpu, const SweepProgress& progress) {
  const Dispatcher::Left left = dispatcher_.left();
  const std::lock_guard lock(mutex_);
  progress_.gpus[gpu].progress = progress;
  SweepProgress& total = progress_.total;
  total.elapsed_s = steady_s() - start_s_;
  total.eta_s = left.measured_s > 0 ? left.predicted_s * total.elapsed_s / left.measured_s
                                    : left.predicted_s / static_cast<double>(gpus_.size());
  total.kernels_compiled = progress.kernels_compiled;
  total.kernels_wanted = progress.kernels_wanted;
  total.worker_starts = 0;
  for (const GpuProgress& one : progress_.gpus) total.worker_starts += one.progress.worker_starts;
  if (hooks_.tick) hooks_.tick(progress_);
}

}  // namespace f8::tuner
