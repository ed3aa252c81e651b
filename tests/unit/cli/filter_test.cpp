// filter, thresholds, explain and query, on a database of known numbers.
#include <gtest/gtest.h>

#include <set>

#include "base/file.hpp"
#include "recipes/model/filter_file.hpp"
#include "tests/unit/cli/run_tool.hpp"
#include "tests/unit/tuning_db/sample.hpp"

namespace f8::testing {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

// Small K and N lose, large ones win; the GEMM of 8192 x 4096 x 4096 has three candidates.
class Asking : public ::testing::Test {
 protected:
  void SetUp() override {
    namespace db = tuning_db;
    auto database = db::Database::open(tool_.path() / "my.db", db::OpenMode::kCreate).value();
    const auto bf16_ns = [](Shape s) {
      return static_cast<double>(s.m) * static_cast<double>(s.n) * static_cast<double>(s.k) * 1e-5;
    };
    const auto speedup = [](Shape s) { return s.n <= 1024 || s.k <= 1024 ? 0.9 : 1.4; };
    db::sweep_linears(database, "rowwise", db::measured_shapes(), bf16_ns, speedup);
    const Problem gemm = db::gemm(8192, 4096, 4096, "rowwise");
    db::sweep(database,
              {{gemm, db::generated(kFast)},
               {gemm, db::generated(kSlow)},
               {gemm, db::heuristic(3)},
               {gemm, {db::Impl::kBf16CublasLt, R"({"heuristic":0})", ""}}},
              [&](const db::TrialKey& cell) {
                if (cell.candidate.config.find(kFast) != std::string::npos) {
                  return db::timed(200'000, 1.9);
                }
                if (cell.candidate.impl == db::Impl::kCublasLt) return db::timed(210'000, 1.81);
                if (cell.candidate.impl == db::Impl::kBf16CublasLt) return db::timed(380'000);
                return db::TrialResult{.state = db::TrialState::kPruned, .reason = "too slow"};
              });
  }

  [[nodiscard]] Json ask(Words words) const {
    words.insert(words.end(), {"--db", "my.db"});
    return tool_.json(words);
  }

  static constexpr const char* kFast = "128x256s4c2x1w2g8";
  static constexpr const char* kSlow = "128x128s4c1x1w2g8";
  Tool tool_;
};

TEST_F(Asking, FilterHasTheFieldsOfTheInterface) {
  const Json result =
      ask({"filter", "--model", "llama3-8b", "--tokens", "8192", "--recipe", "rowwise"});
  EXPECT_EQ(result["recipe"], "rowwise");
  EXPECT_EQ(result["policy"], "measured");
  EXPECT_EQ(result["tokens"], 8192);
  EXPECT_EQ(result["device"], "NVIDIA H100 80GB HBM3");
  EXPECT_GT(result["estimated_model_speedup"].get<double>(), 1.0);
  ASSERT_EQ(result["decisions"].size(), 225U);
  const std::set<std::string> kEvidence = {"measured", "interpolated", "modelled", "rule"};
  for (const Json& d : result["decisions"]) {
    EXPECT_TRUE(d["fqn"].is_string());
    EXPECT_GT(d["in_features"].get<int64_t>(), 0);
    EXPECT_GT(d["out_features"].get<int64_t>(), 0);
    EXPECT_TRUE(d["convert"].is_boolean());
    EXPECT_FALSE(d["reason"].get<std::string>().empty());
    EXPECT_TRUE(kEvidence.contains(d["evidence"].get<std::string>()));
    EXPECT_LE(d["speedup_lo"].get<double>(), d["speedup"].get<double>());
    EXPECT_GE(d["speedup_hi"].get<double>(), d["speedup"].get<double>());
  }
  const Json& wk = result["decisions"][1];
  EXPECT_EQ(wk["fqn"], "layers.0.attention.wk");
  EXPECT_EQ(wk["convert"], false);
  EXPECT_EQ(wk["evidence"], "measured");
  EXPECT_NEAR(wk["speedup"].get<double>(), 0.9, 1e-3);
  EXPECT_EQ(result["decisions"][0]["convert"], true);
}

// A speedup of 1.000 would say that somebody knows it.
TEST_F(Asking, FilterShowsNoSpeedupWhereNothingIsKnown) {
  (void)tool_.write("odd.json", R"([{"fqn": "odd", "in_features": 4096, "out_features": 24},
    {"fqn": "even", "in_features": 4096, "out_features": 4096}])");
  const Words words = {"filter", "--model", "odd.json", "--tokens", "8192", "--recipe", "rowwise"};
  const Json result = ask(words);
  const Json& odd = result["decisions"][0];
  EXPECT_EQ(odd["evidence"], "rule");
  EXPECT_EQ(odd["speedup_known"], false);
  EXPECT_EQ(odd["speedup"], 1);
  EXPECT_EQ(result["decisions"][1]["speedup_known"], true);
  for (const Words& more : {Words{}, {"--tp", "1", "--fsdp", "2"}}) {
    Words all = words;
    all.insert(all.end(), more.begin(), more.end());
    const std::string table = tool_(all).out;
    const std::string line =
        table.substr(table.find("\nodd"), table.find("\neven") - table.find("\nodd"));
    EXPECT_TRUE(contains(line, " -  ")) << line;
    EXPECT_FALSE(contains(line, "1.000")) << line;
    EXPECT_FALSE(contains(line, "->")) << line;
  }
  const std::string why =
      tool_({"explain", "odd", "--model", "odd.json", "--tokens", "8192", "--recipe", "rowwise"})
          .out;
  EXPECT_TRUE(contains(why, "KEEP BF16") && contains(why, "not a multiple of 16")) << why;
  EXPECT_FALSE(contains(why, "  speedup ")) << why;
}

TEST_F(Asking, FilterIsByteStable) {
  const Words words = {"filter",   "--model", "mixtral-8x7b", "--tokens", "2048",
                       "--recipe", "rowwise", "--db",         "my.db",    "--json"};
  const Outcome first = tool_(words);
  EXPECT_EQ(first.code, 0);
  EXPECT_EQ(first.out, tool_(words).out);
}

TEST_F(Asking, FilterWritesTheSameJsonToAFile) {
  const Outcome outcome = tool_({"filter", "--model", "llama3-8b", "--tokens", "8192", "--recipe",
                                 "rowwise", "--db", "my.db", "--json", "-o", "filter.json"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(read_file(tool_.path() / "filter.json").value(), outcome.out);
}

// A trainer reads the same verdicts, without JSON.
TEST_F(Asking, FilterWritesVerdictsForATrainer) {
  const Json result = ask({"filter", "--model", "llama3-8b", "--tokens", "8192", "--recipe",
                           "rowwise", "--filter-fqns", "output", "--verdicts", "model.filter"});
  const FilterFile file =
      FilterFile::parse(read_file(tool_.path() / "model.filter").value()).value();
  EXPECT_EQ(file.recipe, "rowwise");
  EXPECT_EQ(file.tokens, 8192);
  ASSERT_EQ(file.decisions.size(), result["decisions"].size());
  for (size_t i = 0; i < file.decisions.size(); ++i) {
    const Json& d = result["decisions"][i];
    EXPECT_EQ(file.decisions[i].fqn, d["fqn"].get<std::string>());
    EXPECT_EQ(file.decisions[i].convert, d["convert"]);
    EXPECT_EQ(file.decisions[i].reason, d["reason"].get<std::string>());
    EXPECT_EQ(to_string(file.decisions[i].evidence), d["evidence"].get<std::string>());
    EXPECT_NEAR(file.decisions[i].speedup.lo, d["speedup_lo"].get<double>(), 1e-4);
    EXPECT_NEAR(file.decisions[i].speedup.hi, d["speedup_hi"].get<double>(), 1e-4);
    EXPECT_EQ(file.decisions[i].in_features, d["in_features"]);
    EXPECT_EQ(file.decisions[i].out_features, d["out_features"]);
  }
}

TEST_F(Asking, FilterTableGroupsTheLayers) {
  const Outcome outcome = tool_({"filter", "--model", "llama3-8b", "--tokens", "8192", "--recipe",
                                 "rowwise", "--db", "my.db"});
  EXPECT_EQ(outcome.code, 0);
  EXPECT_TRUE(contains(outcome.out, "layers.*.attention.wk"));
  EXPECT_FALSE(contains(outcome.out, "layers.1."));
  EXPECT_TRUE(contains(outcome.out, "of 225 linears"));
}

TEST_F(Asking, FilterGivesExpertsTheirOwnTokens) {
  const Words words = {"filter",   "--model", "mixtral-8x7b", "--tokens", "8192",
                       "--recipe", "rowwise", "--db",         "my.db",    "--expert-linears"};
  const Json answer = tool_.json(words);
  EXPECT_EQ(answer["tokens"], 8192);
  for (const Json& d : answer["decisions"]) {
    const bool expert = contains(d["fqn"].get<std::string>(), ".experts.");
    EXPECT_EQ(d["tokens"], expert ? 2048 : 8192) << d["fqn"];  // two of eight experts
  }
  // A row of 2,048 tokens is what a list with that number of tokens has.
  (void)tool_.write("expert.json",
                    R"([{"fqn": "w1", "in_features": 4096, "out_features": 14336}])");
  const Json alone = tool_.json({"filter", "--model", "expert.json", "--tokens", "2048", "--recipe",
                                 "rowwise", "--db", "my.db"})["decisions"][0];
  const auto w1 = std::ranges::find_if(answer["decisions"], [](const Json& d) {
    return contains(d["fqn"].get<std::string>(), "experts.0.w1");
  });
  ASSERT_NE(w1, answer["decisions"].end());
  for (const char* field : {"speedup", "speedup_lo", "speedup_hi", "convert", "evidence"}) {
    EXPECT_EQ((*w1)[field], alone[field]) << field;
  }
  const std::string table = tool_(words).out;
  EXPECT_TRUE(contains(table.substr(0, table.find('\n')), "  M  "));
  EXPECT_FALSE(
      contains(tool_({"filter", "--model", "llama3-8b", "--tokens", "8192", "--recipe", "rowwise"})
                   .out.substr(0, 60),
               "  M  "));
}

TEST_F(Asking, FilterByNamesAndByThePeersRule) {
  const auto converted = [&](const Words& more) {
    Words words = {"filter", "--model", "llama3-8b", "--tokens", "8192", "--recipe", "rowwise"};
    words.insert(words.end(), more.begin(), more.end());
    std::set<std::string> kinds;
    const Json result = ask(words);
    for (const Json& d : result["decisions"]) {
      const auto fqn = d["fqn"].get<std::string>();
      if (d["convert"] == true) kinds.insert(fqn.substr(fqn.rfind('.') + 1));
    }
    return kinds;
  };
  using Set = std::set<std::string>;
  EXPECT_EQ(converted({"--policy", "torchao", "--filter-fqns", "auto_filter_small_kn"}),
            (Set{"wq", "wo", "w1", "w2", "w3", "output"}));
  EXPECT_EQ(converted({"--policy", "torchao"}),
            (Set{"wq", "wk", "wv", "wo", "w1", "w2", "w3", "output"}));
  EXPECT_EQ(converted({"--policy", "torchao", "--filter-fqns", "output,attention"}),
            (Set{"w1", "w2", "w3"}));
  EXPECT_EQ(converted({"--filter-fqns", "output,w2"}), (Set{"wq", "wo", "w1", "w3"}));
}

TEST_F(Asking, FilterNamesTheFilterFqnsThatKeepNothing) {
  const Words words = {"filter",   "--model",       "llama3-8b",
                       "--tokens", "8192",          "--recipe",
                       "rowwise",  "--filter-fqns", "output,attn.wq,Output,auto_filter_small_kn",
                       "--device", "H100"};
  const Outcome outcome = tool_(words);
  EXPECT_EQ(outcome.code, 0);
  EXPECT_EQ(std::ranges::count(outcome.err, '\n'), 2) << outcome.err;
  for (const char* part : {"--filter-fqns: 'attn.wq' is part of no layer's name", "'Output'",
                           "layers.0.attention.wq, layers.0.attention.wk", "w2, output"}) {
    EXPECT_TRUE(contains(outcome.err, part)) << part << outcome.err;
  }
  EXPECT_FALSE(contains(outcome.err, "'output'"));
  EXPECT_FALSE(contains(outcome.err, "auto_filter"));
  Words quiet = words;
  quiet.emplace_back("--quiet");
  EXPECT_EQ(tool_(quiet).err, "");
}

TEST_F(Asking, FilterTakesEveryKindOfModelFile) {
  tool_.write("list.json", R"([{"fqn": "a", "in_features": 4096, "out_features": 1024}])");
  tool_.write("config.json", R"({"model_type": "llama", "hidden_size": 4096, "vocab_size": 32000,
    "intermediate_size": 11008, "num_attention_heads": 32, "num_hidden_layers": 1})");
  const std::string header = R"({"a.weight": {"dtype": "BF16", "shape": [1024, 4096]}})";
  tool_.write("m.safetensors", safetensors(header));
  tool_.write("m.safetensors.index.json", R"({"weight_map": {"a.weight": "m.safetensors"}})");
  for (const auto& [file, layers] :
       std::vector<std::pair<const char*, size_t>>{{"list.json", 1},
                                                   {"config.json", 8},
                                                   {"m.safetensors", 1},
                                                   {"m.safetensors.index.json", 1}}) {
    const Json result = ask({"filter", "--model", file, "--tokens", "8192", "--recipe", "rowwise"});
    EXPECT_EQ(result["decisions"].size(), layers) << file;
  }
}

TEST_F(Asking, FilterShardsTheModel) {
  const Json result = ask(
      {"filter", "--model", "llama3-8b", "--tokens", "8192", "--recipe", "rowwise", "--tp", "8"});
  EXPECT_EQ(result["decisions"][0]["out_features"], 512);
  EXPECT_EQ(result["decisions"][3]["in_features"], 512);
}

TEST_F(Asking, EnvironmentNamesTheDatabaseToo) {
  tool_.set("FLOAT8_DB", "my.db");
  const Json result = tool_.json({"explain", "8192,1024,4096", "--recipe", "rowwise"});
  EXPECT_EQ(result["evidence"], "measured");
  EXPECT_EQ(result["trials"][0]["provenance"]["database"], "my.db");
}

TEST_F(Asking, Thresholds) {
  const Json result = ask({"thresholds", "--recipe", "rowwise"});
  ASSERT_FALSE(result["thresholds"].empty());
  for (const Json& t : result["thresholds"]) {
    for (const char* field : {"m", "n_max", "k_max", "cells", "agree", "torchao_agree"}) {
      EXPECT_TRUE(t[field].is_number_integer()) << field;
    }
  }
  EXPECT_EQ(result["torchao_keeps_if_any"].size(), 3U);
  EXPECT_TRUE(ask({"thresholds", "--recipe", "blockwise"})["torchao_keeps_if_any"].is_null());
  const Outcome table = tool_({"thresholds", "--recipe", "tensorwise", "--db", "my.db"});
  EXPECT_TRUE(contains(table.out, "N <= 1024 and K <= 4096"));
}

TEST_F(Asking, ExplainSaysWhyAndWhatWouldFlipIt) {
  const Json kept = ask({"explain", "layers.7.attention.wk", "--model", "llama3-8b", "--tokens",
                         "8192", "--recipe", "rowwise"});
  EXPECT_EQ(kept["convert"], false);
  EXPECT_EQ(kept["evidence"], "measured");
  EXPECT_EQ(kept["torchao"]["convert"], false);
  EXPECT_EQ(kept["kernels"].size(), 3U);
  ASSERT_FALSE(kept["trials"].empty());
  EXPECT_EQ(kept["trials"][0]["provenance"]["device"], "NVIDIA H100 80GB HBM3");
  bool wider = false;
  for (const Json& flip : kept["flips"]) wider |= flip["dimension"] == "n" && flip["value"] > 1024;
  EXPECT_TRUE(wider) << kept["flips"].dump();
  const Outcome text = tool_({"explain", "8192,8192,8192", "--recipe", "rowwise", "--db", "my.db"});
  EXPECT_TRUE(contains(text.out, "FLOAT8"));
}

TEST_F(Asking, ExplainsColumnsAreApartAndItsFlipsHaveIntervals) {
  const Words words = {"explain", "8192,1024,4096", "--recipe", "rowwise", "--db", "my.db"};
  const Outcome text = tool_(words);
  std::set<size_t> columns;
  for (const char* label :
       {"why", "speedup", "torchao", "output", "grad_input", "grad_weight", "flips at", "trial"}) {
    const size_t line = text.out.find(std::string("\n  ") + label + " ");
    ASSERT_NE(line, std::string::npos) << label << text.out;
    const size_t label_end = line + 3 + std::string_view(label).size();
    const size_t value = text.out.find_first_not_of(' ', label_end);
    EXPECT_GE(value - label_end, 2U) << label;
    columns.insert(value - line);
  }
  EXPECT_EQ(columns.size(), 1U) << text.out;
  const size_t flip = text.out.find("flips at");
  const std::string line = text.out.substr(flip, text.out.find('\n', flip) - flip);
  EXPECT_TRUE(contains(line, "[") && contains(line, "]")) << line;
  const Json flips = ask({"explain", "8192,1024,4096", "--recipe", "rowwise"})["flips"];
  ASSERT_FALSE(flips.empty());
  EXPECT_TRUE(contains(line, ", to float8: speedup 1.")) << line;
  for (const Json& one : flips) {
    EXPECT_EQ(one["convert"], true);
    EXPECT_LE(one["speedup_lo"], one["speedup"]);
    EXPECT_LE(one["speedup"], one["speedup_hi"]);
    // At the flip the verdict is another, one step of 16 before it is not.
    const int64_t value = one["value"];
    const char dimension = one["dimension"].get<std::string>()[0];
    const auto converts = [&](int64_t at) {
      const auto size = [&](char name, int64_t own) {
        return std::to_string(dimension == name ? at : own);
      };
      return ask({"explain", size('m', 8192) + "," + size('n', 1024) + "," + size('k', 4096),
                  "--recipe", "rowwise"})["convert"] == true;
    };
    const int64_t own = dimension == 'm' ? 8192 : dimension == 'n' ? 1024 : 4096;
    EXPECT_NE(converts(value), converts(value + (value > own ? -16 : 16))) << one;
  }
}

TEST_F(Asking, QueryWithoutAnOpShowsTheKernelsToo) {
  const Json answer =
      ask({"query", "--mnk", "8192,4096,4096", "--recipe", "rowwise"})["results"][0];
  EXPECT_EQ(answer["op"], "linear");
  ASSERT_EQ(answer["gemms"].size(), 3U);
  EXPECT_EQ(answer["gemms"][0]["op"], "output");
  EXPECT_EQ(answer["gemms"][0]["best"]["config"]["config"], kFast);
  EXPECT_EQ(answer["gemms"][2]["op"], "grad_weight");
  EXPECT_EQ(answer["gemms"][0]["best"]["provenance"]["database"], "my.db");
  EXPECT_EQ(answer["gemms"][2]["best"]["provenance"]["database"], "built-in");
  const Words words = {"query", "--mnk", "8192,4096,4096", "--recipe", "rowwise", "--db", "my.db"};
  const Outcome text = tool_(words);
  for (const char* part : {"linear/", "output/", "grad_input/", "grad_weight/"}) {
    EXPECT_TRUE(contains(text.out, part)) << part << text.out;
  }
  Words linear = words;
  linear.insert(linear.end(), {"--op", "linear"});
  EXPECT_FALSE(contains(tool_(linear).out, "output/"));
}

TEST_F(Asking, ExplainWhereThePeerHasNoRule) {
  const Json result = ask({"explain", "8192,4096,4096", "--recipe", "rowwise_with_gw_hp"});
  EXPECT_TRUE(result["torchao"]["convert"].is_null());
}

TEST_F(Asking, QueryRanksTheCandidates) {
  const Json result =
      ask({"query", "--mnk", "8192,4096,4096", "--recipe", "rowwise", "--op", "output"});
  ASSERT_EQ(result["results"].size(), 1U);
  const Json& answer = result["results"][0];
  EXPECT_EQ(answer["best"]["impl"], "generated");
  EXPECT_EQ(answer["best"]["config"]["config"], kFast);
  EXPECT_NEAR(answer["best"]["median_us"].get<double>(), 200, 1e-6);
  EXPECT_LT(answer["best"]["ci_lo_us"], answer["best"]["ci_hi_us"]);
  EXPECT_EQ(answer["best"]["provenance"]["database"], "my.db");
  EXPECT_TRUE(answer["best"]["provenance"]["toolchain"].is_string());
  ASSERT_EQ(answer["runners_up"].size(), 1U);
  EXPECT_EQ(answer["runners_up"][0]["impl"], "cublaslt");
  EXPECT_EQ(answer["baseline"]["impl"], "bf16_cublaslt");
  EXPECT_EQ(answer["other_trials"]["pruned"], 1);
  const Outcome table = tool_({"query", "--mnk", "8192,4096,4096", "--recipe", "rowwise", "--op",
                               "fprop", "--db", "my.db"});
  EXPECT_TRUE(contains(table.out, std::string("generated ") + kFast));
}

TEST_F(Asking, QueryOfALinearAndOfSeveralShapes) {
  const Json result =
      ask({"query", "--mnk", "8192,1024,4096;16384,4096,4096", "--recipe", "rowwise"});
  ASSERT_EQ(result["results"].size(), 2U);
  EXPECT_EQ(result["results"][0]["op"], "linear");
  EXPECT_NEAR(result["results"][0]["best"]["speedup"].get<double>(), 0.9, 1e-3);
}

TEST_F(Asking, QueryOfTheUnmeasuredSaysSoAndNamesTheNearest) {
  const Words words = {"query", "--mnk",  "8192,4352,4096", "--recipe", "rowwise",
                       "--op",  "output", "--db",           "my.db"};
  Words as_json = words;
  as_json.emplace_back("--json");
  const Outcome outcome = tool_(as_json);
  EXPECT_EQ(outcome.code, 0);
  const Json answer = outcome.json()["results"][0];
  EXPECT_TRUE(answer["best"].is_null());
  EXPECT_EQ(answer["nearest_measured"]["config"], kFast);
  EXPECT_TRUE(contains(outcome.err, "sweep"));
  EXPECT_TRUE(contains(tool_(words).out, "not measured"));
}

}  // namespace
}  // namespace f8::testing
