// Databases as a stranger or an accident may leave them, each made of a good file by a few bytes or
// statements of SQL. None of them is a tuning database: every command answers with one error.
#pragma once

#include <gtest/gtest.h>
#include <sqlite3.h>
#include <sys/stat.h>

#include <functional>
#include <string>
#include <vector>

#include "sample.hpp"
#include "tuning_db/file/checksum.hpp"

namespace f8::tuning_db {

// Runs SQL as another program would: without our limits, checks or checksums.
inline void exec(const fs::path& path, const std::string& sql) {
  sqlite3* db = nullptr;
  ASSERT_EQ(sqlite3_open(path.c_str(), &db), SQLITE_OK);
  EXPECT_EQ(sqlite3_exec(db, sql.c_str(), nullptr, nullptr, nullptr), SQLITE_OK)
      << sqlite3_errmsg(db) << " in " << sql;
  sqlite3_close(db);
}

// What a stranger does who knows the checksum.
inline void store_checksums_in(const fs::path& path) {
  auto db = Connection::open(path, SQLITE_OPEN_READWRITE).value();
  ASSERT_TRUE(store_all_checksums(*db));
}

struct Hostile {
  std::string name;
  std::function<void(const fs::path&)> make;  // of a good file
};

inline Hostile by_sql(const std::string& name, const std::string& sql) {
  return {name, [sql](const fs::path& path) { exec(path, sql); }};
}

// A row whose checksum is right and whose values cannot be; `sql` changes them.
inline Hostile by_values(const std::string& name, const std::string& sql) {
  return {name, [sql](const fs::path& path) {
            exec(path,
                 "CREATE TEMP TABLE t AS SELECT sql FROM sqlite_schema WHERE type = 'trigger';"
                 "PRAGMA ignore_check_constraints = ON; DROP TRIGGER trial_is_final;" +
                     sql +
                     "; PRAGMA writable_schema = ON; INSERT INTO main.sqlite_schema SELECT "
                     "'trigger', 'trial_is_final', 'trial', 0, sql FROM t WHERE sql LIKE "
                     "'%trial_is_final%'; PRAGMA writable_schema = OFF");
            store_checksums_in(path);
          }};
}

// These (part, provider, config) for every linear in fp8.
inline std::string take_kernels(const std::string& kernels) {
  return "WITH taken(part, provider, config) AS (VALUES " + kernels +
         ") INSERT INTO trial_kernel (trial_id, part, provider, config) SELECT trial.id, taken.* "
         "FROM taken, trial JOIN candidate ON candidate.id = candidate_id WHERE impl = 'float8'";
}

inline Hostile by_bytes(const std::string& name, const std::function<void(std::string&)>& change) {
  return {name, [change](const fs::path& path) {
            std::string bytes = bytes_of(path);
            change(bytes);
            ASSERT_TRUE(write_file_atomic(path, bytes));
          }};
}

inline std::vector<Hostile> hostile_schemas() {
  const std::string endless =
      "CREATE VIEW trial AS WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) "
      "SELECT x AS id, 'u' AS uuid, 1 AS run_id, 1 AS problem_id, 1 AS candidate_id, 0 AS attempt, "
      "'ok' AS state, 1.0 AS median_ns FROM c";
  return {
      by_sql("view for a table", "DROP TABLE trial; " + endless),
      by_sql("a view more", "CREATE VIEW v AS SELECT * FROM trial"),
      by_sql("a table more", "CREATE TABLE other (x)"),
      by_sql("an index more", "CREATE INDEX i ON trial (abs(median_ns))"),
      by_sql("a trigger more",
             "CREATE TRIGGER w AFTER INSERT ON run BEGIN DELETE FROM candidate; END"),
      by_sql(
          "a trigger that goes on and on",
          "CREATE TRIGGER w AFTER UPDATE ON trial BEGIN INSERT INTO run SELECT * FROM run a, run "
          "b, run c; END"),
      by_sql("a virtual table", "CREATE VIRTUAL TABLE f USING fts5(x)"),
      by_sql("a virtual table for a table",
             "DROP TABLE trial; CREATE VIRTUAL TABLE trial USING fts5(x)"),
      by_sql("a column more", "ALTER TABLE trial ADD COLUMN extra TEXT"),
      by_sql("a computed column",
             "ALTER TABLE trial ADD COLUMN extra TEXT AS (hex(zeroblob(100000000)))"),
      by_sql("a column less", "ALTER TABLE problem DROP COLUMN dims"),
      by_sql("another column's name", "ALTER TABLE run RENAME COLUMN seed TO sown"),
      by_sql("a table less", "DROP TABLE trial"),
      by_sql("an index less", "DROP INDEX trial_cell"),
      by_sql("a trigger less", "DROP TRIGGER trial_is_kept"),
      by_sql("another type",
             "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = "
             "replace(sql, 'seed INTEGER', 'seed TEXT') WHERE name = 'run'"),
      by_sql("a check less",
             "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = "
             "replace(sql, ' CHECK (json_valid(dims))', '') WHERE name = 'problem'"),
      by_sql("columns that are one quoted name",
             "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = 'CREATE TABLE trial(\"' "
             "|| replace(substr(sql, 20), '\"', '') WHERE name = 'trial'"),
      by_sql("no SQL", "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET sql = 'x" +
                           std::string("\x1b[31m") + "' WHERE name = 'trial'"),
      by_sql(
          "two tables in one place",
          "PRAGMA writable_schema = ON; UPDATE sqlite_schema SET rootpage = (SELECT rootpage FROM "
          "sqlite_schema WHERE name = 'run') WHERE name = 'method'"),
      by_sql("statistics", "ANALYZE"),
      by_sql("version 3 in name", "PRAGMA user_version = 3"),
      by_sql("version 2 in name", "PRAGMA user_version = 2"),
      by_sql("version 1 in name", "PRAGMA user_version = 1"),
      by_sql("version 0", "PRAGMA user_version = 0"),
      by_sql("a version below 0", "PRAGMA user_version = -3"),
      by_sql("a newer version", "PRAGMA user_version = 2000000000"),
      by_sql("another program's", "PRAGMA application_id = 7"),
  };
}

inline std::vector<Hostile> hostile_values() {
  return {
      by_sql("a changed number", "UPDATE problem SET dims = replace(dims, 8, 9)"),
      by_sql("a changed run", "UPDATE run SET seed = seed + 1"),
      by_values("a negative ratio",
                "UPDATE trial SET pair_ratio = -1.47, pair_lo = -1.48, pair_hi "
                "= -1.46 WHERE pair_ratio IS NOT NULL"),
      by_values("a huge ratio",
                "UPDATE trial SET pair_ratio = 1e200, pair_hi = 1e300 WHERE "
                "pair_ratio IS NOT NULL"),
      by_values("an infinite time", "UPDATE trial SET median_ns = 9e999, ci_hi_ns = 9e999"),
      by_values("a negative time", "UPDATE trial SET mad_ns = -1"),
      by_values("half a timing", "UPDATE trial SET p05_ns = NULL"),
      by_values("an infinite diagnostic", "UPDATE trial SET rel_err = 9e999"),
      by_values("negative registers", "UPDATE trial SET registers = -1"),
      by_values("a date that is always last", "UPDATE trial SET at = 'zzzz'"),
      by_values("a run's date", "UPDATE run SET started_at = char(27) || '[2J'"),
      by_values("a uuid with control bytes", "UPDATE trial SET uuid = uuid || char(10)"),
      by_values("a device's name with control bytes",
                "UPDATE device_class SET name = char(27) || ']0;x' || char(7)"),
      by_values("more SMs than an int holds", "UPDATE device_class SET sm_count = 1 << 40"),
      by_values("an unknown state", "UPDATE trial SET state = 'excellent'"),
      by_values("an unknown implementation", "UPDATE candidate SET impl = 'magic'"),
      by_values("a problem key that is none", "UPDATE problem SET key = key || '/'"),
      by_values("a kernel's name with spaces",
                take_kernels("('output', 'generated', 'a b'), ('grad_input', 'generated', 'a'), "
                             "('grad_weight', 'generated', 'a')")),
      by_values("one kernel of three", take_kernels("('grad_input', 'generated', 'a')")),
      by_values("kernels of another operation",
                take_kernels("('layout', 'generated', 'a'), ('quantize', 'generated', 'a'), "
                             "('output', 'generated', 'a')")),
      by_values("a provider that is none",
                take_kernels("('output', 'other', 'a'), ('grad_input', 'generated', 'a'), "
                             "('grad_weight', 'generated', 'a')")),
      by_values("an operation of a newer float8",
                "UPDATE problem SET key = 'attention/rowwise/e4m3.e4m3.bf16/b8h32s64d64c1'"
                " WHERE id = 1"),
      by_sql("a giant text", "UPDATE run SET argv = json_array(hex(zeroblob(600000)))"),
  };
}

inline void make_odd(const fs::path& path, mode_t kind) {
  ASSERT_EQ(::mknod(path.c_str(), kind | 0600, 0), 0);
}

inline std::vector<Hostile> hostile_files() {
  return {
      by_bytes("empty", [](std::string& bytes) { bytes.clear(); }),
      by_bytes("short", [](std::string& bytes) { bytes.resize(99); }),
      by_bytes("cut off", [](std::string& bytes) { bytes.resize(bytes.size() / 2 + 1); }),
      by_bytes("a page less", [](std::string& bytes) { bytes.resize(bytes.size() - 4096); }),
      by_bytes("no page size", [](std::string& bytes) { bytes[16] = bytes[17] = 0; }),
      by_bytes("a huge page count", [](std::string& bytes) { bytes[28] = 0x7f; }),
      by_bytes("a huge page count that is not in force",
               [](std::string& bytes) {
                 bytes[28] = 0x7f;
                 bytes[95] = static_cast<char>(bytes[95] + 1);
                 std::fill(bytes.begin() + 4096, bytes.begin() + 8192, '\0');
               }),
      by_bytes("UTF-16", [](std::string& bytes) { bytes[59] = 2; }),
      by_bytes("a page of noise",
               [](std::string& bytes) {
                 for (size_t i = 4096; i < 8192; ++i) bytes[i] = static_cast<char>(i * 37 % 251);
               }),
      {"sparse, 60 GB", [](const fs::path& path) { fs::resize_file(path, 60'000'000'000); }},
      {"sparse -wal",
       [](const fs::path& path) {
         ASSERT_TRUE(write_file_atomic(path.string() + "-wal", "x"));
         fs::resize_file(path.string() + "-wal", 60'000'000'000);
       }},
      {"a fifo",
       [](const fs::path& path) {
         fs::remove(path);
         make_odd(path, S_IFIFO);
       }},
      {"a folder",
       [](const fs::path& path) {
         fs::remove(path);
         fs::create_directory(path);
       }},
      {"a link to a device",
       [](const fs::path& path) {
         fs::remove(path);
         fs::create_symlink("/dev/zero", path);
       }},
      {"a link to itself",
       [](const fs::path& path) {
         fs::remove(path);
         fs::create_symlink(path, path);
       }},
      {"a fifo for a -wal",
       [](const fs::path& path) { make_odd(path.string() + "-wal", S_IFIFO); }},
      {"a fifo for a -journal",
       [](const fs::path& path) { make_odd(path.string() + "-journal", S_IFIFO); }},
      {"a folder for a -shm",
       [](const fs::path& path) { fs::create_directory(path.string() + "-shm"); }},
  };
}

// One file in the form that `db export --format db` writes, with linears, GEMMs and a planned trial.
inline void make_good(const fs::path& path) {
  Database db = Database::open(path, OpenMode::kCreate).value();
  sweep_linears(
      db, "rowwise", {{8192, 4096, 4096}, {2048, 1024, 1024}}, [](Shape) { return 1e6; },
      [](Shape) { return 1.25; });
  const Problem problem = gemm(8192, 4096, 4096);
  sweep(db, {{problem, generated("128x256s4c2x1w2g8")}, {problem, heuristic(0)}},
        [](const TrialKey&) { return timed(100'000); });
  const auto run = db.begin_run({"sweep"}, 1, h100(), "GPU-1", toolchain(), final_method(),
                                {{gemm(16, 16, 16), heuristic(1)}});
  ASSERT_TRUE(run);
  ASSERT_TRUE(db.end_run(run->uuid, "interrupted"));
}

inline void remove_database(const fs::path& path) {
  for (const char* suffix : {"", "-wal", "-shm", "-journal"}) fs::remove(path.string() + suffix);
}

}  // namespace f8::tuning_db
