// Hostile databases: every one is refused by one error that names the file, soon, and nothing that
// is exported from a file with a flipped bit differs from what was written.
#include "hostile.hpp"

#include <chrono>
#include <fstream>
#include <random>
#include <set>

#include "base/log.hpp"
#include "base/text.hpp"
#include "campaign.hpp"
#include "sample.hpp"
#include "tuning_db/file/sqlite.hpp"

namespace f8::tuning_db {
namespace {

using ::f8::testing::cases;

class HostileTest : public ::testing::Test {
 protected:
  HostileTest() : path_(folder_ / "hostile.db"), good_(folder_ / "good.db") {
    set_log_sink([](LogLevel, std::string_view) {});
    make_good(good_);
    good_bytes_ = bytes_of(good_);
  }
  ~HostileTest() override { set_log_sink({}); }

  void make(const Hostile& hostile) {
    fs::create_directory(folder_ / "case");
    path_ = folder_ / "case" / "hostile.db";
    ASSERT_TRUE(write_file_atomic(path_, good_bytes_));
    hostile.make(path_);
  }
  void remove() { fs::remove_all(folder_ / "case"); }

  // One printable line that names the file.
  void expect_clear(const Error& error) const {
    EXPECT_NE(error.message.find("hostile.db"), std::string::npos) << error.message;
    EXPECT_LT(error.message.size(), 600U) << error.message;
    EXPECT_NE(error.code, ErrorCode::kInternal) << error.message;
    for (const char c : error.message)
      EXPECT_GE(static_cast<unsigned char>(c), 0x20) << error.message;
  }
  template <class T>
  void expect_refused(const Result<T>& result, const char* what) const {
    ASSERT_FALSE(result) << what;
    expect_clear(result.error());
  }

  TempFolder folder_;
  fs::path path_, good_;
  std::string good_bytes_;
};

TEST_F(HostileTest, TheGoodFileIsGood) {
  make({"good", [](const fs::path&) {}});
  const auto db = Database::open(path_, OpenMode::kReadOnly);
  ASSERT_TRUE(db) << db.error().message;
  const Status checked = db->check();
  EXPECT_TRUE(checked) << checked.error().message;
  EXPECT_EQ(db->table().value().speedups().size(), 2U);
}

TEST_F(HostileTest, FilesAndSchemasAreRefusedWhenOpened) {
  std::vector<Hostile> all = hostile_files();
  for (Hostile& h : hostile_schemas()) all.push_back(std::move(h));
  for (const Hostile& hostile : all) {
    SCOPED_TRACE(hostile.name);
    make(hostile);
    for (const OpenMode mode : {OpenMode::kReadOnly, OpenMode::kReadWrite, OpenMode::kCreate}) {
      expect_refused(Database::open(path_, mode), "open");
    }
    remove();
  }
}

TEST_F(HostileTest, ValuesAreRefusedWhereverTheyAreRead) {
  for (const Hostile& hostile : hostile_values()) {
    SCOPED_TRACE(hostile.name);
    make(hostile);
    const auto db = Database::open(path_, OpenMode::kReadOnly);
    if (!db) {
      expect_clear(db.error());
    } else {
      expect_refused(db->check(), "check");
      expect_refused(db->export_jsonl(folder_ / "out.jsonl"), "export");
      EXPECT_FALSE(fs::exists(folder_ / "out.jsonl"));
      Database target = Database::open(folder_ / "target.db", OpenMode::kCreate).value();
      expect_refused(target.merge_from(path_), "merge");
      EXPECT_TRUE(target.runs().value().empty());
      remove_database(folder_ / "target.db");
    }
    remove();
  }
}

// A row of the user's that no command may take for evidence.
TEST_F(HostileTest, AValueThatCannotBeIsNoEvidence) {
  make(by_values("infinite", "UPDATE trial SET median_ns = 1e16, ci_hi_ns = 1e16"));
  const Database db = Database::open(path_, OpenMode::kReadOnly).value();
  expect_refused(db.table(), "table");
  expect_refused(db.linears("rowwise"), "linears");
  expect_refused(db.trials(gemm(8192, 4096, 4096)), "trials");
  expect_refused(db.gemms(Impl::kGenerated), "gemms");
  for (const char* part : {"trial", "restore a copy", "a time in ns is 1e+16"}) {
    EXPECT_NE(db.table().error().message.find(part), std::string::npos)
        << db.table().error().message;
  }
}

// All of the file's bytes are open to a flip; what is exported is what was written, or refused.
TEST_F(HostileTest, NoFlippedBitChangesWhatIsExported) {
  {
    Database db = Database::open(good_, OpenMode::kReadWrite).value();
    std::vector<TrialKey> trials;
    for (int i = 0; i < 400; ++i) trials.push_back({gemm(8192, 4096, 4096), heuristic(i)});
    sweep(db, trials, [](const TrialKey&) { return timed(100'000); });
  }
  good_bytes_ = bytes_of(good_);
  const fs::path out = folder_ / "out.jsonl";
  ASSERT_TRUE(Database::open(good_, OpenMode::kReadOnly).value().export_jsonl(out));
  const std::string expected = bytes_of(out);
  path_ = folder_ / "hostile.db";
  std::mt19937_64 random(20261122);
  int refused = 0;
  const int count = cases(300, 20'000);
  for (int i = 0; i < count; ++i) {
    std::string bytes = good_bytes_;
    const size_t at = random() % bytes.size();
    // The whole byte, in the manner of a bad disk, or one bit, in that of bad memory.
    const auto mask = static_cast<char>(i % 2 == 0 ? 1 << (random() % 8) : 1 + random() % 255);
    bytes[at] = static_cast<char>(bytes[at] ^ mask);
    std::ofstream(path_, std::ios::binary) << bytes;
    const auto db = Database::open(path_, OpenMode::kReadOnly);
    const Status exported = db ? db->export_jsonl(out) : std::unexpected(db.error());
    if (!exported) {
      ++refused;
      expect_clear(exported.error());
    } else {
      ASSERT_EQ(bytes_of(out), expected) << "case " << i << ": byte " << at << " ^ " << int{mask};
      EXPECT_TRUE(db->trials(gemm(8192, 4096, 4096)));
    }
    remove_database(path_);
  }
  RecordProperty("refused", refused);
  EXPECT_GT(refused, count / 2) << "most bytes of the file are in use";
}

// A -wal is a part of its database, so the one of a stranger can bring the stranger's rows and a
// damaged one ends where the damage begins, as after a power cut. No row is other than it was written.
TEST_F(HostileTest, AStrangersOrDamagedWalMakesNoRows) {
  const fs::path out = folder_ / "out.jsonl";
  std::set<std::string> written;
  const auto add_lines = [&written](const std::string& text) {
    std::string_view rest = text;
    while (!rest.empty()) written.emplace(take_until(rest, '\n'));
  };
  std::vector<std::string> wals;
  for (const fs::path& path : {good_, folder_ / "other.db"}) {
    Database db = Database::open(path, OpenMode::kCreate).value();
    sweep(db, {{gemm(64, 64, 64), heuristic(2)}, {gemm(64, 64, 64), heuristic(3)}},
          [](const TrialKey&) { return timed(5); });
    wals.push_back(bytes_of(path.string() + "-wal"));
    ASSERT_GT(wals.back().size(), 4096U);
    ASSERT_TRUE(db.export_jsonl(out));
    add_lines(bytes_of(out));
  }
  path_ = folder_ / "hostile.db";
  std::mt19937_64 random(7);
  for (int i = 0; i < cases(80, 2000); ++i) {
    ASSERT_TRUE(write_file_atomic(path_, good_bytes_));
    std::string bytes = wals[static_cast<size_t>(i) % 2];
    if (i > 1) bytes[random() % bytes.size()] ^= static_cast<char>(1 << (random() % 8));
    if (i % 3 == 2) bytes.resize(random() % bytes.size());
    ASSERT_TRUE(write_file_atomic(path_.string() + "-wal", bytes));
    const auto db = Database::open(path_, OpenMode::kReadOnly);
    const Status exported = db ? db->export_jsonl(out) : std::unexpected(db.error());
    if (!exported) {
      expect_clear(exported.error());
    } else {
      const std::string text = bytes_of(out);
      std::string_view rest = text;
      while (!rest.empty()) {
        const std::string line(take_until(rest, '\n'));
        ASSERT_TRUE(written.contains(line)) << i << ": " << line;
      }
    }
    remove_database(path_);
  }
}

TEST(Limits, AStatementThatDoesNotEndIsGivenUp) {
  auto db = Connection::open_empty("x.db").value();
  db->limit_time(std::chrono::milliseconds(50));
  const auto counted = db->scalar(
      "WITH RECURSIVE c(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM c) SELECT count(*) FROM c");
  ASSERT_FALSE(counted);
  EXPECT_NE(counted.error().message.find("x.db: it took longer than 0.05 s"), std::string::npos)
      << counted.error().message;
  // The next one has its own time.
  EXPECT_EQ(db->scalar("SELECT 7").value(), 7);
}

TEST(Limits, ValuesAreBounded) {
  auto db = Connection::open_empty("x.db").value();
  ASSERT_TRUE(db->exec("CREATE TABLE t (x TEXT)"));
  auto insert = db->prepare("INSERT INTO t VALUES (?)").value();
  const Status refused = insert.bind(std::string(kMaxValueBytes + 1, 'x')).run();
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("longer than 1048576 bytes"), std::string::npos)
      << refused.error().message;
  EXPECT_TRUE(insert.bind("short").run());
  EXPECT_EQ(db->scalar("SELECT count(*) FROM t").value(), 1);
  EXPECT_FALSE(db->scalar("SELECT length(zeroblob(2000000))"));
}

// Whatever writes stores checksums: opening verifies every row.
TEST_F(HostileTest, EveryWriterStoresChecksums) {
  const auto sound = [](const fs::path& path) {
    const auto db = Database::open(path, OpenMode::kReadOnly);
    return db ? db->check() : Status(std::unexpected(db.error()));
  };
  const fs::path path = folder_ / "w.db";
  Database db = Database::open(path, OpenMode::kCreate).value();
  EXPECT_TRUE(sound(path));
  const auto run =
      db.begin_run({}, 1, h100(), "u", toolchain(), final_method(),
                   {{gemm(16, 16, 16), heuristic(0)}, {gemm(32, 32, 32), heuristic(0)}});
  EXPECT_TRUE(sound(path));
  const auto pending = take(db.resume_run(run->uuid));
  EXPECT_TRUE(sound(path));
  ASSERT_TRUE(db.start_trial(pending[0]));
  EXPECT_TRUE(sound(path));
  ASSERT_TRUE(db.resume_run(run->uuid));  // the trial was running
  EXPECT_TRUE(sound(path));
  ASSERT_TRUE(db.finish_trial(pending[0], timed(10)));
  EXPECT_TRUE(sound(path));
  ASSERT_TRUE(db.end_run(run->uuid, "done"));
  EXPECT_TRUE(sound(path));
  ASSERT_TRUE(db.merge_from(good_));
  EXPECT_TRUE(sound(path));
  ASSERT_TRUE(db.export_db(folder_ / "copy.db"));
  EXPECT_TRUE(sound(folder_ / "copy.db"));
  ASSERT_TRUE(db.export_jsonl(folder_ / "w.jsonl"));
  Database imported = Database::open(folder_ / "i.db", OpenMode::kCreate).value();
  ASSERT_TRUE(imported.import_jsonl(folder_ / "w.jsonl"));
  EXPECT_TRUE(sound(folder_ / "i.db"));
}

}  // namespace
}  // namespace f8::tuning_db
