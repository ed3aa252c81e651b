// The state of a Database, and how one is opened. Internal to tuning_db.
#pragma once

#include <memory>
#include <span>
#include <string>

#include "tuning_db/database.hpp"
#include "tuning_db/file/sqlite.hpp"

namespace f8::tuning_db {

struct Database::State {
  std::unique_ptr<Connection> db;
  std::string layer;
  bool writable = false;
  // The table for a device where it was made before, else null; null itself where none was made.
  std::shared_ptr<const TuningTable> (*made_table)(const DeviceClass& device) = nullptr;

  static Database wrap(State state);
  // The state of a database, for the parts of tuning_db that are no members of it.
  static State& of(Database& database) { return *database.state_; }
  [[nodiscard]] Status require_writable() const;
};

// One step takes a database from version `from`, whose schema has that fingerprint, to `from` + 1.
// The sql does not set user_version; `then`, where there is one, runs after it. When all steps are
// done, every row gets its checksum and foreign keys are checked, so a step may rebuild a table that
// others refer to.
struct Migration {
  int from = 0;
  std::string_view fingerprint;
  std::string_view sql;
  Status (*then)(Connection&) = nullptr;
};

// A schema and the way to it from older ones; tests open files under a synthetic later schema.
struct SchemaSpec {
  int version = 0;
  std::string_view sql;
  std::span<const Migration> migrations;
};
[[nodiscard]] const SchemaSpec& current_schema();
[[nodiscard]] Result<const Migration*> find_step(const SchemaSpec& schema, int from,
                                                 std::string_view label);
inline constexpr int kFirstWithChecksums = 3;

// Refuses a database whose tables, columns, indexes and triggers are not those of this version.
[[nodiscard]] Status check_schema(const Connection& db, int version, const SchemaSpec& schema);
// A hash of the schema's normalised text.
[[nodiscard]] Result<std::string> schema_fingerprint(const Connection& db);
// SQLite's integrity check: pages, indexes, types, and the schema's CHECKs. Those cost half of its
// time and say nothing where every row has its checksum.
enum class Constraints { kIgnored, kChecked };
[[nodiscard]] Status check_integrity(Connection& db, Constraints constraints);

[[nodiscard]] Result<Database> open_database(const std::filesystem::path& path, OpenMode mode,
                                             const SchemaSpec& schema);

// A whole copy next to the file, FILE.NAME.backup or, where there is one, FILE.NAME.backup2 and so on.
[[nodiscard]] Result<std::filesystem::path> back_up(const Connection& db,
                                                    const std::filesystem::path& path,
                                                    std::string_view name);

// Brings the open database to schema.version: all steps in one transaction.
[[nodiscard]] Status migrate(Connection& db, int from, const SchemaSpec& schema);

// Refuses a file system that is shared between hosts: SQLite's locks and its -shm do not work
// there. `magic` is statfs's f_type.
[[nodiscard]] Status refuse_network_fs(const std::filesystem::path& path, uint64_t magic);
[[nodiscard]] uint64_t fs_magic(const std::filesystem::path& path);  // 0: unknown

}  // namespace f8::tuning_db
