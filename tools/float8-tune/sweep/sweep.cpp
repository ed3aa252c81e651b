// sweep and resume: measure what a plan says and keep each outcome at once. Both are safe to
// interrupt.
#include "tools/tuner/search/sweep.hpp"

#include <unistd.h>

#include <atomic>
#include <csignal>

#include "base/environment.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/sweep/sweep_args.hpp"
#include "tools/float8-tune/sweep/sweep_report.hpp"
#include "tools/tuner/backend/gpu_backend.hpp"
#include "tools/tuner/backend/toolchain.hpp"
#include "tools/tuner/search/kernel_set.hpp"

namespace f8::cli {
namespace {

std::atomic<int> g_signals = 0;

void on_signal(int) {
  ++g_signals;
}

struct Options {
  SweepArgs args;
  std::string budget;
  std::string run;  // resume
  std::string progress = "auto";
  double trial_timeout_s = 30;
  int64_t device = 0;
  int64_t threads = 0;
  bool dry_run = false;
};

// The plan to be measured and the file for its results. A new run has no uuid yet, and a new file
// is made only when there is a device to fill it.
struct Job {
  SweepArgs args;
  tuner::SweepRequest request;
  std::optional<tuning_db::Database> db;
  std::string run_uuid;  // empty: a new run
};

// The run to resume: the one that is named, else the last one with missing trials.
Result<tuning_db::RunInfo> find_run(const Global& global, const tuning_db::Database& db,
                                    const std::string& wanted) {
  for (tuning_db::RunInfo& run : F8_TRY(db.runs())) {
    const bool found = wanted.empty() ? run.done < run.planned && run.state != "imported"
                                      : run.uuid.starts_with(wanted);
    if (found) return std::move(run);
  }
  return fail(ErrorCode::kNotFound, "{}: {}", global.db.string(),
              wanted.empty() ? "no run with missing trials; `float8-tune sweep` begins one"
                             : f8::format("no run {}; `float8-tune db info` lists them", wanted));
}

// Says everything that can be wrong with the input before the device is touched.
Result<Job> job_of(const Global& global, const Options& options) {
  const bool resume =
      !options.dry_run && options.args.mnk.empty() && options.args.model.model.empty();
  if (global.db.empty() && !options.dry_run) {
    return fail(ErrorCode::kInvalidArgument,
                "a sweep needs a database to write to: give --db FILE, or set FLOAT8_DB");
  }
  Job job{.args = options.args, .request = {}, .db = {}, .run_uuid = {}};
  std::error_code unreadable;
  if (resume) {
    job.db = F8_TRY(tuning_db::Database::open(global.db, tuning_db::OpenMode::kReadWrite));
    const tuning_db::RunInfo run = F8_TRY(find_run(global, *job.db, options.run));
    job.run_uuid = run.uuid;
    job.args = F8_TRY(parse_canonical(run.argv));
  }
  job.request = F8_TRY(request_of(job.args));
  if (!resume && !options.dry_run && std::filesystem::exists(global.db, unreadable)) {
    job.db = F8_TRY(tuning_db::Database::open(global.db, tuning_db::OpenMode::kReadWrite));
  }
  return job;
}

// Asks the worker for cuBLASLt's counts. A GEMM whose question it cannot answer goes without
// cuBLASLt.
Result<tuner::SweepPlan> plan_with(tuner::Worker& worker, const tuner::SweepRequest& request,
                                   const Global& global) {
  return tuner::plan_sweep(
      request, worker.device(), [&](const Problem& problem, bool bf16) -> Result<int> {
        const Result<int> count = worker.heuristics(problem, bf16);
        if (count || count.error().code == ErrorCode::kInterrupted ||
            count.error().code == ErrorCode::kEnvironment) {
          return count;
        }
        note(global, "{}: without cuBLASLt: {}", problem.key(), count.error().message);
        return 0;
      });
}

// Begins the job's run in the database, or makes sure that a resumed one may go on here.
Status open_run(Job& job, const Global& global, const runtime::DeviceInfo& device,
                const tuner::SweepPlan& plan) {
  const auto nvml = tuner::NvmlDevice::open(device.uuid);
  const tuning_db::Toolchain toolchain = tuner::current_toolchain(
      nvml ? nvml->driver_version() : "", device.driver_version, FLOAT8_VERSION);
  const tuning_db::Method method = tuner::sweep_method(job.request.options);
  if (!job.run_uuid.empty()) {
    return job.db->verify_run(job.run_uuid, device, device.uuid, toolchain, method);
  }
  if (!job.db) job.db = F8_TRY(tuning_db::Database::open(global.db, tuning_db::OpenMode::kCreate));
  const tuning_db::RunInfo run =
      F8_TRY(job.db->begin_run(canonical(job.args, job.request), job.request.seed, device,
                               device.uuid, toolchain, method, plan.trials));
  job.run_uuid = run.uuid;
  return {};
}

Status want_casts(tuner::CompileAhead& compiler, const tuner::SweepRequest& request) {
  for (const std::string& name : request.recipes) {
    const Recipe recipe = F8_TRY(find_recipe(name));
    for (const auto& kernel : F8_TRY(tuner::cast_kernels(recipe))) compiler.want(kernel.spec);
  }
  return {};
}

int exit_code(tuner::SweepEnd end) {
  switch (end) {
    case tuner::SweepEnd::kDone:
      return kExitOk;
    case tuner::SweepEnd::kBudget:
      return kExitIncomplete;
    case tuner::SweepEnd::kInterrupted:
      break;
  }
  return kExitInterrupted;
}

Result<int> measure(const Global& global, const Options& options) {
  const double budget_s =
      options.budget.empty() ? 0 : F8_TRY(of_option("--budget", parse_duration_s(options.budget)));
  Job job = F8_TRY(job_of(global, options));

  tuner::Sweep* running = nullptr;
  tuner::Worker worker(
      tuner::spawn_self(static_cast<int>(options.device)),
      {.start_timeout_s = 90, .trial_timeout_s = options.trial_timeout_s, .tick = [&] {
         return running != nullptr ? running->tick() : g_signals > 0;
       }});
  g_signals = 0;
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  F8_TRY(worker.start());
  const runtime::DeviceInfo& device = worker.device();
  tuner::CompileAhead compiler(F8_TRY(codegen::CubinCache::open(environment().cache_dir)),
                               static_cast<int>(options.threads));
  F8_TRY(want_casts(compiler, job.request));
  const tuner::SweepPlan plan = F8_TRY(plan_with(worker, job.request, global));
  if (options.dry_run) {
    print(f8::format("{} linears, {} trials, {} configurations pruned by the model, about {}\n",
                     plan.linears.size(), plan.trials.size(), plan.pruned,
                     clock_text(plan.predicted_s)));
    return kExitOk;
  }
  F8_TRY(open_run(job, global, device, plan));
  note(global, "run {} on {}: {} linears, {} trials, about {}", job.run_uuid, device.name,
       plan.linears.size(), plan.trials.size(), clock_text(plan.predicted_s));

  SweepReporter reporter(progress_mode(options.progress, global));
  tuner::Sweep sweep(
      *job.db, worker, compiler, job.request,
      {.finished = [&](const auto& trial, const auto& result,
                       const auto& progress) { reporter.finished(trial, result, progress); },
       .tick = [&](const auto& progress) { reporter.tick(progress); },
       .interrupts = [] { return g_signals.load(); }});
  running = &sweep;
  const Result<tuner::SweepOutcome> outcome = sweep.run(job.run_uuid, plan, budget_s);
  running = nullptr;
  reporter.clear();
  if (!outcome) return std::unexpected(outcome.error());
  print_outcome(global, job.run_uuid, device, *outcome);
  return exit_code(outcome->end);
}

void declare_running(CLI::App& command, Options& options) {
  command.add_option("--budget", options.budget, "stop after this long; resume goes on")
      ->type_name("TIME");
  command
      .add_option("--cell-timeout", options.trial_timeout_s,
                  "seconds without a sign of life after which a measurement is given up")
      ->check(CLI::PositiveNumber)
      ->type_name("SECONDS");
  command
      .add_option(
          "--progress", options.progress,
          "on standard error: a line with the time that is left (rewritten on a terminal, "
          "else every 10 s), JSON events, or nothing; auto is json beside --json, else line")
      ->check(CLI::IsMember({"auto", "line", "json", "none"}))
      ->type_name("HOW");
  add_integer(command, "--device", options.device, "CUDA device", 0, 1023);
  add_integer(command, "--threads", options.threads, "threads that compile kernels; 0: all cores",
              0, 1024);
}

}  // namespace

void add_sweep(CLI::App& app, Program& program) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      add_command(app, program, "sweep", "measure shapes and keep the results in the database",
                  Needs::kGpu, [options, &program]() -> Result<int> {
                    F8_TRY(request_of(options->args));
                    return measure(program.global, *options);
                  });
  declare(*command, options->args);
  declare_running(*command, *options);
  command->add_flag("--dry-run", options->dry_run, "say what would be measured, measure nothing");

  // The command of the process that owns the device; see tools/tuner/worker/worker.hpp.
  auto device = std::make_shared<int>(0);
  CLI::App* worker = app.add_subcommand(tuner::kWorkerCommand, "")->group("");
  worker->add_option("device", *device);
  worker->callback([&program, device] {
    program.action = [device]() -> Result<int> {
      // Standard output is the conversation with the parent: nothing else may write to it.
      const int out = ::dup(STDOUT_FILENO);
      ::dup2(STDERR_FILENO, STDOUT_FILENO);
      return tuner::serve(
          [device]() -> Result<std::unique_ptr<tuner::Backend>> {
            return F8_TRY(tuner::GpuBackend::create(*device));
          },
          STDIN_FILENO, out);
    };
  });
}

void add_resume(CLI::App& app, Program& program) {
  auto options = std::make_shared<Options>();
  CLI::App* command =
      add_command(app, program, "resume", "measure the missing trials of a run", Needs::kGpu,
                  [options, &program] { return measure(program.global, *options); });
  command->add_option("run", options->run, "its uuid or the beginning of it; default: the last one")
      ->type_name("RUN");
  declare_running(*command, *options);
}

}  // namespace f8::cli
