#include "tools/float8-tune/sweep/sweep_job.hpp"

#include <array>
#include <atomic>
#include <csignal>

#include "tools/float8-tune/problem_option.hpp"
#include "tools/float8-tune/sweep/sweep_report.hpp"
#include "tools/tuner/backend/nvml.hpp"
#include "tools/tuner/backend/toolchain.hpp"
#include "tools/tuner/search/kernel_set.hpp"
#include "tools/tuner/search/sweep/measured.hpp"

namespace f8::cli {
namespace {

std::atomic<int> g_signals = 0;

void on_signal(int) {
  ++g_signals;
}

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

}  // namespace

// Says everything that can be wrong with the input before the device is touched.
Result<SweepJob> job_of(const Global& global, const SweepCommand& options) {
  const bool resume = options.is_resume();
  if (global.db.empty() && !options.dry_run) {
    return fail(ErrorCode::kInvalidArgument,
                "a sweep needs a database to write to: give --db FILE, or set FLOAT8_DB");
  }
  SweepJob job{.args = options.args, .request = {}, .db = {}, .run_uuid = {}};
  std::error_code unreadable;
  if (resume) {
    job.db = F8_TRY(tuning_db::Database::open(global.db, tuning_db::OpenMode::kReadWrite));
    const tuning_db::RunInfo run = F8_TRY(find_run(global, *job.db, options.run));
    job.run_uuid = run.uuid;
    job.args = F8_TRY(parse_canonical(run.argv));
  }
  job.request = F8_TRY(request_of(job.args));
  if (!resume && std::filesystem::exists(global.db, unreadable)) {
    job.db = F8_TRY(tuning_db::Database::open(global.db, options.dry_run
                                                             ? tuning_db::OpenMode::kReadOnly
                                                             : tuning_db::OpenMode::kReadWrite));
  }
  return job;
}

Result<double> budget_of(const SweepCommand& command) {
  if (command.budget.empty()) return 0.0;
  return of_option("--budget", parse_duration_s(command.budget));
}

Result<tuner::SweepPlan> plan_with(tuner::Worker& worker, const tuner::SweepRequest& request,
                                   const Global& global) {
  return tuner::plan_sweep(
      request, worker.device(), [&](const Problem& problem, bool bf16) -> Result<tuner::Suggested> {
        const auto found = worker.suggestions(problem, bf16);
        if (found || found.error().code == ErrorCode::kInterrupted ||
            found.error().code == ErrorCode::kEnvironment) {
          return found;
        }
        note(global, "{}: generated kernels alone take part, without cuBLASLt: {}", problem.key(),
             found.error().message);
        return tuner::Suggested{};
      });
}

tuning_db::Toolchain toolchain_of(const runtime::DeviceInfo& device) {
  const auto nvml = tuner::NvmlDevice::open(device.uuid);
  return tuner::current_toolchain(nvml ? nvml->driver_version() : "", device.driver_version,
                                  FLOAT8_VERSION);
}

Status find_mlp_kernels(SweepJob& job, const DeviceClass& device) {
  if (job.request.mlps.empty()) return {};
  const tuning_db::Database builtin = F8_TRY(tuning_db::Database::builtin());
  std::vector<const tuning_db::Database*> databases = {&builtin};
  if (job.db) databases.insert(databases.begin(), &*job.db);
  for (const Problem& problem : F8_TRY(tuner::problems_of(job.request))) {
    if (problem.op != Op::kMlp) continue;
    if (const auto kernels = F8_TRY(tuner::mlp_kernels(problem, databases, device))) {
      job.request.mlp_kernels[problem.key()] = *kernels;
    }
  }
  return {};
}

Status leave_out_measured(SweepJob& job, const SweepCommand& command, const Global& global,
                          const runtime::DeviceInfo& device) {
  const tuning_db::Database builtin = F8_TRY(tuning_db::Database::builtin());
  std::vector<const tuning_db::Database*> databases = {&builtin};
  if (job.db) databases.push_back(&*job.db);
  std::set<std::string> measured =
      F8_TRY(tuner::measured_linears(databases, job.request, device, toolchain_of(device)));
  if (!measured.empty()) {
    note(global,
         "{} of {} {} were measured before, by this toolchain and method on this class of "
         "GPU; {}",
         measured.size(), F8_TRY(tuner::problems_of(job.request)).size(), job.request.noun(),
         command.missing ? "they are left out" : "--missing leaves them out");
  }
  if (command.missing) job.request.skipped = std::move(measured);
  return {};
}

runtime::DeviceInfo planned_device() {
  runtime::DeviceInfo device = tuner::h100();
  static_cast<DeviceClass&>(device) = builtin_device();
  return device;
}

Result<tuner::SweepPlan> plan_without_device(const tuner::SweepRequest& request,
                                             const runtime::DeviceInfo& device) {
  return tuner::plan_sweep(request, device, [&](const Problem&, bool) -> Result<tuner::Suggested> {
    return tuner::Suggested{.count = request.options.heuristics};
  });
}

void print_dry_run(const Global& global, const tuner::SweepRequest& request,
                   const DeviceClass& device, const tuner::SweepPlan& plan) {
  Json problems = Json::array();
  for (const tuner::PlannedLinear& linear : plan.linears) {
    problems.push_back(
        {{"problem", linear.problem.key()}, {"predicted_s", rounded(linear.predicted_s, 3)}});
    if (!global.json) print(linear.problem.key() + "\n");
  }
  if (global.json) {
    print_json({{"device", device.name},
                {"problems", problems},
                {"cells", plan.trials.size()},
                {"pruned", plan.pruned},
                {"predicted_s", rounded(plan.predicted_s, 3)}});
    return;
  }
  print(f8::format("{} {}, {} trials, {} configurations pruned by the model, about {} on {}\n",
                   plan.linears.size(), request.noun(), plan.trials.size(), plan.pruned,
                   clock_text(plan.predicted_s), device.name));
}

Result<int> dry_run_without_gpu(const Global& global, const SweepCommand& command) {
  SweepJob job = F8_TRY(job_of(global, command));
  const runtime::DeviceInfo device = planned_device();
  F8_TRY(leave_out_measured(job, command, global, device));
  F8_TRY(find_mlp_kernels(job, device));
  print_dry_run(global, job.request, device, F8_TRY(plan_without_device(job.request, device)));
  if (!job.request.attention) {
    note(global, "this machine has no GPU: on one cuBLASLt may suggest fewer kernels");
  }
  return kExitOk;
}

Status want_casts(tuner::CompileAhead& compiler, const tuner::SweepRequest& request) {
  // Those of groups depend on their size.
  const auto grouped = [](const tuner::SweptShape& s) { return s.groups.experts > 0; };
  if (std::ranges::all_of(request.shapes, grouped)) return {};
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
    case tuner::SweepEnd::kDeviceLost:
      return kExitIncomplete;
    case tuner::SweepEnd::kInterrupted:
      break;
  }
  return kExitInterrupted;
}

void catch_signals() {
  g_signals = 0;
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
}

int signals() {
  return g_signals.load();
}

}  // namespace f8::cli
