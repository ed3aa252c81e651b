// The finished measurements of a database as values with natural keys: what a merge, an export and
// an import carry. Internal to tuning_db.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "tuning_db/database.hpp"
#include "tuning_db/file/sqlite.hpp"

namespace f8::tuning_db {

struct RunRecord {
  std::string uuid, argv, started_at;
  uint64_t seed = 0;
  std::string device_key, unit_hash, toolchain_key, method_key;
};

struct TrialRecord {
  std::string uuid, run_uuid, at;
  Problem problem;
  Candidate candidate;
  int attempt = 0;
  TrialResult result;
};

// Terminal trials, the runs that have some, and what those refer to; each sorted as the JSONL
// grammar says.
struct Snapshot {
  std::vector<DeviceClass> devices;
  std::vector<Toolchain> toolchains;
  std::vector<Method> methods;
  std::vector<RunRecord> runs;
  std::vector<TrialRecord> trials;
  std::map<std::string, std::string> labels{};  // the keys that a text has labels for
};
// Puts the keys in the place of labels.
void resolve_labels(Snapshot& snapshot);

// The format of exports that this program writes.
inline constexpr int kExportFormat = 3;

[[nodiscard]] Result<Snapshot> read_snapshot(const Connection& db);
// One transaction: all or nothing. A trial or run that is there already must be equal.
[[nodiscard]] Result<Database::MergeCount> insert_snapshot(Connection& db,
                                                           const Snapshot& snapshot);

// The line of a record, without its line feed; equal records are equal bytes.
[[nodiscard]] std::string to_json_line(const DeviceClass& device);
[[nodiscard]] std::string to_json_line(const Toolchain& toolchain);
[[nodiscard]] std::string to_json_line(const Method& method);
[[nodiscard]] std::string to_json_line(const RunRecord& run);
[[nodiscard]] std::string to_json_line(const TrialRecord& trial);
// The JSON within the records, which a database file may hold in any form, can be written again.
[[nodiscard]] Status check_json(const Snapshot& snapshot);
// Names a file of float8 that begins so, and the command that takes it, for messages: "an export of
// a database; ...". Empty for any other.
[[nodiscard]] std::string_view known_as(std::string_view begin);
// `name` stands in errors, with the line's number.
[[nodiscard]] Result<Snapshot> parse_jsonl(std::string_view text, std::string_view name);

}  // namespace f8::tuning_db
