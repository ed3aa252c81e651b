// sweep and resume: measure what a plan says and keep each outcome at once. Both are safe to
// interrupt.
#include "tools/tuner/search/sweep/sweep.hpp"

#include <unistd.h>

#include "base/environment.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/sweep/gpus.hpp"
#include "tools/float8-tune/sweep/sweep_job.hpp"
#include "tools/float8-tune/sweep/sweep_report.hpp"
#include "tools/tuner/backend/gpu/gpu_backend.hpp"

namespace f8::cli {
namespace {

// Begins the job's run in the database, or makes sure that a resumed one may go on here.
Status open_run(SweepJob& job, const Global& global, const runtime::DeviceInfo& device,
                const tuner::SweepPlan& plan) {
  const tuning_db::Toolchain toolchain = toolchain_of(device);
  const tuning_db::Method method = tuner::method_of(job.request);
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

Result<int> measure(const Global& global, const SweepCommand& options) {
  const double budget_s = F8_TRY(budget_of(options));
  SweepJob job = F8_TRY(job_of(global, options));

  tuner::Sweep* running = nullptr;
  tuner::Worker worker(
      tuner::spawn_self(static_cast<int>(options.device)),
      {.start_timeout_s = 90, .trial_timeout_s = options.trial_timeout_s, .tick = [&] {
         return running != nullptr ? running->tick() : signals() > 0;
       }});
  catch_signals();
  F8_TRY(worker.start());
  const runtime::DeviceInfo& device = worker.device();
  tuner::CompileAhead compiler(F8_TRY(codegen::CubinCache::open(environment().cache_dir)),
                               static_cast<int>(options.threads));
  F8_TRY(want_casts(compiler, job.request));
  if (options.missing && job.db && !options.dry_run) F8_TRY(merge_leftovers(*job.db, global));
  if (job.run_uuid.empty()) F8_TRY(leave_out_measured(job, options, global, device));
  F8_TRY(find_mlp_kernels(job, device));
  const tuner::SweepPlan plan = F8_TRY(plan_with(worker, job.request, global));
  if (options.dry_run) {
    print_dry_run(global, job.request, device, plan);
    return kExitOk;
  }
  if (plan.linears.empty()) {
    print_outcome(global, "", device, {});
    return kExitOk;
  }
  F8_TRY(open_run(job, global, device, plan));
  note(global, "run {} on {}: {} {}, {} trials, about {}", job.run_uuid, device.name,
       plan.linears.size(), job.request.noun(), plan.trials.size(), clock_text(plan.predicted_s));

  SweepReporter reporter(progress_mode(options.progress, global));
  tuner::Sweep sweep(
      *job.db, worker, compiler, job.request,
      {.finished = [&](const auto& trial, const auto& result,
                       const auto& progress) { reporter.finished(trial, result, progress); },
       .tick = [&](const auto& progress) { reporter.tick(progress); },
       .interrupts = signals});
  running = &sweep;
  const Result<tuner::SweepOutcome> outcome = sweep.run(job.run_uuid, plan, budget_s);
  running = nullptr;
  reporter.clear();
  if (!outcome) return std::unexpected(outcome.error());
  print_outcome(global, job.run_uuid, device, *outcome);
  return exit_code(outcome->end);
}

void declare_running(CLI::App& command, SweepCommand& options) {
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
  CLI::Option* device = add_integer(command, "--device", options.device, "CUDA device", 0, 1023);
  command
      .add_option("--gpus", options.gpus,
                  "CUDA devices of one class that share the work, separated by commas, or all")
      ->excludes(device)
      ->type_name("LIST");
  add_integer(command, "--threads", options.threads, "threads that compile kernels; 0: all cores",
              0, 1024);
}

}  // namespace

void add_sweep(CLI::App& app, Program& program) {
  auto options = std::make_shared<SweepCommand>();
  CLI::App* command =
      add_command(app, program, "sweep", "measure shapes and keep the results in the database",
                  Needs::kGpu, [options, &program]() -> Result<int> {
                    F8_TRY(request_of(options->args));
                    if (options->dry_run && this_gpu() == nullptr) {
                      return dry_run_without_gpu(program.global, *options);
                    }
                    if (!options->gpus.empty()) return measure_on_gpus(program.global, *options);
                    return measure(program.global, *options);
                  });
  declare(*command, options->args);
  declare_running(*command, *options);
  command->add_flag(
      "--missing", options->missing,
      "leave out the linears, MLPs or operations of attention that the database has of this "
      "method, code generator, NVRTC "
      "and cuBLASLt, whichever GPU of this class measured them");
  command->add_flag("--dry-run", options->dry_run,
                    "list what would be measured, and measure nothing; needs no GPU");

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
  auto options = std::make_shared<SweepCommand>();
  CLI::App* command = add_command(app, program, "resume", "measure the missing trials of a run",
                                  Needs::kGpu, [options, &program]() -> Result<int> {
                                    if (F8_TRY(resumes_on_gpus(program.global, *options))) {
                                      return measure_on_gpus(program.global, *options);
                                    }
                                    return measure(program.global, *options);
                                  });
  command->add_option("run", options->run, "its uuid or the beginning of it; default: the last one")
      ->type_name("RUN");
  declare_running(*command, *options);
}

}  // namespace f8::cli
