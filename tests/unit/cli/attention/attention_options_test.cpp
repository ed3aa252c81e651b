// The options of bench, plan and sweep that ask for attention, and what these refuse.
#include <gtest/gtest.h>

#include "tests/unit/cli/run_tool.hpp"

namespace f8::testing {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

TEST(AttentionBench, IsCheckedBeforeItLooksForADevice) {
  const Tool tool;
  tool.expect_refused(1, {"bench", "attention"}, {"--shape"});
  const std::pair<const char*, const char*> cases[] = {{"s128b1h4g2d96", "64, 128 and 256"},
                                                       {"s128b1h4g3d128", "a multiple"},
                                                       {"s-128b1h4g2d128", "plain number"},
                                                       {"s0b1h4g2d128", "s (tokens) is 0"},
                                                       {"128,4,2,128", "'s'"},
                                                       {"s128b1h4g2d128;", "'s'"}};
  for (const auto& [shape, why] : cases) {
    tool.expect_refused(1, {"bench", "attention", "--shape", shape}, {"--shape", why});
  }
  const Words good = {"bench", "attention", "--shape", "s128b1h4g2d128"};
  const auto refused = [&](Words words, const Words& parts) {
    words.insert(words.begin(), good.begin(), good.end());
    tool.expect_refused(1, words, parts);
  };
  refused({"--masks", "causal,window1024"}, {"--masks", "window1024", "causal and full"});
  refused({"--causal", "--full"}, {"--causal", "--full"});
  refused({"--length", "-1"}, {"--length"});
  refused({"--problem", "x"}, {"--problem", "--shape"});
  tool.expect_refused(
      1, {"bench", "attention", "--problem", "linear/rowwise+fast/e4m3.e4m3.bf16/m64n64k64"},
      {"--problem", "bench linear"});
  refused({"--recipe", "fp4"}, {"--recipe", "'fp4'", "fp8_forward and fp8"});
  refused({"--recipe", "rowwise"}, {"--recipe", "fp8_forward and fp8"});
  const std::string key = "attention/fp8/e4m3.e4m3.bf16/s128b1h4g2d128causal1";
  tool.expect_refused(1, {"bench", "attention", "--problem", key, "--recipe", "fp8"},
                      {"--problem", "--recipe"});
  tool.expect_refused(1,
                      {"bench", "attention", "--problem",
                       "attention_backward/fp8_forward/e4m3.e4m3.bf16/s128b1h4g2d128causal1"},
                      {"--problem", "is in bf16"});
  for (const Words& words :
       {Words{"bench", "linear", "--problem", key}, {"emit", "--problem", key}}) {
    tool.expect_refused(1, words, {"--problem", "bench attention"});
  }
}

TEST(AttentionSweep, PlanTakesTheHeadsOfAModel) {
  const Tool tool;
  const Json plan = tool.json({"plan", "--model", "llama3-8b", "--attention", "--sequence",
                               "8192,32768", "--masks", "causal,full"});
  ASSERT_EQ(plan["attentions"].size(), 2U * 2U * 5U) << "layers are alike";
  std::set<std::string> keys;
  for (const Json& part : plan["attentions"]) keys.insert(part["problem"].get<std::string>());
  for (const char* key : {"attention_forward/fp8_forward/e4m3.e4m3.bf16/s8192b1h32g8d128causal1",
                          "attention_forward/fp8/e4m3.e4m3.bf16/s32768b1h32g8d128causal0",
                          "attention/fp8_forward/e4m3.e4m3.bf16/s8192b1h32g8d128causal0",
                          "attention_backward/fp8/e4m3.e4m3.bf16/s32768b1h32g8d128causal1"}) {
    EXPECT_TRUE(keys.contains(key)) << key;
  }
  EXPECT_GT(plan["predicted_s"].get<double>(), 1);
  EXPECT_LT(plan["predicted_s"].get<double>(), 60);
  EXPECT_EQ(plan["cells"], 2 * 2 * (5 + 2)) << "bf16 stands beside both together";
  // A step has whole sequences, and ranks share the heads.
  const Json step = tool.json({"plan", "--model", "llama3-70b", "--tp", "8", "--attention",
                               "--sequence", "2048", "--tokens", "8192", "--recipe", "fp8"});
  ASSERT_EQ(step["attentions"].size(), 3U);
  EXPECT_EQ(step["attentions"][0]["problem"],
            "attention_forward/fp8/e4m3.e4m3.bf16/s2048b4h8g1d128causal1");
  const Outcome text = tool({"plan", "--attention", "--shape", "s128b1h4g2d64", "--full"});
  EXPECT_TRUE(contains(text.out, "s128b1h4g2d64causal0  attention_backward")) << text.out;
  EXPECT_TRUE(contains(text.out, "5 operations of attention")) << text.out;
}

TEST(AttentionSweep, PlanTakesAPartByItsKey) {
  const Tool tool;
  const Json plan = tool.json(
      {"plan", "--problem", "attention_backward/fp8/e4m3.e4m3.bf16/s128b1h4g2d128causal1"});
  ASSERT_EQ(plan["attentions"].size(), 3U) << "its forward, and both together, too";
}

TEST(AttentionSweep, IsCheckedBeforeItLooksForADevice) {
  const Tool tool;
  const auto refused = [&](Words words, const Words& parts) {
    words.insert(words.begin(), {"sweep", "--db", "x.db"});
    tool.expect_refused(1, words, parts);
  };
  refused({"--attention"}, {"--shape", "--model with --sequence"});
  refused({"--attention", "--model", "llama3-8b"}, {"--sequence"});
  refused({"--attention", "--sequence", "8192"}, {"--model"});
  refused({"--attention", "--model", "llama3-8b", "--sequence", "8k"},
          {"--sequence", "'8k'", "8192,32768"});
  refused({"--attention", "--model", "llama3-8b", "--sequence", "8192,"}, {"--sequence", "''"});
  refused({"--attention", "--model", "llama3-8b", "--sequence", "8192", "--tokens", "5000"},
          {"--tokens", "--sequence"});
  refused({"--attention", "--model", "llama3-8b", "--sequence", "8192", "--tp", "64"},
          {"--attention", "64 ranks"});
  refused({"--attention", "--shape", "s128b1h4g2d96"}, {"--shape", "64, 128 and 256"});
  refused({"--attention", "--shape", "s128b1h4g2d64", "--masks", "window8"},
          {"--masks", "window8"});
  refused({"--attention", "--shape", "s128b1h4g2d64", "--recipe", "rowwise"},
          {"--recipe", "fp8_forward and fp8"});
  refused({"--attention", "--shape", "s128b1h4g2d64", "--mnk", "64,64,64"},
          {"--attention", "--mnk"});
  refused({"--attention", "--shape", "s128b1h4g2d64", "--strategy", "race"},
          {"--attention", "--strategy"});
  refused({"--shape", "s128b1h4g2d64"}, {"--shape", "--attention"});
  refused({"--mnk", "64,64,64", "--sequence", "64"}, {"--sequence", "--attention"});
  refused({"--attention", "--shape", "s128b1h4g2d64", "--length", "-1"}, {"--length"});
  tool.write("list.json", R"([{"fqn":"a","in_features":64,"out_features":64}])");
  refused({"--attention", "--model", "list.json", "--sequence", "8192"},
          {"--attention", "list.json", "config.json"});
}

}  // namespace
}  // namespace f8::testing
