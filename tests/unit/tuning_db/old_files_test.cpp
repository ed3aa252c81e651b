// Files that float8 0.1 wrote mean today what they meant then: databases of schema 1 to 3, exports of
// format 1 and 2, and the table that 0.1 made of the same rows (tests/fixtures, data/).
#include <map>

#include "base/log.hpp"
#include "sample.hpp"
#include "tuning_db/estimate/filter.hpp"
#include "tuning_db/file/sqlite.hpp"

namespace f8::tuning_db {
namespace {

std::string fixture(const std::string& name) {
  return read_file(std::string(FLOAT8_SOURCE_DIR "/tests/fixtures/") + name).value();
}

std::string data(const std::string& name) {
  return FLOAT8_SOURCE_DIR "/tests/unit/tuning_db/data/" + name;
}

class OldFiles : public ::testing::Test {
 protected:
  OldFiles() {
    set_log_sink([](LogLevel, std::string_view) {});
  }
  ~OldFiles() override { set_log_sink({}); }

  // The name of a copy: opening it for writing migrates it.
  fs::path copy_of(const std::string& name) {
    const fs::path path = folder_ / "old.f8db";
    EXPECT_TRUE(write_file_atomic(path, fixture(name)));
    return path;
  }
  fs::path made_by(const std::string& sql) {
    const fs::path path = folder_ / "made.f8db";
    fs::remove(path);
    auto db = Connection::open(path, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE).value();
    EXPECT_TRUE(db->exec(read_file(data(sql)).value()));
    return path;
  }
  Database imported(const std::string& text) {
    fs::remove(folder_ / "imported.f8db");
    Database db = take(Database::open(folder_ / "imported.f8db", OpenMode::kCreate));
    const auto count = db.import_jsonl(text, "the export");
    EXPECT_TRUE(count) << count.error().message;
    return db;
  }

  TempFolder folder_;
};

// The rows of a table, but for the name of the database.
void expect_same_rows(const TuningTable& table, const TuningTable& expected) {
  EXPECT_EQ(table.devices, expected.devices);
  EXPECT_EQ(table.choices(), expected.choices());
  EXPECT_EQ(table.speedups(), expected.speedups());
  ASSERT_EQ(table.sources.size(), expected.sources.size());
  for (size_t i = 0; i < table.sources.size(); ++i) {
    EXPECT_EQ(table.sources[i].toolchain, expected.sources[i].toolchain);
  }
}

// The table that 0.1 made of the rows of database_v3.f8db.
TuningTable table_of_0_1() {
  return take(TuningTable::parse(fixture("table_v3_measured.txt")));
}

TEST_F(OldFiles, ATableOfVersion3SaysWhatItSaid) {
  const TuningTable table = table_of_0_1();
  ASSERT_EQ(table.devices.size(), 2U);
  EXPECT_EQ(table.device_name(), "NVIDIA H200");
  EXPECT_EQ(table.choices().size(), 22U);
  EXPECT_EQ(table.speedups().size(), 9U);
  const auto kernel_of = [&](Op op, const char* recipe, Shape shape) -> std::string {
    const auto problem = Problem::make(op, find_recipe(recipe).value(), shape).value();
    const KernelChoice* choice = table.find(problem);
    return choice == nullptr ? "none" : config_text(choice->kernel);
  };
  EXPECT_EQ(kernel_of(Op::kOutput, "tensorwise", {8192, 4096, 4096}), "128x128s6c1x2w2pg16");
  EXPECT_EQ(kernel_of(Op::kGradInput, "delayed", {8192, 4096, 4096}), "128x256s3c2x1w2g16");
  EXPECT_EQ(kernel_of(Op::kGradWeight, "rowwise_with_gw_hp", {2048, 1024, 1024}), "h1");
  EXPECT_EQ(kernel_of(Op::kGradWeight, "blockwise", {8192, 4096, 4096}), "none");
}

TEST_F(OldFiles, ADatabaseOfSchema3MakesTheTableThatItMade) {
  const fs::path path = copy_of("database_v3.f8db");
  for (const OpenMode mode : {OpenMode::kReadOnly, OpenMode::kReadWrite, OpenMode::kReadOnly}) {
    const Database db = take(Database::open(path, mode));
    const Status checked = db.check();
    EXPECT_TRUE(checked) << checked.error().message;
    expect_same_rows(take(db.table()), table_of_0_1());
  }
}

TEST_F(OldFiles, AnExportOfFormat2MakesTheTableThatItMade) {
  const Database db = imported(fixture("export_v2.jsonl"));
  expect_same_rows(take(db.table()), table_of_0_1());
}

// What one file has, the other has too, and no key became another problem's.
TEST_F(OldFiles, TheirTrialsAreTheSame) {
  Database db = imported(fixture("export_v2.jsonl"));
  const auto count = take(db.merge_from(copy_of("database_v3.f8db")));
  EXPECT_EQ(count.added, 0);
  EXPECT_EQ(count.known, 148);
}

TEST_F(OldFiles, TheirRowsKeepTheirProblems) {
  const Database db = take(Database::open(copy_of("database_v3.f8db"), OpenMode::kReadOnly));
  std::map<std::string_view, int> timed;
  for (const TrialRow& row : take(db.timed())) ++timed[to_string(row.candidate.impl)];
  EXPECT_EQ(timed, (std::map<std::string_view, int>{{"bf16", 10},
                                                    {"bf16_cublaslt", 28},
                                                    {"cublaslt", 24},
                                                    {"float8", 10},
                                                    {"generated", 50}}));
  const auto trials = [&](const char* key) {
    return take(db.trials(Problem::parse(key).value())).size();
  };
  EXPECT_EQ(trials("linear/tensorwise/e4m3.e4m3.bf16/tn/m2048n1024k1024/b0f1"), 2U);
  EXPECT_EQ(trials("linear/tensorwise/e4m3.e4m3.bf16/tn/m2048n1024k1024/b1f1"), 2U) << "a bias";
  EXPECT_EQ(trials("linear/tensorwise/e4m3.e4m3.bf16/tn/m2048n1024k1024/b0f0"), 0U);
  EXPECT_EQ(trials("linear/mine/e4m3.e4m3.bf16/tn/m2048n1024k1024/b0f1"), 2U);
  EXPECT_EQ(trials("output/tensorwise/e4m3.e4m3.f32/tn/m2048n1024k1024/b0f1"), 7U);
}

TEST_F(OldFiles, VerdictsStay) {
  const Database db = take(Database::open(copy_of("database_v3.f8db"), OpenMode::kReadOnly));
  const TuningTable tables[] = {take(db.table()), table_of_0_1()};
  for (const TuningTable& table : tables) {
    const auto verdict = [&](const char* recipe, int64_t tokens, int64_t features) {
      const NamedLinear layer{.fqn = "w", .in_features = features, .out_features = features};
      const auto result = take(filter({&layer, 1}, {.tokens = tokens, .automatic = true},
                                      Estimator(table, recipe, "NVIDIA H100 80GB HBM3")));
      EXPECT_EQ(result.decisions.at(0).evidence, Evidence::kMeasured);
      return result.decisions.at(0).convert;
    };
    EXPECT_FALSE(verdict("tensorwise", 2048, 1024));
    EXPECT_TRUE(verdict("tensorwise", 8192, 4096));
    EXPECT_FALSE(verdict("rowwise_with_gw_hp", 2048, 1024));
    EXPECT_TRUE(verdict("rowwise_with_gw_hp", 8192, 4096));
    EXPECT_TRUE(verdict("blockwise", 8192, 4096));
  }
}

// One run as each version of the file wrote it.
TEST_F(OldFiles, EverySchemaAndFormatOfOneRunDecidesAlike) {
  const auto expect_decisions = [](const Database& db, const std::string& file) {
    const TuningTable table = take(db.table());
    std::map<std::string, std::string> kernels;
    for (const KernelChoice& choice : table.choices()) {
      const std::string shape = to_string(choice.problem.shape());
      kernels[f8::format("{} {}", to_string(choice.problem.op), shape)] =
          config_text(choice.kernel);
    }
    EXPECT_EQ(kernels, (std::map<std::string, std::string>{
                           {"grad_input m2048n1024k1024", "128x128s6c1x2w2g16"},
                           {"output m2048n1024k1024", "128x128s6c1x2w2g16"},
                           {"output m2048n4096k14336", "128x256s3c2x1w2g16"}}))
        << file;
    ASSERT_EQ(table.speedups().size(), 1U) << file;
    EXPECT_EQ(table.speedups()[0].recipe, "blockwise");
    EXPECT_EQ(table.speedups()[0].speedup, 0.9133312643730985);
  };
  for (const char* sql : {"v1_words.sql", "v2.sql", "v3.sql", "v4.sql"}) {
    expect_decisions(take(Database::open(made_by(sql), OpenMode::kReadOnly)), sql);
  }
  for (const char* lines : {"v1.jsonl", "v2.jsonl"}) {
    expect_decisions(imported(read_file(data(lines)).value()), lines);
  }
}

// A run that a schema of 0.1 left unfinished goes on.
TEST_F(OldFiles, ARunOfSchema1IsResumed) {
  Database db = take(Database::open(made_by("v1.sql"), OpenMode::kReadWrite));
  for (const RunInfo& run : take(db.runs())) {
    if (run.done == run.planned || run.state == "imported") continue;
    const auto pending = take(db.resume_run(run.uuid));
    ASSERT_FALSE(pending.empty());
    EXPECT_TRUE(db.finish_trial(pending.front(), timed(5)));
    EXPECT_EQ(take(db.trials(pending.front().key.problem)).front().result.timing->median_ns, 5);
    return;
  }
  FAIL() << "the fixture has an unfinished run";
}

}  // namespace
}  // namespace f8::tuning_db
