// The accuracy of attention's trials: kept with them, in a file, an export and an import, and nowhere else.
#include "recipes/attention.hpp"
#include "sample.hpp"
#include "tuning_db/file/sqlite.hpp"

namespace f8::tuning_db {
namespace {

const std::vector<Accuracy> kAccuracy = {{"normal", "O", 26.5, 0.998, 1.0 / 3},
                                         {"outlier", "dQ", 19.7, 0.9, 1e-5}};

class AccuracyTest : public ::testing::Test {
 protected:
  static Problem attention() {
    return attention_problem(Op::kAttention, AttentionRecipe::kFp8,
                             {.tokens = 128, .heads_q = 4, .heads_kv = 2})
        .value();
  }
  static TrialResult measured(std::vector<Accuracy> accuracy) {
    return {.timing = Timing{.n = 9, .median_ns = 5, .ci_lo_ns = 4, .ci_hi_ns = 6},
            .accuracy = std::move(accuracy)};
  }
  // A finished run of one trial; the error of its result where it has one.
  Status write(Database& db, const Problem& problem, const TrialResult& result) {
    const Candidate candidate{Impl::kFloat8, R"({"kernels":"tuned"})", ""};
    const auto run = db.begin_run({"test"}, 1, h100(), "unit", toolchain(), final_method(),
                                  {{problem, candidate}});
    const auto pending = db.resume_run(run.value().uuid).value();
    EXPECT_TRUE(db.start_trial(pending.front()));
    const Status finished = db.finish_trial(pending.front(), result);
    EXPECT_TRUE(db.end_run(run->uuid, "done"));
    return finished;
  }
  TempFolder folder_;
};

TEST_F(AccuracyTest, IsReadBackFromAFileAndAnExport) {
  auto db = Database::open(folder_ / "a.db", OpenMode::kCreate).value();
  const Status written = write(db, attention(), measured(kAccuracy));
  ASSERT_TRUE(written) << written.error().message;
  const auto rows = db.trials(attention()).value();
  ASSERT_EQ(rows.size(), 1U);
  EXPECT_EQ(rows.front().result.accuracy, kAccuracy);
  EXPECT_TRUE(db.check());
  const std::string text = db.to_jsonl().value();
  auto other = Database::open(folder_ / "b.db", OpenMode::kCreate).value();
  ASSERT_TRUE(other.import_jsonl(text, "text"));
  EXPECT_EQ(other.trials(attention()).value().front().result.accuracy, kAccuracy);
  EXPECT_EQ(other.to_jsonl().value(), text);
  EXPECT_EQ(other.import_jsonl(text, "text")->added, 0);
}

TEST_F(AccuracyTest, IsRefusedWhereItCannotBe) {
  auto db = Database::open(folder_ / "a.db", OpenMode::kCreate).value();
  const auto refused = [&](const Problem& problem, std::vector<Accuracy> accuracy,
                           std::string_view words) {
    const Status written = write(db, problem, measured(std::move(accuracy)));
    ASSERT_FALSE(written) << words;
    EXPECT_NE(written.error().message.find(words), std::string::npos) << written.error().message;
  };
  refused(gemm(8192, 4096, 4096), kAccuracy, "trials of attention have");
  refused(attention(), {{"", "O", 1, 1, 0}}, "names no data");
  refused(attention(), {kAccuracy[0], kAccuracy[0]}, "given twice");
  refused(attention(), {{"normal", "O", 1, 2, 0}}, "cosine");
  refused(attention(), {{"normal", "O", 1, 1, -1}}, "rmse");
  refused(attention(), {{"normal", "O", std::nan(""), 1, 1}}, "sqnr_db is not finite");
}

TEST_F(AccuracyTest, ABadLineOfAnImportAddsNothing) {
  auto db = Database::open(folder_ / "a.db", OpenMode::kCreate).value();
  ASSERT_TRUE(write(db, attention(), measured({kAccuracy[0]})));
  const std::string text = db.to_jsonl().value();
  auto other = Database::open(folder_ / "b.db", OpenMode::kCreate).value();
  const auto refused = [&](const std::string& from, const std::string& to, std::string_view words) {
    std::string bad = text;
    ASSERT_NE(bad.find(from), std::string::npos) << from;
    bad.replace(bad.find(from), from.size(), to);
    const auto added = other.import_jsonl(bad, "rows.jsonl");
    ASSERT_FALSE(added) << words;
    EXPECT_NE(added.error().message.find(words), std::string::npos) << added.error().message;
    EXPECT_TRUE(other.trials(attention()).value().empty());
  };
  refused("\"sqnr_db\":26.5", "\"sqnr\":26.5", "\"sqnr_db\" is missing");
  refused("\"cosine\":0.998", "\"cosine\":\"0.998\"", "\"cosine\" is not a number");
  refused("\"accuracy\":[{", "\"accuracy\":[7,{", "no object");
  refused("\"accuracy\":[", "\"accuracy\":{\"a\":[", "rows.jsonl:");
  refused("\"tensor\":\"O\"", "\"tensor\":\"\"", "no tensor");
  refused("d128causal1", "d96causal1", "64, 128 and 256");
}

// As a program writes it that does not know how keys are made.
TEST_F(AccuracyTest, ImportedRecordsMayHaveLabels) {
  auto db = Database::open(folder_ / "a.db", OpenMode::kCreate).value();
  ASSERT_TRUE(write(db, attention(), measured(kAccuracy)));
  const std::string text = db.to_jsonl().value();
  std::string labelled = text;
  const auto replace = [&](const std::string& from, const std::string& to) {
    for (size_t at = 0; (at = labelled.find(from, at)) != std::string::npos;) {
      labelled.replace(at, from.size(), to);
    }
  };
  replace(key(h100()), "@device");
  replace(final_method().key(), "@method");
  EXPECT_NE(labelled, text);
  auto other = Database::open(folder_ / "b.db", OpenMode::kCreate).value();
  const auto added = other.import_jsonl(labelled, "text");
  ASSERT_TRUE(added) << added.error().message;
  EXPECT_EQ(other.to_jsonl().value(), text);
  EXPECT_EQ(other.import_jsonl(labelled, "text")->known, 1);

  replace("\"device\":\"@device\",\"method\"", "\"device\":\"@other\",\"method\"");
  const auto unknown = other.import_jsonl(labelled, "text");
  ASSERT_FALSE(unknown);
  EXPECT_NE(unknown.error().message.find("device @other, which has no record"), std::string::npos)
      << unknown.error().message;
}

TEST_F(AccuracyTest, OfAFinishedTrialNeverChanges) {
  {
    auto db = Database::open(folder_ / "a.db", OpenMode::kCreate).value();
    ASSERT_TRUE(write(db, attention(), measured(kAccuracy)));
  }
  auto raw = Connection::open(folder_ / "a.db", SQLITE_OPEN_READWRITE).value();
  EXPECT_EQ(raw->scalar("SELECT count(*) FROM accuracy WHERE checksum <> 0").value(), 2);
  EXPECT_FALSE(raw->exec("UPDATE accuracy SET sqnr_db = 99"));
  EXPECT_FALSE(raw->exec("DELETE FROM accuracy"));
}

}  // namespace
}  // namespace f8::tuning_db
