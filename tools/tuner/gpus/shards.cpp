#include "tools/tuner/gpus/shards.hpp"

#include <fcntl.h>
#include <sys/file.h>

#include <algorithm>
#include <cerrno>
#include <cstring>

#include "base/hash.hpp"

namespace f8::tuner {
namespace fs = std::filesystem;

using tuning_db::Database;
using tuning_db::OpenMode;

namespace {
constexpr std::string_view kInfix = ".gpu-";
constexpr size_t kDigits = 12;
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
  std::error_code error;
  const fs::path folder = database.has_parent_path() ? database.parent_path() : fs::path(".");
  for (const auto& entry : fs::directory_iterator(folder, error)) {
    const std::string name = entry.path().filename().string();
    if (name.starts_with(prefix) && name.size() == prefix.size() + kDigits) {
      paths.push_back(entry.path());
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
    if (trial.key.problem.op == Op::kLinear) linears.missing.insert(trial.key.problem.key());
  }
  for (const PlannedLinear& linear : plan.linears) {
    const std::string key = linear.problem.key();
    if (linears.missing.contains(key)) continue;
    const auto rows = F8_TRY(shard.db.trials(linear.problem));
    const bool own = std::ranges::any_of(
        rows, [&](const tuning_db::TrialRow& row) { return row.run_uuid == shard.run.uuid; });
    if (own) linears.measured.insert(key);
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
