// The filter's verdicts on the experts of a layer, on a database of known numbers.
#include <gtest/gtest.h>

#include <algorithm>
#include <set>

#include "base/file.hpp"
#include "recipes/model/filter_file.hpp"
#include "tests/unit/cli/run_tool.hpp"
#include "tests/unit/tuning_db/sample.hpp"

namespace f8::testing {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

constexpr const char* kExperts = "layers.3.moe.experts";

// A linear and eight experts of 4096 x 1024, of which a token is sent to two: 8,192 rows.
class FilterExperts : public ::testing::Test {
 protected:
  void SetUp() override {
    (void)tool_.write("model.json", R"([
      {"fqn": "layers.3.wq", "in_features": 4096, "out_features": 4096},
      {"fqn": "layers.3.moe.experts", "num_experts": 8, "top_k": 2, "dim": 4096,
       "hidden_dim": 1024}])");
    namespace db = tuning_db;
    auto database = db::Database::open(tool_.path() / "my.db", db::OpenMode::kCreate).value();
    db::sweep_experts(database, {w13({8, kEven})}, 1.5);
    db::sweep_experts(database, {w2({8, kEven})}, 1.2);
    db::sweep_experts(database, {w13({8, kZipf}), w2({8, kZipf})}, 0.9);
  }
  static Problem w13(Groups groups) {
    return tuning_db::experts(Op::kLinear, {8192, 2048, 4096}, groups);
  }
  static Problem w2(Groups groups) {
    return tuning_db::experts(Op::kLinear, {8192, 4096, 1024}, groups);
  }
  static Words filter(const Words& more) {
    Words words = {"filter",   "--model", "model.json", "--tokens", "4096",
                   "--recipe", "rowwise", "--db",       "my.db"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }
  [[nodiscard]] Json decision(const Words& more) const {
    const Json answer = tool_.json(filter(more));
    EXPECT_EQ(answer["decisions"].size(), 2U);
    return answer["decisions"].back();
  }
  Tool tool_;
};

TEST_F(FilterExperts, HaveOneVerdictOfBothExpertLinears) {
  const Json d = decision({});
  EXPECT_EQ(d["fqn"], kExperts);
  EXPECT_EQ(d["experts"], 8);
  EXPECT_EQ(d["skew"], 0);
  EXPECT_EQ(d["tokens"], 8192);
  EXPECT_EQ(d["in_features"], 4096);
  EXPECT_EQ(d["out_features"], 1024);
  EXPECT_EQ(d["convert"], true);
  EXPECT_EQ(d["evidence"], "measured");
  EXPECT_EQ(d["trials"].size(), 2U);
  ASSERT_EQ(d["parts"].size(), 2U);
  EXPECT_EQ(d["parts"][0]["name"], "w13");
  EXPECT_EQ(d["parts"][0]["n"], 2048);
  EXPECT_EQ(d["parts"][1]["name"], "w2");
  EXPECT_EQ(d["parts"][1]["speedup"], 1.2);
  // Both take as long in bf16: the times add up, not the speedups.
  EXPECT_NEAR(d["speedup"].get<double>(), 2 / (1 / 1.5 + 1 / 1.2), 1e-4);
  EXPECT_LT(d["speedup_lo"], d["speedup"]);
  const std::string table = tool_(filter({})).out;
  EXPECT_TRUE(contains(table, "of 1 linears and 1 of 1 layers of experts to float8")) << table;
}

// What runs is an MLP, whose rows go before those of its linears.
TEST_F(FilterExperts, AreJudgedByTheirMlpWhereItWasMeasured) {
  namespace db = tuning_db;
  {
    auto database = db::Database::open(tool_.path() / "my.db", db::OpenMode::kReadWrite).value();
    db::sweep_mlps(database, {{{8192, 1024, 4096}, true, {8, kZipf}}}, 1.25);
  }
  const Json d = decision({"--skew", "zipf"});
  EXPECT_EQ(d["convert"], true) << "the linears by themselves are slower in fp8";
  EXPECT_EQ(d["evidence"], "measured");
  EXPECT_EQ(d["speedup"], 1.25);
  EXPECT_EQ(d["trials"].size(), 1U);
  EXPECT_TRUE(d["parts"].empty()) << d;
  EXPECT_TRUE(contains(d["reason"].get<std::string>(), "the experts' MLP as a whole"));
  // Rows of another skew are none of these, and one of another M is weaker evidence than both linears.
  EXPECT_EQ(decision({})["parts"].size(), 2U);
  {
    auto database = db::Database::open(tool_.path() / "my.db", db::OpenMode::kReadWrite).value();
    db::sweep_mlps(database, {{{1024, 1024, 4096}, true, {8, kEven}}}, 0.5);
  }
  EXPECT_EQ(decision({})["convert"], true);
  const std::string key = "mlp/rowwise+fast/e4m3.e4m3.bf16/m8192n1024k4096gate1e8skew1";
  const Json explained = tool_.json({"explain", key, "--db", "my.db"});
  EXPECT_EQ(explained["convert"], true);
  EXPECT_EQ(explained["speedup"], 1.25);
  EXPECT_EQ(explained["trials"].size(), 1U);
  const Json asked = tool_.json({"query", "--problem", key, "--db", "my.db"});
  EXPECT_EQ(asked["results"][0]["op"], "mlp");
}

TEST_F(FilterExperts, AreJudgedByTheirSkew) {
  const Json d = decision({"--skew", "zipf"});
  EXPECT_EQ(d["skew"], 1);
  EXPECT_EQ(d["evidence"], "measured");
  EXPECT_EQ(d["convert"], false);
}

TEST_F(FilterExperts, ThatNobodyMeasuredHaveAnEstimateThatSaysSo) {
  const Json d = decision({"--ep", "4"});
  EXPECT_EQ(d["experts"], 2);
  EXPECT_EQ(d["tokens"], 8192) << "a rank receives what it sends";
  EXPECT_EQ(d["evidence"], "modelled");
  EXPECT_TRUE(d["trials"].empty());
  const auto reason = d["reason"].get<std::string>();
  for (const char* part : {"an estimate", "--experts 2 --skew 0 --recipe rowwise",
                           "sweep --mlp gated --mnk 8192,1024,4096"}) {
    EXPECT_TRUE(contains(reason, part)) << part << ": " << reason;
  }
  EXPECT_EQ(d["convert"], d["speedup_lo"].get<double>() > 1.02);
  EXPECT_GT(d["speedup_hi"].get<double>() / d["speedup_lo"].get<double>(), 1.3);
}

// Between two measured M the rows of the same experts are interpolated, as a linear's are.
TEST_F(FilterExperts, BetweenMeasuredRowsAreInterpolated) {
  namespace db = tuning_db;
  {
    auto database = db::Database::open(tool_.path() / "my.db", db::OpenMode::kReadWrite).value();
    db::sweep_experts(database,
                      {db::experts(Op::kLinear, {32768, 2048, 4096}, {8, kEven}),
                       db::experts(Op::kLinear, {32768, 4096, 1024}, {8, kEven})},
                      1.5);
  }
  Words words = filter({});
  words[4] = "8192";
  const Json d = tool_.json(words)["decisions"].back();
  EXPECT_EQ(d["tokens"], 16384);
  EXPECT_EQ(d["evidence"], "interpolated");
  EXPECT_EQ(d["convert"], true);
}

TEST_F(FilterExperts, StayInBf16WhereNamesSizesOrThePeersRuleSaySo) {
  const Json named = decision({"--filter-fqns", "moe.experts"});
  EXPECT_EQ(named["convert"], false);
  EXPECT_EQ(named["evidence"], "rule");
  const Json torchao = decision({"--policy", "torchao", "--filter-fqns", "auto_filter_small_kn"});
  EXPECT_EQ(torchao["convert"], false);
  EXPECT_TRUE(contains(torchao["reason"].get<std::string>(), "torchao has no rule for experts"));
  EXPECT_EQ(decision({"--policy", "torchao"})["convert"], true);
  (void)tool_.write("odd.json", R"([{"fqn": "e", "num_experts": 8, "top_k": 2, "dim": 4096,
      "hidden_dim": 1000}])");
  Words odd = filter({});
  odd[2] = "odd.json";
  const Json kept = tool_.json(odd)["decisions"][0];
  EXPECT_EQ(kept["convert"], false);
  EXPECT_TRUE(contains(kept["reason"].get<std::string>(), "hidden_dim 1000")) << kept;
}

TEST_F(FilterExperts, BadInputIsRefused) {
  tool_.expect_refused(1, filter({"--ep", "3"}), {"--ep", "8 experts", "choose a divisor"});
  tool_.expect_refused(1, filter({"--ep", "0"}), {"--ep"});
  tool_.expect_refused(1, filter({"--skew", "often"}), {"--skew", "even, zipf, one"});
  tool_.expect_refused(1, filter({"--ep", "2", "--expert-linears"}), {"--ep", "--expert-linears"});
  const auto refuse = [&](const char* entry, const Words& more, const Words& parts) {
    (void)tool_.write("bad.json", f8::format("[{}]", entry));
    Words words = filter(more);
    words[2] = "bad.json";
    tool_.expect_refused(1, words, parts);
  };
  const char* linear = R"({"fqn": "w", "in_features": 4096, "out_features": 4096})";
  refuse(linear, {"--ep", "2"}, {"--ep", "no layer of experts"});
  refuse(linear, {"--skew", "zipf"}, {"--skew", "no layer of experts"});
  refuse(R"({"fqn": "e", "num_experts": 2048, "top_k": 2, "dim": 64, "hidden_dim": 64})", {},
         {"--ep", "2048 experts", "at most 1024", "at least 2"});
  refuse(R"({"fqn": "e", "num_experts": 8, "top_k": 9, "dim": 64, "hidden_dim": 64})", {},
         {"bad.json", "top_k"});
  refuse(R"({"fqn": "e", "num_experts": 8, "dim": 64, "hidden_dim": 64})", {}, {"top_k", "add it"});
  refuse(R"({"fqn": "e", "num_experts": 8, "top_k": 2, "dim": 64, "hidden_dim": 64,
         "in_features": 64})",
         {}, {"num_experts", "in_features"});
}

// With --fuse the linears of an MLP have one verdict.
TEST(FilterMlps, HaveOneVerdictWhereTheyAreFused) {
  namespace db = tuning_db;
  const Tool tool;
  (void)tool.write("model.json", R"([
    {"fqn": "layers.0.mlp.gate_proj", "in_features": 1024, "out_features": 2816},
    {"fqn": "layers.0.mlp.up_proj", "in_features": 1024, "out_features": 2816},
    {"fqn": "layers.0.mlp.down_proj", "in_features": 2816, "out_features": 1024},
    {"fqn": "layers.0.self_attn.o_proj", "in_features": 1024, "out_features": 1024}])");
  {
    auto database = db::Database::open(tool.path() / "my.db", db::OpenMode::kCreate).value();
    db::sweep_linears(
        database, "rowwise", {{8192, 2816, 1024}, {8192, 1024, 2816}, {8192, 1024, 1024}},
        [](Shape) { return 1e6; }, [](Shape) { return 0.9; });
    db::sweep_mlps(database, {{{8192, 2816, 1024}, true, {}}}, 1.2);
  }
  const Words words = {"filter",   "--model", "model.json", "--tokens", "8192",
                       "--recipe", "rowwise", "--db",       "my.db"};
  const auto decisions = [&](const Words& more) {
    Words all = words;
    all.insert(all.end(), more.begin(), more.end());
    return tool.json(all);
  };
  const Json apart = decisions({});
  for (const Json& d : apart["decisions"]) EXPECT_EQ(d["convert"], false) << d;
  const Json fused = decisions({"--fuse"});
  for (size_t i = 0; i < 4; ++i) {
    const Json& d = fused["decisions"][i];
    EXPECT_EQ(d["convert"], i < 3) << d;
    if (i < 3) {
      EXPECT_EQ(d["speedup"], 1.2);
      EXPECT_EQ(d["evidence"], "measured");
      EXPECT_TRUE(contains(d["reason"].get<std::string>(), "its MLP as a whole"));
    }
  }
  // 3 ms of an MLP become 2.5, and 1 ms of the linear stays.
  EXPECT_NEAR(fused["estimated_model_speedup"].get<double>(), 4 / 3.5, 1e-3);
  // Without rows of MLPs the linears' times together decide: half of an MLP would not be fused.
  {
    auto database = db::Database::open(tool.path() / "half.db", db::OpenMode::kCreate).value();
    db::sweep_linears(
        database, "rowwise", {{8192, 2816, 1024}, {8192, 1024, 2816}, {8192, 1024, 1024}},
        [](Shape) { return 1e6; }, [](Shape s) { return s.n == 2816 ? 1.2 : 0.9; });
  }
  Words of_half = words;
  of_half.back() = "half.db";
  const auto verdicts = [&](const Words& asked) {
    std::string text;
    const Json answer = tool.json(asked);
    for (const Json& d : answer["decisions"]) text += d["convert"].get<bool>() ? "y" : "n";
    return text;
  };
  EXPECT_EQ(verdicts(of_half), "yynn");
  of_half.emplace_back("--fuse");
  EXPECT_EQ(verdicts(of_half), "yyyn");
  const Json down = tool.json(of_half)["decisions"][2];
  EXPECT_TRUE(contains(down["reason"].get<std::string>(),
                       "the linears of its MLP together, gate_proj 1.200, up_proj 1.200, "
                       "down_proj 0.900"))
      << down;
  const Json explained =
      tool.json({"explain", "layers.0.mlp.down_proj", "--model", "model.json", "--tokens", "8192",
                 "--recipe", "rowwise", "--db", "my.db", "--fuse"});
  EXPECT_EQ(explained["convert"], true);
  EXPECT_EQ(explained["speedup"], 1.2);
  // An MLP of which a linear is kept by name is not fused.
  const Json kept = decisions({"--fuse", "--filter-fqns", "up_proj"});
  for (const Json& d : kept["decisions"]) EXPECT_EQ(d["convert"], false) << d;
}

// A line says where rows of MLPs decide about none.
TEST(FilterMlps, ThatNoRowsDecideAboutAreCounted) {
  const Tool tool;
  const auto said = [&](const std::string& recipe, const Words& more) {
    Words all = {"filter", "--model", "llama3-8b", "--tokens", "8192", "--recipe", recipe};
    all.insert(all.end(), more.begin(), more.end());
    return tool(all).err;
  };
  const std::string note = "--fuse: 32 of 32 MLPs are judged by their linears: ";
  const std::string none = said("rowwise", {"--fuse", "--device", "H100"});
  EXPECT_TRUE(contains(none, note +
                                 "MLPs of recipe rowwise were measured on 'NVIDIA H200' and not on "
                                 "'NVIDIA H100 80GB HBM3'; --device 'NVIDIA H200' shows that"))
      << none;
  for (const Words& words : {Words{"--fuse", "--device", "H200"}, Words{"--device", "H100"}}) {
    EXPECT_FALSE(contains(said("rowwise", words), "--fuse"));
  }
  const Words explained = {"explain",  "layers.0.feed_forward.w1",
                           "--model",  "llama3-8b",
                           "--tokens", "8192",
                           "--recipe", "rowwise",
                           "--device", "H100",
                           "--fuse"};
  EXPECT_TRUE(contains(tool(explained).err,
                       note + "MLPs of recipe rowwise were measured on 'NVIDIA H200'"));
  EXPECT_TRUE(contains(said("rowwise_with_gw_hp", {"--fuse", "--device", "H200"}),
                       "--fuse: float8.torch.fuse leaves MLPs of recipe rowwise_with_gw_hp"));
  EXPECT_TRUE(
      contains(said("rowwise", {"--fuse", "--filter-fqns", "w1"}), "--fuse: the model has no MLP"));
}

TEST_F(FilterExperts, ASweepOfAModelMeasuresThem) {
  const auto problems = [&](const Words& more) {
    Words words = {"plan", "--model", "model.json", "--tokens", "4096", "--recipe", "rowwise"};
    words.insert(words.end(), more.begin(), more.end());
    std::set<std::string> keys;
    const Json plan = tool_.json(words);
    for (const Json& linear : plan["linears"]) keys.insert(linear["problem"]);
    return keys;
  };
  const std::string dense =
      Problem::make(Op::kLinear, find_recipe("rowwise").value(), Shape{4096, 4096, 4096})->key();
  using Keys = std::set<std::string>;
  EXPECT_EQ(problems({}), (Keys{dense, w13({8, kEven}).key(), w2({8, kEven}).key()}));
  EXPECT_EQ(problems({"--skew", "zipf"}),
            (Keys{dense, w13({8, kZipf}).key(), w2({8, kZipf}).key()}));
  EXPECT_EQ(problems({"--ep", "2"}), (Keys{dense, w13({4, kEven}).key(), w2({4, kEven}).key()}));
  // The shapes that it prints are taken again, as a run that is resumed takes them.
  const Outcome text = tool_({"plan", "--model", "model.json", "--tokens", "4096"});
  const std::string mnk = "e8m8192n2048k4096skew0;4096,4096,4096;e8m8192n4096k1024skew0";
  EXPECT_TRUE(contains(text.out, mnk.substr(0, mnk.find(';')))) << text.out;
  const Json again = tool_.json({"plan", "--mnk", mnk, "--recipe", "rowwise"});
  EXPECT_EQ(again["linears"].size(), 3U);
  // With --mlp the MLP of the experts too; a linear that stands alone is none of an MLP.
  const std::string mlp = "mlp/rowwise+fast/e4m3.e4m3.bf16/m8192n1024k4096gate1e8skew0";
  EXPECT_EQ(problems({"--mlp", "gated"}),
            (Keys{dense, w13({8, kEven}).key(), w2({8, kEven}).key(), mlp}));
  for (const Words& same :
       {Words{"--mnk", "8192,1024,4096", "--experts", "8", "--mlp", "gated", "--recipe", "rowwise"},
        Words{"--mnk", "m8192n1024k4096gate1e8skew0", "--recipe", "rowwise"},
        Words{"--problem", mlp}}) {
    Words plan = {"plan"};
    plan.insert(plan.end(), same.begin(), same.end());
    const Json planned = tool_.json(plan);
    ASSERT_EQ(planned["linears"].size(), 3U) << same.front();
    EXPECT_EQ(planned["linears"].back()["problem"], mlp);
  }
  tool_.expect_refused(1, {"plan", "--mnk", "8192,1024,4096", "--experts", "8", "--mlp", "plain"},
                       {"gated"});
  tool_.expect_refused(
      1, {"plan", "--mnk", "64,64,64", "--mlp", "gated", "--recipe", "rowwise_with_gw_hp"},
      {"rowwise_with_gw_hp", "--mlp"});
  tool_.expect_refused(1, {"plan", "--problem", mlp, "--mlp", "plain"}, {"--mlp", "--problem"});
  tool_.expect_refused(1, {"bench", "linear", "--problem", mlp}, {"--problem", "sweep --mlp"});
  tool_.expect_refused(1, {"plan", "--mnk", "e8m8192n2048k4096"}, {"--mnk", "skew"});
  tool_.expect_refused(1, {"plan", "--mnk", mnk + ";"}, {"--mnk", "not M,N,K"});
  tool_.expect_refused(1, {"plan", "--mnk", mnk, "--skew", "zipf"}, {"--skew", "--experts"});
}

TEST_F(FilterExperts, OfAConfigAreALayerOrLinearsOfTheirOwn) {
  Words words = filter({});
  words[2] = "mixtral-8x7b";
  const Json layers = tool_.json(words)["decisions"];
  int64_t experts = 0;
  for (const Json& d : layers) {
    if (!d.contains("experts")) continue;
    ++experts;
    EXPECT_TRUE(contains(d["fqn"].get<std::string>(), ".mlp.experts")) << d;
    EXPECT_EQ(d["experts"], 8);
    EXPECT_EQ(d["out_features"], 14336);
  }
  EXPECT_EQ(experts, 32);
  words.emplace_back("--expert-linears");
  const Json linears = tool_.json(words)["decisions"];
  EXPECT_EQ(linears.size(), layers.size() + 32 * (8 * 3 - 1));
}

TEST_F(FilterExperts, AreInTheFileForATrainer) {
  ASSERT_EQ(tool_(filter({"--verdicts", "model.filter"})).code, 0);
  const FilterFile file =
      FilterFile::parse(read_file(tool_.path() / "model.filter").value()).value();
  ASSERT_EQ(file.decisions.size(), 2U);
  EXPECT_EQ(file.decisions[1].fqn, kExperts);
  EXPECT_TRUE(file.decisions[1].convert);
  EXPECT_EQ(file.decisions[1].out_features, 1024);
}

// A table has the rows of experts, so that the runtime decides by the same.
TEST_F(FilterExperts, AreInTheTable) {
  ASSERT_EQ(tool_({"db", "export", "--format", "table", "-o", "t.txt", "--db", "my.db"}).code, 0);
  const std::string text = read_file(tool_.path() / "t.txt").value();
  EXPECT_TRUE(contains(text, "\nexperts rowwise e8m8192n2048k4096skew0 0 1.5 ")) << text;
  const auto table = TuningTable::parse(text);
  ASSERT_TRUE(table) << table.error().message;
  // The others are built in.
  EXPECT_EQ(
      std::ranges::count_if(table->experts(), [](const auto& row) { return row.shape.m == 8192; }),
      4);
  EXPECT_EQ(table->serialize(), text);
}

TEST_F(FilterExperts, AreExplainedAndReported) {
  const Words words = {"explain",  "layers.*.moe.experts",
                       "--model",  "model.json",
                       "--tokens", "4096",
                       "--recipe", "rowwise",
                       "--db",     "my.db"};
  const Json why = tool_.json(words);
  EXPECT_EQ(why["convert"], true);
  EXPECT_EQ(why["m"], 8192);
  EXPECT_EQ(why["parts"].size(), 2U);
  EXPECT_TRUE(why["torchao"]["convert"].is_null());
  ASSERT_EQ(why["kernels"].size(), 6U);
  EXPECT_EQ(why["kernels"][5]["op"], "w2 grad_weight");
  EXPECT_EQ(why["kernels"][5]["chosen_by"], "the tuning table's row of this shape");
  EXPECT_EQ(why["trials"].size(), 2U);
  const std::string text = tool_(words).out;
  EXPECT_TRUE(contains(text, "experts=8 rows=8192 dim=4096 hidden_dim=1024")) << text;
  ASSERT_EQ(tool_({"report", "-o", "r.html", "--model", "model.json", "--tokens", "4096", "--ep",
                   "4", "--recipe", "rowwise", "--db", "my.db"})
                .code,
            0);
  const std::string page = read_file(tool_.path() / "r.html").value();
  EXPECT_TRUE(contains(page, "of 1 layers of experts to float8"));
  EXPECT_TRUE(contains(page, "4 expert-parallel ranks"));
}

}  // namespace
}  // namespace f8::testing
