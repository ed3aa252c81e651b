// The life of runs and trials: planned, running, finished; resumed after a death; a full disk.
#include <sqlite3.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <limits>

#include "sample.hpp"
#include "tuning_db/file/sqlite.hpp"

namespace f8::tuning_db {
namespace {

class SweepTest : public ::testing::Test {
 protected:
  SweepTest() : path_(folder_ / "t.db"), db_(Database::open(path_, OpenMode::kCreate).value()) {
    for (int i = 0; i < 4; ++i) cells_.push_back({gemm(8192, 4096, 4096), heuristic(i)});
  }
  RunInfo begin() {
    return db_
        .begin_run({"float8-tune", "sweep"}, 7, h100(), "GPU-1", toolchain(), final_method(),
                   cells_)
        .value();
  }
  // Reopens as after the death of the process: a running trial stays running.
  void reopen() {
    { const Database closed = std::move(db_); }
    db_ = Database::open(path_, OpenMode::kReadWrite).value();
  }

  TempFolder folder_;
  fs::path path_;
  Database db_;
  std::vector<TrialKey> cells_;
};

TEST_F(SweepTest, FromPlannedToFinished) {
  const RunInfo run = begin();
  EXPECT_EQ(run.planned, 4);
  EXPECT_TRUE(db_.trials(cells_[0].problem).value().empty());
  const auto pending = db_.resume_run(run.uuid).value();
  ASSERT_EQ(pending.size(), 4U);
  for (size_t i = 0; i < pending.size(); ++i) {
    EXPECT_EQ(pending[i].key.problem, cells_[i].problem);
    EXPECT_EQ(pending[i].key.candidate.config, cells_[i].candidate.config);
    EXPECT_EQ(pending[i].attempt, 0);
  }
  ASSERT_TRUE(db_.start_trial(pending[0]));
  ASSERT_TRUE(db_.finish_trial(pending[0], timed(120'000, 1.5)));
  const auto rows = db_.trials(cells_[0].problem).value();
  ASSERT_EQ(rows.size(), 1U);
  const TrialRow& row = rows[0];
  EXPECT_EQ(row.uuid, pending[0].uuid);
  EXPECT_EQ(row.run_uuid, run.uuid);
  EXPECT_EQ(row.layer, path_.string());
  EXPECT_EQ(row.device_name, "NVIDIA H100 80GB HBM3");
  EXPECT_EQ(row.device.power_limit_w, 700);
  EXPECT_NE(row.toolchain.find("driver 580.65.06"), std::string::npos);
  EXPECT_EQ(row.method_key, final_method().key());
  EXPECT_EQ(row.fidelity, "final");
  ASSERT_TRUE(row.result.timing && row.result.ratio);
  EXPECT_EQ(row.result.timing->median_ns, 120'000);
  EXPECT_EQ(row.result.timing->n, 48);
  EXPECT_EQ(row.result.ratio->hi, 1.505);
  EXPECT_EQ(row.result.registers, 168);
  EXPECT_EQ(row.result.spill_bytes, std::nullopt);
  EXPECT_EQ(row.result.cubin_hash, "feedbeef");
  EXPECT_EQ(row.result.power_w, 698.25);

  const RunInfo info = db_.runs().value().at(0);
  EXPECT_EQ(info.planned, 4);
  EXPECT_EQ(info.done, 1);
  EXPECT_EQ(info.state, "running");
  EXPECT_EQ(info.argv, R"(["float8-tune","sweep"])");
}

TEST_F(SweepTest, ACellPlannedTwiceIsMeasuredOnce) {
  cells_.push_back(cells_[1]);
  cells_.push_back({cells_[2].problem, {Impl::kCublasLt, R"({ "heuristic" : 2 })", ""}});
  EXPECT_EQ(begin().planned, 4);
}

TEST_F(SweepTest, ResumeGivesExactlyTheMissingCells) {
  const RunInfo run = begin();
  const auto pending = db_.resume_run(run.uuid).value();
  ASSERT_TRUE(db_.start_trial(pending[0]));
  ASSERT_TRUE(db_.finish_trial(pending[0], timed(1000)));
  ASSERT_TRUE(db_.finish_trial(pending[2], {.state = TrialState::kPruned, .reason = "bound"}));
  ASSERT_TRUE(db_.start_trial(pending[1]));
  reopen();
  const auto first = db_.resume_run(run.uuid).value();
  ASSERT_EQ(first.size(), 2U);
  EXPECT_EQ(first[0].uuid, pending[1].uuid);
  EXPECT_EQ(first[0].attempt, 1);
  EXPECT_EQ(first[1].uuid, pending[3].uuid);
  EXPECT_EQ(first[1].attempt, 0);
  // The same trial kills the process again.
  ASSERT_TRUE(db_.start_trial(first[0]));
  reopen();
  const auto second = db_.resume_run(run.uuid).value();
  ASSERT_EQ(second.size(), 1U);
  EXPECT_EQ(second[0].uuid, pending[3].uuid);
  bool quarantined = false;
  for (const TrialRow& row : take(db_.trials(cells_[0].problem))) {
    if (row.uuid != pending[1].uuid) continue;
    quarantined = row.result.state == TrialState::kQuarantined;
    EXPECT_NE(row.result.reason.find("twice"), std::string::npos);
  }
  EXPECT_TRUE(quarantined);
}

TEST_F(SweepTest, EndedInOrderARunningCellIsNoDeath) {
  const RunInfo run = begin();
  const auto pending = db_.resume_run(run.uuid).value();
  for (int i = 0; i < 3; ++i) {
    ASSERT_TRUE(db_.start_trial(pending[0]));
    ASSERT_TRUE(db_.end_run(run.uuid, "interrupted"));
    EXPECT_EQ(db_.runs().value().at(0).state, "interrupted");
    const auto again = db_.resume_run(run.uuid).value();
    ASSERT_EQ(again.size(), 4U);
    EXPECT_EQ(again[0].attempt, 0);
  }
}

TEST_F(SweepTest, ARunWithCellsLeftIsNotDone) {
  const RunInfo run = begin();
  ASSERT_TRUE(db_.end_run(run.uuid, "done"));
  EXPECT_EQ(db_.runs().value().at(0).state, "interrupted");
  for (const PendingTrial& t : take(db_.resume_run(run.uuid))) {
    ASSERT_TRUE(db_.finish_trial(t, {.state = TrialState::kPruned}));
  }
  ASSERT_TRUE(db_.end_run(run.uuid, "done"));
  EXPECT_EQ(db_.runs().value().at(0).state, "done");
  EXPECT_TRUE(db_.resume_run(run.uuid).value().empty());
}

TEST_F(SweepTest, AFinishedTrialIsNeverChanged) {
  const RunInfo run = begin();
  const auto pending = db_.resume_run(run.uuid).value();
  ASSERT_TRUE(db_.start_trial(pending[0]));
  EXPECT_FALSE(db_.start_trial(pending[0]));
  ASSERT_TRUE(db_.finish_trial(pending[0], timed(1000)));
  EXPECT_FALSE(db_.start_trial(pending[0]));
  EXPECT_FALSE(db_.finish_trial(pending[0], timed(900)));
  EXPECT_EQ(db_.trials(cells_[0].problem).value().at(0).result.timing->median_ns, 1000);
  // Nor by SQL.
  auto raw = Connection::open(path_, SQLITE_OPEN_READWRITE).value();
  EXPECT_FALSE(raw->exec("UPDATE trial SET median_ns = 1 WHERE state = 'ok'"));
  EXPECT_FALSE(raw->exec("DELETE FROM trial WHERE state = 'ok'"));
  EXPECT_TRUE(raw->exec("UPDATE trial SET at = at WHERE state = 'planned'"));
}

TEST_F(SweepTest, ResultsThatCannotBeAreRefused) {
  const RunInfo run = begin();
  const auto pending = db_.resume_run(run.uuid).value();
  const auto refused = [&](const TrialResult& result, const char* text) {
    const Status status = db_.finish_trial(pending[0], result);
    ASSERT_FALSE(status) << text;
    EXPECT_EQ(status.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(status.error().message.find(text), std::string::npos) << status.error().message;
  };
  refused({.state = TrialState::kRunning}, "terminal");
  refused({.state = TrialState::kOk}, "timing");
  TrialResult r = timed(1000);
  r.timing->ci_lo_ns = 1001;
  refused(r, "outside");
  r = timed(1000);
  r.timing->median_ns = std::numeric_limits<double>::quiet_NaN();
  refused(r, "not finite");
  r = timed(1000);
  r.timing->n = 0;
  refused(r, "samples is 0");
  r = timed(1000, 1.5);
  r.ratio->lo = 1.6;
  refused(r, "ratio");
  // The error of a wrong kernel may well be NaN; the row is kept.
  r = {.state = TrialState::kWrong, .reason = "rel_err"};
  r.rel_err = std::numeric_limits<double>::quiet_NaN();
  r.sqnr_db = -std::numeric_limits<double>::infinity();
  EXPECT_TRUE(db_.finish_trial(pending[0], r));
  const TrialResult stored = db_.trials(cells_[0].problem).value().at(0).result;
  EXPECT_EQ(stored.rel_err, std::nullopt);
  EXPECT_EQ(stored.sqnr_db, std::nullopt);
}

TEST_F(SweepTest, BadJsonAndUnknownRunsAreRefused) {
  EXPECT_FALSE(db_.begin_run({}, 0, h100(), "u", toolchain(), {"final", "{"}, {}));
  EXPECT_FALSE(db_.begin_run({}, 0, h100(), "u", toolchain(), {"finest", "{}"}, {}));
  EXPECT_FALSE(db_.begin_run({}, 0, h100(), "u", toolchain(), final_method(),
                             {{gemm(16, 16, 16), {Impl::kCublasLt, "h3", ""}}}));
  EXPECT_TRUE(db_.runs().value().empty());
  const auto unknown = db_.resume_run("no-such-run");
  ASSERT_FALSE(unknown);
  EXPECT_EQ(unknown.error().code, ErrorCode::kNotFound);
  EXPECT_FALSE(db_.end_run("no-such-run", "done"));
  EXPECT_FALSE(db_.end_run(begin().uuid, "finished"));
}

TEST_F(SweepTest, ARunKeepsItsDeviceToolchainAndMethod) {
  const RunInfo run = begin();
  EXPECT_TRUE(db_.verify_run(run.uuid, h100(), "GPU-1", toolchain(), final_method()));
  const auto differs = [&](const Status& status, const char* field) {
    ASSERT_FALSE(status) << field;
    EXPECT_NE(status.error().message.find(field), std::string::npos) << status.error().message;
  };
  differs(db_.verify_run(run.uuid, h100(500), "GPU-1", toolchain(), final_method()), "power limit");
  differs(db_.verify_run(run.uuid, h100(), "GPU-2", toolchain(), final_method()),
          "sweep --missing");
  EXPECT_TRUE(db_.verify_run(run.uuid, h100(), "", toolchain(), final_method()));
  differs(db_.verify_run(run.uuid, h100(), "GPU-1", toolchain("fff"), final_method()), "revision");
  differs(db_.verify_run(run.uuid, h100(), "GPU-1", toolchain(), {"screen", "{}"}), "method");
}

TEST_F(SweepTest, ARunThatALivingProcessMeasuresIsLeftAlone) {
  int to_parent[2];
  int to_child[2];
  ASSERT_EQ(::pipe(to_parent), 0);
  ASSERT_EQ(::pipe(to_child), 0);
  const pid_t child = in_child([&] {
    Database db = take(Database::open(path_, OpenMode::kReadWrite));
    const RunInfo run =
        take(db.begin_run({}, 7, h100(), "GPU-1", toolchain(), final_method(), cells_));
    if (!db.start_trial(take(db.resume_run(run.uuid)).at(0))) return 1;
    (void)!::write(to_parent[1], run.uuid.data(), run.uuid.size());
    char byte = 0;
    (void)!::read(to_child[0], &byte, 1);
    return 0;
  });
  ASSERT_GE(child, 0);
  char uuid[36];
  ASSERT_EQ(::read(to_parent[0], uuid, sizeof uuid), 36);
  const std::string run(uuid, sizeof uuid);
  const auto refused = db_.resume_run(run);
  ASSERT_FALSE(refused);
  EXPECT_NE(refused.error().message.find("process " + std::to_string(child)), std::string::npos)
      << refused.error().message;
  EXPECT_EQ(db_.runs().value().at(0).state, "running");
  ASSERT_EQ(::kill(child, SIGKILL), 0);
  // Dead but not yet reaped counts as dead.
  while (db_.runs().value().at(0).state == "running") ::usleep(1000);
  EXPECT_EQ(db_.runs().value().at(0).state, "crashed");
  const auto pending = db_.resume_run(run);
  ASSERT_TRUE(pending) << pending.error().message;
  EXPECT_EQ(pending->at(0).attempt, 1);
  ::waitpid(child, nullptr, 0);
  for (const int fd : {to_parent[0], to_parent[1], to_child[0], to_child[1]}) ::close(fd);
}

// A limit on the file size is a full disk to one process.
TEST_F(SweepTest, AFullDiskLosesNothing) {
  cells_.clear();
  for (int i = 0; i < 2000; ++i) cells_.push_back({gemm(8192, 4096, 4096), heuristic(i)});
  const RunInfo run = begin();
  ASSERT_TRUE(db_.end_run(run.uuid, "interrupted"));
  reopen();
  const auto size = fs::file_size(path_);
  int pipe_ends[2];
  ASSERT_EQ(::pipe(pipe_ends), 0);
  const pid_t child = in_child([&] {
    std::signal(SIGXFSZ, SIG_IGN);
    const rlimit limit{size, size};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    Database db = take(Database::open(path_, OpenMode::kReadWrite));
    int64_t done = 0;
    Status status{};
    for (const PendingTrial& trial : take(db.resume_run(run.uuid))) {
      status = db.start_trial(trial);
      if (status) status = db.finish_trial(trial, timed(1000));
      if (!status) break;
      ++done;
    }
    const std::string said = f8::format("{} {}", done, status ? "" : status.error().message);
    return ::write(pipe_ends[1], said.data(), said.size()) > 0 ? 0 : 1;
  });
  ASSERT_GE(child, 0);
  ::close(pipe_ends[1]);
  std::string said;
  char buffer[512];
  for (ssize_t n = 0; (n = ::read(pipe_ends[0], buffer, sizeof buffer)) > 0;) {
    said.append(buffer, static_cast<size_t>(n));
  }
  ::close(pipe_ends[0]);
  ::waitpid(child, nullptr, 0);
  const int64_t done = std::stoll(said);
  EXPECT_GT(done, 10) << said;
  EXPECT_LT(done, 2000) << said;
  EXPECT_NE(said.find("what was finished is kept"), std::string::npos) << said;
  EXPECT_NE(said.find(path_.string()), std::string::npos) << said;

  reopen();
  EXPECT_TRUE(db_.check());
  EXPECT_EQ(db_.runs().value().at(0).done, done);
  EXPECT_EQ(static_cast<int64_t>(db_.resume_run(run.uuid).value().size()), 2000 - done);
}

TEST_F(SweepTest, SqliteSaysFull) {
  auto raw = Connection::open(path_, SQLITE_OPEN_READWRITE).value();
  ASSERT_TRUE(raw->exec("PRAGMA max_page_count = 1"));  // the present size is the least it takes
  const Status status =
      raw->exec("CREATE TABLE big (x); INSERT INTO big VALUES (zeroblob(1000000))");
  ASSERT_FALSE(status);
  EXPECT_EQ(status.error().code, ErrorCode::kIo);
  EXPECT_NE(status.error().message.find("disk is full"), std::string::npos);
}

TEST_F(SweepTest, EqualUnitsInTwoPowerClassesAreTwoRows) {
  begin();
  const auto run = db_.begin_run({}, 0, h100(500), "GPU-1", toolchain(), final_method(), cells_);
  ASSERT_TRUE(run) << run.error().message;
  EXPECT_EQ(db_.devices().value().size(), 2U);
  EXPECT_TRUE(db_.check());
}

}  // namespace
}  // namespace f8::tuning_db
