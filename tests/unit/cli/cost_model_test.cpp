// The commands cost-model and profile: the cost of choices on measured GEMMs, and rates of devices.
#include <gtest/gtest.h>

#include <map>
#include <set>
#include <sstream>

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

// benchmarks/fit/cost_model.py reads the columns by their names.
TEST(CostModelCommand, WritesTheKernelsThatItRead) {
  const Tool tool;
  const auto regret = tool.json({"cost-model", "score", "--train", kHeldOut, "--test",
                                 FLOAT8_DATA_DIR "/h200_left_out.jsonl", "--csv", "kernels.csv",
                                 "--json"})["regret"];
  const std::string csv = read_file(tool.path() / "kernels.csv").value();
  EXPECT_TRUE(csv.starts_with("set,number,device,sms,problem,gemm,impl,config,ns\n"));
  std::map<std::string, std::set<std::string>> gemms;
  std::istringstream lines(csv.substr(csv.find('\n') + 1));
  for (std::string line; std::getline(lines, line);) {
    gemms[line.substr(0, line.find(','))].insert(line.substr(0, line.find(",generated,")));
  }
  std::erase_if(gemms["train"], [](const auto& gemm) { return contains(gemm, ",cublaslt,"); });
  EXPECT_EQ(gemms["train"].size(), regret["fitted to"]["products"]);
  EXPECT_TRUE(contains(csv,
                       ",output/rowwise+fast/e4m3.e4m3.bf16/m512n1280k8192,"
                       "e4m3.e4m3.bf16/axis/fast/m512n1280k8192,generated,128x128s6c1x1w2g16,"));
  EXPECT_GT(gemms["test"].size(), 300u);
  EXPECT_EQ(tool({"cost-model", "score", "--train", kHeldOut, "--csv", "-"}).out,
            csv.substr(0, csv.find("\ntest,") + 1));
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
  tool.expect_refused(1, {"cost-model", "score", "--train", empty, "--csv", "kernels.csv"},
                      {"--train", "sweep --exhaustive"});
  tool.expect_refused(1, {"cost-model", "score", "--test", empty}, {"--test"});
}

}  // namespace
}  // namespace f8::testing
