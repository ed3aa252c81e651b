// The commands cost-model and profile: the cost of choices on measured GEMMs, what is fitted to rows.
#include <gtest/gtest.h>

#include "base/file.hpp"
#include "tests/unit/cli/run_tool.hpp"
#include "tests/unit/tuning_db/sample.hpp"

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

// 2,886 weight gradients of an H100 and an H200 and, held out, those of the left-out layers.
TEST(CostModelCommand, RanksTheSuggestionsOfCublaslt) {
  const Tool tool;
  const std::string train = FLOAT8_DATA_DIR "/h100.csv," FLOAT8_DATA_DIR "/h200.csv";
  const auto fitted = tool.json({"cost-model", "fit-suggestions", "--train", train, "--test",
                                 FLOAT8_DATA_DIR "/left_out.csv", "--json"});
  const auto& regret = fitted["regret"];
  EXPECT_GE(regret["cuBLASLt's first"]["gemms"], 2800);
  EXPECT_GE(regret["cuBLASLt's first"]["p95"], 0.2);
  for (const char* set : {"ranked first, before", "ranked first, fitted", "ranked first, 5 folds",
                          "held out: ranked first"}) {
    EXPECT_LE(regret[set]["mean"], 0.03) << set;
    EXPECT_LE(regret[set]["p95"], 0.1) << set;
  }
  const auto built_in = read_file(FLOAT8_SOURCE_DIR "/runtime/gemm/cost_model_constants.cpp");
  ASSERT_TRUE(built_in) << built_in.error().message;
  const auto coefficients = [](const std::string& source) {
    std::string text = source.substr(source.find(".suggestions"));
    std::erase_if(text, [](char c) { return c == ' ' || c == '\n'; });
    return text;
  };
  EXPECT_EQ(coefficients(fitted["source"]), coefficients(*built_in))
      << "the built-in ones are fitted to these tables";
}

TEST(CostModelCommand, SaysWhatItCannotRank) {
  const Tool tool;
  tool.expect_refused(1, {"cost-model", "fit-suggestions", "--train", "nothing.csv"},
                      {"--train", "nothing.csv"});
  const std::string other = tool.write("other.csv", "m,n,k\n1,2,3\n");
  tool.expect_refused(1, {"cost-model", "fit-suggestions", "--train", other, "-o", "constants.cpp"},
                      {"--train", "other.csv", "line 1", "bench suggestions"});
  const std::string few = tool.write(
      "few.csv",
      "device,sms,d,m,n,k,heuristic,algorithm,tile_m,tile_n,cluster_m,cluster_n,split_k,us\n"
      "x,132,bf16,16,16,16,0,66,64,64,1,1,1,2\n");
  tool.expect_refused(1, {"cost-model", "fit-suggestions", "--train", few, "-o", "constants.cpp"},
                      {"--train", "1 ranked suggestions of 1 GEMMs", "bench suggestions"});
  EXPECT_FALSE(std::filesystem::exists(tool.path() / "constants.cpp"));
  const std::string empty = tool.write("empty.csv", "");
  tool.expect_refused(1, {"cost-model", "fit-suggestions", "--train", empty},
                      {"--train", "bench suggestions"});
}

TEST(ProfileCommand, ShowsTheBuiltInDevices) {
  const Tool tool;
  const auto profiles = tool.json({"profile", "show"})["profiles"];
  ASSERT_EQ(profiles[0]["device"], "NVIDIA H100 80GB HBM3");
  EXPECT_NEAR(profiles[0]["memory_gb_per_s"], 3562, 100);
  EXPECT_NEAR(profiles[0]["cast_gb_per_s"], 2116, 100);
  EXPECT_NEAR(profiles[1]["memory_gb_per_s"], 5194, 100);
}

TEST(ProfileCommand, ARateThatNoRowShowsIsNotSeen) {
  const Tool tool;
  std::vector<Shape> large;
  for (const int64_t m : {8192, 16384, 32768}) {
    for (const int64_t n : {8192, 16384}) {
      for (const int64_t k : {8192, 16384}) large.push_back({m, n, k});
    }
  }
  {
    auto db = tuning_db::take(
        tuning_db::Database::open(tool.path() / "large.db", tuning_db::OpenMode::kCreate));
    tuning_db::sweep_linears(
        db, "rowwise", large,
        [](Shape s) { return 6.0 * static_cast<double>(s.m * s.n * s.k) / 700e3; },
        [](Shape) { return 1.5; });
  }
  const std::vector<std::string> words = {"profile", "fit", "--db", "large.db"};
  EXPECT_TRUE(tool.json(words)["profiles"][0]["memory_gb_per_s"].is_null());
  const std::string text = tool(words).out;
  const std::string line = text.substr(text.find("memory_gb_per_s"));
  EXPECT_TRUE(contains(line.substr(0, line.find('\n')), "not seen")) << text;
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
