// kill -9 at random moments of a sweep: no finished row is lost, and the resumed run ends with the
// same cells as one that was never interrupted.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <random>
#include <set>

#include "base/log.hpp"
#include "campaign.hpp"
#include "hostile.hpp"
#include "sample.hpp"

namespace f8::tuning_db {
namespace {

constexpr int kCells = 400;
constexpr int kKills = 40;

TEST(Crash, KilledAtRandomMomentsASweepLosesNothing) {
  const TempFolder folder;
  const fs::path path = folder / "t.db";
  std::vector<TrialKey> cells;
  for (int i = 0; i < kCells; ++i) cells.push_back({gemm(8192, 4096, 4096), heuristic(i)});
  std::string run;
  {
    Database db = Database::open(path, OpenMode::kCreate).value();
    run = db.begin_run({}, 1, h100(), "GPU-1", toolchain(), final_method(), cells).value().uuid;
    ASSERT_TRUE(db.end_run(run, "interrupted"));
  }
  // The child tells of every trial that it has finished; all that it told of must be there later.
  std::set<std::string> told;
  std::mt19937 random(20240607);
  bool complete = false;
  int kills = 0;
  while (!complete) {
    int ends[2];
    ASSERT_EQ(::pipe(ends), 0);
    const pid_t child = in_child([&] {
      ::close(ends[0]);
      Database db = take(Database::open(path, OpenMode::kReadWrite));
      for (const PendingTrial& trial : take(db.resume_run(run))) {
        if (!db.start_trial(trial) || !db.finish_trial(trial, timed(1000))) return 4;
        if (::write(ends[1], trial.uuid.data(), trial.uuid.size()) != 36) return 5;
      }
      return db.end_run(run, "done") ? 0 : 6;
    });
    ASSERT_GE(child, 0);
    ::close(ends[1]);
    if (kills < kKills) {
      ::usleep(std::uniform_int_distribution<useconds_t>(1000, 25'000)(random));
      ::kill(child, SIGKILL);
      ++kills;
    }
    char uuid[36];
    while (::read(ends[0], uuid, sizeof uuid) == sizeof uuid) told.emplace(uuid, sizeof uuid);
    ::close(ends[0]);
    int status = 0;
    ASSERT_EQ(::waitpid(child, &status, 0), child);
    complete = WIFEXITED(status);
    if (complete) {
      ASSERT_EQ(WEXITSTATUS(status), 0);
    }

    const Database db = Database::open(path, OpenMode::kReadOnly).value();
    std::set<std::string> finished;
    for (const TrialRow& row : take(db.trials(cells[0].problem))) finished.insert(row.uuid);
    for (const std::string& t : told) ASSERT_TRUE(finished.contains(t)) << t;
    // At most one that it had finished but not told of, for each kill.
    ASSERT_LE(finished.size(), told.size() + static_cast<size_t>(kills));
  }
  Database db = Database::open(path, OpenMode::kReadWrite).value();
  EXPECT_TRUE(db.check());
  std::set<std::string> configs;
  for (const TrialRow& row : take(db.trials(cells[0].problem))) {
    EXPECT_TRUE(is_terminal(row.result.state));
    EXPECT_TRUE(configs.insert(row.candidate.config).second);
  }
  EXPECT_EQ(configs.size(), static_cast<size_t>(kCells));
  EXPECT_TRUE(db.resume_run(run).value().empty());
}

TEST(Crash, KilledWhileCreatingLeavesNoHalfDatabase) {
  const TempFolder folder;
  std::mt19937 random(7);
  for (int i = 0; i < 20; ++i) {
    const fs::path path = folder.path() / f8::format("t{}.db", i);
    const pid_t child = in_child([&] { return Database::open(path, OpenMode::kCreate) ? 0 : 1; });
    ASSERT_GE(child, 0);
    ::usleep(std::uniform_int_distribution<useconds_t>(0, 12'000)(random));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const auto db = Database::open(path, OpenMode::kCreate);
    ASSERT_TRUE(db) << db.error().message;
    EXPECT_TRUE(db->check());
  }
}

// An import, a merge and a migration are one transaction each: after kill -9 all of it is there or
// nothing is, and doing it again completes it.
class KilledTest : public ::testing::Test {
 protected:
  KilledTest() {
    set_log_sink([](LogLevel, std::string_view) {});
    Database db = Database::open(folder_ / "source.db", OpenMode::kCreate).value();
    std::vector<TrialKey> trials;
    for (int i = 0; i < 300; ++i) trials.push_back({gemm(8192, 4096, 4096), heuristic(i)});
    sweep(db, trials, [](const TrialKey&) { return timed(1000); });
    EXPECT_TRUE(db.export_jsonl(folder_ / "source.jsonl"));
  }
  ~KilledTest() override { set_log_sink({}); }

  std::string exported(const fs::path& path) {
    const Database db = take(Database::open(path, OpenMode::kReadOnly));
    const Status checked = db.check();
    EXPECT_TRUE(checked) << checked.error().message;
    EXPECT_TRUE(db.export_jsonl(folder_ / "out.jsonl"));
    return bytes_of(folder_ / "out.jsonl");
  }

  // Runs `work` on empty files in children that are killed after up to `longest_us`, and then to
  // its end: the file holds nothing or all. On a busy machine all children may have ended before: then others are
  // killed at once, until one of them was at work.
  void expect_all_or_nothing(useconds_t longest_us, const std::function<bool(Database&)>& work) {
    const fs::path path = folder_ / "t.db";
    ASSERT_TRUE(Database::open(path, OpenMode::kCreate));
    const std::string empty = bytes_of(path);
    const std::string nothing = exported(path);
    const std::string all = exported(folder_ / "source.db");
    std::mt19937 random(20261122);
    int killed = 0;
    const int cases = f8::testing::cases(8, 300);
    for (int i = 0; i < cases || (killed == 0 && i < cases + 100); ++i) {
      remove_database(path);
      ASSERT_TRUE(write_file_atomic(path, empty));
      const pid_t child = in_child([&] {
        Database db = take(Database::open(path, OpenMode::kReadWrite));
        return work(db) ? 0 : 1;
      });
      ASSERT_GE(child, 0);
      const useconds_t longest = i < cases ? longest_us : 0;
      ::usleep(std::uniform_int_distribution<useconds_t>(0, longest)(random));
      ::kill(child, SIGKILL);
      ::waitpid(child, nullptr, 0);
      const std::string found = exported(path);
      ASSERT_TRUE(found == nothing || found == all) << "a half was found";
      if (found == nothing) ++killed;
      Database db = take(Database::open(path, OpenMode::kReadWrite));
      ASSERT_TRUE(work(db));
      ASSERT_EQ(exported(path), all);
    }
    EXPECT_GT(killed, 0) << "some were killed before the end";
  }

  TempFolder folder_;
};

TEST_F(KilledTest, AnImportIsAllOrNothing) {
  expect_all_or_nothing(
      60'000, [&](Database& db) { return db.import_jsonl(folder_ / "source.jsonl").has_value(); });
}

TEST_F(KilledTest, AMergeIsAllOrNothing) {
  expect_all_or_nothing(
      60'000, [&](Database& db) { return db.merge_from(folder_ / "source.db").has_value(); });
}

TEST_F(KilledTest, AMigrationIsAllOrNothing) {
  const fs::path path = folder_ / "old.db";
  {
    auto db = Connection::open(path, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE).value();
    const char* sql = FLOAT8_SOURCE_DIR "/tests/unit/tuning_db/data/v1_words.sql";
    ASSERT_TRUE(db->exec(read_file(sql).value()));
  }
  const std::string before = exported(path);
  std::mt19937 random(20261122);
  int old = 0;
  const int cases = f8::testing::cases(10, 300);
  for (int i = 0; i < cases || (old == 0 && i < cases + 100); ++i) {
    const pid_t child =
        in_child([&] { return Database::open(path, OpenMode::kReadWrite) ? 0 : 1; });
    ASSERT_GE(child, 0);
    const useconds_t longest = i < cases ? 15'000 : 0;
    ::usleep(std::uniform_int_distribution<useconds_t>(0, longest)(random));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    ASSERT_EQ(exported(path), before);
    auto db = Connection::open(path, SQLITE_OPEN_READWRITE).value();
    const int64_t version = db->scalar("PRAGMA user_version").value();
    ASSERT_TRUE(version == 1 || version == kSchemaVersion) << version;
    if (version == 1) {
      ++old;
      continue;
    }
    db.reset();
    remove_database(path);
    fs::rename(folder_ / "old.db.v1.backup", path);  // which is as good as the file was
  }
  EXPECT_GT(old, 0) << "some were killed before the end";
  ASSERT_TRUE(Database::open(path, OpenMode::kReadWrite));
  EXPECT_EQ(exported(path), before);
}

}  // namespace
}  // namespace f8::tuning_db
