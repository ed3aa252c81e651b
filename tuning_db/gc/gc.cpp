// Garbage collection: see gc.hpp.
//
// The schema's triggers refuse to delete a finished trial. They are switched off for the one
// connection that collects, while its transaction is open: nothing of that is stored in the file, so
// a process that dies in it leaves the file as it was, with its triggers. Foreign keys stay on.
#include "tuning_db/gc/gc.hpp"

#include <algorithm>
#include <array>
#include <string>

#include "tuning_db/file/owner.hpp"
#include "tuning_db/state.hpp"
#include "tuning_db/trial_rows.hpp"

namespace f8::tuning_db {
namespace {

Status refuse_active_run(const Connection& db) {
  auto select = F8_TRY(db.prepare("SELECT uuid, owner FROM run WHERE state = 'running'"));
  while (F8_TRY(select.step())) {
    if (!is_living(select.view(1))) continue;
    return fail(ErrorCode::kInvalidArgument,
                "{}: run {} is being measured by process {}; wait for it, or stop it with Ctrl-C",
                db.label(), select.view(0), owner_pid(select.view(1)));
  }
  return {};
}

// What counts now, as the table has it: temp.current has the problems and device classes, each with
// its toolchains and methods.
Status note_current(Connection& db) {
  std::vector<IdentifiedRow> rows;
  {
    auto select = F8_TRY(
        db.prepare(select_rows() + "WHERE t.state = 'ok' AND m.fidelity = 'final' ORDER BY t.id"));
    while (F8_TRY(select.step())) rows.push_back(F8_TRY(read_row(select, db.label())));
  }
  F8_TRY(
      db.exec("CREATE TEMP TABLE current (problem_id INTEGER, class_id INTEGER, toolchain_id "
              "INTEGER, method_id INTEGER, PRIMARY KEY (problem_id, class_id, toolchain_id, "
              "method_id)) WITHOUT ROWID"));
  auto insert = F8_TRY(db.prepare("INSERT OR IGNORE INTO temp.current VALUES (?, ?, ?, ?)"));
  for (const IdentifiedRow& row : newest(std::move(rows))) {
    F8_TRY(insert.bind(row.problem, row.device_class, row.toolchain, row.method).run());
  }
  return {};
}

constexpr std::string_view kScreenings =
    "DELETE FROM trial WHERE id IN (SELECT t.id FROM trial t JOIN run r ON r.id = t.run_id "
    "JOIN method m ON m.id = r.method_id "
    "WHERE m.fidelity = 'screen' AND r.state IN ('done', 'imported'))";

// FROM trial t ..., which leaves the superseded ones.
std::string from_superseded(const GcOptions& options) {
  std::string sql =
      "FROM trial t JOIN run r ON r.id = t.run_id JOIN device_unit u ON u.id = r.unit_id "
      "JOIN device_class d ON d.id = u.class_id JOIN toolchain tc ON tc.id = r.toolchain_id "
      "WHERE true";
  if (options.toolchains_but) {
    sql += f8::format(
        " AND (u.class_id, r.toolchain_id) NOT IN (SELECT class_id, toolchain_id FROM "
        "(SELECT class_id, toolchain_id, row_number() OVER "
        "(PARTITION BY class_id ORDER BY max(started_at) DESC, toolchain_id DESC) AS place "
        "FROM run JOIN device_unit ON device_unit.id = unit_id GROUP BY class_id, toolchain_id) "
        "WHERE place <= {})",
        *options.toolchains_but);
  }
  if (options.older_than) {
    sql += f8::format(" AND t.at < strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-{} seconds')",
                      options.older_than->count());
  }
  if (!options.include_current) {
    sql +=
        " AND NOT EXISTS (SELECT 1 FROM temp.current c WHERE c.problem_id = t.problem_id AND "
        "c.class_id = u.class_id AND c.toolchain_id = r.toolchain_id AND c.method_id = "
        "r.method_id)";
  }
  return sql;
}

Status list_superseded(const Connection& db, const GcOptions& options, GcReport& report) {
  auto select =
      F8_TRY(db.prepare(f8::format("SELECT d.name, count(*), {} {} GROUP BY d.id, tc.id "
                                   "ORDER BY d.name, min(r.started_at), tc.key",
                                   kToolchainColumns, from_superseded(options))));
  while (F8_TRY(select.step())) {
    report.superseded.push_back(
        {select.text(0), describe(F8_TRY(read_toolchain(select, 2))), select.integer(1)});
  }
  return {};
}

// A table orders its devices by their newest runs, so these stay where current trials do.
std::string empty_runs(const GcOptions& options) {
  std::string sql = "DELETE FROM run WHERE id NOT IN (SELECT run_id FROM trial)";
  if (options.include_current) return sql;
  return sql +
         " AND id NOT IN (SELECT id FROM (SELECT run.id, row_number() OVER "
         "(PARTITION BY class_id ORDER BY started_at DESC, run.id DESC) AS place "
         "FROM run JOIN device_unit ON device_unit.id = unit_id) WHERE place = 1)";
}

bool removes_superseded(const GcOptions& options) {
  return options.toolchains_but || options.older_than;
}

struct Deletion {
  std::string_view kind;
  std::string sql;
};

// In this order, each leaves the next what nothing refers to any more.
std::vector<Deletion> deletions(const GcOptions& options) {
  std::vector<Deletion> all = {{"trials_of_screenings", std::string(kScreenings)}};
  if (removes_superseded(options)) {
    all.push_back({"superseded_trials",
                   "DELETE FROM trial WHERE id IN (SELECT t.id " + from_superseded(options) + ")"});
  }
  all.push_back({"runs", empty_runs(options)});
  struct Orphans {
    std::string_view kind, table, referring;
  };
  constexpr std::array kOrphans = {
      Orphans{"problems", "problem", "SELECT problem_id FROM trial"},
      Orphans{"candidates", "candidate", "SELECT candidate_id FROM trial"},
      Orphans{"toolchains", "toolchain", "SELECT toolchain_id FROM run"},
      Orphans{"methods", "method", "SELECT method_id FROM run"},
      Orphans{"devices", "device_unit", "SELECT unit_id FROM run"},
      Orphans{"device_classes", "device_class", "SELECT class_id FROM device_unit"}};
  for (const auto& [kind, table, referring] : kOrphans) {
    all.push_back({kind, f8::format("DELETE FROM {} WHERE id NOT IN ({})", table, referring)});
  }
  return all;
}

Status remove_rows(Connection& db, const GcOptions& options, GcReport& report) {
  const WithoutTriggers unguarded(db);
  F8_TRY(unguarded.status());
  auto transaction = F8_TRY(Transaction::begin(db));
  F8_TRY(refuse_active_run(db));
  F8_TRY(note_current(db));
  if (removes_superseded(options)) F8_TRY(list_superseded(db, options, report));
  // Without it each candidate's foreign keys would be looked for in all trials.
  F8_TRY(db.exec("CREATE INDEX trial_candidate ON trial (candidate_id)"));
  for (const Deletion& deletion : deletions(options)) {
    auto statement = F8_TRY(db.prepare(deletion.sql));
    F8_TRY(statement.run());
    report.removed.emplace_back(deletion.kind, db.changes());
  }
  F8_TRY(db.exec("DROP INDEX trial_candidate; DROP TABLE temp.current"));
  return transaction.commit();
}

Result<int64_t> bytes_of(const Connection& db) {
  return F8_TRY(db.scalar("PRAGMA page_count")) * F8_TRY(db.scalar("PRAGMA page_size"));
}

Result<GcReport> collect(Connection& db, const GcOptions& options) {
  GcReport report;
  report.bytes_before = F8_TRY(bytes_of(db));
  F8_TRY(remove_rows(db, options, report));
  F8_TRY(db.exec("VACUUM"));
  report.bytes_after = F8_TRY(bytes_of(db));
  return report;
}

}  // namespace

bool GcReport::is_empty() const {
  return bytes_after >= bytes_before &&
         std::ranges::none_of(removed, [](const auto& kind) { return kind.second > 0; });
}

Result<GcReport> collect_garbage(const std::filesystem::path& path, const GcOptions& options) {
  Database database =
      F8_TRY(Database::open(path, options.dry_run ? OpenMode::kReadOnly : OpenMode::kReadWrite));
  Connection& db = *Database::State::of(database).db;
  F8_TRY(refuse_active_run(db));
  const auto copy = F8_TRY(Connection::copy_to_memory(db));
  GcReport preview = F8_TRY(collect(*copy, options));
  if (options.dry_run || preview.is_empty()) return preview;
  F8_TRY(db.require_sole_user());
  std::filesystem::path backup;
  if (options.back_up) backup = F8_TRY(back_up(db, path, "gc"));
  GcReport report = F8_TRY(collect(db, options));
  F8_TRY(db.exec("PRAGMA wal_checkpoint(TRUNCATE)"));
  report.backup = std::move(backup);
  return report;
}

}  // namespace f8::tuning_db
