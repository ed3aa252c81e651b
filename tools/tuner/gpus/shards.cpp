#include "tools/tuner/gpus/shards.hpp"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/folder.hpp"
#include "base/hash.hpp"

namespace f8::tuner {
namespace fs = std::filesystem;

using tuning_db::Database;
using tuning_db::OpenMode;

namespace {

constexpr std::string_view kInfix = ".gpu-";
constexpr size_t kDigits = 12;

struct FinishedLinear {
  std::string key;
  std::string at;
  bool timed = false;
};

// The fp8 rows of the shard's linears.
Result<std::vector<FinishedLinear>> finished_linears(const Database& db, const SweepPlan& plan) {
  std::vector<FinishedLinear> finished;
  for (const PlannedLinear& linear : plan.linears) {
    for (const tuning_db::TrialRow& row : F8_TRY(db.trials(linear.problem))) {
      if (row.candidate.impl != tuning_db::Impl::kFloat8) continue;
      finished.push_back({linear.problem.key(), row.at, row.result.is_timed()});
    }
  }
  return finished;
}

}  // namespace

fs::path shard_path(const fs::path& database, std::string_view unit_uuid) {
  fs::path path = database;
  path += f8::format("{}{}", kInfix, hash_hex(unit_uuid).substr(0, kDigits));
  return path;
}

Result<Descriptor> lock_shards(const fs::path& database) {
  const std::string name = database.string() + ".gpus";
  Descriptor lock(::open(name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (!lock.is_open()) {
    return fail(ErrorCode::kIo, "cannot open {}: {}; the sweep's shards lie beside its database",
                name, std::strerror(errno));
  }
  if (::flock(lock.get(), LOCK_EX | LOCK_NB) != 0 && errno == EWOULDBLOCK) {
    return fail(
        ErrorCode::kInvalidArgument,
        "{}: another sweep on several GPUs writes to it; wait for that one, or give this one "
        "a --db of its own and `db merge` them",
        database.string());
  }
  return lock;
}

Result<std::vector<Shard>> idle_shards(const fs::path& database) {
  const std::string prefix = database.filename().string() + std::string(kInfix);
  std::vector<fs::path> paths;
  const fs::path folder = database.parent_path();
  FolderNames names(folder);
  while (const char* next = names.next()) {
    const std::string_view name = next;
    if (name.starts_with(prefix) && name.size() == prefix.size() + kDigits) {
      paths.push_back(folder / name);
    }
  }
  // A folder that cannot be read has no shards: opening the database says what is wrong with it.
  std::ranges::sort(paths);
  std::vector<Shard> shards;
  for (const fs::path& path : paths) {
    Database db = F8_TRY(Database::open(path, OpenMode::kReadWrite));
    std::vector<tuning_db::RunInfo> runs = F8_TRY(db.runs());
    if (!runs.empty() && runs.front().state == "running") continue;
    tuning_db::RunInfo run = runs.empty() ? tuning_db::RunInfo{} : std::move(runs.front());
    shards.push_back({.path = path, .db = std::move(db), .run = std::move(run)});
  }
  std::ranges::stable_sort(shards, std::ranges::greater{},
                           [](const Shard& shard) { return shard.run.started_at; });
  return shards;
}

Result<ShardLinears> linears_of(Shard& shard, const SweepPlan& plan) {
  ShardLinears linears;
  for (const auto& trial : F8_TRY(shard.db.resume_run(shard.run.uuid))) {
    if (!is_gemm(trial.key.problem.op)) linears.missing.insert(trial.key.problem.key());
  }
  const std::vector<FinishedLinear> finished = F8_TRY(finished_linears(shard.db, plan));
  std::string last_timed;
  for (const FinishedLinear& one : finished) {
    if (one.timed) last_timed = std::max(last_timed, one.at);
  }
  for (const FinishedLinear& one : finished) {
    if (linears.missing.contains(one.key)) continue;
    const bool blames_gpu = shard.run.state == "crashed" && one.at > last_timed;
    (blames_gpu ? linears.failed : linears.measured).insert(one.key);
  }
  return linears;
}

Status merge_shards(Database& database, const std::vector<fs::path>& shards) {
  for (const fs::path& shard : shards) F8_TRY(database.merge_from(shard));
  return {};
}

void remove_shards(const std::vector<fs::path>& shards) {
  std::error_code ignored;
  for (const fs::path& shard : shards) {
    for (const char* suffix : {"", "-wal", "-shm"}) fs::remove(shard.string() + suffix, ignored);
  }
}

}  // namespace f8::tuner
