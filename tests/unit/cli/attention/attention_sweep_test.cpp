// What a sweep of attention on a fake machine leaves, and what the tool makes of it; and what a benchmark prints.
#include "recipes/attention.hpp"
#include "tests/unit/cli/run_tool.hpp"
#include "tests/unit/tools/search/sweep_fixture.hpp"
#include "tests/unit/tuning_db/sample.hpp"
#include "tools/float8-tune/bench/attention_report.hpp"
#include "tools/float8-tune/sweep/sweep_report.hpp"

namespace f8::cli {
namespace {

using Words = std::vector<std::string>;
using f8::testing::contains;
using tuner::Impl;

class SweptAttention : public tuner::SweepTest {
 protected:
  void SetUp() override {
    SweepTest::SetUp();
    request_.attention =
        tuner::AttentionRequest{.shapes = {kShape},
                                .recipes = {kAttentionRecipes.begin(), kAttentionRecipes.end()},
                                .accuracy_tokens = 16};
    machine_.ns = [](const Problem& p, const tuner::Candidate& c, double) {
      if (p.op != Op::kAttention) return 100e3;
      return c.impl == Impl::kBf16 ? 660e3 : p.recipe == "fp8" ? 500e3 : 600e3;
    };
    tool_.write("config.json", R"({"model_type":"llama","hidden_size":4096,
      "intermediate_size":1024,"num_attention_heads":32,"num_key_value_heads":4,
      "num_hidden_layers":1,"vocab_size":32000})");
  }
  [[nodiscard]] Words with_db(Words words) const {
    for (const std::string& word : {std::string("--db"), (directory_ / "t.f8db").string(),
                                    std::string("--device"), std::string("H100")}) {
      words.push_back(word);
    }
    return words;
  }
  [[nodiscard]] Json filter() const {
    return tool_
        .json(with_db({"filter", "--model", "config.json", "--recipe", "rowwise", "--tokens",
                       "8192", "--attention", "--sequence", "8192"}))["attention"]
        .at(0);
  }
  // What a sweep prints at its end, and what it notes.
  [[nodiscard]] std::pair<std::string, std::string> printed(const tuner::SweepOutcome& outcome,
                                                            bool json) {
    Global global;
    global.db = directory_ / "t.f8db";
    global.json = json;
    ::testing::internal::CaptureStdout();
    ::testing::internal::CaptureStderr();
    print_outcome(global, run_, tuner::h100(), outcome);
    std::fflush(nullptr);
    std::string out = ::testing::internal::GetCapturedStdout();
    return {std::move(out), ::testing::internal::GetCapturedStderr()};
  }

  static constexpr AttentionShape kShape{.tokens = 8192, .heads_q = 32, .heads_kv = 4};
  f8::testing::Tool tool_;
};

TEST_F(SweptAttention, Decides) {
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  const Json one = filter();
  EXPECT_EQ(one["recipe"], "fp8");
  EXPECT_EQ(one["convert"], true);
  EXPECT_NEAR(one["speedup"].get<double>(), 1.32, 0.02);
  EXPECT_EQ(one["accuracy"].size(), 16U);
  EXPECT_EQ(one["recipes"][1]["recipe"], "fp8_forward");
  EXPECT_NEAR(one["recipes"][1]["speedup"].get<double>(), 1.1, 0.02);
  const std::string key =
      attention_problem(Op::kAttention, AttentionRecipe::kFp8, kShape).value().key();
  const Json why = tool_.json(with_db({"explain", key}));
  EXPECT_EQ(why["recipes"][0]["parts"].size(), 2U);
  const Json rows = tool_.json(with_db({"query", "--problem", key}))["results"][0];
  EXPECT_EQ(rows["baseline"]["config"]["backend"], "cudnn");
  EXPECT_EQ(rows["best"]["accuracy"].size(), 16U);
  const auto [text, notes] = printed(*outcome, false);
  for (const char* part : {"speedup", "both", "660.", "1.3"}) {
    EXPECT_TRUE(contains(text, part)) << part << text;
  }
  EXPECT_EQ(notes, "");
  const Json results = Json::parse(printed(*outcome, true).first)["results"];
  ASSERT_EQ(results.size(), 5U);
  for (const Json& row : results) {
    EXPECT_EQ(row.contains("speedup"), row["op"] == "attention") << row;
    EXPECT_EQ(row.contains("bf16_us"), row["op"] == "attention") << row;
  }
}

// A recipe that is too inaccurate is not taken, however fast.
TEST_F(SweptAttention, WithoutItsAccuracyDecidesNothing) {
  request_.attention->accuracy_tokens = 0;
  ASSERT_TRUE(sweep_all());
  const Json one = filter();
  EXPECT_EQ(one["convert"], false);
  EXPECT_TRUE(contains(one["reason"].get<std::string>(), "accuracy not known")) << one;
}

TEST_F(SweptAttention, WithoutBf16DecidesNothingAndNamesPyTorch) {
  machine_.misbehaviour = [](const Problem& p, const tuner::Candidate&) {
    return p.op == Op::kAttention ? tuner::Misbehaviour::kUnsupported : tuner::Misbehaviour::kNone;
  };
  const auto outcome = sweep_all();
  ASSERT_TRUE(outcome) << outcome.error().message;
  const Json one = filter();
  EXPECT_EQ(one["convert"], false);
  EXPECT_TRUE(contains(one["reason"].get<std::string>(), "it was not measured")) << one;
  const auto [text, notes] = printed(*outcome, false);
  EXPECT_TRUE(contains(text, "pruned")) << text;
  for (const char* part :
       {"not on this device", "attention.py --shapes s8192b1h32g4d128 --masks causal"}) {
    EXPECT_TRUE(contains(notes, part)) << part << notes;
  }
}

// 0.5 ms of 2 products, 1 ms of 5 and 1.4 ms of all, under a mask that is full.
tuner::AttentionBench benched(AttentionRecipe recipe, bool with_bf16) {
  const AttentionShape shape{.tokens = 8192, .heads_q = 32, .heads_kv = 4, .causal = false};
  tuner::AttentionBench bench{.problem =
                                  attention_problem(Op::kAttentionForward, recipe, shape).value()};
  const auto times = [&](double ns) {
    if (!with_bf16) return tuner::AttentionTimes{.float8 = tuning_db::timed(ns)};
    return tuner::AttentionTimes{.float8 = tuning_db::timed(ns, 1.31, 0.01),
                                 .bf16 = tuning_db::timed(1.31 * ns)};
  };
  bench.forward = times(0.5e6);
  if (recipe == AttentionRecipe::kFp8) bench.backward = times(1e6);
  if (with_bf16) bench.both = times(1.4e6);
  if (!with_bf16) bench.no_bf16 = "there is no cuDNN";
  bench.kernels = {{.name = "cast q,k,v", .ns = 1e4, .bytes = 1e7},
                   {.name = "forward", .ns = 4e5, .products = 2}};
  return bench;
}

TEST(AttentionReport, HasEachOperationBesideBf16) {
  const tuner::AttentionBench fp8 = benched(AttentionRecipe::kFp8, true);
  const std::string text = text_of(fp8, false);
  for (const char* part :
       {"fp8 forward with casts 500.0 us", "fp8 backward with casts 1000.0 us",
        "fp8 forward and backward with casts 1400.0 us", " · over cuDNN's bf16: 1.310 [1.3"}) {
    EXPECT_TRUE(contains(text, part)) << part << "\n" << text;
  }
  EXPECT_FALSE(contains(text, "not measured")) << text;
  const Json json = to_json(fp8, {});
  for (const Json& of : {json, json["backward"], json["both"]}) {
    EXPECT_EQ(of["speedup"], 1.31);
    EXPECT_LT(of["speedup_lo"], of["speedup_hi"]);
    EXPECT_NEAR(of["bf16_us"].get<double>(), 1.31 * of["us"].get<double>(), 1);
    EXPECT_NEAR(of["tflops"].get<double>(), 1.31 * of["bf16_tflops"].get<double>(), 1);
  }
  // Seven products take 2.8 times as long as two here.
  EXPECT_NEAR(json["both"]["tflops"].get<double>() / json["tflops"].get<double>(), 3.5 / 2.8, 0.01);
  const tuner::AttentionBench forward = benched(AttentionRecipe::kFp8Forward, true);
  EXPECT_TRUE(
      contains(text_of(forward, false), "fp8 forward and bf16 backward with casts 1400.0 us"));
  EXPECT_FALSE(to_json(forward, {}).contains("backward"));
}

TEST(AttentionReport, SaysWhyThereIsNoBf16) {
  for (const AttentionRecipe recipe : kAttentionRecipes) {
    const tuner::AttentionBench alone = benched(recipe, false);
    const std::string text = text_of(alone, false);
    EXPECT_TRUE(contains(text, "bf16 not measured: there is no cuDNN\n")) << text;
    EXPECT_FALSE(contains(text, "over cuDNN's")) << text;
    const Json json = to_json(alone, {});
    EXPECT_EQ(json["bf16_reason"], "there is no cuDNN");
    EXPECT_FALSE(json.contains("both") || json.contains("speedup") || json.contains("bf16_us"));
  }
}

}  // namespace
}  // namespace f8::cli
