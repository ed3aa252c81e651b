// The shards of a sweep on several GPUs: databases next to the one that the sweep fills, one for each
// GPU, named after it with a hash of the GPU's UUID. They are merged when the sweep ends, and removed
// when nothing is missing; what a killed sweep leaves, the next one merges.
#pragma once

#include <set>
#include <string>
#include <vector>

#include "base/descriptor.hpp"
#include "tools/tuner/search/plan/sweep_plan.hpp"
#include "tuning_db/database.hpp"

namespace f8::tuner {

[[nodiscard]] std::filesystem::path shard_path(const std::filesystem::path& database,
                                               std::string_view unit_uuid);

// Taken for as long as shards of a database are made, filled or merged: what is idle is then nobody's.
// It ends with the process. kInvalidArgument: another process has it. A file system without locks
// gives one that keeps nobody out.
[[nodiscard]] Result<Descriptor> lock_shards(const std::filesystem::path& database);

struct Shard {
  std::filesystem::path path;
  tuning_db::Database db;
  tuning_db::RunInfo run;  // its newest
};
// Those next to the database that no living process measures into. The newest run comes first.
[[nodiscard]] Result<std::vector<Shard>> idle_shards(const std::filesystem::path& database);

// The linears of a shard, by problem key. Its newest run is this process's afterwards.
struct ShardLinears {
  std::set<std::string> missing, measured;
  // Linears of a crashed run that failed after the last timed one: the GPU may be at fault. The run
  // has their rows, so it cannot repeat them.
  std::set<std::string> failed;
};
[[nodiscard]] Result<ShardLinears> linears_of(Shard& shard, const SweepPlan& plan);

// Adds the finished trials of the files to the database.
[[nodiscard]] Status merge_shards(tuning_db::Database& database,
                                  const std::vector<std::filesystem::path>& shards);
// Removes the files and what SQLite keeps next to them.
void remove_shards(const std::vector<std::filesystem::path>& shards);

}  // namespace f8::tuner
