// Garbage collection: what goes, what stays, and that no way of failing harms the file.
#include "tuning_db/gc/gc.hpp"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <map>
#include <random>

#include "base/log.hpp"
#include "campaign.hpp"
#include "hostile.hpp"
#include "sample.hpp"
#include "tuning_db/file/sqlite.hpp"

namespace f8::tuning_db {
namespace {

constexpr std::chrono::hours kDay{24};

std::map<std::string, int64_t> counts_of(const GcReport& report) {
  std::map<std::string, int64_t> counts;
  for (const auto& [kind, rows] : report.removed) {
    if (rows > 0) counts[std::string(kind)] = rows;
  }
  return counts;
}
using Counts = std::map<std::string, int64_t>;

class GcTest : public ::testing::Test {
 protected:
  GcTest() : path_(folder_ / "t.db") {
    set_log_sink([](LogLevel, std::string_view) {});
  }
  ~GcTest() override { set_log_sink({}); }

  Database create() { return take(Database::open(path_, OpenMode::kCreate)); }
  int64_t scalar(const char* sql) {
    return Connection::open(path_, SQLITE_OPEN_READONLY).value()->scalar(sql).value();
  }
  std::string exported() {
    const Database db = take(Database::open(path_, OpenMode::kReadOnly));
    const Status checked = db.check();
    EXPECT_TRUE(checked) << checked.error().message;
    return take(db.to_jsonl());
  }
  std::string table() {
    return take(take(Database::open(path_, OpenMode::kReadOnly)).table()).serialize();
  }
  // Sets the date of all trials, or of those of a run.
  void set_age(int days, const std::string& run = "") {
    exec(path_, f8::format("UPDATE trial SET checksum = checksum + 1, at = "
                           "strftime('%Y-%m-%dT%H:%M:%fZ', 'now', '-{} days') WHERE run_id IN "
                           "(SELECT id FROM run WHERE uuid LIKE '{}%')",
                           days, run));
    store_checksums_in(path_);
  }
  void expect_refused(const GcOptions& options, const std::vector<std::string>& parts) {
    const std::string before = exported();
    const auto report = collect_garbage(path_, options);
    ASSERT_FALSE(report);
    for (const std::string& part : parts) {
      EXPECT_NE(report.error().message.find(part), std::string::npos) << report.error().message;
    }
    EXPECT_EQ(exported(), before);
    EXPECT_FALSE(fs::exists(path_.string() + ".gc.backup"));
  }

  // Three toolchains, oldest first: the first measured two problems, the others only the first of
  // them. The runs' uuids.
  std::vector<std::string> make_history() {
    Database db = create();
    std::vector<std::string> runs;
    for (const char* sha : {"aaaaaaa", "bbbbbbb", "ccccccc"}) {
      std::vector<TrialKey> trials = {{gemm(8192, 4096, 4096), generated("128x256s4c2x1w2g8")},
                                      {gemm(8192, 4096, 4096), heuristic(0)}};
      if (runs.empty()) trials.push_back({gemm(4096, 4096, 4096), heuristic(7)});
      runs.push_back(sweep(
          db, trials, [](const TrialKey&) { return timed(1000); }, h100(), toolchain(sha)));
    }
    return runs;
  }

  TempFolder folder_;
  fs::path path_;
};

TEST_F(GcTest, UnaskedItRemovesScreeningsAndOrphans) {
  {
    Database db = create();
    const Method screen{"screen", R"({"name":"screen-v1"})"};
    sweep(
        db, {{gemm(8192, 4096, 4096), heuristic(0)}, {gemm(4096, 4096, 4096), heuristic(1)}},
        [](const TrialKey&) { return timed(1000); }, h100(), toolchain(), screen);
    const RunInfo later = take(db.begin_run({}, 1, h100(), "GPU-1", toolchain(), screen,
                                            {{gemm(8192, 4096, 4096), heuristic(2)}}));
    ASSERT_TRUE(db.end_run(later.uuid, "interrupted"));
    sweep(db, {{gemm(8192, 4096, 4096), heuristic(0)}}, [](const TrialKey&) { return timed(900); });
    sweep(db, {{gemm(8192, 4096, 4096), heuristic(0)}}, [](const TrialKey&) { return timed(950); });
  }
  set_age(1000);
  const std::string before = table();
  const GcReport report = take(collect_garbage(path_, {}));
  EXPECT_EQ(counts_of(report),
            (Counts{{"trials_of_screenings", 2}, {"runs", 1}, {"problems", 1}, {"candidates", 1}}));
  EXPECT_EQ(table(), before);
  exported();
  // The interrupted run can still be resumed.
  EXPECT_EQ(scalar("SELECT count(*) FROM trial WHERE state = 'planned'"), 1);
  EXPECT_EQ(scalar("SELECT count(*) FROM trial"), 3);
}

TEST_F(GcTest, SupersededToolchainsGoWhereAskedAndWhatCountsStays) {
  make_history();
  const std::string before = table();
  EXPECT_TRUE(take(collect_garbage(path_, {.toolchains_but = 3})).is_empty());
  const GcReport one = take(collect_garbage(path_, {.toolchains_but = 2}));
  // The oldest toolchain's trial of the problem that no other measured counts now.
  EXPECT_EQ(counts_of(one), (Counts{{"superseded_trials", 2}}));
  ASSERT_EQ(one.superseded.size(), 1U);
  EXPECT_EQ(one.superseded[0].device, h100().name);
  EXPECT_EQ(one.superseded[0].toolchain,
            "driver 580.65.06, CUDA 13.0, NVRTC 13.0.48, cuBLASLt 13.0.2, float8 0.1.0 (aaaaaaa)");
  EXPECT_EQ(one.superseded[0].trials, 2);
  EXPECT_EQ(table(), before);
  const GcReport two = take(collect_garbage(path_, {.toolchains_but = 1}));
  EXPECT_EQ(counts_of(two), (Counts{{"superseded_trials", 2}, {"runs", 1}, {"toolchains", 1}}));
  EXPECT_EQ(table(), before);
  const GcReport three =
      take(collect_garbage(path_, {.toolchains_but = 1, .include_current = true}));
  EXPECT_EQ(counts_of(three), (Counts{{"superseded_trials", 1},
                                      {"runs", 1},
                                      {"problems", 1},
                                      {"candidates", 1},
                                      {"toolchains", 1}}));
  EXPECT_EQ(scalar("SELECT count(*) FROM trial"), 2);
  exported();
}

TEST_F(GcTest, AnAgeIsACondition) {
  const std::vector<std::string> runs = make_history();
  set_age(100, runs[0]);
  set_age(50, runs[1]);
  EXPECT_TRUE(take(collect_garbage(path_, {.older_than = 101 * kDay})).is_empty());
  EXPECT_TRUE(take(collect_garbage(path_, {.toolchains_but = 3, .older_than = kDay})).is_empty());
  const GcReport old = take(collect_garbage(path_, {.older_than = 90 * kDay}));
  EXPECT_EQ(counts_of(old), (Counts{{"superseded_trials", 2}}));
  const GcReport all = take(
      collect_garbage(path_, {.older_than = std::chrono::seconds(0), .include_current = true}));
  EXPECT_EQ(counts_of(all).at("superseded_trials"), 5);
  EXPECT_EQ(counts_of(all).at("device_classes"), 1);
  EXPECT_EQ(scalar("SELECT count(*) FROM device_unit"), 0);
  EXPECT_EQ(exported(), "{\"float8_tuning_db\":3}\n");
}

TEST_F(GcTest, EachDeviceClassHasItsNewestToolchains) {
  {
    Database db = create();
    const std::vector<TrialKey> trials = {{gemm(8192, 4096, 4096), heuristic(0)}};
    const auto result = [](const TrialKey&) { return timed(1000); };
    sweep(db, trials, result, h100(500), toolchain("aaaaaaa"));
    sweep(db, trials, result, h100(700), toolchain("aaaaaaa"));
    sweep(db, trials, result, h100(700), toolchain("bbbbbbb"));
  }
  const GcReport report =
      take(collect_garbage(path_, {.toolchains_but = 1, .include_current = true}));
  EXPECT_EQ(counts_of(report), (Counts{{"superseded_trials", 1}, {"runs", 1}}));
}

// The table says the same before and after a collection, whatever was measured when.
TEST_F(GcTest, TheTableIsTheSameOfAnyHistory) {
  std::mt19937 random(20261123);
  const auto pick = [&](int n) { return std::uniform_int_distribution<int>(0, n - 1)(random); };
  int64_t removed = 0;
  for (int i = 0; i < f8::testing::cases(6, 100); ++i) {
    remove_database(path_);
    {
      Database db = create();
      for (int run = 0; run < 8; ++run) {
        std::vector<TrialKey> trials;
        for (int t = 0; t < 6; ++t) {
          const int64_t n = 1024 * (1 + pick(2));
          if (pick(2) == 0) {
            trials.push_back({gemm(8192, n, 4096), heuristic(pick(3))});
          } else {
            trials.push_back({linear({8192, n, 4096}), {Impl::kFloat8, "{}", "ff"}});
            trials.push_back({linear({8192, n, 4096}), {Impl::kBf16, "{}", ""}});
          }
        }
        const auto result = [&](const TrialKey& trial) -> TrialResult {
          if (pick(4) == 0) return {.state = TrialState::kPruned, .reason = "slow"};
          if (trial.candidate.impl == Impl::kFloat8) return timed(900 + pick(100), 1.2);
          return timed(900 + pick(100));
        };
        sweep(db, trials, result, h100(500 + 100 * pick(2)),
              toolchain(std::string(7, static_cast<char>('a' + pick(4)))),
              {pick(5) == 0 ? "screen" : "final", f8::format(R"({{"blocks":{}}})", pick(2))});
      }
    }
    const std::string before = table();
    GcOptions options{.toolchains_but = 1 + pick(2)};
    if (pick(2) == 0) options.older_than = std::chrono::seconds(0);
    const GcReport report = take(collect_garbage(path_, options));
    for (const auto& [kind, rows] : report.removed) removed += rows;
    ASSERT_EQ(table(), before);
    exported();
    ASSERT_TRUE(take(collect_garbage(path_, options)).is_empty()) << "a second one has no work";
  }
  EXPECT_GT(removed, 0);
}

TEST_F(GcTest, ADryRunSaysTheSameAndChangesNothing) {
  make_history();
  const std::string before = bytes_of(path_);
  GcOptions options{.toolchains_but = 1, .dry_run = true};
  const GcReport said = take(collect_garbage(path_, options));
  EXPECT_EQ(bytes_of(path_), before);
  EXPECT_TRUE(said.backup.empty());
  options.dry_run = false;
  const GcReport done = take(collect_garbage(path_, options));
  EXPECT_EQ(said.removed, done.removed);
  EXPECT_EQ(said.bytes_before, done.bytes_before);
  EXPECT_EQ(said.bytes_after, done.bytes_after);
  EXPECT_EQ(done.bytes_before, static_cast<int64_t>(before.size()));
  EXPECT_EQ(done.bytes_after, static_cast<int64_t>(fs::file_size(path_)));
}

TEST_F(GcTest, TheSpaceIsGivenBack) {
  {
    Database db = create();
    std::vector<TrialKey> trials;
    for (int i = 0; i < 500; ++i) trials.push_back({gemm(8192, 4096, 4096), heuristic(i)});
    for (const char* sha : {"aaaaaaa", "bbbbbbb"}) {
      sweep(
          db, trials, [](const TrialKey&) { return timed(1000); }, h100(), toolchain(sha));
    }
  }
  const GcReport report = take(collect_garbage(path_, {.toolchains_but = 1}));
  EXPECT_EQ(counts_of(report).at("superseded_trials"), 500);
  EXPECT_LT(report.bytes_after, report.bytes_before * 3 / 4);
  EXPECT_EQ(report.bytes_after, static_cast<int64_t>(fs::file_size(path_)));
  EXPECT_EQ(scalar("PRAGMA freelist_count"), 0);
}

TEST_F(GcTest, TheBackupIsTheDatabaseAsItWas) {
  make_history();
  const std::string before = exported();
  const GcReport report = take(collect_garbage(path_, {.toolchains_but = 2}));
  EXPECT_EQ(report.backup, folder_ / "t.db.gc.backup");
  EXPECT_EQ(take(take(Database::open(report.backup, OpenMode::kReadOnly)).to_jsonl()), before);
  // No backup is made where nothing is removed, and an earlier one is kept.
  EXPECT_TRUE(take(collect_garbage(path_, {.toolchains_but = 2})).backup.empty());
  EXPECT_EQ(take(collect_garbage(path_, {.toolchains_but = 1})).backup,
            folder_ / "t.db.gc.backup2");
  const GcReport unsafe = take(
      collect_garbage(path_, {.toolchains_but = 1, .include_current = true, .back_up = false}));
  EXPECT_EQ(counts_of(unsafe).at("superseded_trials"), 1);
  EXPECT_FALSE(fs::exists(folder_ / "t.db.gc.backup3"));
}

TEST_F(GcTest, AnActiveRunOrAnotherConnectionIsRefused) {
  make_history();
  for (const OpenMode mode : {OpenMode::kReadOnly, OpenMode::kReadWrite}) {
    const Database other = take(Database::open(path_, mode));
    expect_refused({.toolchains_but = 1}, {"t.db", "has it open", "try again"});
    EXPECT_TRUE(collect_garbage(path_, {.toolchains_but = 1, .dry_run = true}));
  }
  Database db = take(Database::open(path_, OpenMode::kReadWrite));
  const RunInfo run = take(db.begin_run({}, 1, h100(), "GPU-1", toolchain(), final_method(), {}));
  expect_refused({.toolchains_but = 1}, {"t.db", run.uuid, std::to_string(::getpid()), "Ctrl-C"});
  expect_refused({.toolchains_but = 1, .dry_run = true}, {run.uuid});
}

TEST_F(GcTest, TheTriggersAndReferencesStandAsBefore) {
  make_history();
  ASSERT_FALSE(take(collect_garbage(path_, {.toolchains_but = 1})).is_empty());
  const auto db = Connection::open(path_, SQLITE_OPEN_READWRITE).value();
  EXPECT_FALSE(db->exec("DELETE FROM trial"));
  // Without triggers a finished trial goes, and a row that others refer to does not.
  ASSERT_TRUE(db->enable_triggers(false));
  EXPECT_FALSE(db->exec("DELETE FROM candidate"));
  EXPECT_TRUE(db->exec("DELETE FROM trial"));
  ASSERT_TRUE(db->enable_triggers(true));
}

TEST_F(GcTest, AFileThatCannotBeWrittenIsRefused) {
  make_history();
  const std::string before = bytes_of(path_);
  ASSERT_EQ(::chmod(path_.c_str(), 0444), 0);
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0555), 0);
  const pid_t child = in_child([&] {
    if (::geteuid() == 0 && ::setuid(65534) != 0) return 3;  // root writes everywhere
    const auto done = collect_garbage(path_, {.toolchains_but = 1});
    if (done || done.error().code != ErrorCode::kIo) return 2;
    const auto said = collect_garbage(path_, {.toolchains_but = 1, .dry_run = true});
    return said && !said->is_empty() ? 0 : 1;
  });
  ASSERT_GE(child, 0);
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 0) << WEXITSTATUS(status);
  ASSERT_EQ(::chmod(folder_.path().c_str(), 0755), 0);
  EXPECT_EQ(bytes_of(path_), before);
}

TEST_F(GcTest, AnOlderSchemaIsMigratedAndADryRunLeavesIt) {
  {
    auto db = Connection::open(path_, SQLITE_OPEN_READWRITE | SQLITE_OPEN_CREATE).value();
    ASSERT_TRUE(db->exec(read_file(FLOAT8_SOURCE_DIR "/tests/unit/tuning_db/data/v1.sql").value()));
  }
  const GcOptions all{.older_than = std::chrono::seconds(0), .include_current = true};
  GcOptions dry = all;
  dry.dry_run = true;
  const GcReport said = take(collect_garbage(path_, dry));
  EXPECT_EQ(scalar("PRAGMA user_version"), 1);
  EXPECT_EQ(take(collect_garbage(path_, all)).removed, said.removed);
  EXPECT_EQ(scalar("PRAGMA user_version"), kSchemaVersion);
}

// After kill -9 all of it is removed or nothing is, with the triggers in place, and doing it again
// completes it.
TEST_F(GcTest, KilledItIsAllOrNothing) {
  {
    Database db = create();
    std::vector<TrialKey> trials;
    for (int i = 0; i < 300; ++i) trials.push_back({gemm(8192, 4096, 4096), heuristic(i)});
    for (const char* sha : {"aaaaaaa", "bbbbbbb"}) {
      sweep(
          db, trials, [](const TrialKey&) { return timed(1000); }, h100(), toolchain(sha));
    }
  }
  const std::string file = bytes_of(path_);
  const std::string before = exported();
  const GcOptions options{.toolchains_but = 1, .back_up = false};
  ASSERT_TRUE(collect_garbage(path_, options));
  const std::string after = exported();
  ASSERT_NE(after, before);
  std::mt19937 random(20261123);
  int undone = 0;
  for (int i = 0; i < f8::testing::cases(12, 300); ++i) {
    remove_database(path_);
    ASSERT_TRUE(write_file_atomic(path_, file));
    const pid_t child = in_child([&] { return collect_garbage(path_, options) ? 0 : 1; });
    ASSERT_GE(child, 0);
    ::usleep(std::uniform_int_distribution<useconds_t>(0, 40'000)(random));
    ::kill(child, SIGKILL);
    ::waitpid(child, nullptr, 0);
    const std::string found = exported();
    ASSERT_TRUE(found == before || found == after) << "a half was found";
    if (found == before) ++undone;
    const auto again = collect_garbage(path_, options);
    ASSERT_TRUE(again) << again.error().message;
    ASSERT_EQ(exported(), after);
  }
  EXPECT_GT(undone, 0) << "some were killed before the end";
}

}  // namespace
}  // namespace f8::tuning_db
