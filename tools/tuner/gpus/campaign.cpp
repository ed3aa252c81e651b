#include "tools/tuner/gpus/campaign.hpp"

#include <algorithm>

namespace f8::tuner {
namespace fs = std::filesystem;

using tuning_db::Database;
using tuning_db::OpenMode;

namespace {

// The trials of these linears and of their GEMMs.
std::vector<tuning_db::TrialKey> trials_of(const SweepPlan& plan,
                                           const std::set<std::string>& linears) {
  std::set<std::string> problems;
  for (const PlannedLinear& linear : plan.linears) {
    if (!linears.contains(linear.problem.key())) continue;
    problems.insert(linear.problem.key());
    for (const PlannedGemm& gemm : linear.gemms) problems.insert(gemm.problem.key());
  }
  std::vector<tuning_db::TrialKey> trials;
  for (const tuning_db::TrialKey& trial : plan.trials) {
    if (problems.contains(trial.problem.key())) trials.push_back(trial);
  }
  return trials;
}

}  // namespace

Status Campaign::add(const fs::path& database, Gpu& gpu, const CampaignIdentity& identity,
                     const SweepPlan& plan) {
  const runtime::DeviceInfo& device = gpu.worker.device();
  const fs::path path = shard_path(database, device.uuid);
  // A process that ended between making its shard and beginning its run leaves one without a run.
  gpu.shard = F8_TRY(Database::open(path, OpenMode::kCreate));
  if (!F8_TRY(gpu.shard->runs()).empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "GPU {}: {} holds what another sweep measured on it; resume that one first, or let "
                "`sweep --missing` take it over",
                gpu.index, path.string());
  }
  paths_.push_back(path);
  return plan_run(gpu, identity, plan);
}

Status Campaign::plan_run(Gpu& gpu, const CampaignIdentity& identity, const SweepPlan& plan) {
  const runtime::DeviceInfo& device = gpu.worker.device();
  gpu.run_uuid =
      F8_TRY(gpu.shard->begin_run(identity.argv, identity.seed, device, device.uuid,
                                  identity.toolchain, identity.method, trials_of(plan, wanted_)))
          .uuid;
  return {};
}

Result<Campaign> Campaign::begin(const fs::path& database, const Gpus& gpus,
                                 const CampaignIdentity& identity, const SweepPlan& plan) {
  Campaign campaign;
  for (const PlannedLinear& linear : plan.linears) campaign.wanted_.insert(linear.problem.key());
  for (const auto& gpu : gpus) F8_TRY(campaign.add(database, *gpu, identity, plan));
  return campaign;
}

Result<Campaign> Campaign::resume(const fs::path& database, const Gpus& gpus,
                                  std::vector<Shard> shards, const CampaignIdentity& identity,
                                  const SweepPlan& plan) {
  Campaign campaign;
  std::set<std::string> measured;
  std::set<fs::path> with_failures;
  for (Shard& shard : shards) {
    F8_TRY(shard.db.verify_run(shard.run.uuid, gpus.front()->worker.device(), "",
                               identity.toolchain, identity.method));
    campaign.paths_.push_back(shard.path);
  }
  for (Shard& shard : shards) {
    ShardLinears linears = F8_TRY(linears_of(shard, plan));
    if (!linears.failed.empty()) with_failures.insert(shard.path);
    campaign.wanted_.merge(linears.missing);
    campaign.wanted_.merge(linears.failed);
    measured.merge(linears.measured);
  }
  for (const std::string& key : measured) campaign.wanted_.erase(key);
  for (const auto& gpu : gpus) {
    const fs::path path = shard_path(database, gpu->worker.device().uuid);
    const auto own = std::ranges::find(shards, path, &Shard::path);
    if (own == shards.end()) {
      F8_TRY(campaign.add(database, *gpu, identity, plan));
      continue;
    }
    gpu->run_uuid = own->run.uuid;
    gpu->shard = std::move(own->db);
    if (with_failures.contains(path)) {
      F8_TRY(gpu->shard->end_run(gpu->run_uuid, "interrupted"));
      F8_TRY(campaign.plan_run(*gpu, identity, plan));
    }
    shards.erase(own);
  }
  for (Shard& other : shards) {
    const bool crashed = other.run.state == "crashed";
    F8_TRY(other.db.end_run(other.run.uuid, crashed ? "crashed" : "interrupted"));
  }
  return campaign;
}

Status Campaign::end(const Gpus& gpus, Database& database, bool done) {
  for (const auto& gpu : gpus) gpu->shard.reset();
  F8_TRY(merge_shards(database, paths_));
  if (done) remove_shards(paths_);
  return {};
}

std::vector<Shard> shards_of_run(std::vector<Shard> idle, std::string_view run) {
  const auto named = std::ranges::find_if(
      idle, [&](const Shard& shard) { return shard.run.uuid.starts_with(run); });
  if (named == idle.end()) return {};
  const std::string argv = named->run.argv;
  std::erase_if(idle, [&](const Shard& shard) { return shard.run.argv != argv; });
  return idle;
}

}  // namespace f8::tuner
