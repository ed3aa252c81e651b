// Creating, opening and refusing files. A refused file is found as it was, with nothing beside it.
#include <fcntl.h>
#include <sqlite3.h>
#include <sys/wait.h>
#include <unistd.h>

#include <set>
#include <thread>

#include "base/log.hpp"
#include "hostile.hpp"
#include "sample.hpp"
#include "tuning_db/state.hpp"

namespace f8::tuning_db {
namespace {

using ::testing::Test;

std::set<std::string> names_in(const fs::path& folder) {
  std::set<std::string> names;
  for (const auto& entry : fs::directory_iterator(folder)) names.insert(entry.path().filename());
  return names;
}

class OpenTest : public Test {
 protected:
  OpenTest() : path_(folder_ / "t.db") {}

  fs::path create_filled() {
    Database db = Database::open(path_, OpenMode::kCreate).value();
    std::vector<TrialKey> cells;
    for (int i = 0; i < 200; ++i) cells.push_back({gemm(8192, 4096, 4096), heuristic(i)});
    sweep(db, cells, [](const TrialKey&) { return timed(100'000); });
    return path_;
  }

  // Every mode refuses the file with an error that holds `text`, and leaves the folder as it is.
  void expect_refused(ErrorCode code, const std::string& text) {
    const std::string before = bytes_of(path_);
    const auto names = names_in(folder_.path());
    for (const OpenMode mode : {OpenMode::kReadOnly, OpenMode::kReadWrite, OpenMode::kCreate}) {
      const auto opened = Database::open(path_, mode);
      ASSERT_FALSE(opened);
      EXPECT_EQ(opened.error().code, code) << opened.error().message;
      EXPECT_NE(opened.error().message.find(text), std::string::npos) << opened.error().message;
      EXPECT_NE(opened.error().message.find(path_.string()), std::string::npos);
      EXPECT_EQ(opened.error().message.find('\n'), std::string::npos);
    }
    EXPECT_EQ(bytes_of(path_), before);
    EXPECT_EQ(names_in(folder_.path()), names);
  }

  TempFolder folder_;
  fs::path path_;
};

TEST_F(OpenTest, CreatesAndOpensAgain) {
  create_filled();
  EXPECT_EQ(names_in(folder_.path()), std::set<std::string>{"t.db"});
  for (const OpenMode mode : {OpenMode::kReadOnly, OpenMode::kReadWrite, OpenMode::kCreate}) {
    const auto db = Database::open(path_, mode);
    ASSERT_TRUE(db) << db.error().message;
    EXPECT_TRUE(db->check());
    EXPECT_EQ(db->trials(gemm(8192, 4096, 4096)).value().size(), 200U);
  }
}

TEST_F(OpenTest, ReadingLeavesTheFolderAsItWas) {
  create_filled();
  const std::string before = bytes_of(path_);
  {
    const Database a = Database::open(path_, OpenMode::kReadOnly).value();
    const Database b = Database::open(path_, OpenMode::kReadOnly).value();
    EXPECT_EQ(a.runs().value().size(), b.runs().value().size());
    ASSERT_TRUE(a.export_db(folder_ / "copy.db"));
  }
  EXPECT_EQ(bytes_of(path_), before);
  EXPECT_EQ(names_in(folder_.path()), (std::set<std::string>{"t.db", "copy.db"}));
}

TEST_F(OpenTest, RowsInAWalAreRead) {
  create_filled();
  Database writer = Database::open(path_, OpenMode::kReadWrite).value();
  sweep(writer, {{gemm(16, 16, 16), heuristic(0)}}, [](const TrialKey&) { return timed(1); });
  ASSERT_TRUE(fs::exists(folder_ / "t.db-wal"));
  const Database reader = Database::open(path_, OpenMode::kReadOnly).value();
  EXPECT_EQ(reader.trials(gemm(16, 16, 16)).value().size(), 1U);
  sweep(writer, {{gemm(16, 16, 16), heuristic(1)}}, [](const TrialKey&) { return timed(1); });
  EXPECT_EQ(reader.trials(gemm(16, 16, 16)).value().size(), 2U);
}

TEST_F(OpenTest, MissingFileAndFolder) {
  const auto missing = Database::open(path_, OpenMode::kReadWrite);
  ASSERT_FALSE(missing);
  EXPECT_EQ(missing.error().code, ErrorCode::kNotFound);
  for (const char* way : {"sweep", "db import", "db merge"}) {
    EXPECT_NE(missing.error().message.find(way), std::string::npos) << way;
  }
  EXPECT_FALSE(fs::exists(path_));
  const auto no_folder = Database::open(folder_ / "no" / "t.db", OpenMode::kCreate);
  ASSERT_FALSE(no_folder);
  EXPECT_EQ(no_folder.error().code, ErrorCode::kNotFound);
}

TEST_F(OpenTest, RefusesGarbage) {
  ASSERT_TRUE(write_file_atomic(path_, std::string(5000, 'x')));
  expect_refused(ErrorCode::kCorrupt, "not an SQLite file");
}

TEST_F(OpenTest, RefusesShortGarbage) {
  ASSERT_TRUE(write_file_atomic(path_, "SQLite format 3"));
  expect_refused(ErrorCode::kCorrupt, "not an SQLite file");
}

TEST_F(OpenTest, RefusesEmptyFile) {
  ASSERT_TRUE(write_file_atomic(path_, ""));
  expect_refused(ErrorCode::kCorrupt, "empty");
}

TEST_F(OpenTest, RefusesFolder) {
  const auto opened = Database::open(folder_.path(), OpenMode::kReadOnly);
  ASSERT_FALSE(opened);
  EXPECT_NE(opened.error().message.find("is a directory"), std::string::npos);
}

TEST_F(OpenTest, RefusesADevice) {
  const auto opened = Database::open("/dev/zero", OpenMode::kReadWrite);
  ASSERT_FALSE(opened);
  EXPECT_EQ(opened.error().message, "/dev/zero is a character device; a regular file is needed");
}

TEST_F(OpenTest, RefusesAnExportAndATableByTheirNames) {
  ASSERT_TRUE(write_file_atomic(path_, "{\"float8_tuning_db\":2}\n" + std::string(200, ' ')));
  expect_refused(ErrorCode::kInvalidArgument, "`float8-tune db import`");
  ASSERT_TRUE(write_file_atomic(path_, "float8-table 3\n" + std::string(200, ' ')));
  expect_refused(ErrorCode::kInvalidArgument, "is a tuning table");
}

TEST_F(OpenTest, RemovesWhatAKillLeftADayAgo) {
  ASSERT_TRUE(Database::open(path_, OpenMode::kCreate));
  const std::string uuid = "01234567-89ab-4def-8123-456789abcdef";
  const auto write = [&](const std::string& name, int hours) {
    const fs::path path = path_.string() + name;
    ASSERT_TRUE(write_file_atomic(path, "half"));
    fs::last_write_time(path, fs::file_time_type::clock::now() - std::chrono::hours(hours));
  };
  const std::vector<std::string> left = {".new-" + uuid, ".new-" + uuid + "-journal",
                                         ".new-" + uuid + "-wal", ".new-" + uuid + "-shm"};
  const std::vector<std::string> other = {".new-" + uuid + "-other", ".new-", ".new-mine", "-x"};
  for (const std::string& name : left) write(name, 25);
  for (const std::string& name : other) write(name, 25);
  ASSERT_TRUE(Database::open(path_, OpenMode::kReadOnly));
  for (const std::string& name : left) EXPECT_TRUE(fs::exists(path_.string() + name)) << name;
  write(left[1], 1);
  ASSERT_TRUE(Database::open(path_, OpenMode::kReadWrite));
  for (const std::string& name : left) {
    EXPECT_EQ(fs::exists(path_.string() + name), name == left[1]) << name;
  }
  for (const std::string& name : other) EXPECT_TRUE(fs::exists(path_.string() + name)) << name;
}

TEST_F(OpenTest, RefusesForeignDatabase) {
  exec(path_, "CREATE TABLE t (x); INSERT INTO t VALUES (1)");
  expect_refused(ErrorCode::kInvalidArgument, "another program");
}

TEST_F(OpenTest, RefusesForeignDatabaseWithOurTableNames) {
  create_filled();
  exec(path_, "PRAGMA application_id = 1234; PRAGMA wal_checkpoint(TRUNCATE)");
  expect_refused(ErrorCode::kInvalidArgument, "application_id 0x4d2");
}

TEST_F(OpenTest, RefusesNewerSchemaAndNamesBothVersions) {
  create_filled();
  exec(path_, "PRAGMA user_version = 7; PRAGMA wal_checkpoint(TRUNCATE)");
  expect_refused(ErrorCode::kUnsupported, "schema version is 7");
}

TEST_F(OpenTest, RefusesTruncatedFile) {
  create_filled();
  fs::resize_file(path_, fs::file_size(path_) / 2);
  expect_refused(ErrorCode::kCorrupt, "truncated");
}

TEST_F(OpenTest, DamagedPagesAreCorrupt) {
  create_filled();
  const std::string bytes = bytes_of(path_);
  ASSERT_TRUE(
      write_file_atomic(path_, bytes.substr(0, 4096) + std::string(bytes.size() - 4096, 'Z')));
  const auto db = Database::open(path_, OpenMode::kReadOnly);
  const Status status = db ? db->check() : std::unexpected(db.error());
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::kCorrupt) << status.error().message;
}

TEST_F(OpenTest, CheckFindsDanglingReferencesAndWrongKeys) {
  create_filled();
  const std::string good = bytes_of(path_);
  for (const char* sql :
       {"PRAGMA foreign_keys = OFF; DELETE FROM run", "UPDATE device_class SET power_limit_w = 500",
        "UPDATE toolchain SET driver = '1'", "UPDATE problem SET dims = '{}'",
        "UPDATE problem SET op = 'linear'", "UPDATE candidate SET impl = 'bf16' WHERE id = 1",
        "UPDATE method SET fidelity = 'screen'"}) {
    ASSERT_TRUE(write_file_atomic(path_, good));
    exec(path_, sql);
    store_checksums_in(path_);
    const Status status = Database::open(path_, OpenMode::kReadOnly).value().check();
    ASSERT_FALSE(status) << sql;
    EXPECT_EQ(status.error().code, ErrorCode::kCorrupt);
  }
}

TEST_F(OpenTest, WritesOfAReaderAreRefused) {
  create_filled();
  Database db = Database::open(path_, OpenMode::kReadOnly).value();
  const auto run = db.begin_run({}, 0, h100(), "u", toolchain(), final_method(), {});
  ASSERT_FALSE(run);
  EXPECT_NE(run.error().message.find("opened for reading"), std::string::npos);
  EXPECT_FALSE(db.merge_from(path_));
  EXPECT_FALSE(db.import_jsonl(path_));
}

TEST_F(OpenTest, ReadsInAFolderThatCannotBeWritten) {
  create_filled();
  if (::geteuid() == 0) {
    // Root writes everywhere, so a child gives root up.
    ASSERT_EQ(::chmod(folder_.path().c_str(), 0555), 0);
    ASSERT_EQ(::chmod(path_.c_str(), 0444), 0);
    const pid_t child = in_child([&] {
      if (::setuid(65534) != 0) return 3;
      const Database read = take(Database::open(path_, OpenMode::kReadOnly));
      const auto write = Database::open(path_, OpenMode::kReadWrite);
      if (write || write.error().code != ErrorCode::kIo) return 2;
      return take(read.trials(gemm(8192, 4096, 4096))).size() == 200 ? 0 : 1;
    });
    ASSERT_GE(child, 0);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << WEXITSTATUS(status);
  } else {
    ASSERT_EQ(::chmod(folder_.path().c_str(), 0555), 0);
    const auto read = Database::open(path_, OpenMode::kReadOnly);
    ASSERT_TRUE(read) << read.error().message;
    EXPECT_EQ(read->trials(gemm(8192, 4096, 4096)).value().size(), 200U);
  }
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0755), 0);
}

TEST_F(OpenTest, NothingIsCreatedInAFolderThatCannotBeWritten) {
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0555), 0);
  const pid_t child = in_child([&] {
    if (::geteuid() == 0 && ::setuid(65534) != 0) return 3;  // root writes everywhere
    const auto created = Database::open(path_, OpenMode::kCreate);
    const std::string said = path_.string() + ": cannot create it: Permission denied";
    return !created && created.error().message.starts_with(said) ? 0 : 1;
  });
  ASSERT_GE(child, 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << WEXITSTATUS(status);
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0755), 0);
}

TEST_F(OpenTest, CreatorsInARaceAllGetTheSameDatabase) {
  std::vector<std::thread> threads;
  std::vector<std::string> errors(8);
  for (size_t i = 0; i < errors.size(); ++i) {
    threads.emplace_back([this, i, &errors] {
      auto db = Database::open(path_, OpenMode::kCreate);
      if (!db) {
        errors[i] = db.error().message;
        return;
      }
      const auto run = db->begin_run({}, i, h100(), "u", toolchain(), final_method(), {});
      if (!run) errors[i] = run.error().message;
    });
  }
  for (std::thread& t : threads) t.join();
  for (const std::string& e : errors) EXPECT_EQ(e, "");
  EXPECT_EQ(Database::open(path_, OpenMode::kReadOnly).value().runs().value().size(),
            errors.size());
  for (const std::string& name : names_in(folder_.path())) {
    EXPECT_EQ(name.find(".new"), std::string::npos) << name;
  }
}

class NameTest : public OpenTest {
 protected:
  NameTest() : before_(fs::current_path()) { fs::current_path(folder_.path()); }
  ~NameTest() override { fs::current_path(before_); }
  fs::path before_;
};

// SQLite gives meaning to these; here they are names of files.
TEST_F(NameTest, EveryPathIsTheNameOfAFile) {
  for (const char* name : {"file:a.db", "file:///tmp/a.db", "file::memory:?cache=shared",
                           ":memory:", "#?mode=ro%20", "-a.db", " "}) {
    if (std::string_view(name).find('/') != std::string_view::npos) {
      EXPECT_FALSE(Database::open(name, OpenMode::kCreate)) << "it has no folder: " << name;
      continue;
    }
    for (const fs::path& path : {fs::path(name), folder_ / name}) {
      SCOPED_TRACE(path);
      auto db = Database::open(path, OpenMode::kCreate);
      ASSERT_TRUE(db) << db.error().message;
      sweep(*db, {{gemm(16, 16, 16), heuristic(0)}}, [](const TrialKey&) { return timed(1); });
      ASSERT_TRUE(Database::open(path, OpenMode::kReadWrite));
      EXPECT_EQ(Database::open(path, OpenMode::kReadOnly).value().runs().value().size(), 1U);
      EXPECT_TRUE(fs::is_regular_file(folder_ / name));
      db = Database::open(folder_ / "other.db", OpenMode::kCreate);
      EXPECT_EQ(db->merge_from(path).value().added, 1);
      EXPECT_TRUE(db->check());
      std::error_code ignored;
      for (const auto& entry : fs::directory_iterator(folder_.path())) {
        fs::remove(entry.path(), ignored);
      }
    }
  }
  EXPECT_FALSE(Database::open("", OpenMode::kCreate));
  EXPECT_TRUE(names_in(folder_.path()).empty());
}

TEST_F(NameTest, ABackupOfAnOddNameLiesBesideIt) {
  auto old = Connection::open("file:o.db", SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE).value();
  ASSERT_TRUE(old->exec(read_file(FLOAT8_SOURCE_DIR "/tests/unit/tuning_db/data/v1.sql").value()));
  old.reset();
  set_log_sink([](LogLevel, std::string_view) {});
  EXPECT_TRUE(Database::open("file:o.db", OpenMode::kReadWrite));
  set_log_sink({});
  EXPECT_EQ(names_in(folder_.path()), (std::set<std::string>{"file:o.db", "file:o.db.v1.backup"}));
}

TEST(NetworkFs, IsRefusedByName) {
  EXPECT_TRUE(refuse_network_fs("x.db", 0xef53));      // ext4
  EXPECT_TRUE(refuse_network_fs("x.db", 0x9123683e));  // btrfs
  EXPECT_TRUE(refuse_network_fs("x.db", 0));
  for (const auto& [magic, name] :
       std::vector<std::pair<uint64_t, std::string>>{{0x6969, "NFS"},
                                                     {0x0bd00bd0, "Lustre"},
                                                     {0xff534d42, "CIFS"},
                                                     {0x47504653, "GPFS"},
                                                     {0x19830326, "BeeGFS"}}) {
    const Status status = refuse_network_fs("/mnt/x.db", magic);
    ASSERT_FALSE(status);
    EXPECT_EQ(status.error().code, ErrorCode::kUnsupported);
    EXPECT_NE(status.error().message.find("(" + name + ")"), std::string::npos);
    EXPECT_NE(status.error().message.find("/mnt/x.db"), std::string::npos);
    EXPECT_NE(status.error().message.find("merge"), std::string::npos);
  }
  EXPECT_NE(fs_magic("/"), 0U);
}

TEST(Schema, IsTheTextThatCreates) {
  EXPECT_NE(Database::schema().find("CREATE TABLE trial"), std::string_view::npos);
  EXPECT_NE(Database::schema().find("application_id = 1178092610"), std::string_view::npos);
}

}  // namespace
}  // namespace f8::tuning_db
