// What sweep and resume, on one GPU or on several, have in common.
#pragma once

#include <optional>
#include <string>

#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/sweep/sweep_args.hpp"
#include "tools/tuner/search/sweep/sweep.hpp"

namespace f8::cli {

struct SweepCommand {
  SweepArgs args;
  std::string budget;
  std::string run;   // resume
  std::string gpus;  // "all", or indices separated by commas; empty: `device` alone
  std::string progress = "auto";
  double trial_timeout_s = 30;
  int64_t device = 0;
  int64_t threads = 0;
  bool dry_run = false;
  bool missing = false;

  [[nodiscard]] bool is_resume() const {
    return !dry_run && args.mnk.empty() && args.model.model.empty() && !args.attention &&
           !args.part;
  }
};

// The plan to be measured and the file for its results. A new run has no uuid yet, and a new file
// is made only when there is a device to fill it.
struct SweepJob {
  SweepArgs args;
  tuner::SweepRequest request;
  std::optional<tuning_db::Database> db;
  std::string run_uuid;  // empty: a new run
};

// Says everything that can be wrong with the input before the device is touched.
[[nodiscard]] Result<SweepJob> job_of(const Global& global, const SweepCommand& command);
[[nodiscard]] Result<double> budget_of(const SweepCommand& command);  // 0: none

// Asks the worker for cuBLASLt's counts. A GEMM whose question it cannot answer goes without
// cuBLASLt.
[[nodiscard]] Result<tuner::SweepPlan> plan_with(tuner::Worker& worker,
                                                 const tuner::SweepRequest& request,
                                                 const Global& global);
// The device of a plan where none is at hand: of the class of this machine's GPU, else of that whose built-in measurements
// are asked first. Such a plan takes all suggestions of cuBLASLt that are asked for, since only the device knows how many
// there are.
[[nodiscard]] runtime::DeviceInfo planned_device();
[[nodiscard]] Result<tuner::SweepPlan> plan_without_device(const tuner::SweepRequest& request,
                                                           const runtime::DeviceInfo& device);
[[nodiscard]] tuning_db::Toolchain toolchain_of(const runtime::DeviceInfo& device);
// Looks in the databases for the kernels of the MLPs that a new run measures.
[[nodiscard]] Status find_mlp_kernels(SweepJob& job, const DeviceClass& device);
// Under --missing, leaves out what the databases hold; else says how much they hold.
[[nodiscard]] Status leave_out_measured(SweepJob& job, const SweepCommand& command,
                                        const Global& global, const runtime::DeviceInfo& device);
// Lists what the plan would measure on the device.
void print_dry_run(const Global& global, const tuner::SweepRequest& request,
                   const DeviceClass& device, const tuner::SweepPlan& plan);
// The same on a machine without a GPU.
[[nodiscard]] Result<int> dry_run_without_gpu(const Global& global, const SweepCommand& command);

[[nodiscard]] Status want_casts(tuner::CompileAhead& compiler, const tuner::SweepRequest& request);
[[nodiscard]] int exit_code(tuner::SweepEnd end);

// Counts SIGINT and SIGTERM from now on.
void catch_signals();
[[nodiscard]] int signals();

}  // namespace f8::cli
