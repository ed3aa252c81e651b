// verify-dist on emulated ranks: what it finds, how it says so, and what it refuses.
#include <gtest/gtest.h>

#include <set>

#include "base/file.hpp"
#include "tests/unit/cli/run_tool.hpp"
#include "tuning_db/estimate/tuning_table.hpp"

namespace f8::testing {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

const Words kTwo = {"verify-dist", "--emulate", "--ranks", "2"};

const std::set<std::string> kSharded = {"kernels", "scales",  "copies",   "y",       "dx",
                                        "dw",      "batch y", "batch dx", "batch dw"};
const std::set<std::string> kAll = [] {
  std::set<std::string> all = kSharded;
  for (const char* linear : {"column", "row"}) {
    for (const char* result : {" y", " dx", " dw"}) all.insert(linear + std::string(result));
  }
  return all;
}();

TEST(VerifyDist, FindsShardedLinearsEqual) {
  const Tool tool;
  for (const char* ranks : {"1", "2", "3", "4"}) {
    // 400 rows are no equal shards, and ranks cut the blocks of blockwise.
    const Json result = tool.json({"verify-dist", "--emulate", "--ranks", ranks, "--shape",
                                   "512x256", "--shape", "400x144", "--tokens", "192"});
    EXPECT_TRUE(result["ok"].get<bool>()) << result.dump(1);
    EXPECT_EQ(result["devices"].size(), static_cast<size_t>(std::stoi(ranks)));
    std::set<std::string> recipes, checks;
    for (const Json& check : result["checks"]) {
      EXPECT_TRUE(check["ok"].get<bool>()) << check;
      recipes.insert(check["recipe"]);
      checks.insert(check["check"]);
      if (check["check"] == "copies") {
        EXPECT_EQ(check["rule"], "bits");
      }
      if (check["check"] == "batch y" && check["recipe"] == "rowwise") {
        EXPECT_TRUE(check["sqnr_db"].is_null()) << "rows have scales of their own";
      }
      const std::string name = check["check"];
      if (name == "column y" || name == "column dw" || name == "row dx" || name == "row dw") {
        EXPECT_EQ(check["rule"], "bits");
      }
    }
    EXPECT_EQ(result["differences"].size(), 0U);
    EXPECT_EQ(recipes.size(), 5U);
    // Three ranks share no tensor-parallel width here.
    EXPECT_EQ(checks, std::string_view(ranks) == "3" ? kSharded : kAll) << ranks;
  }
}

TEST(VerifyDist, PrintsATable) {
  const Tool tool;
  const Outcome outcome = tool(kTwo + Words{"--recipe", "rowwise", "--quiet"});
  ASSERT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(contains(outcome.out, "rowwise  512x256  dw         equal"));
  EXPECT_TRUE(contains(outcome.out, "all ranks have the tuning table"));
  EXPECT_EQ(outcome.err, "");
}

TEST(VerifyDist, ARankWithAnotherTableIsADifference) {
  const Tool tool;
  ASSERT_EQ(tool({"db", "export", "--format", "table", "-o", "one"}).code, 0);
  TuningTable other = TuningTable::parse(*read_file(tool.path() / "one")).value();
  other.sources.front().name = "another";
  tool.write("two", other.serialize());
  const Words words = kTwo + Words{"--recipe", "rowwise", "--shape", "512x256"};
  EXPECT_EQ(tool(words + Words{"--table", "one"}).code, 0);
  const Outcome outcome = tool(words + Words{"--table", "one", "--table", "two"});
  EXPECT_EQ(outcome.code, 3);
  EXPECT_TRUE(contains(outcome.out,
                       "rank 1 differs in table: it has " + other.hash() + ", and rank 0 has "))
      << outcome.out;
}

// A table that would choose other kernels shows in the kernels too.
TEST(VerifyDist, ARankWithOtherKernelsIsADifference) {
  const Tool tool;
  ASSERT_EQ(tool({"db", "export", "--format", "table", "-o", "one"}).code, 0);
  TuningTable other = TuningTable::parse(*read_file(tool.path() / "one")).value();
  const Json emitted = tool.json({"emit", "--mnk", "128,512,256", "--recipe", "rowwise"});
  const std::string config = emitted["kernels"][0]["config"];
  const std::string another =
      config.starts_with("64x64") ? "128x128s6c1x2w2pg8" : "64x64s8c1x1w1g8";
  const std::string key = emitted["kernels"][0]["problem"];
  other.add(KernelChoice{.problem = Problem::parse(key).value(),
                         .kernel = {.config = parse_gemm_config(another).value()},
                         .median_ns = 1});
  tool.write("two", other.serialize());
  const Outcome outcome = tool(kTwo + Words{"--recipe", "rowwise", "--shape", "512x256", "--table",
                                            "one", "--table", "two", "--json"});
  EXPECT_EQ(outcome.code, 3) << outcome.err;
  const Json result = outcome.json();
  EXPECT_FALSE(result["ok"].get<bool>());
  EXPECT_FALSE(result["one_table"].get<bool>());
  EXPECT_NE(result["tables"][0], result["tables"][1]);
  const Json& kernels = result["checks"][0];
  EXPECT_EQ(kernels["check"], "kernels");
  EXPECT_EQ(kernels["different"], 1);
  const Json& lines = result["differences"];
  ASSERT_EQ(lines.size(), 2U) << lines;
  const std::string line = lines[1];
  EXPECT_TRUE(
      contains(line, "rowwise 512x256: rank 1 differs in kernels: it has generated " + another))
      << line;
  EXPECT_TRUE(contains(line, ", and rank 0 has generated " + config)) << line;
}

TEST(VerifyDist, BadInputIsOneLine) {
  const Tool tool;
  const auto refuse = [&](const Words& words, const Words& parts) {
    tool.expect_refused(1, words, parts);
  };
  refuse({"verify-dist"}, {"--gpus 0,1", "--emulate --ranks 2"});
  refuse(kTwo + Words{"--gpus", "0,1"}, {"--emulate and --gpus"});
  refuse({"verify-dist", "--gpus", "0,x"}, {"--gpus", "'x'"});
  refuse({"verify-dist", "--gpus", "0,1,0"}, {"--gpus", "0 is there twice", "name each once"});
  refuse({"verify-dist", "--emulate", "--ranks", "9"}, {"--ranks", "'9'", "1 to 8"});
  refuse(kTwo + Words{"--shape", "512"}, {"--shape", "'512'", "NxK"});
  refuse(kTwo + Words{"--shape", "512x250"}, {"--shape", "'512x250'", "multiples of 16"});
  refuse(kTwo + Words{"--shape", "512x256\nx"}, {"--shape"});
  refuse(kTwo + Words{"--recipe", "fp4"}, {"--recipe", "fp4"});
  refuse(kTwo + Words{"--recipe", "bf16"}, {"--recipe", "bf16"});
  refuse(kTwo + Words{"--tokens", "33"}, {"--tokens is 33", "a multiple of 2"});
  refuse(kTwo + Words{"--table", "gone"}, {"gone"});
  tool.write("damaged", "no table");
  refuse(kTwo + Words{"--table", "damaged"}, {"damaged"});
  refuse(kTwo + Words{"--table", "a", "--table", "b", "--table", "c"},
         {"--table is given 3 times"});
}

TEST(VerifyDist, WithoutAGpuOneLineSaysSo) {
  const Tool tool;
  tool.expect_refused(2, {"verify-dist", "--gpus", "0,1"}, {"verify-dist with --emulate"});
}

}  // namespace
}  // namespace f8::testing
