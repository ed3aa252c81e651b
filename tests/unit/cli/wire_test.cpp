// The command wire, and filter with the wire in its verdicts, on measured rows of known constants.
#include <gtest/gtest.h>

#include <map>

#include "base/file.hpp"
#include "tests/unit/cli/run_tool.hpp"
#include "tests/unit/tuning_db/sample.hpp"
#include "tuning_db/estimate/wire_model.hpp"

namespace f8::testing {
namespace {

using Json = nlohmann::json;
using tuning_db::Collective;
using tuning_db::RankGroup;
using Words = std::vector<std::string>;

class Wire : public ::testing::Test {
 protected:
  // Collectives of GPUs with a launch of 10 us, NVLink of 2 us and 200 GB/s, a network of 8 us and
  // 40 GB/s.
  void SetUp() override {
    tuning_db::WireModel truth;
    truth.launch_us = 10;
    truth.nvlink = {.step_us = 2, .gb_per_s = 200};
    truth.network = {.step_us = 8, .gb_per_s = 40};
    std::string csv = "collective,dtype,ranks,hosts,bytes,us\n";
    for (const RankGroup group : {RankGroup{2, 1}, {8, 1}, {2, 2}}) {
      for (int64_t bytes = 4096; bytes < 1'000'000'000; bytes *= 8) {
        csv += f8::format("all_gather,uint8,{},{},{},{}\n", group.ranks, group.hosts, bytes,
                          truth.us(Collective::kAllGather, group, static_cast<double>(bytes)));
      }
    }
    tool_.write("rows.csv", csv);
    tool_.write("model.json", R"([
      {"fqn": "layers.0.attention.wq", "in_features": 4096, "out_features": 4096},
      {"fqn": "layers.0.attention.wk", "in_features": 4096, "out_features": 1024},
      {"fqn": "layers.0.feed_forward.w2", "in_features": 8192, "out_features": 4096},
      {"fqn": "output", "in_features": 4096, "out_features": 8192}])");
    auto database =
        tuning_db::Database::open(tool_.path() / "my.db", tuning_db::OpenMode::kCreate).value();
    const auto bf16_ns = [](Shape s) {
      return static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k) * 1e-5;
    };
    tuning_db::sweep_linears(database, "tensorwise",
                             {{2048, 4096, 4096},
                              {2048, 1024, 4096},
                              {2048, 4096, 8192},
                              {2048, 8192, 4096},
                              {2048, 4096, 1024},
                              {2048, 256, 4096}},
                             bf16_ns, [](Shape s) { return s.n <= 1024 ? 1.0 : 1.5; });
  }

  [[nodiscard]] static Words filter(const Words& more) {
    Words words = {"filter", "--model",  "model.json", "--tokens",    "2048",    "--db",
                   "my.db",  "--recipe", "tensorwise", "--wire-rows", "rows.csv"};
    words.insert(words.end(), more.begin(), more.end());
    return words;
  }

  Tool tool_;
};

TEST_F(Wire, PredictsGatherAndAmaxesForManyRanks) {
  const Outcome table = tool_({"wire", "predict", "--wire-rows", "rows.csv"});
  EXPECT_EQ(table.code, 0) << table.err;
  EXPECT_EQ(table.out,
            R"(ranks  hosts  bf16 gather us  fp8 gather us  amaxes us  saved a step us
    2      1             306            159         14              280  measured
    8      1             538            281         38              476  measured
   64      8             756            467         86              492  predicted
  512     64            1996           1703        134              452  predicted
 4096    512           11853          11560        182              405  predicted
16384   2048           45645          45352        214              373  predicted

weight 14336,4096, gathered twice a step
launch 10 us; NVLink 2 us a step, 200 GB/s; network 8 us a step, 40 GB/s a card
rows.csv; times within 0 %
)");
  const Json answer =
      tool_.json({"wire", "predict", "--wire-rows", "rows.csv", "--weight", "4096,4096", "--ranks",
                  "2,64", "--words", "1", "--csv", "predictions.csv"});
  ASSERT_EQ(answer["predictions"].size(), 2U);
  EXPECT_EQ(answer["predictions"][0]["is_prediction"], false);
  EXPECT_EQ(answer["predictions"][1]["is_prediction"], true);
  EXPECT_EQ(answer["predictions"][1]["hosts"], 8);
  const std::string csv = read_file(tool_.path() / "predictions.csv").value();
  EXPECT_EQ(csv,
            "ranks,hosts,bf16_gather_us,fp8_gather_us,amax_all_reduce_us,saved_us_a_step,"
            "half_width,is_prediction\n"
            "2,1,95.9,53.9,14.0,69.9,0.000,0\n"
            "64,8,343.2,260.6,86.0,79.2,0.000,1\n");
}

TEST_F(Wire, BuiltInConstantsSayWhereTheyComeFrom) {
  const Json constants = tool_.json({"wire", "predict"})["constants"];
  EXPECT_FALSE(constants["source"].get<std::string>().empty());
  EXPECT_FALSE(constants["date"].get<std::string>().empty());
  EXPECT_GT(constants["error"], 0);
  EXPECT_FALSE(constants["measured"].empty());
}

TEST_F(Wire, FitReportsTheErrorOfRowsLeftOutAndWritesTheConstants) {
  const Json fit = tool_.json({"wire", "fit", "--rows", "rows.csv", "--source", "two GPUs",
                               "--date", "2026-11-23", "-o", "constants.cpp"});
  EXPECT_EQ(fit["rows"], 18);
  EXPECT_EQ(fit["constants"]["nvlink_gb_per_s"], 200);
  EXPECT_EQ(fit["constants"]["network_step_us"], 8);
  EXPECT_LT(fit["left_out_rms"], 1e-6);
  const std::string source = read_file(tool_.path() / "constants.cpp").value();
  EXPECT_TRUE(contains(source, ".measured = {{2, 1}, {8, 1}, {2, 2}},")) << source;
  EXPECT_TRUE(contains(source, ".source = \"two GPUs\",")) << source;
  const Outcome text = tool_({"wire", "fit", "--rows", "rows.csv", "--date", "2026-11-23"});
  EXPECT_TRUE(contains(text.out, "launch 10 us; NVLink 2 us a step, 200 GB/s")) << text.out;
  EXPECT_TRUE(contains(text.out, "18 rows: error 0.0 % of those fitted to, 0.0 % of each left out"))
      << text.out;
}

TEST_F(Wire, BadRowsAreOneLine) {
  tool_.write("few.csv", "ranks,bytes,us\n2,4096,20\n");
  tool_.expect_refused(1, {"wire", "fit", "--rows", "few.csv"},
                       {"--rows", "1 rows of one host", "takes 6"});
  tool_.write("odd.csv", "ranks,bytes,us\n2,x,20\n");
  tool_.expect_refused(1, {"wire", "fit", "--rows", "odd.csv"},
                       {"odd.csv", "line 2", "column bytes is 'x'"});
  tool_.expect_refused(1, {"wire", "fit", "--rows", "none.csv"}, {"--rows", "none.csv"});
  tool_.expect_refused(1, {"wire", "fit", "--rows", "rows.csv", "--source", "a\"b"},
                       {"--source", "quotes"});
  tool_.expect_refused(1, {"wire", "predict", "--ranks", "2,0"}, {"--ranks", "'0'"});
  tool_.expect_refused(1, {"wire", "predict", "--ranks", "13"}, {"--ranks", "fill hosts of 8"});
  tool_.expect_refused(1, {"wire", "predict", "--weight", "4096"}, {"--weight", "N,K"});
  tool_.expect_refused(1, filter({"--fsdp", "2", "--wire-rows", "few.csv"}), {"--wire-rows"});
}

TEST_F(Wire, FilterShowsWireAndExposedBesideTheVerdict) {
  const Outcome outcome = tool_(filter({"--fsdp", "16", "--hosts", "16"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  std::string text;
  for (std::string_view rest = outcome.out; !rest.empty();) {
    std::string line(take_until(rest, '\n'));
    line = line.substr(0, line.find("; tensorwise"));
    text += line.substr(0, line.find(" without the wire")) + "\n";
  }
  // 343.6 us of GEMMs in wq: 114.5 hide some of the gather of 826.4, 229.1 of the other and 1612.9.
  EXPECT_EQ(
      text,
      R"(layer                     count     N     K  verdict  speedup        interval           wire us        exposed us  evidence  reason
layers.*.attention.wq         1  4096  4096  float8     1.307  [1.307, 1.307]  3265.7 -> 2497.8  2922.1 -> 2291.4  modelled  converted: at least 1.307, need > 1.02; 1.500 [1.495, 1.505]
layers.*.attention.wk         1  1024  4096  float8     1.279  [1.279, 1.279]    816.4 -> 638.3    730.5 -> 558.1  modelled  converted: at least 1.279, need > 1.02; 1.000 [0.995, 1.005]
layers.*.feed_forward.w2      1  4096  8192  float8     1.312  [1.312, 1.312]  6531.5 -> 4977.1  5844.3 -> 4564.2  modelled  converted: at least 1.312, need > 1.02; 1.500 [1.495, 1.505]
output                        1  8192  4096  float8     1.303  [1.303, 1.303]  6681.5 -> 5127.1  5994.3 -> 4714.2  modelled  converted: at least 1.303, need > 1.02; 1.500 [1.495, 1.505]

4 of 4 linears to float8 (tensorwise, measured, M 2048, NVIDIA H100 80GB HBM3); these linears together 1.306x
from bf16 to fp8 on the wire: predicted for fsdp 16 and tp 1 on 16 hosts, wire times within 0 % (rows.csv)
)");
  EXPECT_EQ(tool_.json(filter({}))["decisions"][1]["convert"], false) << "the wire turns wk";
}

TEST_F(Wire, FilterSaysWhatIsPredictedInJson) {
  const Json two = tool_.json(filter({"--fsdp", "2"}));
  EXPECT_EQ(two["ranks"]["is_prediction"], false);
  EXPECT_EQ(two["ranks"]["hosts"], 1);
  const Json many = tool_.json(filter({"--fsdp", "1024", "--tp", "4", "--network-gbit", "200"}));
  EXPECT_EQ(many["tp"], 4);
  EXPECT_EQ(many["ranks"]["is_prediction"], true);
  EXPECT_EQ(many["ranks"]["hosts"], 512);
  EXPECT_EQ(many["ranks"]["network_gbit_per_s"], 200);
  EXPECT_EQ(many["ranks"]["source"], "rows.csv");
  for (const Json& d : many["decisions"]) {
    ASSERT_TRUE(d.contains("wire")) << d.dump();
    EXPECT_EQ(d["evidence"], "modelled");
    EXPECT_GE(d["wire"]["bf16_us"], d["wire"]["bf16_exposed_us"]);
    EXPECT_TRUE(
        contains(d["reason"].get<std::string>(), "predicted for fsdp 1024 and tp 4 on 512 hosts"));
  }
  EXPECT_EQ(many["decisions"][0]["out_features"], 1024);
  const Json alone = tool_.json(filter({}));
  EXPECT_FALSE(alone.contains("ranks"));
  EXPECT_FALSE(alone["decisions"][0].contains("wire"));
  EXPECT_EQ(two["decisions"][0]["wire"]["compute_speedup"], alone["decisions"][0]["speedup"]);
}

// Its layers share what the whole model sends, so that one alone would be charged for all.
TEST_F(Wire, ExplainGivesTheVerdictOfTheFilter) {
  const auto explain = [](const std::string& layer, const Words& more) {
    Words words = filter(more);
    words.front() = "explain";
    words.insert(words.begin() + 1, layer);
    return words;
  };
  for (const Words& ranks : {Words{"--fsdp", "16", "--hosts", "16"}, Words{"--tp", "4"},
                             Words{"--fsdp", "8", "--tp", "4"}}) {
    for (const Json& decision : tool_.json(filter(ranks))["decisions"]) {
      const Json one = tool_.json(explain(decision["fqn"], ranks));
      for (const char* field :
           {"convert", "speedup", "speedup_lo", "speedup_hi", "reason", "wire"}) {
        EXPECT_EQ(one[field], decision[field]) << field << one.dump();
      }
      EXPECT_EQ(one["flips"], Json::array());
    }
  }
  const Json one = tool_.json(explain("layers.0.attention.wk", {"--fsdp", "16", "--hosts", "16"}));
  EXPECT_EQ(one["ranks"]["fsdp"], 16);
  EXPECT_EQ(one["convert"], true);
  const std::string text = tool_(explain("output", {"--fsdp", "16", "--hosts", "16"})).out;
  EXPECT_TRUE(contains(text, "wire         predicted for fsdp 16 and tp 1 on 16 hosts")) << text;
  EXPECT_FALSE(tool_.json(explain("output", {})).contains("ranks"));
}

// A tp that does not suit one layer decides the others.
TEST_F(Wire, FilterKeepsTheLayersThatTensorParallelRanksCannotShare) {
  const auto decisions = [&](const char* tp) {
    std::map<std::string, Json> of;
    const Json all = tool_.json(
        {"filter", "--model", "llama3-8b", "--tokens", "2048", "--recipe", "rowwise", "--tp", tp});
    for (const Json& d : all["decisions"]) of[d["fqn"]] = d;
    return of;
  };
  auto wide = decisions("128");
  EXPECT_EQ(wide["layers.0.attention.wk"]["convert"], false);
  EXPECT_EQ(wide["layers.0.attention.wk"]["evidence"], "rule");
  EXPECT_EQ(
      wide["layers.0.attention.wk"]["reason"],
      "kept in bf16: tp 128 leaves a rank 8 of its 1024 out_features, no multiple of 16; a tp "
      "that divides 16 suits all layers");
  EXPECT_EQ(wide["layers.0.attention.wq"]["out_features"], 32);
  EXPECT_FALSE(contains(wide["layers.0.attention.wq"]["reason"].get<std::string>(), "leaves"));
  auto odd = decisions("3");
  EXPECT_EQ(odd["layers.0.feed_forward.w2"]["reason"],
            "kept in bf16: tp 3 does not divide its 14336 in_features; a tp that divides 16 suits "
            "all layers");
  EXPECT_EQ(odd["output"]["out_features"], 42752);
  EXPECT_FALSE(contains(odd["output"]["reason"].get<std::string>(), "does not divide"));
  // What is measured and compiled leaves them out too.
  const Json compiled = tool_.json(
      {"plan", "--model", "llama3-8b", "--tokens", "2048", "--tp", "3", "--recipe", "rowwise"});
  EXPECT_EQ(compiled["linears"].size(), 1U);
}

TEST_F(Wire, FilterRefusesRanksThatCannotBe) {
  tool_.expect_refused(1, filter({"--fsdp", "2", "--hosts", "4"}),
                       {"hosts is 4", "2 ranks", "choose 1 to 2"});
  tool_.expect_refused(1, filter({"--fsdp", "4", "--hosts", "3"}), {"hosts 3", "divisor"});
  tool_.expect_refused(1, filter({"--fsdp", "0"}), {"--fsdp", "from 1 to"});
  tool_.expect_refused(1, filter({"--tp", "5"}),
                       {"--tp", "tp 5 does not divide its", "'layers.0", "divides 64 suits all"});
  tool_.expect_refused(1, filter({"--network-gbit", "0"}), {"--network-gbit"});
}

}  // namespace
}  // namespace f8::testing
