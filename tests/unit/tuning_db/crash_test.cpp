// kill -9 at random moments of a sweep: no finished row is lost, and the resumed run ends with the
// same cells as one that was never interrupted.
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <random>
#include <set>

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

}  // namespace
}  // namespace f8::tuning_db
