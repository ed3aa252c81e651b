#include "tools/float8-tune/sweep/gpus.hpp"

#include <algorithm>
#include <array>
#include <numeric>

#include "base/environment.hpp"
#include "base/number.hpp"
#include "base/text.hpp"
#include "recipes/mlp.hpp"
#include "tools/float8-tune/sweep/sweep_report.hpp"
#include "tools/tuner/gpus/campaign.hpp"
#include "tuning_db/estimate/filter.hpp"

namespace f8::cli {
namespace {

using Gpus = tuner::Campaign::Gpus;

// The devices that the command names. A resume that names none takes those that have a shard.
Result<std::vector<int>> devices_of(const Global& global, const SweepCommand& command) {
  std::vector<int> devices = F8_TRY(of_option("--gpus", parse_gpus(command.gpus)));
  const int count = F8_TRY(runtime::device_count());
  if (count == 0) return fail(ErrorCode::kEnvironment, "there is no GPU here");
  if (devices.empty()) {
    devices.resize(static_cast<size_t>(count));
    std::iota(devices.begin(), devices.end(), 0);
  }
  for (const int device : devices) {
    if (device < count) continue;
    return fail(ErrorCode::kInvalidArgument, "--gpus: there is no GPU {}; the last one is {}",
                device, count - 1);
  }
  if (!command.gpus.empty()) return devices;
  std::error_code unreadable;
  std::erase_if(devices, [&](int device) {
    const auto info = runtime::device_info(device);
    return !info || !std::filesystem::exists(tuner::shard_path(global.db, info->uuid), unreadable);
  });
  if (devices.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "the GPUs that the run began on are not here; name others with --gpus");
  }
  return devices;
}

Result<Gpus> start(const std::vector<int>& devices, const SweepCommand& command) {
  Gpus gpus;
  for (const int device : devices) {
    gpus.push_back(std::make_unique<tuner::Gpu>(
        device, tuner::spawn_self(device),
        tuner::WorkerOptions{
            .start_timeout_s = 90, .trial_timeout_s = command.trial_timeout_s, .tick = nullptr},
        signals));
  }
  const auto of_gpu = [](const tuner::Gpu& gpu, Status started) {
    return of_option(f8::format("GPU {}", gpu.index), std::move(started));
  };
  for (const auto& gpu : gpus) F8_TRY(of_gpu(*gpu, gpu->worker.launch()));  // side by side
  for (const auto& gpu : gpus) F8_TRY(of_gpu(*gpu, gpu->worker.start()));
  F8_TRY(tuner::check_one_class(gpus));
  return gpus;
}

// The request of the run, and its shards where it is resumed.
struct Request {
  SweepJob job;
  std::vector<tuner::Shard> shards;
  std::vector<std::string> argv;
};

Result<Request> request_for(const Global& global, const SweepCommand& command) {
  Request request;
  if (!command.is_resume()) {
    request.job = F8_TRY(job_of(global, command));
    request.argv = canonical(request.job.args, request.job.request);
    return request;
  }
  if (global.db.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "resume needs the database of the run: give --db FILE, or set FLOAT8_DB");
  }
  std::vector<tuner::Shard> idle = F8_TRY(tuner::idle_shards(global.db));
  request.shards = tuner::shards_of_run(std::move(idle), command.run);
  if (request.shards.empty()) {
    return fail(
        ErrorCode::kNotFound,
        "{}: no run on several GPUs has missing trials; `float8-tune sweep --missing --gpus "
        "{}` with the shapes measures what the database lacks",
        global.db.string(), command.gpus);
  }
  request.job.args = F8_TRY(parse_canonical(request.shards.front().run.argv));
  request.job.request = F8_TRY(request_of(request.job.args));
  request.argv = canonical(request.job.args, request.job.request);
  return request;
}

// GPUs have files of their own, so that one does not see the kernels of linears that another one has measured.
Status check_mlp_kernels(const tuner::SweepRequest& request) {
  for (const Problem& problem : F8_TRY(tuner::problems_of(request))) {
    if (problem.op != Op::kMlp || request.mlp_kernels.contains(problem.key())) continue;
    const std::vector<Shape> linears = linears_of(mlp_shape(problem.dims));
    return fail(
        ErrorCode::kUnsupported, "{}: on several GPUs MLPs are measured after their linears; {}",
        problem.key(),
        tuning_db::how_to_measure(F8_TRY(find_recipe(problem.recipe)),
                                  std::array{linears.front(), linears.back()}, problem.groups()));
  }
  return {};
}

Result<tuner::Campaign> open_campaign(const Global& global, Request request, const Gpus& gpus,
                                      const tuner::SweepPlan& plan) {
  const tuner::SweepRequest& sweep = request.job.request;
  const tuner::CampaignIdentity identity{.argv = std::move(request.argv),
                                         .seed = sweep.seed,
                                         .toolchain = toolchain_of(gpus.front()->worker.device()),
                                         .method = tuner::method_of(sweep)};
  if (request.shards.empty()) return tuner::Campaign::begin(global.db, gpus, identity, plan);
  return tuner::Campaign::resume(global.db, gpus, std::move(request.shards), identity, plan);
}

}  // namespace

Result<std::vector<int>> parse_gpus(const std::string& list) {
  std::vector<int> gpus;
  if (list.empty() || list == "all") return gpus;
  for (const std::string& item : split(list, ',')) {
    const int gpu = number_of<int>(item).value_or(-1);
    if (gpu < 0) {
      return fail(ErrorCode::kInvalidArgument, "{} is no GPU; write all, or 0,1 and so on",
                  quote(item));
    }
    if (std::ranges::find(gpus, gpu) != gpus.end()) {
      return fail(ErrorCode::kInvalidArgument, "GPU {} is named twice", gpu);
    }
    gpus.push_back(gpu);
  }
  return gpus;
}

Status merge_leftovers(tuning_db::Database& database, const Global& global) {
  std::vector<std::filesystem::path> paths;
  for (const tuner::Shard& shard : F8_TRY(tuner::idle_shards(global.db))) {
    paths.push_back(shard.path);
  }
  if (paths.empty()) return {};
  F8_TRY(tuner::merge_shards(database, paths));
  tuner::remove_shards(paths);
  note(global, "what an unfinished sweep measured on {} GPUs is merged into {}", paths.size(),
       global.db.string());
  return {};
}

Result<bool> resumes_on_gpus(const Global& global, const SweepCommand& command) {
  if (!command.gpus.empty()) return true;
  if (global.db.empty()) return false;
  const auto shards = tuner::shards_of_run(F8_TRY(tuner::idle_shards(global.db)), command.run);
  return !shards.empty();
}

Result<int> measure_on_gpus(const Global& global, const SweepCommand& command) {
  const double budget_s = F8_TRY(budget_of(command));
  Request request = F8_TRY(request_for(global, command));
  SweepJob& job = request.job;
  catch_signals();
  const std::vector<int> devices = F8_TRY(devices_of(global, command));
  Gpus gpus = F8_TRY(start(devices, command));
  Descriptor lock;  // only now: what is refused writes nothing
  if (!command.dry_run) lock = F8_TRY(tuner::lock_shards(global.db));
  tuner::Worker& first = gpus.front()->worker;
  tuner::CompileAhead compiler(F8_TRY(codegen::CubinCache::open(environment().cache_dir)),
                               static_cast<int>(command.threads));
  F8_TRY(want_casts(compiler, job.request));
  if (!command.dry_run) {
    if (!job.db)
      job.db = F8_TRY(tuning_db::Database::open(global.db, tuning_db::OpenMode::kCreate));
    if (request.shards.empty()) F8_TRY(merge_leftovers(*job.db, global));
  }
  if (request.shards.empty()) F8_TRY(leave_out_measured(job, command, global, first.device()));
  F8_TRY(find_mlp_kernels(job, first.device()));
  F8_TRY(check_mlp_kernels(job.request));
  const tuner::SweepPlan plan = F8_TRY(plan_with(first, job.request, global));
  if (command.dry_run) {
    print_dry_run(global, job.request, first.device(), plan);
    return kExitOk;
  }
  if (plan.linears.empty()) {
    print_outcome(global, "", first.device(), {});
    return kExitOk;
  }
  tuning_db::Database database = *std::move(job.db);
  const tuner::SweepRequest sweep_request = job.request;
  tuner::Campaign campaign = F8_TRY(open_campaign(global, std::move(request), gpus, plan));
  const std::string run_uuid = gpus.front()->run_uuid;
  note(global, "run {} on {} of {}: {} {} are missing, about {}", run_uuid, gpus.size(),
       first.device().name, campaign.wanted().size(), sweep_request.noun(),
       clock_text(plan.predicted_s / static_cast<double>(gpus.size())));
  SweepReporter reporter(progress_mode(command.progress, global));
  tuner::GpusSweep sweep(
      gpus, compiler, sweep_request, plan, campaign.wanted(),
      {.finished = [&](int gpu, const auto& trial, const auto& result,
                       const auto& total) { reporter.finished(trial, result, total, gpu); },
       .tick = [&](const tuner::GpusProgress& progress) { reporter.tick(progress); },
       .interrupts = signals});
  const tuner::GpusOutcome outcome = sweep.run(budget_s);
  reporter.clear();
  F8_TRY(campaign.end(gpus, database, outcome.total.end == tuner::SweepEnd::kDone));
  print_outcome(global, run_uuid, first.device(), outcome.total, outcome.gpus);
  return exit_code(outcome.total.end);
}

}  // namespace f8::cli
