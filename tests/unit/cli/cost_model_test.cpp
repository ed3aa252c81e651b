// The command cost-model: the cost of its choices on measured GEMMs, and constants fitted to them.
#include <gtest/gtest.h>

#include "base/file.hpp"
#include "tests/unit/cli/run_tool.hpp"

namespace f8::testing {
namespace {

const std::string kFittedTo = FLOAT8_DATA_DIR "/fitted_to.jsonl";
const std::string kHeldOut = FLOAT8_DATA_DIR "/held_out.jsonl";

// Layers that the constants have not seen. Among them are a few tokens, for which cuBLASLt has
// kernels that the generator has not.
TEST(CostModelCommand, TheBuiltInConstantsChooseWellForLayersHeldOut) {
  const Tool tool;
  const auto regret =
      tool.json({"cost-model", "score", "--train", "builtin," + kFittedTo, "--test",
                 kHeldOut + "," FLOAT8_DATA_DIR "/h200_left_out.jsonl", "--json"})["regret"];
  EXPECT_GE(regret["fitted to"]["products"], 2000);
  const std::string with_rows = "held out, and rows of the others";
  for (const std::string& set : {std::string("fitted to"), std::string("held out"), with_rows}) {
    EXPECT_LE(regret[set]["median"], 0.01) << set;
    EXPECT_LE(regret[set]["median_to_any"], 0.02) << set;
    EXPECT_LE(regret[set]["p95"], set == "held out" ? 0.13 : 0.11) << set;
    EXPECT_LE(regret[set]["p95_to_any"], 0.17) << set;
  }
  EXPECT_GE(regret["held out"]["products"], 400);
  EXPECT_LE(regret[with_rows]["p95"], 0.09);
}

TEST(CostModelCommand, WritesTheConstantsThatItFitted) {
  const Tool tool;
  const auto regret = tool.json({"cost-model", "fit", "--train", kHeldOut, "--folds", "1", "-o",
                                 "constants.cpp", "--json"})["regret"];
  EXPECT_LE(regret["fitted"]["p95"], regret["before"]["p95"]);
  const auto source = read_file(tool.path() / "constants.cpp");
  ASSERT_TRUE(source) << source.error().message;
  EXPECT_TRUE(contains(*source, "CostModel::fitted()"));
  EXPECT_TRUE(contains(*source, ".port_bytes_per_clock = "));
  EXPECT_EQ(tool.json({"cost-model", "fit", "--train", kHeldOut, "--folds", "1"})["source"],
            *source);
}

TEST(ProfileCommand, ARateThatNoRowShowsIsNotSeen) {
  const Tool tool;
  const auto profiles = tool.json({"profile", "show"})["profiles"];
  ASSERT_EQ(profiles[0]["device"], "NVIDIA H100 80GB HBM3");
  EXPECT_TRUE(profiles[0]["memory_gb_per_s"].is_null());
  EXPECT_NEAR(profiles[0]["cast_gb_per_s"], 2810, 100);
  EXPECT_NEAR(profiles[1]["memory_gb_per_s"], 4819, 100);
  const std::string text = tool({"profile", "show"}).out;
  const std::string line = text.substr(text.find("memory_gb_per_s"));
  EXPECT_TRUE(contains(line.substr(0, line.find('\n')), "not seen"));
}

TEST(CostModelCommand, SaysWhatItCannotFitTo) {
  const Tool tool;
  tool.expect_refused(1, {"cost-model", "score", "--train", "nothing.jsonl"},
                      {"--train", "nothing.jsonl"});
  tool.expect_refused(1, {"cost-model", "score", "--train", "builtin,"}, {"--train", "empty name"});
  const std::string empty = tool.write("empty.jsonl", "{\"float8_tuning_db\":2}\n");
  tool.expect_refused(1, {"cost-model", "fit", "--train", empty, "-o", "constants.cpp"},
                      {"--train", "sweep --exhaustive"});
  tool.expect_refused(1, {"cost-model", "score", "--test", empty}, {"--test"});
}

}  // namespace
}  // namespace f8::testing
