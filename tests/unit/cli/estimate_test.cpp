// The command estimate score, on linears that the built-in tables have no row of.
#include <gtest/gtest.h>

#include "tests/unit/cli/run_tool.hpp"

namespace f8::testing {
namespace {

const std::string kH100 = FLOAT8_DATA_DIR "/h100_left_out.jsonl";
const std::string kH200 = FLOAT8_DATA_DIR "/h200_left_out.jsonl";

nlohmann::json score_of_all(const Tool& tool, const std::string& truth) {
  const auto rows = tool.json({"estimate", "score", "--truth", truth, "--json"})["estimates"];
  return rows.empty() ? nlohmann::json() : rows.back();
}

// Odd sizes, experts, slices, 1 to 24,000 tokens: unlike what was swept.
TEST(EstimateScore, IntervalsHoldTheTruthOfLayersLeftOut) {
  const Tool tool;
  for (const std::string& truth : {kH100, kH200}) {
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

TEST(EstimateScore, WritesEachLinearAndItsEstimate) {
  const Tool tool;
  const std::string csv =
      tool({"estimate", "score", "--truth", kH200, "--recipe", "rowwise", "--csv", "-"}).out;
  EXPECT_TRUE(csv.starts_with("m,n,k,recipe,speedup,estimate,estimate_lo,estimate_hi,evidence,"))
      << csv;
  EXPECT_EQ(std::ranges::count(csv, '\n'), 47) << "46 linears";
  EXPECT_TRUE(contains(csv, "\n2048,2880,2880,rowwise,")) << csv;
}

TEST(EstimateScore, SaysWhatItCannotScore) {
  const Tool tool;
  tool.expect_refused(1, {"estimate", "score", "--truth", "nothing.jsonl"},
                      {"--truth", "nothing.jsonl"});
  tool.expect_refused(1, {"estimate", "score", "--device", "NVIDIA B300"},
                      {"on NVIDIA B300", "float8-tune db info"});
}

}  // namespace
}  // namespace f8::testing
