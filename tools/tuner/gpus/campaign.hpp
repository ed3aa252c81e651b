// A sweep on several GPUs with its files: a run in a shard for each GPU. The shards are merged into
// the database when the sweep ends. They stay where trials are missing, for a resume, which may be on
// other GPUs of the class.
#pragma once

#include "tools/tuner/gpus/gpus_sweep.hpp"
#include "tools/tuner/gpus/shards.hpp"

namespace f8::tuner {

struct CampaignIdentity {
  std::vector<std::string> argv;
  uint64_t seed = 1;
  tuning_db::Toolchain toolchain;
  tuning_db::Method method;
};

class Campaign {
 public:
  using Gpus = std::vector<std::unique_ptr<Gpu>>;  // their workers have started

  // Plans a run for each GPU.
  [[nodiscard]] static Result<Campaign> begin(const std::filesystem::path& database,
                                              const Gpus& gpus, const CampaignIdentity& identity,
                                              const SweepPlan& plan);
  // Goes on with the run that the shards share. A GPU without a shard gets one. Linears that failed
  // on a lost GPU are missing; the GPU itself, where it is back, has a new run for them.
  [[nodiscard]] static Result<Campaign> resume(const std::filesystem::path& database,
                                               const Gpus& gpus, std::vector<Shard> shards,
                                               const CampaignIdentity& identity,
                                               const SweepPlan& plan);
  // The linears that are missing, by problem key.
  [[nodiscard]] const std::set<std::string>& wanted() const { return wanted_; }
  // Closes the GPUs' shards and merges all; removes them where the sweep is done.
  [[nodiscard]] Status end(const Gpus& gpus, tuning_db::Database& database, bool done);

 private:
  [[nodiscard]] Status add(const std::filesystem::path& database, Gpu& gpu,
                           const CampaignIdentity& identity, const SweepPlan& plan);
  // Begins a run of what is wanted in the GPU's shard.
  [[nodiscard]] Status plan_run(Gpu& gpu, const CampaignIdentity& identity, const SweepPlan& plan);

  std::set<std::string> wanted_;
  std::vector<std::filesystem::path> paths_;
};

// Returns the idle shards of one run: the one whose uuid begins with `run`, or the newest.
[[nodiscard]] std::vector<Shard> shards_of_run(std::vector<Shard> idle, std::string_view run);

}  // namespace f8::tuner
