// sweep and resume: measure what a plan says, keep each outcome at once. Safe to interrupt.
//
// Standard error carries progress: on a terminal one line that is rewritten, else one JSON object a
// line for each measured cell, and at most ten seconds apart a heartbeat.
#include "tools/tuner/search/sweep.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <csignal>
#include <cstdio>

#include "base/environment.hpp"
#include "tools/float8-tune/command.hpp"
#include "tools/float8-tune/output.hpp"
#include "tools/float8-tune/sweep_args.hpp"
#include "tools/float8-tune/trial_json.hpp"
#include "tools/tuner/backend/gpu_backend.hpp"
#include "tools/tuner/backend/toolchain.hpp"
#include "tools/tuner/search/kernel_set.hpp"

namespace f8::cli {
namespace {

using tuning_db::TrialState;

std::atomic<int> g_signals = 0;

void on_signal(int) {
  ++g_signals;
}

constexpr double kHeartbeatS = 8;

double seconds() {
  using namespace std::chrono;
  return duration<double>(steady_clock::now().time_since_epoch()).count();
}

std::string clock_text(double s) {
  const auto whole = static_cast<int64_t>(s + 0.5);
  return whole >= 60 ? fmt::format("{}m{:02}", whole / 60, whole % 60) : fmt::format("{}s", whole);
}

int64_t count_of(const tuner::SweepProgress& progress, std::initializer_list<TrialState> states) {
  int64_t count = 0;
  for (const TrialState state : states) {
    const auto found = progress.states.find(state);
    if (found != progress.states.end()) count += found->second;
  }
  return count;
}

class Reporter {
 public:
  explicit Reporter(const Global& global) : global_(global), terminal_(stderr_is_terminal()) {}

  void finished(const tuning_db::Cell& cell, const tuning_db::TrialResult& result,
                const tuner::SweepProgress& progress) {
    if (global_.quiet || terminal_ || result.state == TrialState::kPruned) return;
    Json event = {{"event", "cell"},
                  {"problem", cell.problem.key()},
                  {"candidate", candidate_text(cell.candidate)},
                  {"state", tuning_db::to_string(result.state)}};
    if (result.timing) event["us"] = rounded(result.timing->median_ns / 1e3);
    if (result.ratio) event["speedup"] = rounded(result.ratio->ratio, 4);
    if (!result.reason.empty()) event["reason"] = result.reason;
    event["done"] = progress.done;
    event["cells"] = progress.cells;
    line(event.dump(-1, ' ', false, Json::error_handler_t::replace));
  }

  void tick(const tuner::SweepProgress& p) {
    if (global_.quiet) return;
    const double now = seconds();
    if (now - last_s_ < (terminal_ ? 0.2 : kHeartbeatS)) return;
    const int64_t ok = count_of(p, {TrialState::kOk});
    const int64_t pruned = count_of(p, {TrialState::kPruned});
    const int64_t noisy = count_of(p, {TrialState::kNoisy});
    const int64_t failed = p.done - ok - pruned - noisy;
    if (terminal_) {
      std::string text = fmt::format("\r{}/{} · {} ok · {} pruned", p.done, p.cells, ok, pruned);
      if (noisy > 0) text += fmt::format(" · {} noisy", noisy);
      if (failed > 0) text += fmt::format(" · {} failed", failed);
      if (p.best_speedup > 0) text += fmt::format(" · best {:.2f}x", p.best_speedup);
      if (p.kernels_compiled < p.kernels_wanted) {
        text += fmt::format(" · {}/{} kernels", p.kernels_compiled, p.kernels_wanted);
      }
      text += fmt::format(" · {} · ETA {}\x1b[K", clock_text(p.elapsed_s), clock_text(p.eta_s));
      std::fwrite(text.data(), 1, text.size(), stderr);
      shown_ = true;
      last_s_ = now;
      return;
    }
    line(Json{{"event", "progress"},
              {"done", p.done},
              {"cells", p.cells},
              {"ok", ok},
              {"pruned", pruned},
              {"noisy", noisy},
              {"failed", failed},
              {"best_speedup", rounded(p.best_speedup, 4)},
              {"kernels", fmt::format("{}/{}", p.kernels_compiled, p.kernels_wanted)},
              {"doing", p.doing},
              {"elapsed_s", rounded(p.elapsed_s, 4)},
              {"eta_s", rounded(p.eta_s, 3)}}
             .dump());
  }

  void clear() {
    if (shown_) std::fputs("\r\x1b[K", stderr);
    shown_ = false;
  }

 private:
  void line(std::string text) {
    text += '\n';
    std::fwrite(text.data(), 1, text.size(), stderr);
    last_s_ = seconds();
  }

  const Global& global_;
  bool terminal_;
  bool shown_ = false;
  double last_s_ = 0;
};

struct Options {
  SweepArgs args;
  std::string budget;
  std::string run;  // resume
  double cell_timeout_s = 30;
  int64_t device = 0;
  int64_t threads = 0;
  bool dry_run = false;
};

Json result_json(const tuner::LinearResult& result) {
  const Shape shape = result.problem.shape;
  Json row = {{"m", shape.m}, {"n", shape.n}, {"k", shape.k}, {"recipe", result.problem.recipe}};
  row["state"] = tuning_db::to_string(result.float8.state);
  if (result.float8.timing) row["fp8_us"] = rounded(result.float8.timing->median_ns / 1e3);
  if (result.bf16.timing) row["bf16_us"] = rounded(result.bf16.timing->median_ns / 1e3);
  if (const auto& ratio = result.float8.ratio) {
    add_interval(row, "speedup", ratio->ratio, ratio->lo, ratio->hi, 5);
  }
  if (!result.float8.reason.empty()) row["reason"] = result.float8.reason;
  return row;
}

std::string result_table(const tuner::SweepOutcome& outcome, bool color) {
  Table table({{"m"},
               {"n"},
               {"k"},
               {"recipe", Table::Align::kLeft},
               {"fp8 us"},
               {"bf16 us"},
               {"speedup"},
               {"interval"},
               {"state", Table::Align::kLeft}});
  std::vector<const tuner::LinearResult*> rows;
  for (const auto& linear : outcome.linears) rows.push_back(&linear);
  std::ranges::stable_sort(rows, std::ranges::greater{}, [](const tuner::LinearResult* r) {
    return r->float8.ratio ? r->float8.ratio->ratio : 0;
  });
  for (const tuner::LinearResult* row : rows) {
    const auto us = [](const tuning_db::TrialResult& r) {
      return r.timing ? fmt::format("{:.1f}", r.timing->median_ns / 1e3) : "-";
    };
    const auto& ratio = row->float8.ratio;
    table.add({std::to_string(row->problem.shape.m), std::to_string(row->problem.shape.n),
               std::to_string(row->problem.shape.k), row->problem.recipe, us(row->float8),
               us(row->bf16), ratio ? fmt::format("{:.3f}", ratio->ratio) : "-",
               ratio ? fmt::format("[{:.3f}, {:.3f}]", ratio->lo, ratio->hi) : "-",
               std::string(tuning_db::to_string(row->float8.state))});
  }
  return table.text(color);
}

Result<int> measure(const Global& global, Options& options) {
  const bool resume =
      !options.dry_run && options.args.mnk.empty() && options.args.model.model.empty();
  if (global.db.empty() && !options.dry_run) {
    return fail(ErrorCode::kInvalidArgument,
                "a sweep needs a database to write to: give --db FILE, or set FLOAT8_DB");
  }
  const double budget_s =
      options.budget.empty() ? 0 : F8_TRY(of_option("--budget", parse_duration_s(options.budget)));

  // Everything that can be wrong with the input is said before the device is touched.
  std::optional<tuning_db::Database> db;
  std::string run_uuid = options.run;
  if (resume) {
    db = F8_TRY(tuning_db::Database::open(global.db, tuning_db::OpenMode::kReadWrite));
    bool found = false;
    for (const tuning_db::RunInfo& run : F8_TRY(db->runs())) {
      const bool wanted = options.run.empty() ? run.done < run.planned && run.state != "imported"
                                              : run.uuid.starts_with(options.run);
      if (!wanted) continue;
      run_uuid = run.uuid;
      options.args = F8_TRY(parse_canonical(run.argv));
      found = true;
      break;
    }
    if (!found) {
      return fail(ErrorCode::kNotFound, "{}: {}", global.db.string(),
                  options.run.empty() ? "no run with missing cells; nothing to resume"
                                      : fmt::format("no run {}", options.run));
    }
  }
  const tuner::SweepRequest request = F8_TRY(request_of(options.args));
  std::error_code unreadable;
  if (!resume && !options.dry_run && std::filesystem::exists(global.db, unreadable)) {
    db = F8_TRY(tuning_db::Database::open(global.db, tuning_db::OpenMode::kReadWrite));
  }

  Reporter reporter(global);
  tuner::Sweep* sweep = nullptr;
  tuner::Worker worker(tuner::spawn_self(static_cast<int>(options.device)),
                       {.start_timeout_s = 90,
                        .cell_timeout_s = options.cell_timeout_s,
                        .tick = [&] { return sweep != nullptr ? sweep->tick() : g_signals > 0; }});
  g_signals = 0;
  std::signal(SIGINT, on_signal);
  std::signal(SIGTERM, on_signal);
  F8_TRY(worker.start());
  const runtime::DeviceInfo& device = worker.device();
  const auto nvml = tuner::NvmlDevice::open(device.uuid);
  const tuning_db::Toolchain toolchain = tuner::current_toolchain(
      nvml ? nvml->driver_version() : "", device.driver_version, FLOAT8_VERSION);

  tuner::CompileAhead compiler(F8_TRY(codegen::CubinCache::open(environment().cache_dir)),
                               static_cast<int>(options.threads));
  for (const std::string& name : request.recipes) {
    const Recipe recipe = F8_TRY(find_recipe(name));
    for (const auto& kernel : F8_TRY(tuner::cast_kernels(recipe))) compiler.want(kernel.spec);
  }
  const tuner::SweepPlan plan = F8_TRY(
      tuner::plan_sweep(request, device, [&](const Problem& problem, bool bf16) -> Result<int> {
        const Result<int> count = worker.heuristics(problem, bf16);
        if (count || count.error().code == ErrorCode::kInterrupted ||
            count.error().code == ErrorCode::kEnvironment) {
          return count;
        }
        note(global, "{}: without cuBLASLt: {}", problem.key(), count.error().message);
        return 0;
      }));
  if (options.dry_run) {
    print(fmt::format("{} linears, {} cells, {} configurations pruned by the model, about {}\n",
                      plan.linears.size(), plan.cells.size(), plan.pruned,
                      clock_text(plan.predicted_s)));
    return kExitOk;
  }

  const tuning_db::Method method = tuner::sweep_method(request.knobs);
  if (resume) {
    F8_TRY(db->verify_run(run_uuid, tuner::device_class(device), device.uuid, toolchain, method));
  } else {
    // A new file only now that there is a device to fill it.
    if (!db) db = F8_TRY(tuning_db::Database::open(global.db, tuning_db::OpenMode::kCreate));
    const tuning_db::RunInfo run = F8_TRY(
        db->begin_run(canonical(options.args, request), request.seed, tuner::device_class(device),
                      device.uuid, toolchain, method, plan.cells));
    run_uuid = run.uuid;
  }
  note(global, "run {} on {}: {} linears, {} cells, about {}", run_uuid, device.name,
       plan.linears.size(), plan.cells.size(), clock_text(plan.predicted_s));

  tuner::Sweep engine(
      *db, worker, compiler, request,
      {.finished = [&](const auto& cell, const auto& result,
                       const auto& progress) { reporter.finished(cell, result, progress); },
       .tick = [&](const auto& progress) { reporter.tick(progress); },
       .interrupts = [] { return g_signals.load(); }});
  sweep = &engine;
  const Result<tuner::SweepOutcome> outcome = engine.run(run_uuid, plan, budget_s);
  sweep = nullptr;
  reporter.clear();
  if (!outcome) return std::unexpected(outcome.error());

  const auto end_text = [&] {
    switch (outcome->end) {
      case tuner::SweepEnd::kDone:
        return "done";
      case tuner::SweepEnd::kBudget:
        return "budget";
      case tuner::SweepEnd::kInterrupted:
        break;
    }
    return "interrupted";
  }();
  const tuner::SweepProgress& progress = outcome->progress;
  if (global.json) {
    Json states = Json::object();
    for (const auto& [state, count] : progress.states) {
      states[std::string(tuning_db::to_string(state))] = count;
    }
    Json results = Json::array();
    for (const auto& linear : outcome->linears) results.push_back(result_json(linear));
    print_json({{"run", run_uuid},
                {"end", end_text},
                {"device", device.name},
                {"cells", progress.cells},
                {"done", progress.done},
                {"states", states},
                {"elapsed_s", rounded(progress.elapsed_s, 4)},
                {"workers", progress.worker_starts},
                {"results", results}});
  } else {
    print(result_table(*outcome, stdout_color(global)));
  }
  const int64_t failed =
      count_of(progress, {TrialState::kLaunchError, TrialState::kTimeout, TrialState::kWrong,
                          TrialState::kCompileError, TrialState::kQuarantined});
  if (failed > 0) {
    note(global, "{} cells failed; `float8-tune query` on their shape shows why", failed);
  }
  if (const int64_t noisy = count_of(progress, {TrialState::kNoisy}); noisy > 0) {
    note(global, "{} cells are noisy; sweep them again with a larger --linear-max-ms", noisy);
  }
  if (outcome->end != tuner::SweepEnd::kDone) {
    note(global, "{} of {} cells are missing; `float8-tune resume {} --db {}` measures them",
         progress.cells - progress.done, progress.cells, run_uuid, global.db.string());
  }
  switch (outcome->end) {
    case tuner::SweepEnd::kDone:
      return kExitOk;
    case tuner::SweepEnd::kBudget:
      return kExitIncomplete;
    case tuner::SweepEnd::kInterrupted:
      break;
  }
  return kExitInterrupted;
}

void declare_running(CLI::App& command, Options& options) {
  command.add_option("--budget", options.budget, "stop after this long; resume goes on")
      ->type_name("TIME");
  command
      .add_option("--cell-timeout", options.cell_timeout_s,
                  "seconds without a sign of life after which a measurement is given up")
      ->check(CLI::PositiveNumber)
      ->type_name("SECONDS");
  add_integer(command, "--device", options.device, "CUDA device", 0, 1023);
  add_integer(command, "--threads", options.threads, "that compile kernels; 0: all cores", 0, 1024);
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

  // The process that owns the device; see tools/tuner/worker.hpp.
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
      add_command(app, program, "resume", "measure the missing cells of a run", Needs::kGpu,
                  [options, &program] { return measure(program.global, *options); });
  command->add_option("run", options->run, "its uuid or the beginning of it; default: the last one")
      ->type_name("RUN");
  declare_running(*command, *options);
}

}  // namespace f8::cli
