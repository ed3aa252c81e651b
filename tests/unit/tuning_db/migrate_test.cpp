// Migration: version 1 files of the repository, opened under the current version and under a
// synthetic one behind it.
#include <algorithm>
#include <array>

#include "base/log.hpp"
#include "sample.hpp"
#include "tuning_db/file/checksum.hpp"
#include "tuning_db/file/sqlite.hpp"
#include "tuning_db/rows.hpp"
#include "tuning_db/state.hpp"

namespace f8::tuning_db {
namespace {

constexpr const char* kToVersionBehind =
    "ALTER TABLE trial ADD COLUMN rung INTEGER NOT NULL DEFAULT 0;"
    "CREATE TABLE note (trial_id INTEGER NOT NULL REFERENCES trial(id), said TEXT) STRICT;"
    "INSERT INTO note SELECT id, 'migrated' FROM trial";

std::string fingerprint_of(const std::string& sql) {
  auto db = Connection::open_empty("schema").value();
  EXPECT_TRUE(db->exec(sql));
  return schema_fingerprint(*db).value();
}

const std::string kNewestFingerprint = fingerprint_of(std::string(Database::schema()));
const std::string kVersionBehindSql = std::string(Database::schema()) + kToVersionBehind;
const std::array kSteps = {
    current_schema().migrations[0],
    current_schema().migrations[1],
    current_schema().migrations[2],
    current_schema().migrations[3],
    Migration{kSchemaVersion, kNewestFingerprint, kToVersionBehind},
};
const SchemaSpec kVersionBehind{kSchemaVersion + 1, kVersionBehindSql, kSteps};

void make_file(const fs::path& path, const char* sql_name) {
  auto db = Connection::open(path, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE).value();
  const std::string folder = FLOAT8_SOURCE_DIR "/tests/unit/tuning_db/data/";
  EXPECT_TRUE(db->exec(read_file(folder + sql_name).value()));
}

class MigrateTest : public ::testing::Test {
 protected:
  MigrateTest() : path_(folder_ / "old.db") {
    set_log_sink([](LogLevel, std::string_view) {});
    make_file(path_, "v1.sql");
  }
  ~MigrateTest() override { set_log_sink({}); }

  int64_t scalar(const fs::path& path, const char* sql) {
    return Connection::open(path, SQLITE_OPEN_READONLY).value()->scalar(sql).value();
  }

  TempFolder folder_;
  fs::path path_;
};

TEST_F(MigrateTest, Version1FileOpens) {
  const auto db = Database::open(path_, OpenMode::kReadOnly);
  ASSERT_TRUE(db) << db.error().message;
  EXPECT_TRUE(db->check());
  EXPECT_EQ(db->trials(gemm(8192, 4096, 4096)).value().size(), 2U);
}

// Its reader has a copy in memory, its writer the file itself; both verify the checksums that the
// migration made.
TEST_F(MigrateTest, Version2FileOpensAndGetsChecksums) {
  const fs::path path = folder_ / "v2.db";
  make_file(path, "v2.sql");
  const auto exported = [&](OpenMode mode) {
    const Database db = take(Database::open(path, mode));
    const Status checked = db.check();
    EXPECT_TRUE(checked) << checked.error().message;
    EXPECT_TRUE(db.export_jsonl(folder_ / "out.jsonl"));
    return bytes_of(folder_ / "out.jsonl");
  };
  const std::string before = exported(OpenMode::kReadOnly);
  EXPECT_EQ(std::ranges::count(before, '\n'), 30);
  EXPECT_EQ(scalar(path, "PRAGMA user_version"), 2);
  EXPECT_EQ(exported(OpenMode::kReadWrite), before);
  EXPECT_EQ(scalar(path, "PRAGMA user_version"), kSchemaVersion);
  EXPECT_EQ(scalar(folder_ / "v2.db.v2.backup", "PRAGMA user_version"), 2);
  for (const char* table : {"device_class", "device_unit", "toolchain", "method", "problem",
                            "candidate", "run", "trial", "trial_kernel", "accuracy"}) {
    EXPECT_EQ(scalar(path, f8::format("SELECT count(*) FROM {} WHERE checksum = 0", table).c_str()),
              0);
  }
  EXPECT_EQ(exported(OpenMode::kReadOnly), before);
}

// The checksum's bytes are a part of the format: a file of these versions stays readable.
TEST_F(MigrateTest, FilesOfVersions3And4HaveTheirChecksums) {
  for (const char* sql : {"v3.sql", "v4.sql"}) {
    const fs::path path = folder_ / sql;
    make_file(path, sql);
    const auto db = Database::open(path, OpenMode::kReadOnly);
    ASSERT_TRUE(db) << db.error().message;
    const Status checked = db->check();
    EXPECT_TRUE(checked) << checked.error().message;
    EXPECT_EQ(scalar(path, "SELECT count(*) FROM trial"), 25);
  }
}

TEST_F(MigrateTest, AMigratedFileHasTheSchemaOfANewOne) {
  ASSERT_TRUE(Database::open(path_, OpenMode::kReadWrite));
  const fs::path fresh = folder_ / "new.db";
  ASSERT_TRUE(Database::open(fresh, OpenMode::kCreate));
  const auto columns = [](const fs::path& path) {
    const auto db = Connection::open(path, SQLITE_OPEN_READONLY).value();
    auto select = db->prepare(
                        "SELECT m.type, m.name, c.cid, c.name, c.type, c.\"notnull\" FROM "
                        "sqlite_master m LEFT JOIN pragma_table_info(m.name) c "
                        "WHERE m.name NOT LIKE 'sqlite_%' ORDER BY 1, 2, 3")
                      .value();
    std::string text;
    while (select.step().value()) {
      for (int i = 0; i < 6; ++i) text += select.text(i) + " ";
      text += "\n";
    }
    return text;
  };
  EXPECT_EQ(columns(path_), columns(fresh));
  // The checks came with the columns.
  const auto db = Connection::open(path_, SQLITE_OPEN_READWRITE).value();
  EXPECT_FALSE(db->exec("UPDATE trial SET screened_ns = 0 WHERE state = 'planned'"));
  EXPECT_TRUE(db->exec("UPDATE trial SET screened_ns = 1 WHERE state = 'planned'"));
  EXPECT_FALSE(db->exec("UPDATE trial SET screened_ns = 1 WHERE state = 'ok'")) << "it is final";
}

// Version 1 said these things in the words of `reason`.
class WordsTest : public ::testing::Test {
 protected:
  WordsTest() : path_(folder_ / "words.db") {
    set_log_sink([](LogLevel, std::string_view) {});
    make_file(path_, "v1_words.sql");
  }
  ~WordsTest() override { set_log_sink({}); }
  static TrialResult result_of(const Database& db, const char* problem, const char* uuid) {
    for (TrialRow& row : take(db.trials(Problem::parse(problem).value()))) {
      if (row.uuid.starts_with(uuid)) return std::move(row.result);
    }
    ADD_FAILURE() << uuid;
    return {};
  }
  TempFolder folder_;
  fs::path path_;
};

TEST_F(WordsTest, BecomeColumns) {
  const Database db = Database::open(path_, OpenMode::kReadWrite).value();
  EXPECT_TRUE(db.check());
  const TrialResult screened =
      result_of(db, "output/blockwise/e4m3.e4m3.bf16/m2048n1024k1024", "a7d945d3");
  EXPECT_EQ(screened.screened_ns, 7840);
  EXPECT_EQ(screened.reason, "1.151x the best");
  const TrialResult shared =
      result_of(db, "output/blockwise/e4m3.e4m3.bf16/m2048n1024k1024", "7e2d0ca1");
  EXPECT_EQ(shared.screened_ns, 11410);
  EXPECT_EQ(shared.reason,
            "1.056x the best; the same product as "
            "output/tensorwise/e4m3.e4m3.bf16/tn/m2048n1024k1024/b0f1");
  const auto raw = Connection::open(path_, SQLITE_OPEN_READONLY).value();
  const int64_t screenings = raw->scalar("SELECT count(screened_ns) FROM trial").value();
  const int64_t kernels = raw->scalar("SELECT count(*) FROM trial_kernel").value();
  EXPECT_EQ(screenings, 6);
  EXPECT_EQ(kernels, 3 * 3);
  EXPECT_EQ(raw->scalar("SELECT count(*) FROM trial WHERE reason GLOB '*screened at*' OR "
                        "reason GLOB '*kernels generated*' OR reason GLOB '*kernels cublaslt*'")
                .value(),
            0);
  EXPECT_EQ(raw->scalar("SELECT count(*) FROM trial WHERE reason = ''").value(), 0);
}

TEST_F(WordsTest, AreTheSameByMergeAndByJsonLines) {
  Database merged = Database::open(folder_ / "merged.db", OpenMode::kCreate).value();
  const auto added = merged.merge_from(path_);
  ASSERT_TRUE(added) << added.error().message;
  EXPECT_EQ(added->added, 25);
  const Database opened = Database::open(path_, OpenMode::kReadOnly).value();
  ASSERT_TRUE(opened.export_jsonl(folder_ / "opened.jsonl"));
  ASSERT_TRUE(merged.export_jsonl(folder_ / "merged.jsonl"));
  const std::string text = bytes_of(folder_ / "opened.jsonl");
  EXPECT_EQ(text, bytes_of(folder_ / "merged.jsonl"));
  EXPECT_TRUE(text.starts_with("{\"float8_tuning_db\":3}\n"));

  // The same run as version 1 exported it is known.
  const auto known = merged.import_jsonl(FLOAT8_SOURCE_DIR "/tests/unit/tuning_db/data/v1.jsonl");
  ASSERT_TRUE(known) << known.error().message;
  EXPECT_EQ(known->added, 0);
  EXPECT_EQ(known->known, 25);
}

// An export of today's program is that of its database of version 3.
TEST_F(WordsTest, JsonLinesOfVersion2AreKnown) {
  Database imported = Database::open(folder_ / "imported.db", OpenMode::kCreate).value();
  const auto added = imported.import_jsonl(FLOAT8_SOURCE_DIR "/tests/unit/tuning_db/data/v2.jsonl");
  ASSERT_TRUE(added) << added.error().message;
  EXPECT_EQ(added->added, 25);
  const fs::path path = folder_ / "v3.db";
  make_file(path, "v3.sql");
  const auto known = imported.merge_from(path);
  ASSERT_TRUE(known) << known.error().message;
  EXPECT_EQ(known->added, 0);
  EXPECT_EQ(known->known, 25);
  const TrialResult screened =
      result_of(imported, "output/blockwise/e4m3.e4m3.bf16/m2048n1024k1024", "a7d945d3");
  EXPECT_EQ(screened.screened_ns, 7840);
}

TEST(Words, OfAnotherFormStay) {
  const auto taken = [](TrialState state, const char* reason) {
    TrialResult result{.state = state, .reason = reason};
    take_data_from_reason(result);
    EXPECT_TRUE(result.reason == reason || result.screened_ns || !result.kernels.empty());
    return result;
  };
  for (const char* none :
       {"", "kernels", "kernels ", "kernels cublaslt:h1", "kernels cublaslt:h1,cublaslt:h1",
        "kernels cublaslt:h1,cublaslt:h1,cublaslt:h1,cublaslt:h1",
        "kernels cublaslt:h1,cublaslt:h1,cublaslt:", "kernels cublaslt:h1,cublaslt:h1,other:h1",
        "kernels cublaslt:h1, cublaslt:h1, cublaslt:h1", "no kernels work for output"}) {
    EXPECT_TRUE(taken(TrialState::kOk, none).kernels.empty()) << none;
  }
  const TrialResult linear =
      taken(TrialState::kNoisy,
            "0.7 %; kernels generated:128x256s4c2x1w2g8,cublaslt:h3,generated:64x64s8c1x1w1g8");
  ASSERT_EQ(linear.kernels.size(), 3U);
  EXPECT_EQ(linear.reason, "0.7 %");
  EXPECT_EQ(linear.kernels[1], (PartKernel{"grad_input", Provider::kCublasLt, "h3"}));
  for (const char* none : {"screened at", "screened at x us, 1x", "screened at 0 us, 1x",
                           "screened at 5 ms, 1x", "it was screened at 5 us, 1x"}) {
    EXPECT_FALSE(taken(TrialState::kPruned, none).screened_ns) << none;
  }
  EXPECT_FALSE(taken(TrialState::kOk, "screened at 5.00 us, 1x").screened_ns);
}

TEST_F(MigrateTest, AllStepsAfterABackup) {
  const std::string before = bytes_of(path_);
  const int64_t trials = scalar(path_, "SELECT count(*) FROM trial");
  {
    const auto db = open_database(path_, OpenMode::kReadWrite, kVersionBehind);
    ASSERT_TRUE(db) << db.error().message;
    EXPECT_EQ(db->trials(gemm(8192, 4096, 4096)).value().size(), 2U);
  }
  EXPECT_EQ(scalar(path_, "PRAGMA user_version"), kSchemaVersion + 1);
  EXPECT_EQ(scalar(path_, "SELECT count(*) FROM note"), trials);
  EXPECT_EQ(scalar(path_, "SELECT count(rung) FROM trial"), trials);

  // The backup is a whole database of the old version.
  const fs::path backup = folder_ / "old.db.v1.backup";
  ASSERT_TRUE(fs::exists(backup));
  EXPECT_EQ(scalar(backup, "PRAGMA user_version"), 1);
  const Database old = Database::open(backup, OpenMode::kReadOnly).value();
  EXPECT_TRUE(old.check());
  EXPECT_EQ(scalar(backup, "SELECT count(*) FROM trial"), trials);

  // Opened again, there is nothing left to do.
  ASSERT_TRUE(open_database(path_, OpenMode::kReadWrite, kVersionBehind));
  EXPECT_FALSE(fs::exists(folder_ / "old.db.v1.backup2"));
  // And the older program refuses it.
  EXPECT_FALSE(Database::open(path_, OpenMode::kReadOnly));
}

TEST_F(MigrateTest, AnEarlierBackupIsKept) {
  ASSERT_TRUE(write_file_atomic(folder_ / "old.db.v1.backup", "precious"));
  ASSERT_TRUE(open_database(path_, OpenMode::kReadWrite, kVersionBehind));
  EXPECT_EQ(bytes_of(folder_ / "old.db.v1.backup"), "precious");
  EXPECT_EQ(scalar(folder_ / "old.db.v1.backup2", "PRAGMA user_version"), 1);
}

TEST_F(MigrateTest, AFailingStepUndoesAll) {
  const std::array steps = {kSteps[0],
                            Migration{2, kSteps[1].fingerprint, "INSERT INTO no VALUES (1)"}};
  const SchemaSpec broken{3, Database::schema(), steps};
  const auto db = open_database(path_, OpenMode::kReadWrite, broken);
  ASSERT_FALSE(db);
  EXPECT_NE(db.error().message.find("from schema version 2 to 3 failed and was undone"),
            std::string::npos)
      << db.error().message;
  EXPECT_EQ(scalar(path_, "PRAGMA user_version"), 1);
  EXPECT_EQ(
      scalar(path_, "SELECT count(*) FROM pragma_table_info('trial') WHERE name = 'screened_ns'"),
      0);
  EXPECT_TRUE(Database::open(path_, OpenMode::kReadWrite).value().check());
}

TEST_F(MigrateTest, AKeyThatIsNoneUndoesAll) {
  const fs::path path = folder_ / "v3.db";
  make_file(path, "v3.sql");
  {
    auto db = Connection::open(path, SQLITE_OPEN_READWRITE).value();
    ASSERT_TRUE(
        db->exec("UPDATE problem SET key = 'convolution/rowwise/any/tn/e8/b0f1' WHERE id = 3"));
    ASSERT_TRUE(store_all_checksums(*db));
  }
  for (const OpenMode mode : {OpenMode::kReadOnly, OpenMode::kReadWrite}) {
    const auto db = Database::open(path, mode);
    ASSERT_FALSE(db);
    EXPECT_NE(db.error().message.find("from schema version 3 to 4 failed and was undone"),
              std::string::npos)
        << db.error().message;
    EXPECT_NE(db.error().message.find("unknown op 'convolution'"), std::string::npos);
    EXPECT_EQ(db.error().message.find('\n'), std::string::npos);
    EXPECT_EQ(scalar(path, "PRAGMA user_version"), 3);
    EXPECT_EQ(scalar(path, "SELECT count(kernel_output) FROM trial"), 3);
  }
}

TEST_F(MigrateTest, AMissingStepIsRefused) {
  const std::array steps = {kSteps[1]};
  const SchemaSpec gap{3, Database::schema(), steps};
  const auto db = open_database(path_, OpenMode::kReadWrite, gap);
  ASSERT_FALSE(db);
  EXPECT_EQ(db.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(scalar(path_, "PRAGMA user_version"), 1);
}

TEST_F(MigrateTest, AReaderMigratesACopyInMemory) {
  const std::string before = bytes_of(path_);
  const auto db = open_database(path_, OpenMode::kReadOnly, kVersionBehind);
  ASSERT_TRUE(db) << db.error().message;
  EXPECT_EQ(db->trials(gemm(8192, 4096, 4096)).value().size(), 2U);
  EXPECT_EQ(bytes_of(path_), before);
  EXPECT_FALSE(fs::exists(folder_ / "old.db.v1.backup"));
}

TEST_F(MigrateTest, AForeignVersion0IsNotOurs) {
  auto db = Connection::open(path_, SQLITE_OPEN_READWRITE).value();
  ASSERT_TRUE(db->exec("PRAGMA user_version = 0"));
  db.reset();
  const auto opened = Database::open(path_, OpenMode::kReadWrite);
  ASSERT_FALSE(opened);
  EXPECT_NE(opened.error().message.find("schema version 0"), std::string::npos);
}

}  // namespace
}  // namespace f8::tuning_db
