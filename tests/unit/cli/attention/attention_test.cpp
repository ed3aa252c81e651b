// Attention in the tool: what filter, explain, query, compare and report make of its rows, and what they refuse.
#include "recipes/attention.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>

#include "base/file.hpp"
#include "recipes/model/filter_file.hpp"
#include "tests/unit/cli/run_tool.hpp"
#include "tests/unit/tuning_db/sample.hpp"

namespace f8::testing {
namespace {

namespace db = tuning_db;
using Json = nlohmann::json;
using Words = std::vector<std::string>;

constexpr const char* kConfig =
    R"({"model_type":"llama","hidden_size":4096,"intermediate_size":1024,
  "num_attention_heads":32,"num_key_value_heads":4,"num_hidden_layers":2,"vocab_size":32000})";

Problem attention(int64_t tokens, int64_t batch = 1,
                  AttentionRecipe recipe = AttentionRecipe::kFp8Forward) {
  return attention_problem(Op::kAttention, recipe,
                           {.tokens = tokens, .batch = batch, .heads_q = 32, .heads_kv = 4})
      .value();
}

std::vector<db::Accuracy> accuracy(double db_of_all) {
  std::vector<db::Accuracy> all;
  for (const char* data : {"normal", "outlier", "bias", "sharp"}) {
    for (const char* tensor : {"O", "dQ", "dK", "dV"}) {
      all.push_back({data, tensor, db_of_all, 0.999, 0.01});
    }
  }
  return all;
}

class AttentionAsked : public ::testing::Test {
 protected:
  // Adds rows of this speedup, of which `interval` is the half width.
  void add(const Problem& problem, double speedup, std::vector<db::Accuracy> own,
           double interval = 0.005, const DeviceClass& device = db::h100()) {
    auto database = db::Database::open(tool_.path() / "my.db", db::OpenMode::kCreate).value();
    db::sweep(
        database,
        {{problem, {db::Impl::kBf16, R"({"backend":"sdpa-cudnn"})", ""}},
         {problem, {db::Impl::kFloat8, R"({"kernels":"tuned"})", ""}}},
        [&](const db::TrialKey& cell) {
          if (cell.candidate.impl == db::Impl::kBf16) return db::timed(1e6);
          db::TrialResult result = db::timed(1e6 / speedup, speedup, interval);
          result.accuracy = own;
          return result;
        },
        device);
  }
  [[nodiscard]] Json filter(const std::string& tokens, const std::string& sequence) const {
    const Json result =
        tool_.json({"filter", "--model", "config.json", "--recipe", "rowwise", "--tokens", tokens,
                    "--attention", "--sequence", sequence, "--db", "my.db", "--device", "H100"});
    EXPECT_EQ(result["attention"].size(), 2U);
    return result["attention"].at(0);
  }
  void SetUp() override { tool_.write("config.json", kConfig); }
  Tool tool_;
};

TEST_F(AttentionAsked, ConvertsWhatIsFasterAndNearEnough) {
  add(attention(8192), 1.1, accuracy(20.5));
  const Json one = filter("8192", "8192");
  EXPECT_EQ(one["fqn"], "model.layers.0.self_attn");
  EXPECT_EQ(one["problem"], attention(8192).key());
  EXPECT_EQ(one["convert"], true);
  EXPECT_EQ(one["speedup"], 1.1);
  EXPECT_EQ(one["accuracy"].size(), 16U);
  EXPECT_NE(one["reason"].get<std::string>().find("converted"), std::string::npos);
  // The other batch was not measured.
  const Json other = filter("16384", "8192");
  EXPECT_EQ(other["convert"], false);
  const auto reason = other["reason"].get<std::string>();
  EXPECT_NE(reason.find("sweep --attention --shape \"s8192b2h32g4d128\" --masks causal"),
            std::string::npos)
      << reason;
}

TEST_F(AttentionAsked, TakesTheRecipeWhoseSpeedupIsAtLeastTheLargest) {
  constexpr AttentionRecipe kFp8 = AttentionRecipe::kFp8;
  const auto chosen = [&](int64_t tokens) {
    const Json one = filter(std::to_string(tokens), std::to_string(tokens));
    EXPECT_EQ(one["recipes"].size(), 2U);
    EXPECT_EQ(one["problem"], one["recipes"][0]["problem"]);
    EXPECT_EQ(one["convert"], one["recipe"] != "bf16");
    return one["recipe"].get<std::string>();
  };
  add(attention(1024), 1.2, accuracy(25));
  add(attention(1024, 1, kFp8), 1.3, accuracy(22));
  EXPECT_EQ(chosen(1024), "fp8");
  add(attention(2048), 1.2, accuracy(25));
  add(attention(2048, 1, kFp8), 1.22, accuracy(22), 0.04);  // its lower end is below the other's
  EXPECT_EQ(chosen(2048), "fp8_forward");
  add(attention(4096), 1.2, accuracy(25));
  add(attention(4096, 1, kFp8), 1.3, accuracy(17));  // its gradients are out of the budget
  EXPECT_EQ(chosen(4096), "fp8_forward");
  add(attention(8192), 1.01, accuracy(25));
  add(attention(8192, 1, kFp8), 1.1, accuracy(17));
  EXPECT_EQ(chosen(8192), "bf16");
  add(attention(16384, 1, kFp8), 1.3, accuracy(22));  // the other is not measured
  EXPECT_EQ(chosen(16384), "fp8");
  EXPECT_EQ(chosen(32768), "bf16");
}

TEST_F(AttentionAsked, FilterFilesHaveTheVerdicts) {
  add(attention(8192), 1.1, accuracy(25));
  add(attention(8192, 1, AttentionRecipe::kFp8), 1.3, accuracy(22));
  const auto filed = [&](const std::string& tokens) {
    const Outcome done = tool_({"filter", "--model", "config.json", "--recipe", "rowwise",
                                "--tokens", tokens, "--attention", "--sequence", tokens, "--db",
                                "my.db", "--device", "H100", "--verdicts", "verdicts"});
    EXPECT_EQ(done.code, 0) << done.err;
    return FilterFile::parse(read_file(tool_.path() / "verdicts").value()).value();
  };
  const FilterFile file = filed("8192");
  EXPECT_EQ(file.sequence, 8192);
  EXPECT_EQ(file.decisions.size(), 15U) << "linears are there too";
  ASSERT_EQ(file.attention.size(), 2U);
  const FilterFile::Attention& one = file.attention[1];
  EXPECT_EQ(one.fqn, "model.layers.1.self_attn");
  EXPECT_EQ(one.recipe, "fp8");
  EXPECT_EQ(one.heads_q, 32);
  EXPECT_EQ(one.heads_kv, 4);
  EXPECT_EQ(one.head_dim, 128);
  EXPECT_EQ(one.evidence, Evidence::kMeasured);
  EXPECT_NEAR(one.speedup.speedup, 1.3, 1e-9);
  EXPECT_TRUE(one.reason.starts_with("converted")) << one.reason;
  const FilterFile::Attention unknown = filed("4096").attention[0];
  EXPECT_EQ(unknown.recipe, "bf16");
  EXPECT_EQ(unknown.evidence, Evidence::kRule);
  EXPECT_EQ(unknown.speedup, SpeedupInterval{});
}

TEST_F(AttentionAsked, ExplainSaysTheNumbersOfEachRecipe) {
  add(attention(8192), 1.1, accuracy(25));
  add(attention(8192, 1, AttentionRecipe::kFp8), 1.3, accuracy(17));
  for (const AttentionRecipe recipe : kAttentionRecipes) {
    const Words words = {"explain", attention(8192, 1, recipe).key(), "--db", "my.db", "--device",
                         "H100"};
    const Json why = tool_.json(words);
    EXPECT_EQ(why["recipe"], "fp8_forward") << "the answer is about the shape";
    EXPECT_EQ(why["speedup"], 1.1);
    EXPECT_EQ(why["recipes"][1]["recipe"], "fp8");
    EXPECT_EQ(why["recipes"][1]["convert"], false);
    EXPECT_EQ(why["recipes"][1]["speedup"], 1.3);
    EXPECT_EQ(why["recipes"][1]["accuracy"].size(), 16U);
    EXPECT_EQ(why["trials"].size(), 2U);
    const Outcome text = tool_(words);
    for (const char* part : {"FLOAT8, recipe fp8_forward", "1.100", "25.0", "1.300", "17.0",
                             "too inaccurate: O 17.0 dB"}) {
      EXPECT_TRUE(contains(text.out, part)) << part << text.out;
    }
  }
}

TEST_F(AttentionAsked, RecipesOfTwoDevicesAreNotCompared) {
  if (!tool_.json({"doctor"}).at("records").at("device").is_null()) {
    GTEST_SKIP() << "this machine's GPU is asked about";
  }
  DeviceClass h200 = db::h100();
  h200.name = "NVIDIA H200";
  add(attention(8192), 1.4, accuracy(25));
  add(attention(8192, 1, AttentionRecipe::kFp8), 1.3, accuracy(25), 0.005, h200);
  const Json why = tool_.json({"explain", attention(8192).key(), "--db", "my.db"});
  EXPECT_EQ(why["recipe"], "fp8") << "the H200 was measured last";
  EXPECT_EQ(why["device"], "NVIDIA H200");
  const auto reason = why["recipes"][1]["reason"].get<std::string>();
  EXPECT_NE(reason.find("H100"), std::string::npos) << reason;
}

TEST_F(AttentionAsked, KeepsWhatIsNotSurelyFaster) {
  add(attention(2048), 1.03, accuracy(30), 0.02);
  const Json one = filter("2048", "2048");
  EXPECT_EQ(one["convert"], false);
  EXPECT_NE(one["reason"].get<std::string>().find("ambiguous"), std::string::npos);
}

TEST_F(AttentionAsked, KeepsWhatIsTooInaccurateOrOfUnknownAccuracy) {
  auto own = accuracy(25);
  own[5].sqnr_db = 12.4;
  add(attention(8192), 1.3, own);
  EXPECT_EQ(filter("8192", "8192")["convert"], false);
  EXPECT_NE(filter("8192", "8192")["reason"].get<std::string>().find(
                "too inaccurate: dQ 12.4 dB on outlier"),
            std::string::npos);
  own = accuracy(19);  // enough of dQ and dK alone
  add(attention(4096), 1.3, own);
  EXPECT_NE(filter("4096", "4096")["reason"].get<std::string>().find("too inaccurate: O 19.0 dB"),
            std::string::npos);
  own = accuracy(25);
  own.erase(own.begin() + 11);
  add(attention(1024), 1.3, own);
  EXPECT_EQ(filter("1024", "1024")["convert"], false);
  EXPECT_NE(filter("1024", "1024")["reason"].get<std::string>().find(
                "accuracy not known: dV on bias data"),
            std::string::npos);
}

TEST_F(AttentionAsked, KeepsHeadsWindowsAndScoresThatItHasNot) {
  add(attention(8192), 1.3, accuracy(25));
  const auto reason = [&](const std::string& from, const std::string& to) {
    std::string config = kConfig;
    config.replace(config.find(from), from.size(), to);
    tool_.write("config.json", config);
    const Json one = filter("8192", "8192");
    EXPECT_EQ(one["convert"], false);
    return one["reason"].get<std::string>();
  };
  EXPECT_NE(reason("\"vocab_size\"", "\"head_dim\":96,\"vocab_size\"").find("64, 128 and 256"),
            std::string::npos);
  EXPECT_NE(
      reason("\"vocab_size\"", "\"sliding_window\":512,\"vocab_size\"").find("windows of 512 keys"),
      std::string::npos);
  // Heads that fp8 has not are the first reason: another window would not help.
  EXPECT_NE(reason("\"vocab_size\"", "\"head_dim\":96,\"sliding_window\":512,\"vocab_size\"")
                .find("64, 128 and 256"),
            std::string::npos);
  EXPECT_NE(reason("\"llama\"", "\"gemma2\"").find("capped scores"), std::string::npos);
}

TEST_F(AttentionAsked, ExplainAndQueryShowBothNumbers) {
  add(attention(8192), 1.1, accuracy(20.5));
  const std::string key = attention(8192).key();
  const Words device = {"--db", "my.db", "--device", "H100"};
  const auto with = [&](Words words) {
    words.insert(words.end(), device.begin(), device.end());
    return words;
  };
  const Json why = tool_.json(with({"explain", key}));
  EXPECT_EQ(why["convert"], true);
  EXPECT_EQ(why["speedup"], 1.1);
  EXPECT_EQ(why["accuracy"].size(), 16U);
  const Outcome text = tool_(with({"explain", key}));
  for (const char* part : {"FLOAT8, recipe fp8_forward", "1.100", "SQNR", "outlier", "20.5",
                           "18 dB", "  fp8          kept in bf16: it was not measured"}) {
    EXPECT_TRUE(contains(text.out, part)) << part << text.out;
  }
  const Json known = tool_.json(with({"query", "--problem", key})).at("results").at(0);
  EXPECT_EQ(known["best"]["accuracy"].size(), 16U);
  EXPECT_EQ(known["baseline"]["config"]["backend"], "sdpa-cudnn");
  EXPECT_EQ(known["s"], 8192);
  const Outcome rows = tool_(with({"query", "--problem", key}));
  for (const char* part : {"float8", "sdpa-cudnn", "SQNR"}) {
    EXPECT_TRUE(contains(rows.out, part)) << part << rows.out;
  }
  const Outcome none = tool_(with({"query", "--problem", attention(4096).key()}));
  EXPECT_TRUE(contains(none.err, "--shape \"s4096b1h32g4d128\"")) << none.err;
}

TEST_F(AttentionAsked, RefusesBadQuestions) {
  const Words base = {"filter", "--model", "config.json", "--recipe", "rowwise"};
  const auto refused = [&](Words words, const Words& parts) {
    words.insert(words.begin(), base.begin(), base.end());
    tool_.expect_refused(1, words, parts);
  };
  refused({"--tokens", "8192", "--attention"}, {"--sequence"});
  refused({"--tokens", "8192", "--sequence", "8192"}, {"--attention"});
  refused({"--tokens", "8192", "--attention", "--sequence", "-1"}, {"--sequence"});
  refused({"--tokens", "8192", "--attention", "--sequence", "5000"}, {"--tokens", "--sequence"});
  refused({"--tokens", "8192", "--attention", "--sequence", "8192", "--tp", "16"}, {"16 ranks"});
  tool_.write("list.json", R"([{"fqn":"a","in_features":64,"out_features":64}])");
  tool_.expect_refused(1,
                       {"filter", "--model", "list.json", "--recipe", "rowwise", "--tokens", "8192",
                        "--attention", "--sequence", "8192"},
                       {"--attention", "list.json", "config.json"});
}

// Programs that measure elsewhere put these into their rows.
TEST(AttentionRecords, DoctorHasThoseOfThisMachine) {
  const Tool tool;
  const Json records = tool.json({"doctor"}).at("records");
  EXPECT_EQ(records["toolchain"]["toolchain"].get<std::string>().size(), 32U);
  EXPECT_TRUE(records["toolchain"].contains("git_sha"));
  EXPECT_TRUE(records["device"].is_null() || records["device"].contains("sm_count"));
}

TEST(AttentionSweep, LeavesOutLayersThatAreNotMeasured) {
  const Tool tool;
  std::string config = kConfig;
  const std::string at = "\"vocab_size\"";
  config.replace(config.find(at), at.size(), "\"sliding_window\":512,\"vocab_size\"");
  tool.write("config.json", config);
  const Words words = {"plan", "--model", "config.json", "--attention", "--sequence"};
  const auto with = [&](const std::string& sequence) {
    Words all = words;
    all.push_back(sequence);
    return all;
  };
  EXPECT_EQ(tool.json(with("512,8192"))["attentions"].size(), 5U) << "the window holds 512 tokens";
  tool.expect_refused(1, with("8192"),
                      {"--model config.json", "windows of 512 keys", "--sequence"});
}

// Adds rows of the parts, as a sweep does.
void add_parts(const Tool& tool, const std::string& file, double forward_ns, double backward_ns) {
  auto database = db::Database::open(tool.path() / file, db::OpenMode::kCreate).value();
  std::vector<db::TrialKey> cells;
  for (const AttentionRecipe recipe : kAttentionRecipes) {
    for (const Op op : {Op::kAttentionForward, Op::kAttentionBackward}) {
      const auto part =
          attention_problem(op, recipe, {.tokens = 8192, .heads_q = 32, .heads_kv = 4});
      if (part) cells.push_back({*part, {db::Impl::kFloat8, R"({"kernels":"tuned"})", ""}});
    }
  }
  db::sweep(database, cells, [&](const db::TrialKey& cell) {
    const bool forward = cell.problem.op == Op::kAttentionForward;
    db::TrialResult result = db::timed(forward ? forward_ns : backward_ns);
    for (const db::Accuracy& a : accuracy(24)) {
      if ((a.tensor == "O") == forward) result.accuracy.push_back(a);
    }
    return result;
  });
}

TEST_F(AttentionAsked, QueryHasTheRowsOfAShape) {
  add(attention(8192, 1, AttentionRecipe::kFp8), 1.3, accuracy(22));
  add_parts(tool_, "my.db", 2e5, 5e5);
  const Words base = {"query", "--shape", "s8192b1h32g4d128", "--db", "my.db", "--device", "H100"};
  const auto with = [&](const Words& more) {
    Words words = base;
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const Json all = tool_.json(base).at("results");
  ASSERT_EQ(all.size(), 2U) << "both recipes";
  EXPECT_EQ(all[0]["recipe"], "fp8_forward");
  EXPECT_TRUE(all[0]["best"].is_null()) << "it was not measured beside bf16";
  ASSERT_EQ(all[0]["parts"].size(), 1U) << "its backward is in bf16";
  EXPECT_EQ(all[1]["best"]["speedup"], 1.3);
  ASSERT_EQ(all[1]["parts"].size(), 2U);
  EXPECT_EQ(all[1]["parts"][1]["op"], "attention_backward");
  EXPECT_EQ(all[1]["parts"][1]["best"]["median_us"], 500);
  EXPECT_EQ(all[1]["parts"][1]["best"]["accuracy"].size(), 12U);
  const Json forwards = tool_.json(with({"--op", "attention_forward"})).at("results");
  ASSERT_EQ(forwards.size(), 2U);
  for (const Json& each : forwards) {
    EXPECT_EQ(each["op"], "attention_forward");
    EXPECT_EQ(each["best"]["median_us"], 200);
    EXPECT_FALSE(each.contains("parts"));
  }
  EXPECT_EQ(tool_.json(with({"--op", "attention_backward"})).at("results").size(), 1U);
  EXPECT_EQ(tool_.json(with({"--recipe", "fp8", "--masks", "causal,full"})).at("results").size(),
            2U);
  const Outcome text = tool_(base);
  EXPECT_TRUE(contains(text.err, "sweep --attention --shape \"s8192b1h32g4d128\"")) << text.err;
  const Outcome part = tool_(with({"--op", "attention_backward", "--full"}));
  EXPECT_TRUE(contains(part.err, "sweep --attention --shape \"s8192b1h32g4d128\" --masks full "))
      << part.err;
  tool_.expect_refused(1, with({"--op", "linear"}), {"--op linear", "attention_forward"});
  tool_.expect_refused(1, with({"--op", "attention_backward", "--recipe", "fp8_forward"}),
                       {"fp8_forward", "bf16"});
  tool_.expect_refused(1, with({"--mnk", "64,64,64"}), {"--shape", "--mnk"});
  tool_.expect_refused(1, {"query", "--mnk", "64,64,64", "--recipe", "rowwise", "--masks", "full"},
                       {"--masks", "--shape"});
}

TEST_F(AttentionAsked, ExplainHasThePartsByThemselves) {
  add(attention(8192, 1, AttentionRecipe::kFp8), 1.3, accuracy(22));
  add_parts(tool_, "my.db", 2e5, 5e5);
  const Words words = {"explain", attention(8192).key(), "--db", "my.db", "--device", "H100"};
  const Json why = tool_.json(words);
  const Json& fp8 = why["recipes"][0];
  EXPECT_EQ(fp8["recipe"], "fp8");
  EXPECT_EQ(fp8["parts"]["attention_forward"]["median_us"], 200);
  EXPECT_EQ(fp8["parts"]["attention_backward"]["median_us"], 500);
  EXPECT_EQ(why["recipes"][1]["parts"].size(), 1U) << "its backward is in bf16";
  const Outcome text = tool_(words);
  EXPECT_TRUE(contains(text.out, "backward     500.0 us, ")) << text.out;
}

TEST(AttentionRows, AreCompared) {
  const Tool tool;
  add_parts(tool, "a.db", 2e5, 5e5);
  add_parts(tool, "b.db", 1.8e5, 6e5);
  const auto compare = [&](const Words& more) {
    Words words = {"compare", "a.db", "b.db", "--json"};
    words.insert(words.end(), more.begin(), more.end());
    return tool(words);
  };
  const Outcome all = compare({});
  EXPECT_EQ(all.code, 3) << "the backward is slower";
  EXPECT_EQ(all.json()["results"].size(), 3U);
  const Outcome forward = compare({"--op", "attention_forward"});
  EXPECT_EQ(forward.code, 0) << forward.err;
  ASSERT_EQ(forward.json()["results"].size(), 2U);
  EXPECT_EQ(forward.json()["results"][0]["verdict"], "FASTER");
  EXPECT_EQ(compare({"--op", "attention_forward", "--recipe", "fp8"}).json()["results"].size(), 1U);
  EXPECT_EQ(compare({"--recipe", "fp8_forward"}).json()["results"].size(), 1U);
  const Outcome backward = compare({"--op", "attention_backward"});
  EXPECT_EQ(backward.code, 3);
  EXPECT_EQ(backward.json()["results"][0]["verdict"], "SLOWER");
  tool.expect_refused(1, {"compare", "a.db", "b.db", "--op", "forward"},
                      {"--op", "'forward'", "attention_forward"});
  tool.expect_refused(1, {"compare", "a.db", "b.db", "--op", "attention", "--recipe", "rowwise"},
                      {"--recipe", "fp8_forward and fp8"});
  tool.expect_refused(1, {"compare", "a.db", "b.db", "--op", "linear", "--recipe", "fp8"},
                      {"--recipe", "'fp8'"});
}

// Rows that are exported and imported again say the same.
TEST_F(AttentionAsked, RowsTravelWithTheirAccuracy) {
  add(attention(8192, 1, AttentionRecipe::kFp8), 1.3, accuracy(22));
  add_parts(tool_, "my.db", 2e5, 5e5);
  ASSERT_EQ(tool_({"db", "export", "--db", "my.db", "-o", "rows.jsonl"}).code, 0);
  ASSERT_EQ(tool_({"db", "import", "rows.jsonl", "--db", "other.db"}).code, 0);
  for (const char* file : {"my.db", "other.db"}) {
    const Json answer = tool_.json({"query", "--shape", "s8192b1h32g4d128", "--recipe", "fp8",
                                    "--db", file, "--device", "H100"})["results"][0];
    EXPECT_EQ(answer["best"]["accuracy"].size(), 16U) << file;
    EXPECT_EQ(answer["parts"][0]["best"]["accuracy"].size(), 4U) << file;
  }
}

// The build puts rows of attention into the built-in database, and not into the tables of the runtime.
TEST_F(AttentionAsked, TheBuiltInDatabaseTakesRowsThatNoTableHas) {
  add(attention(8192, 1, AttentionRecipe::kFp8), 1.3, accuracy(22));
  ASSERT_EQ(tool_({"db", "export", "--db", "my.db", "-o", "rows.jsonl"}).code, 0);
  {
    auto linears = db::Database::open(tool_.path() / "linears.db", db::OpenMode::kCreate).value();
    db::sweep_linears(
        linears, "rowwise", {{1024, 1024, 1024}}, [](Shape) { return 1e6; },
        [](Shape) { return 1.3; });
  }
  ASSERT_EQ(tool_({"db", "export", "--db", "linears.db", "-o", "linears.jsonl"}).code, 0);
  const auto make = [&](const std::string& arguments) {
    const std::string line =
        "cd " + tool_.path().string() + " && " FLOAT8_MAKE_BUILTIN " " + arguments;
    return std::system(line.c_str());
  };
  ASSERT_EQ(make("with.db with.cpp linears.jsonl --rows rows.jsonl"), 0);
  ASSERT_EQ(make("without.db without.cpp linears.jsonl --rows"), 0);
  EXPECT_EQ(read_file(tool_.path() / "with.cpp").value(),
            read_file(tool_.path() / "without.cpp").value());
  const auto converts = [&](const char* file) {
    return tool_.json({"explain", attention(8192).key(), "--db", file, "--device", "H100"})
        .at("convert")
        .get<bool>();
  };
  EXPECT_TRUE(converts("with.db"));
  EXPECT_FALSE(converts("without.db"));
}

TEST_F(AttentionAsked, ReportShowsADatabaseOfAttentionAlone) {
  add(attention(8192, 1, AttentionRecipe::kFp8), 1.3, accuracy(22.5));
  add(attention(8192), 1.1, accuracy(25));
  add(attention(4096, 1, AttentionRecipe::kFp8), 1.2, accuracy(17));
  add_parts(tool_, "my.db", 2e5, 5e5);
  const Outcome report = tool_({"report", "-o", "-", "--db", "my.db"});
  ASSERT_EQ(report.code, 0) << report.err;
  for (const char* part :
       {"<h2 id=\"attention-h\">Attention in fp8</h2>", "Speed of attention in fp8", "32/8 of 128",
        "1.300", "converted", "not taken: fp8 is faster", "too inaccurate: O 17.0 dB",
        "Accuracy of attention in fp8", "<td>17.0</td>", "outlier"}) {
    EXPECT_TRUE(contains(report.out, part)) << part;
  }
  // Rows of the parts alone are enough.
  add_parts(tool_, "parts.db", 2e5, 5e5);
  const Outcome parts = tool_({"report", "-o", "-", "--db", "parts.db"});
  ASSERT_EQ(parts.code, 0) << parts.err;
  EXPECT_TRUE(contains(parts.out, "<td>24.0</td>"));
}

}  // namespace
}  // namespace f8::testing
