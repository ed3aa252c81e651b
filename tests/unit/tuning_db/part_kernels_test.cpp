// The kernels that a trial of an operation of several parts took: rows of their own that live and die
// with their trial.
#include <algorithm>

#include "base/log.hpp"
#include "hostile.hpp"
#include "sample.hpp"
#include "tuning_db/file/sqlite.hpp"
#include "tuning_db/gc/gc.hpp"

namespace f8::tuning_db {
namespace {

const std::vector<PartKernel> kTaken = {{"output", Provider::kGenerated, "128x256s4c2x1w2g8"},
                                        {"grad_input", Provider::kCublasLt, "h3"},
                                        {"grad_weight", Provider::kGenerated, "64x256s5c1x1w1g16"}};

class PartKernels : public ::testing::Test {
 protected:
  PartKernels() : path_(folder_ / "t.db") {
    set_log_sink([](LogLevel, std::string_view) {});
  }
  ~PartKernels() override { set_log_sink({}); }

  // A linear that took these kernels, and one that says nothing of them.
  void measure(const Method& method = final_method()) const {
    Database db = take(Database::open(path_, OpenMode::kCreate));
    sweep(
        db, {{problem_, {Impl::kFloat8, "{}", "ff"}}, {problem_, {Impl::kBf16, "{}", ""}}},
        [](const TrialKey& key) {
          TrialResult result = timed(1000);
          if (key.candidate.impl == Impl::kFloat8) result.kernels = kTaken;
          return result;
        },
        h100(), toolchain(), method);
  }
  std::vector<PartKernel> taken(const Database& db) const {
    for (const TrialRow& row : take(db.trials(problem_))) {
      if (row.candidate.impl == Impl::kFloat8) return row.result.kernels;
      EXPECT_TRUE(row.result.kernels.empty());
    }
    return {};
  }
  int64_t scalar(const char* sql) const {
    return Connection::open(path_, SQLITE_OPEN_READONLY).value()->scalar(sql).value();
  }

  const Problem problem_ = linear({8192, 4096, 4096});
  TempFolder folder_;
  fs::path path_;
};

TEST_F(PartKernels, AreReadInTheOrderOfTheParts) {
  measure();
  const Database db = take(Database::open(path_, OpenMode::kReadOnly));
  EXPECT_EQ(taken(db), kTaken);
  EXPECT_TRUE(db.check());
  EXPECT_EQ(scalar("SELECT count(*) FROM trial_kernel WHERE checksum <> 0"), 3);
}

TEST_F(PartKernels, AMergeAndAnImportTakeThemOnce) {
  measure();
  Database merged = take(Database::open(folder_ / "merged.db", OpenMode::kCreate));
  for (const int64_t added : {2, 0}) {
    EXPECT_EQ(take(merged.merge_from(path_)).added, added);
    EXPECT_EQ(taken(merged), kTaken);
  }
  const std::string text = take(merged.to_jsonl());
  Database imported = take(Database::open(folder_ / "imported.db", OpenMode::kCreate));
  for (const int64_t added : {2, 0}) {
    EXPECT_EQ(take(imported.import_jsonl(text, "text")).added, added);
    EXPECT_EQ(taken(imported), kTaken);
  }
  EXPECT_EQ(take(imported.to_jsonl()), text);
}

// A copy finished the trial that was only planned here.
TEST_F(PartKernels, CompleteATrialThatWasPlanned) {
  Database db = take(Database::open(path_, OpenMode::kCreate));
  const TrialKey key = {problem_, {Impl::kFloat8, "{}", "ff"}};
  const RunInfo run =
      take(db.begin_run({"sweep"}, 1, h100(), "GPU-1", toolchain(), final_method(), {key}));
  ASSERT_TRUE(db.end_run(run.uuid, "interrupted"));
  ASSERT_TRUE(db.export_db(folder_ / "copy.db"));
  Database copy = take(Database::open(folder_ / "copy.db", OpenMode::kReadWrite));
  TrialResult result = timed(1000);
  result.kernels = kTaken;
  const PendingTrial trial = take(copy.resume_run(run.uuid)).at(0);
  ASSERT_TRUE(copy.finish_trial(trial, result));
  EXPECT_FALSE(copy.finish_trial(trial, result)) << "once";
  EXPECT_EQ(take(db.merge_from(folder_ / "copy.db")).added, 1);
  EXPECT_EQ(taken(db), kTaken);
}

TEST_F(PartKernels, OfOtherPartsAreRefusedAndNothingIsWritten) {
  Database db = take(Database::open(path_, OpenMode::kCreate));
  const Problem output = gemm(8192, 4096, 4096);
  const RunInfo run = take(db.begin_run(
      {"sweep"}, 1, h100(), "GPU-1", toolchain(), final_method(),
      {{problem_, {Impl::kFloat8, "{}", "ff"}}, {output, generated("128x256s4c2x1w2g8")}}));
  const std::vector<PendingTrial> trials = take(db.resume_run(run.uuid));
  const auto refused = [&](const PendingTrial& trial, const std::vector<PartKernel>& kernels,
                           const char* message) {
    TrialResult result = timed(1000);
    result.kernels = kernels;
    const Status status = db.finish_trial(trial, result);
    ASSERT_FALSE(status);
    EXPECT_NE(status.error().message.find(message), std::string::npos) << status.error().message;
  };
  refused(trials[0], {kTaken[0]}, "those of output, grad_input, grad_weight, not of 'output'");
  refused(trials[0], {kTaken[1], kTaken[0], kTaken[2]}, "not of 'grad_input, output");
  refused(trials[1], {kTaken[0]}, "the kernels of output are those of ");
  EXPECT_EQ(scalar("SELECT count(*) FROM trial_kernel"), 0);
  EXPECT_EQ(take(db.runs()).at(0).done, 0);
}

TEST_F(PartKernels, AreNeverChanged) {
  measure();
  auto db = Connection::open(path_, SQLITE_OPEN_READWRITE).value();
  EXPECT_FALSE(db->exec("UPDATE trial_kernel SET config = 'h4'"));
  EXPECT_FALSE(db->exec("DELETE FROM trial_kernel"));
  EXPECT_FALSE(
      db->exec("INSERT INTO trial_kernel (trial_id, part, provider, config) "
               "SELECT trial_id, part, provider, config FROM trial_kernel"));
  ASSERT_TRUE(db->exec("DROP TRIGGER trial_kernel_is_final"));
  ASSERT_TRUE(db->exec("UPDATE trial_kernel SET config = 'h4' WHERE part = 'grad_input'"));
  ASSERT_TRUE(
      db->exec("CREATE TRIGGER trial_kernel_is_final BEFORE UPDATE ON trial_kernel "
               "WHEN OLD.checksum = NEW.checksum BEGIN SELECT RAISE(ABORT, "
               "'a finished trial is never changed'); END"));
  db.reset();
  const auto opened = Database::open(path_, OpenMode::kReadOnly);
  ASSERT_FALSE(opened);
  EXPECT_NE(opened.error().message.find("table trial_kernel is not as float8 wrote it"),
            std::string::npos)
      << opened.error().message;
}

TEST_F(PartKernels, GoWithTheirTrial) {
  measure({"screen", "{}"});
  ASSERT_EQ(scalar("SELECT count(*) FROM trial_kernel"), 3);
  const auto report = collect_garbage(path_, {});
  ASSERT_TRUE(report) << report.error().message;
  EXPECT_EQ(scalar("SELECT count(*) FROM trial_kernel"), 0);
  EXPECT_TRUE(take(Database::open(path_, OpenMode::kReadOnly)).check());
}

}  // namespace
}  // namespace f8::tuning_db
