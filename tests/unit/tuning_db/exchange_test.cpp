// Merge, export and import: idempotent, order-free, all or nothing; equal data gives equal bytes.
#include <algorithm>
#include <sstream>

#include "base/hash.hpp"
#include "sample.hpp"

namespace f8::tuning_db {
namespace {

class ExchangeTest : public ::testing::Test {
 protected:
  Database make(const char* name) {
    return Database::open(folder_ / name, OpenMode::kCreate).value();
  }

  std::string exported(const Database& db) {
    const Status status = db.export_jsonl(folder_ / "export.jsonl");
    EXPECT_TRUE(status) << (status ? "" : status.error().message);
    return bytes_of(folder_ / "export.jsonl");
  }

  // Two shards that share a device, a problem and a candidate.
  void fill_shards() {
    Database a = make("a.db");
    Database b = make("b.db");
    sweep(a,
          {{gemm(8192, 4096, 4096), heuristic(0)}, {gemm(8192, 4096, 4096), generated("128x256")}},
          [](const TrialKey&) { return timed(100'000); });
    sweep(b, {{gemm(8192, 4096, 4096), heuristic(0)}, {gemm(16, 16, 16), heuristic(3)}},
          [](const TrialKey& c) {
            return c.problem.shape().m == 16
                       ? TrialResult{.state = TrialState::kCompileError, .reason = "C7510 \"x\"\n"}
                       : timed(1e5 / 3, 4.0 / 3);
          });
    sweep_linears(
        b, "rowwise", {{8192, 4096, 4096}}, [](Shape) { return 1e6; }, [](Shape) { return 1.25; },
        h100(500));
  }

  TempFolder folder_;
};

TEST_F(ExchangeTest, MergeIsIdempotentAndOrderFree) {
  fill_shards();
  Database ab = make("ab.db");
  Database ba = make("ba.db");
  EXPECT_EQ(ab.merge_from(folder_ / "a.db").value().added, 2);
  const auto second = ab.merge_from(folder_ / "b.db").value();
  EXPECT_EQ(second.added, 4);
  EXPECT_EQ(second.known, 0);
  ASSERT_TRUE(ba.merge_from(folder_ / "b.db"));
  ASSERT_TRUE(ba.merge_from(folder_ / "a.db"));
  const std::string text = exported(ab);
  EXPECT_EQ(text, exported(ba));

  const auto again = ab.merge_from(folder_ / "b.db").value();
  EXPECT_EQ(again.added, 0);
  EXPECT_EQ(again.known, 4);
  EXPECT_EQ(ab.merge_from(folder_ / "ab.db").value().added, 0);
  EXPECT_EQ(exported(ab), text);
  EXPECT_TRUE(ab.check());
  // Into one of the shards as well.
  Database a = Database::open(folder_ / "a.db", OpenMode::kReadWrite).value();
  EXPECT_EQ(a.merge_from(folder_ / "b.db").value().added, 4);
  EXPECT_EQ(exported(a), text);
}

TEST_F(ExchangeTest, ExpertsTravelBesideLinearsOfTheirShape) {
  const Shape shape = {4096, 1024, 2048};
  const Problem zipf = experts(Op::kLinear, shape, {16, kZipf});
  const Problem even = experts(Op::kLinear, shape, {16, kEven});
  Database a = make("a.db");
  sweep_experts(a, {zipf, even}, 1.3);
  sweep_linears(
      a, "rowwise", {shape}, [](Shape) { return 1e6; }, [](Shape) { return 1.1; });
  EXPECT_TRUE(a.check());
  const std::string text = exported(a);
  EXPECT_NE(text.find("experts/rowwise+fast/e4m3.e4m3.bf16/e16m4096n1024k2048skew1"),
            std::string::npos);
  Database b = make("b.db");
  ASSERT_TRUE(b.import_jsonl(folder_ / "export.jsonl"));
  EXPECT_EQ(exported(b), text);
  Database c = make("c.db");
  ASSERT_TRUE(c.merge_from(folder_ / "a.db"));
  EXPECT_EQ(exported(c), text);
  for (const Database* db : {&a, &b, &c}) {
    const auto rows = take(db->linears("rowwise", Impl::kFloat8, Op::kExperts));
    ASSERT_EQ(rows.size(), 2u);
    EXPECT_EQ(rows[0].problem, even);
    EXPECT_EQ(rows[1].problem, zipf);
    EXPECT_EQ(take(db->linears("rowwise")).size(), 1u);
    EXPECT_TRUE(take(db->gemms(Impl::kGenerated)).empty()) << "grouped ones are not among them";
    const TuningTable table = take(db->table());
    EXPECT_EQ(table.speedups().size(), 1u);
    ASSERT_EQ(table.choices().size(), 6u);
    for (const KernelChoice& choice : table.choices()) {
      EXPECT_EQ(config_text(choice.kernel), "64x256s4c1x1w1g8") << "what the fastest whole took";
    }
    EXPECT_EQ(TuningTable::parse(table.serialize()).value().choices(), table.choices());
  }
}

TEST_F(ExchangeTest, OnlyFinishedTrialsTravelAndTheirRunCannotBeResumed) {
  Database a = make("a.db");
  const RunInfo run =
      a.begin_run({}, ~uint64_t{0}, h100(), "GPU-1", toolchain(), final_method(),
                  {{gemm(16, 16, 16), heuristic(0)}, {gemm(16, 16, 16), heuristic(1)}})
          .value();
  const auto pending = a.resume_run(run.uuid).value();
  ASSERT_TRUE(a.finish_trial(pending[0], timed(10)));
  ASSERT_TRUE(a.start_trial(pending[1]));
  Database b = make("b.db");
  EXPECT_EQ(b.merge_from(folder_ / "a.db").value().added, 1);
  EXPECT_EQ(b.runs().value().at(0).state, "imported");
  const auto resumed = b.resume_run(run.uuid);
  ASSERT_FALSE(resumed);
  EXPECT_NE(resumed.error().message.find("imported"), std::string::npos);
  EXPECT_NE(exported(b).find("\"seed\":18446744073709551615"), std::string::npos);
  // Finished later, the rest follows.
  ASSERT_TRUE(a.finish_trial(pending[1], timed(20)));
  EXPECT_EQ(b.merge_from(folder_ / "a.db").value().added, 1);
  EXPECT_EQ(exported(a), exported(b));
}

TEST_F(ExchangeTest, ACopyThatWentOnCompletesTheOriginal) {
  Database a = make("a.db");
  const RunInfo run = a.begin_run({}, 0, h100(), "GPU-1", toolchain(), final_method(),
                                  {{gemm(16, 16, 16), heuristic(0)}})
                          .value();
  ASSERT_TRUE(a.export_db(folder_ / "copy.db"));
  Database copy = Database::open(folder_ / "copy.db", OpenMode::kReadWrite).value();
  const auto pending = copy.resume_run(run.uuid).value();
  ASSERT_TRUE(copy.finish_trial(pending.at(0), timed(10)));
  EXPECT_EQ(a.merge_from(folder_ / "copy.db").value().added, 1);
  EXPECT_TRUE(a.resume_run(run.uuid).value().empty());
  EXPECT_EQ(exported(a), exported(copy));
}

TEST_F(ExchangeTest, TwoResultsOfOneTrialAreRefused) {
  Database a = make("a.db");
  const RunInfo run = a.begin_run({}, 0, h100(), "GPU-1", toolchain(), final_method(),
                                  {{gemm(16, 16, 16), heuristic(0)}})
                          .value();
  const auto pending = a.resume_run(run.uuid).value();
  ASSERT_TRUE(a.export_db(folder_ / "copy.db"));
  Database copy = Database::open(folder_ / "copy.db", OpenMode::kReadWrite).value();
  ASSERT_TRUE(a.finish_trial(pending.at(0), timed(10)));
  ASSERT_TRUE(copy.finish_trial(pending.at(0), timed(11)));
  const std::string before = exported(a);
  const auto merged = a.merge_from(folder_ / "copy.db");
  ASSERT_FALSE(merged);
  EXPECT_NE(merged.error().message.find(pending.at(0).uuid), std::string::npos);
  EXPECT_EQ(exported(a), before);
}

TEST_F(ExchangeTest, JsonlRoundTrips) {
  fill_shards();
  Database ab = make("ab.db");
  ASSERT_TRUE(ab.merge_from(folder_ / "a.db"));
  ASSERT_TRUE(ab.merge_from(folder_ / "b.db"));
  const std::string text = exported(ab);
  Database c = make("c.db");
  EXPECT_EQ(c.import_jsonl(folder_ / "export.jsonl").value().added, 6);
  EXPECT_TRUE(c.check());
  EXPECT_EQ(exported(c), text);
  EXPECT_EQ(c.import_jsonl(folder_ / "export.jsonl").value().added, 0);
  // Doubles come back bit for bit.
  const auto rows = c.trials(gemm(8192, 4096, 4096)).value();
  EXPECT_EQ(rows.at(0).result.timing->median_ns, 1e5 / 3);
  EXPECT_EQ(rows.at(0).result.ratio->ratio, 4.0 / 3);
  EXPECT_EQ(c.trials(gemm(16, 16, 16)).value().at(0).result.reason, "C7510 \"x\"\n");

  // One line a record, each kind once, and no name of the GPU or of a folder.
  EXPECT_EQ(std::ranges::count(text, '\n'), 1 + 2 + 1 + 1 + 3 + 6);
  EXPECT_EQ(text.find("GPU-1"), std::string::npos);
  EXPECT_EQ(text.substr(0, text.find('\n')), "{\"float8_tuning_db\":3}");
}

TEST_F(ExchangeTest, FoldersOfTheMachineStayThere) {
  Database a = make("a.db");
  const RunInfo run =
      a.begin_run({"/opt/x/float8-tune", "sweep", "--db=/home/me/t.db", "-o", "a/b"}, 0, h100(),
                  "u", toolchain(), final_method(), {{gemm(16, 16, 16), heuristic(0)}})
          .value();
  ASSERT_TRUE(a.finish_trial(a.resume_run(run.uuid).value().at(0), timed(10)));
  EXPECT_NE(exported(a).find(R"("argv":["float8-tune","sweep","--db=t.db","-o","a/b"])"),
            std::string::npos);
  // The copy made from the text still is the same run.
  Database b = make("b.db");
  ASSERT_TRUE(b.import_jsonl(folder_ / "export.jsonl"));
  EXPECT_EQ(b.merge_from(folder_ / "a.db").value().known, 1);
}

TEST_F(ExchangeTest, RecordsComeInAnyOrderAndJoinedFilesAreFiles) {
  fill_shards();
  Database a = Database::open(folder_ / "a.db", OpenMode::kReadOnly).value();
  Database b = Database::open(folder_ / "b.db", OpenMode::kReadOnly).value();
  std::vector<std::string> lines;
  std::istringstream in(exported(a) + "\n" + exported(b));
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  std::reverse(lines.begin() + 1, lines.end());
  std::string joined;
  for (const std::string& line : lines) joined += line + "\n";
  ASSERT_TRUE(write_file_atomic(folder_ / "joined.jsonl", joined));
  Database c = make("c.db");
  const auto count = c.import_jsonl(folder_ / "joined.jsonl");
  ASSERT_TRUE(count) << count.error().message;
  EXPECT_EQ(count->added, 6);
  Database ab = make("ab.db");
  ASSERT_TRUE(ab.merge_from(folder_ / "a.db"));
  ASSERT_TRUE(ab.merge_from(folder_ / "b.db"));
  EXPECT_EQ(exported(c), exported(ab));
}

TEST_F(ExchangeTest, BadTextIsRefusedByLineAndNothingIsAdded) {
  fill_shards();
  const std::string good = exported(Database::open(folder_ / "a.db", OpenMode::kReadOnly).value());
  Database c = make("c.db");
  const auto refused = [&](const std::string& text, const std::string& message) {
    ASSERT_TRUE(write_file_atomic(folder_ / "bad.jsonl", text));
    const auto count = c.import_jsonl(folder_ / "bad.jsonl");
    ASSERT_FALSE(count) << message;
    EXPECT_NE(count.error().message.find(message), std::string::npos) << count.error().message;
    EXPECT_NE(count.error().message.find("bad.jsonl"), std::string::npos);
    EXPECT_EQ(count.error().message.find('\n'), std::string::npos);
    EXPECT_TRUE(c.runs().value().empty());
    EXPECT_TRUE(c.devices().value().empty());
  };
  const auto replaced = [&](std::string from, const std::string& to) {
    std::string text = good;
    const size_t at = text.find(from);
    EXPECT_NE(at, std::string::npos) << from;
    return text.replace(at, from.size(), to);
  };
  refused("", "header");
  refused("hello\n", ":1: not a JSON object");
  refused("[]\n", ":1: not a JSON object");
  refused(std::string("SQLite format 3\0 ...", 20), "is a database; `float8-tune db merge`");
  refused("float8-table 4\n", "is a tuning table");
  refused("float8-filter 2\n", "is a filter file");
  refused("{\"x\":1}\n", "not a float8 tuning export");
  refused("{\"float8_tuning_db\":4}\n", "format is 4");
  refused(good.substr(0, good.size() - 40), "cut off");
  refused(good + "{\"y\":1}\n", "names its kind");
  refused(replaced("\"power_limit_w\":700", "\"power_limit_w\":650"), "changed by hand");
  refused(replaced("\"power_limit_w\":700", "\"power_limit_w\":\"700\""), "not an integer");
  refused(replaced("\"power_limit_w\":700", "\"power_limit_w\":1e99"), "not an integer");
  refused(replaced("\"sm_count\":132", "\"sm_count\":99999999999"), "out of range");
  refused(replaced("\"state\":\"ok\"", "\"state\":\"good\""), "no state");
  refused(replaced("\"state\":\"ok\"", "\"state\":\"planned\""), "terminal");
  refused(replaced("\"median_ns\":100000.0", "\"median_ns\":5"), "outside");
  refused(replaced("m8192", "m0"), "problem key");
  refused(replaced("\"impl\":\"cublaslt\"", "\"impl\":\"cublaslt+bias\""),
          "unknown implementation 'cublaslt+bias'");
  refused(replaced("\"impl\"", "\"kernels\":{\"output\":\"cublaslt:h3\"},\"impl\""),
          "not of the 0 parts of output");
  refused(replaced("\"problem\":\"output", "\"problem\":\"convolution"),
          "unknown op 'convolution'");
  refused(replaced("\"impl\"", "\"screened_ns\":-1.0,\"impl\""), "screened_ns");
  refused(replaced("\"attempt\":0,", ""), "\"attempt\" is missing");
  refused(replaced("\"attempt\":0", "\"attempt\":-1"), "attempt is -1");
  // A reference without its record.
  std::string dangling = good;
  const size_t device = dangling.find("{\"cc\"");
  dangling.erase(device, dangling.find('\n', device) - device + 1);
  refused(dangling, "export the database again");
}

TEST_F(ExchangeTest, ExportIsAtomic) {
  Database a = make("a.db");
  ASSERT_TRUE(write_file_atomic(folder_ / "out.jsonl", "old"));
  ASSERT_TRUE(a.export_jsonl(folder_ / "out.jsonl"));
  EXPECT_EQ(bytes_of(folder_ / "out.jsonl"), "{\"float8_tuning_db\":3}\n");
  EXPECT_FALSE(a.export_jsonl(folder_ / "no" / "out.jsonl"));
  EXPECT_FALSE(a.export_db(folder_ / "no" / "out.db"));
}

TEST_F(ExchangeTest, MergingWhatIsNoDatabaseChangesNothing) {
  Database a = make("a.db");
  ASSERT_TRUE(write_file_atomic(folder_ / "x.db", "garbage"));
  EXPECT_FALSE(a.merge_from(folder_ / "x.db"));
  EXPECT_FALSE(a.merge_from(folder_ / "missing.db"));
  EXPECT_FALSE(fs::exists(folder_ / "missing.db"));
  EXPECT_TRUE(a.runs().value().empty());
}

}  // namespace
}  // namespace f8::tuning_db
