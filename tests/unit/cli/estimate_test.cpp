// The command estimate score, on linears that the built-in tables have no row of.
#include <gtest/gtest.h>

#include "base/file.hpp"
#include "tests/unit/cli/run_tool.hpp"

namespace f8::testing {
namespace {

const std::string kH100LeftOut = FLOAT8_DATA_DIR "/h100_left_out.jsonl";
const std::string kH200LeftOut = FLOAT8_DATA_DIR "/h200_left_out.jsonl";

nlohmann::json score_of_all(const Tool& tool, const std::string& truth) {
  const auto rows = tool.json({"estimate", "score", "--truth", truth, "--json"})["estimates"];
  return rows.empty() ? nlohmann::json() : rows.back();
}

// Odd sizes, experts, slices, 1 to 24,000 tokens: unlike what was swept.
TEST(EstimateScore, IntervalsHoldTheTruthOfLayersLeftOut) {
  const Tool tool;
  for (const std::string& truth : {kH100LeftOut, kH200LeftOut}) {
    SCOPED_TRACE(truth);
    const auto all = score_of_all(tool, truth);
    ASSERT_EQ(all["recipe"], "all");
    EXPECT_GE(all["linears"], 160);
    EXPECT_GE(all["coverage"], 0.92);
    EXPECT_LE(all["coverage"], 0.98);
    EXPECT_GE(all["right"], 0.98);
    EXPECT_GE(all["decided"], 0.7 * all["linears"].get<double>()) << "wide intervals decide little";
    EXPECT_LE(all["regret"], 0.003);
    EXPECT_LT(all["regret"], all["regret_torchao"]);
  }
}

// The same twelve layers, by the same GPU, with another NVRTC and with another cuBLASLt.
TEST(EstimateScore, IntervalsHoldWhatOtherToolchainsReach) {
  const Tool tool;
  for (const char* file : {"/h200_nvrtc_13_5.jsonl", "/h200_cublaslt_13_10.jsonl"}) {
    SCOPED_TRACE(file);
    const std::vector<std::string> words = {
        "estimate", "score",       "--truth", FLOAT8_DATA_DIR + std::string(file),
        "--device", "NVIDIA H200", "--csv",   "each.csv",
        "--json"};
    const auto all = tool.json(words)["estimates"].back();
    EXPECT_EQ(all["linears"], 60);
    EXPECT_GE(all["coverage"], 0.92);
    EXPECT_LE(all["half_width"], 0.04);
    const std::string csv = read_file(tool.path() / "each.csv").value();
    EXPECT_TRUE(contains(csv,
                         "by another toolchain, NVRTC 13.0, cuBLASLt 13.1.0, generator 1, "
                         "give or take 3 %: measured"))
        << csv;
  }
}

TEST(EstimateScore, WritesEachLinearAndItsEstimate) {
  const Tool tool;
  const std::string csv =
      tool({"estimate", "score", "--truth", kH200LeftOut, "--recipe", "rowwise", "--csv", "-"}).out;
  EXPECT_TRUE(csv.starts_with("m,n,k,recipe,speedup,estimate,estimate_lo,estimate_hi,evidence,"))
      << csv;
  EXPECT_EQ(std::ranges::count(csv, '\n'), 49) << "48 linears";
  EXPECT_TRUE(contains(csv, "\n2048,2880,2880,rowwise,")) << csv;
}

TEST(EstimateScore, SaysWhatItCannotScore) {
  const Tool tool;
  tool.expect_refused(1, {"estimate", "score", "--truth", "nothing.jsonl"},
                      {"--truth", "nothing.jsonl"});
  tool.expect_refused(1, {"estimate", "score", "--device", "NVIDIA B300"},
                      {"--device", "'NVIDIA B300'", "'NVIDIA H200'"});
}

}  // namespace
}  // namespace f8::testing
