// db: whole databases through the command line.
#include <gtest/gtest.h>

#include "tests/unit/cli/run_tool.hpp"
#include "tests/unit/tuning_db/sample.hpp"
#include "tuning_db/estimate/tuning_table.hpp"

namespace f8::testing {
namespace {

using Json = nlohmann::json;

void make_database(const Tool& tool, const char* name, int64_t n) {
  namespace db = tuning_db;
  auto database = db::Database::open(tool.path() / name, db::OpenMode::kCreate).value();
  const Problem gemm = db::gemm(8192, n, 4096);
  db::sweep(database, {{gemm, db::generated("128x256s4c2x1w2g8")}, {gemm, db::heuristic(0)}},
            [](const db::TrialKey& cell) {
              return db::timed(cell.candidate.impl == db::Impl::kGenerated ? 100 : 110);
            });
}

TEST(Db, InfoCheckSchemaOfTheBuiltIn) {
  const Tool tool;
  const Json info = tool.json({"db", "info"});
  EXPECT_EQ(info["database"], "built-in");
  EXPECT_EQ(info["schema_version"], db::kSchemaVersion);
  EXPECT_EQ(tool.json({"db", "check"})["ok"], true);
  const Outcome schema = tool({"db", "schema"});
  EXPECT_TRUE(contains(schema.out, "CREATE TABLE"));
  EXPECT_EQ(tool.json({"db", "schema"})["sql"], schema.out);
}

TEST(Db, InfoOfAFile) {
  const Tool tool;
  make_database(tool, "a.db", 4096);
  const Json info = tool.json({"db", "info", "--db", "a.db"});
  EXPECT_EQ(info["database"], "a.db");
  EXPECT_EQ(info["kernels"], 1);
  ASSERT_EQ(info["runs"].size(), 1U);
  EXPECT_EQ(info["runs"][0]["state"], "done");
  EXPECT_EQ(info["runs"][0]["done"], 2);
  EXPECT_EQ(info["devices"][0]["name"], "NVIDIA H100 80GB HBM3");
  EXPECT_TRUE(contains(tool({"db", "info", "--db", "a.db"}).out, "2/2 cells"));
  EXPECT_EQ(tool({"db", "check", "--db", "a.db"}).code, 0);
  EXPECT_EQ(tool.json({"db", "migrate", "--db", "a.db"})["schema_version"], db::kSchemaVersion);
}

TEST(Db, MergeIsIdempotentAndRefusesItself) {
  const Tool tool;
  make_database(tool, "a.db", 4096);
  make_database(tool, "b.db", 8192);
  const Json first = tool.json({"db", "merge", "a.db", "b.db", "--db", "all.db"});
  EXPECT_EQ(first["added"], 4);
  const Json second = tool.json({"db", "merge", "a.db", "b.db", "--db", "all.db"});
  EXPECT_EQ(second["added"], 0);
  EXPECT_EQ(second["known"], 4);
  EXPECT_EQ(tool.json({"db", "info", "--db", "all.db"})["kernels"], 2);
  tool.expect_refused(1, {"db", "merge", "a.db", "--db", "a.db"},
                      {"a.db", "itself", "another --db"});
}

TEST(Db, DiffOfTwoFiles) {
  const Tool tool;
  make_database(tool, "a.db", 4096);
  make_database(tool, "b.db", 8192);
  const Json same = tool.json({"db", "diff", "a.db", "a.db"});
  EXPECT_EQ(same["equal"], true);
  EXPECT_EQ(same["kinds"]["trial"]["in_a"], 2);
  const Json other = tool.json({"db", "diff", "a.db", "b.db"});
  EXPECT_EQ(other["equal"], false);
  EXPECT_TRUE(other["kinds"]["device"]["only_a"].empty());
  EXPECT_EQ(other["kinds"]["run"]["only_a"].size(), 1U);
  EXPECT_EQ(other["kinds"]["trial"]["only_b"].size(), 2U);
  EXPECT_EQ(other["kinds"]["problem"]["only_b"][0]["key"],
            "output/tensorwise+fast/e4m3.e4m3.bf16/m8192n8192k4096");
  EXPECT_EQ(other["kinds"]["decision"]["only_b"][0]["text"], "generated 128x256s4c2x1w2g8");
  const Outcome text = tool({"db", "diff", "a.db", "b.db", "--limit", "1"});
  EXPECT_EQ(text.code, 0);
  EXPECT_TRUE(
      text.out.starts_with("A a.db\nB b.db\n"
                           "kind       in A  in B  only in A  only in B  changed\n"
                           "device        1     1          0          0        0\n"
                           "toolchain     1     1          0          0        0\n"
                           "method        1     1          0          0        0\n"
                           "run           1     1          1          1        0\n"
                           "problem       1     1          1          1        0\n"
                           "trial         2     2          2          2        0\n"
                           "decision      1     1          1          1        0\n"))
      << text.out;
  EXPECT_TRUE(contains(text.out, "\nonly in B: trial\n"));
  EXPECT_TRUE(contains(text.out, "  and 1 more; --limit shows them\n"));
  EXPECT_TRUE(contains(tool({"db", "diff", "--help"}).out, "Examples:\n  float8-tune db diff"));
  tool.expect_refused(1, {"db", "diff", "a.db", "none.db"}, {"none.db"});
  tool.expect_refused(1, {"db", "diff", "a.db", "-"}, {"db export -o -"});
}

// Measured twice, so that the first two trials are superseded.
void make_superseded(const Tool& tool, const char* name) {
  namespace db = tuning_db;
  make_database(tool, name, 4096);
  auto database = db::Database::open(tool.path() / name, db::OpenMode::kReadWrite).value();
  const Problem gemm = db::gemm(8192, 4096, 4096);
  db::sweep(
      database, {{gemm, db::generated("128x256s4c2x1w2g8")}, {gemm, db::heuristic(0)}},
      [](const db::TrialKey&) { return db::timed(90); }, db::h100(), db::toolchain("newer"));
}

TEST(Db, GcOfSupersededTrials) {
  const Tool tool;
  make_superseded(tool, "a.db");
  const Outcome nothing = tool({"db", "gc", "--db", "a.db"});
  EXPECT_EQ(nothing.out,
            "a.db: nothing to remove; --toolchains-but N and --older-than 90d ask for superseded "
            "trials too\n");
  const std::string hash = tool.json({"db", "info", "--db", "a.db"})["table_hash"];
  const std::string before = read_file(tool.path() / "a.db").value();
  const Json said = tool.json({"db", "gc", "--db", "a.db", "--toolchains-but", "1", "--dry-run"});
  EXPECT_EQ(said["removed"]["superseded_trials"], 2);
  EXPECT_EQ(said["superseded"][0]["trials"], 2);
  EXPECT_FALSE(said.contains("backup"));
  EXPECT_EQ(read_file(tool.path() / "a.db").value(), before);
  const Outcome done = tool({"db", "gc", "--db", "a.db", "--toolchains-but", "1"});
  EXPECT_EQ(done.code, 0) << done.err;
  EXPECT_TRUE(
      done.out.starts_with("removed               rows\n"
                           "trials of screenings     0\n"
                           "superseded trials        2\n"
                           "runs                     1\n"
                           "problems                 0\n"
                           "candidates               0\n"
                           "toolchains               1\n"))
      << done.out;
  EXPECT_TRUE(contains(done.out, f8::format("a.db: {} bytes, ", before.size())));
  EXPECT_TRUE(
      contains(done.out, "superseded: 2 trials of NVIDIA H100 80GB HBM3, driver 580.65.06, CUDA "));
  EXPECT_TRUE(contains(done.err, "a.db.gc.backup"));
  EXPECT_EQ(tool.json({"db", "info", "--db", "a.db"})["table_hash"], hash);
  EXPECT_EQ(tool.json({"db", "info", "--db", "a.db"})["runs"].size(), 1U);
  EXPECT_EQ(tool.json({"db", "info", "--db", "a.db.gc.backup"})["runs"].size(), 2U);
}

TEST(Db, GcRefusesWhatItCannotDo) {
  const Tool tool;
  make_superseded(tool, "a.db");
  const auto refuse = [&](std::vector<std::string> words, const std::vector<std::string>& parts) {
    words.insert(words.begin(), {"db", "gc", "--db", "a.db"});
    tool.expect_refused(1, words, parts);
  };
  refuse({"--older-than", "90"}, {"--older-than", "90d"});
  refuse({"--older-than", "soon"}, {"--older-than", "soon", "2d"});
  refuse({"--older-than", "9999999d"}, {"--older-than", "90d"});
  refuse({"--toolchains-but", "0"}, {"--toolchains-but"});
  refuse({"--include-current"}, {"--include-current", "--older-than"});
  tool.expect_refused(1, {"db", "gc"}, {"--db FILE"});
  tool.expect_refused(1, {"db", "gc", "--db", "none.db"}, {"--db", "none.db"});
  const auto reader =
      tuning_db::Database::open(tool.path() / "a.db", tuning_db::OpenMode::kReadOnly);
  ASSERT_TRUE(reader);
  refuse({"--toolchains-but", "1"}, {"--db", "a.db", "another process", "try again"});
}

TEST(Db, OneBadSourceMergesNothing) {
  const Tool tool;
  make_database(tool, "a.db", 4096);
  tool.write("bad.db", "no database");
  tool.expect_refused(1, {"db", "merge", "a.db", "bad.db", "--db", "new.db"}, {"bad.db"});
}

TEST(Db, ExportAndImportRoundTrip) {
  const Tool tool;
  make_database(tool, "a.db", 4096);
  EXPECT_EQ(tool({"db", "export", "--db", "a.db", "-o", "a.jsonl"}).code, 0);
  EXPECT_EQ(tool.json({"db", "import", "a.jsonl", "--db", "b.db"})["added"], 2);
  EXPECT_EQ(tool({"db", "export", "--db", "b.db", "-o", "b.jsonl"}).code, 0);
  EXPECT_EQ(read_file(tool.path() / "a.jsonl").value(), read_file(tool.path() / "b.jsonl").value());
}

TEST(Db, ExportedTableIsWhatATrainerLoads) {
  const Tool tool;
  make_database(tool, "a.db", 4096);
  ASSERT_EQ(tool({"db", "export", "--format", "table", "--db", "a.db", "-o", "t"}).code, 0);
  const auto table = TuningTable::parse(read_file(tool.path() / "t").value());
  ASSERT_TRUE(table.has_value());
  const KernelChoice* own = table->find(tuning_db::gemm(8192, 4096, 4096));
  ASSERT_NE(own, nullptr);
  EXPECT_EQ(config_text(own->kernel), "128x256s4c2x1w2g8");
  EXPECT_EQ(own->median_ns, 100) << "the database's, not the built-in one";
  // The built-in rows follow the database's, as for `filter --db`.
  ASSERT_EQ(table->sources.size(), 1U) << "the database has no linear";
  EXPECT_EQ(table->sources[0].name, "built-in");
  EXPECT_EQ(table->sources[0].toolchain.nvrtc, "13.0");
  EXPECT_GT(table->choices().size(), 100U);
  EXPECT_GT(table->speedups().size(), 100U);
  EXPECT_EQ(tool.json({"db", "info", "--db", "a.db"})["table_hash"], table->hash());
  ASSERT_EQ(tool({"db", "export", "--format", "db", "--db", "a.db", "-o", "copy.db"}).code, 0);
  EXPECT_EQ(tool.json({"db", "info", "--db", "copy.db"})["kernels"], 1);
}

// PRAGMA user_version: 4 bytes, big-endian, at offset 60 of the file.
TEST(Db, ANewerSchemaIsRefusedWithBothVersions) {
  const Tool tool;
  make_database(tool, "a.db", 4096);
  ASSERT_EQ(tool({"db", "export", "--format", "db", "--db", "a.db", "-o", "new.db"}).code, 0);
  std::string bytes = read_file(tool.path() / "new.db").value();
  bytes[63] = 99;
  tool.write("new.db", bytes);
  for (const std::vector<std::string>& words : {std::vector<std::string>{"db", "info"},
                                                {"db", "migrate"},
                                                {"db", "check"},
                                                {"thresholds", "--recipe", "rowwise"}}) {
    std::vector<std::string> all = words;
    all.insert(all.end(), {"--db", "new.db"});
    tool.expect_refused(1, all, {"new.db", "99", std::to_string(db::kSchemaVersion)});
  }
}

TEST(Db, ACorruptFileIsNamed) {
  const Tool tool;
  make_database(tool, "a.db", 4096);
  ASSERT_EQ(tool({"db", "export", "--format", "db", "--db", "a.db", "-o", "bad.db"}).code, 0);
  std::string bytes = read_file(tool.path() / "bad.db").value();
  for (size_t i = 4096; i < bytes.size(); i += 7) bytes[i] = static_cast<char>(i * 31);
  tool.write("bad.db", bytes);
  tool.expect_refused(1, {"db", "check", "--db", "bad.db"}, {"bad.db"});
}

}  // namespace
}  // namespace f8::testing
