// compare: two databases through the command line, as a gate.
#include <gtest/gtest.h>

#include "tests/unit/cli/run_tool.hpp"
#include "tests/unit/tuning_db/sample.hpp"

namespace f8::testing {
namespace {

namespace db = tuning_db;
using Json = nlohmann::json;
using Words = std::vector<std::string>;

// Two GEMMs and a linear, with times that are multiplied by `factor`. Returns the run's uuid.
std::string make_compared(const Tool& tool, const char* name, double factor,
                          const db::Method& method = db::final_method(),
                          const DeviceClass& device = db::h100(), int64_t m = 8192) {
  auto database = db::Database::open(tool.path() / name, db::OpenMode::kCreate).value();
  return db::sweep(
      database,
      {{db::gemm(m, 4096, 4096), db::generated("128x256s4c2x1w2g8")},
       {db::gemm(m, 1024, 4096), db::heuristic(0)},
       {db::linear({m, 4096, 4096}), {db::Impl::kFloat8, "{}", "ff"}}},
      [&](const db::TrialKey& cell) {
        const bool is_small = cell.problem.shape().n == 1024;
        return cell.problem.op == Op::kLinear ? db::timed(4e5 * factor, 1.25 / factor)
                                              : db::timed(is_small ? 5e4 : 1e5 * factor);
      },
      device, db::toolchain(), method);
}

TEST(CompareCommand, GoldenText) {
  const Tool tool;
  make_compared(tool, "a.db", 1);
  make_compared(tool, "b.db", 1.1);
  const Outcome slower = tool({"compare", "a.db", "b.db"});
  EXPECT_EQ(slower.code, 3);
  EXPECT_EQ(slower.err, "");
  EXPECT_EQ(slower.out,
            "A a.db\n"
            "B b.db\n"
            "problem                                                  A us    B us  B vs A        "
            "interval  verdict  reason\n"
            "linear/tensorwise+fast/e4m3.e4m3.bf16/m8192n4096k4096  400.00  440.00   0.909  "
            "[0.905, 0.914]  SLOWER\n"
            "output/tensorwise+fast/e4m3.e4m3.bf16/m8192n4096k4096  100.00  110.00   0.909  "
            "[0.905, 0.914]  SLOWER\n"
            "3 compared: 0 FASTER, 2 SLOWER, 1 SAME (within 2 %), 0 AMBIGUOUS; geometric mean "
            "0.938\n"
            "only in A 0, only in B 0, of unlike methods 0\n");
  const Outcome faster = tool({"compare", "b.db", "a.db", "--op", "linear"});
  EXPECT_EQ(faster.code, 0);
  EXPECT_TRUE(contains(faster.out, "1 compared: 1 FASTER, 0 SLOWER"));
  EXPECT_EQ(tool({"compare", "a.db", "b.db", "--threshold", "0.2"}).code, 0);
  const Outcome all = tool({"compare", "a.db", "b.db", "--threshold", "0.2", "--all"});
  EXPECT_TRUE(contains(all.out, "m8192n1024k4096"));
}

TEST(CompareCommand, JsonAndCsv) {
  const Tool tool;
  make_compared(tool, "a.db", 1);
  make_compared(tool, "b.db", 0.9);
  const Json faster = tool.json({"compare", "a.db", "b.db", "--csv", "rows.csv"});
  EXPECT_EQ(faster["counts"]["FASTER"], 2);
  EXPECT_EQ(faster["counts"]["SAME"], 1);
  EXPECT_EQ(faster["results"].size(), 3U);
  const Json& one = faster["results"][0];
  EXPECT_EQ(one["op"], "linear");
  EXPECT_EQ(one["verdict"], "FASTER");
  EXPECT_EQ(one["reason"], "");
  EXPECT_NEAR(one["ratio"].get<double>(), 1 / 0.9, 1e-5);
  EXPECT_LT(one["ratio_lo"], one["ratio"]);
  EXPECT_GT(one["ratio_hi"], one["ratio"]);
  EXPECT_EQ(one["a"]["median_us"], 400);
  EXPECT_EQ(one["b"]["median_us"], 360);
  EXPECT_EQ(one["b"]["provenance"]["power_limit_w"], 700);
  const std::string csv = read_file(tool.path() / "rows.csv").value();
  EXPECT_TRUE(csv.starts_with("problem,op,recipe,m,n,k,a,b,ratio,ratio_lo,ratio_hi,verdict,"));
  EXPECT_TRUE(contains(csv, "linear,tensorwise,8192,4096,4096,400.00,360.00,1.11111,"));
  const Outcome streamed = tool({"compare", "a.db", "b.db", "--csv", "-"});
  EXPECT_EQ(streamed.out, csv);
  tool.expect_refused(1, {"compare", "a.db", "b.db", "--csv", "-", "--json"}, {"--csv"});
  const Json speedups = tool.json({"compare", "a.db", "b.db", "--by", "speedup"});
  EXPECT_EQ(speedups["results"].size(), 1U);
  EXPECT_EQ(speedups["results"][0]["verdict"], "FASTER");
}

TEST(CompareCommand, RunsOfOneDatabase) {
  const Tool tool;
  const std::string before = make_compared(tool, "a.db", 1);
  const std::string after = make_compared(tool, "a.db", 1.5);
  const Outcome outcome = tool({"compare", "a.db", "a.db", "--run-a", before, "--run-b", after});
  EXPECT_EQ(outcome.code, 3);
  EXPECT_TRUE(contains(outcome.out, "2 SLOWER"));
  tool.expect_refused(1, {"compare", "a.db", "./a.db"}, {"a.db", "itself", "--run-a"});
  tool.expect_refused(1, {"compare", "a.db", "a.db", "--run-a", "zz"}, {"--run-a", "db info"});
}

TEST(CompareCommand, UnlikeMethodsAreNamed) {
  const Tool tool;
  make_compared(tool, "a.db", 1);
  make_compared(tool, "b.db", 1, {"final", R"({"name":"final-v1","blocks":24})"});
  tool.expect_refused(1, {"compare", "a.db", "b.db"},
                      {"a.db", "b.db", "unlike methods", "blocks is 12 and 24", "sweep"});
  make_compared(tool, "b.db", 1, db::final_method(), db::h100(), 4096);
  make_compared(tool, "a.db", 1, db::final_method(), db::h100(), 4096);
  const Outcome some = tool({"compare", "a.db", "b.db"});
  EXPECT_EQ(some.code, 0);
  EXPECT_TRUE(contains(some.out, "of unlike methods 3"));
  EXPECT_TRUE(contains(some.err, "3 problems are measured by unlike methods"));
}

TEST(CompareCommand, NothingToCompareIsOneMessage) {
  const Tool tool;
  make_compared(tool, "a.db", 1);
  { ASSERT_TRUE(db::Database::open(tool.path() / "empty.db", db::OpenMode::kCreate)); }
  tool.expect_refused(1, {"compare", "a.db", "empty.db"}, {"empty.db", "no final", "sweep"});
  make_compared(tool, "b.db", 1, db::final_method(), db::h100(), 4096);
  tool.expect_refused(1, {"compare", "a.db", "b.db"}, {"no problem in common", "m4096", "m8192"});
  tool.expect_refused(1, {"compare", "a.db", "none.db"}, {"none.db"});
  tool.expect_refused(1, {"compare", "a.db", "-"}, {"db export -o -"});
  tool.expect_refused(1, {"compare", "a.db"}, {"b is required", "--help"});
  tool.expect_refused(1, {"compare", "a.db", "b.db", "--op", "gemm"}, {"--op"});
  tool.expect_refused(1, {"compare", "a.db", "b.db", "--recipe", "fp9"}, {"--recipe"});
  tool.expect_refused(1, {"compare", "a.db", "b.db", "--threshold", "-1"}, {"--threshold"});
}

TEST(CompareCommand, DevicesAndPowerLimits) {
  const Tool tool;
  make_compared(tool, "a.db", 1);
  make_compared(tool, "capped.db", 2, db::final_method(), db::h100(500));
  const Json capped = tool.json({"compare", "a.db", "capped.db"});
  EXPECT_EQ(capped["counts"]["AMBIGUOUS"], 3);
  EXPECT_EQ(capped["results"][0]["reason"], "other power limits: 700 W and 500 W");
  DeviceClass h200 = db::h100();
  h200.name = "NVIDIA H200";
  make_compared(tool, "h200.db", 0.8, db::final_method(), h200);
  tool.expect_refused(1, {"compare", "a.db", "h200.db"}, {"--device-a", "H100", "H200"});
  const Json across =
      tool.json({"compare", "a.db", "h200.db", "--device-a", "H100", "--device-b", "H200"});
  EXPECT_EQ(across["counts"]["FASTER"], 2);
}

TEST(CompareCommand, TwoPartsOfOneDatabaseHaveTheirNames) {
  const Tool tool;
  DeviceClass h200 = db::h100();
  h200.name = "NVIDIA H200";
  make_compared(tool, "both.db", 1);
  make_compared(tool, "both.db", 0.8, db::final_method(), h200);
  const Words devices = {"--device-a", "H100", "--device-b", "H200"};
  const auto compared = [&](const char* file, const Words& more) {
    Words words = {"compare", file, file};
    words.insert(words.end(), devices.begin(), devices.end());
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const Json across = tool.json(compared("both.db", {}));
  EXPECT_EQ(across["a"], "both.db");
  EXPECT_EQ(across["a_name"], "both.db, device H100");
  EXPECT_EQ(across["b_name"], "both.db, device H200");
  EXPECT_TRUE(tool(compared("both.db", {}))
                  .out.starts_with("A both.db, device H100\nB both.db, device H200\n"));
  // The built-in devices were measured by unlike methods in part.
  const Outcome parts = tool(compared("built-in", {"--op", "linear"}));
  EXPECT_TRUE(contains(parts.err, "measured by unlike methods"));
  for (const char* name : {"in built-in, device H100", "in built-in, device H200"}) {
    EXPECT_TRUE(contains(parts.err, name)) << parts.err;
  }
  tool.expect_refused(1, compared("built-in", {"--run-b", "ffffffff"}), {"--run-b", "db info"});
}

// Under --strict a gate fails that decided nothing, and only then.
TEST(CompareCommand, StrictFailsWhereAllAreAmbiguous) {
  const Tool tool;
  make_compared(tool, "a.db", 1);
  make_compared(tool, "capped.db", 1, db::final_method(), db::h100(500));
  EXPECT_EQ(tool({"compare", "a.db", "capped.db"}).code, 0);
  const Outcome strict = tool({"compare", "a.db", "capped.db", "--strict"});
  EXPECT_EQ(strict.code, 3);
  EXPECT_TRUE(contains(strict.out, "3 AMBIGUOUS"));
  EXPECT_EQ(strict.err,
            "--strict: all 3 problems are AMBIGUOUS (the first: other power limits: 700 W and 500 "
            "W); sweep both sides again under equal conditions, or raise --threshold\n");
  const Outcome data = tool({"compare", "a.db", "capped.db", "--strict", "--json", "--quiet"});
  EXPECT_EQ(data.code, 3);
  EXPECT_EQ(data.err, "");
  EXPECT_EQ(data.json()["undecided"], true);
  // One that is decided is enough.
  make_compared(tool, "b.db", 1);
  EXPECT_EQ(tool({"compare", "a.db", "b.db", "--strict"}).code, 0);
  EXPECT_EQ(tool.json({"compare", "a.db", "b.db", "--strict"})["undecided"], false);
}

TEST(CompareCommand, HelpHasAnExampleAndTheExitCodes) {
  const Tool tool;
  const Outcome help = tool({"compare", "--help"});
  EXPECT_TRUE(contains(help.out, "Examples:\n  float8-tune compare before.f8db after.f8db"));
  EXPECT_TRUE(contains(help.out, "Exit code: 3 with any SLOWER"));
}

}  // namespace
}  // namespace f8::testing
