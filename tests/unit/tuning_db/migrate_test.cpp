// Migration, with a version 1 file of the repository opened under a synthetic version 3.
#include <array>

#include "base/log.hpp"
#include "sample.hpp"
#include "tuning_db/sqlite.hpp"
#include "tuning_db/state.hpp"

namespace f8::tuning_db {
namespace {

constexpr std::array kSteps = {
    Migration{1, "ALTER TABLE trial ADD COLUMN rung INTEGER NOT NULL DEFAULT 0"},
    Migration{
        2,
        "CREATE TABLE note (trial_id INTEGER NOT NULL REFERENCES trial(id), said TEXT) STRICT;"
        "INSERT INTO note SELECT id, 'migrated' FROM trial"},
};
const SchemaSpec kVersion3{3, "", kSteps};

class MigrateTest : public ::testing::Test {
 protected:
  MigrateTest() : path_(folder_ / "old.db") {
    set_log_sink([](LogLevel, std::string_view) {});
    auto db = Connection::open(path_, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE).value();
    const std::string sql =
        read_file(FLOAT8_SOURCE_DIR "/tests/unit/tuning_db/data/v1.sql").value();
    EXPECT_TRUE(db->exec(sql));
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

TEST_F(MigrateTest, AllStepsAfterABackup) {
  const std::string before = bytes_of(path_);
  const int64_t trials = scalar(path_, "SELECT count(*) FROM trial");
  {
    const auto db = open_database(path_, OpenMode::kReadWrite, kVersion3);
    ASSERT_TRUE(db) << db.error().message;
    EXPECT_EQ(db->trials(gemm(8192, 4096, 4096)).value().size(), 2U);
  }
  EXPECT_EQ(scalar(path_, "PRAGMA user_version"), 3);
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
  ASSERT_TRUE(open_database(path_, OpenMode::kReadWrite, kVersion3));
  EXPECT_FALSE(fs::exists(folder_ / "old.db.v1.backup2"));
  // And the older program refuses it.
  EXPECT_FALSE(Database::open(path_, OpenMode::kReadOnly));
}

TEST_F(MigrateTest, AnEarlierBackupIsKept) {
  ASSERT_TRUE(write_file_atomic(folder_ / "old.db.v1.backup", "precious"));
  ASSERT_TRUE(open_database(path_, OpenMode::kReadWrite, kVersion3));
  EXPECT_EQ(bytes_of(folder_ / "old.db.v1.backup"), "precious");
  EXPECT_EQ(scalar(folder_ / "old.db.v1.backup2", "PRAGMA user_version"), 1);
}

TEST_F(MigrateTest, AFailingStepUndoesAll) {
  constexpr std::array steps = {kSteps[0], Migration{2, "INSERT INTO nowhere VALUES (1)"}};
  const SchemaSpec broken{3, "", steps};
  const auto db = open_database(path_, OpenMode::kReadWrite, broken);
  ASSERT_FALSE(db);
  EXPECT_NE(db.error().message.find("from schema version 2 to 3 failed and was undone"),
            std::string::npos)
      << db.error().message;
  EXPECT_EQ(scalar(path_, "PRAGMA user_version"), 1);
  EXPECT_EQ(scalar(path_, "SELECT count(*) FROM pragma_table_info('trial') WHERE name = 'rung'"),
            0);
  EXPECT_TRUE(Database::open(path_, OpenMode::kReadWrite).value().check());
}

TEST_F(MigrateTest, AMissingStepIsRefused) {
  constexpr std::array steps = {kSteps[1]};
  const SchemaSpec gap{3, "", steps};
  const auto db = open_database(path_, OpenMode::kReadWrite, gap);
  ASSERT_FALSE(db);
  EXPECT_EQ(db.error().code, ErrorCode::kUnsupported);
  EXPECT_EQ(scalar(path_, "PRAGMA user_version"), 1);
}

TEST_F(MigrateTest, AReaderMigratesACopyInMemory) {
  const std::string before = bytes_of(path_);
  const auto db = open_database(path_, OpenMode::kReadOnly, kVersion3);
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
