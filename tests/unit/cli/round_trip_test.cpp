// The program takes what it prints: the same problem, the same kernel.
#include <gtest/gtest.h>

#include <sstream>

#include "base/file.hpp"
#include "tests/unit/cli/run_tool.hpp"
#include "tests/unit/tuning_db/sample.hpp"

namespace f8::testing {
namespace {

namespace db = tuning_db;
using Json = nlohmann::json;
using Words = std::vector<std::string>;

constexpr const char* kLinear = "linear/rowwise+fast/e4m3.e4m3.bf16/m8192n4096k4096";
constexpr const char* kGradInput = "grad_input/rowwise/e4m3.e4m3.bf16/m8192n4096k4096";

// The words of a text that are problem keys.
Words keys_in(const std::string& text) {
  Words keys;
  std::istringstream words(text);
  for (std::string word; words >> word;) {
    if (Problem::parse(word)) keys.push_back(word);
  }
  return keys;
}

TEST(RoundTrip, QueryTakesTheProblemsThatItPrints) {
  const Tool tool;
  const Outcome all = tool({"query", "--mnk", "8192,4096,4096", "--recipe", "rowwise"});
  const Words keys = keys_in(all.out);
  EXPECT_EQ(keys.size(), 4U) << all.out;
  for (const std::string& key : keys) {
    const Outcome one = tool({"query", "--problem", key});
    EXPECT_EQ(one.code, 0) << one.err;
    EXPECT_EQ(keys_in(one.out), Words{key});
    EXPECT_TRUE(contains(all.out, one.out)) << one.out;
  }
  // A shape that was not measured: the nearest one is pasted as well.
  const Outcome missing = tool({"query", "--mnk", "8200,4096,4096", "--recipe", "rowwise"});
  const Words with_nearest = keys_in(missing.out);
  EXPECT_EQ(with_nearest.size(), 7U) << missing.out;
  for (const std::string& key : with_nearest) {
    EXPECT_EQ(tool({"query", "--problem", key, "--json"}).json()["results"][0]["problem"], key);
  }
}

// An expert linear of a database, as each command that reads shows it.
TEST(RoundTrip, ExpertsAreShownByEveryCommandThatReads) {
  const Tool tool;
  const Problem even = db::experts(Op::kLinear, {4096, 1024, 2048}, {16, kEven});
  const Problem zipf = db::experts(Op::kLinear, {4096, 1024, 2048}, {16, kZipf});
  const std::string file = (tool.path() / "experts.f8db").string();
  {
    db::Database made = db::Database::open(file, db::OpenMode::kCreate).value();
    db::sweep_experts(made, {even}, 1.3);
    db::sweep_experts(made, {zipf}, 0.9);
  }
  const Words shape = {"--mnk", "4096,1024,2048", "--recipe", "rowwise", "--experts",
                       "16",    "--db",           file};
  const auto with = [&](Words words, const Words& more) {
    words.insert(words.end(), shape.begin(), shape.end());
    words.insert(words.end(), more.begin(), more.end());
    return words;
  };
  const Json answer = tool.json(with({"query"}, {"--skew", "zipf"}))["results"][0];
  EXPECT_EQ(answer["problem"], zipf.key());
  EXPECT_EQ(answer["op"], "experts");
  EXPECT_EQ(answer["e"], 16);
  EXPECT_EQ(answer["skew"], 1);
  EXPECT_EQ(answer["best"]["speedup"], 0.9);
  EXPECT_EQ(answer["best"]["kernels"]["output"], "generated:64x256s4c1x1w1g8");
  EXPECT_FALSE(answer["baseline"].is_null());
  ASSERT_EQ(answer["gemms"].size(), 3u);
  EXPECT_EQ(answer["gemms"][2]["op"], "grouped_grad_weight");
  EXPECT_EQ(answer["gemms"][2]["best"]["chosen_by"], "linear");
  const Words keys = keys_in(tool(with({"query"}, {})).out);
  ASSERT_EQ(keys.size(), 4u);
  EXPECT_EQ(keys.front(), even.key());
  for (const std::string& key : keys) {
    EXPECT_EQ(keys_in(tool({"query", "--problem", key, "--db", file}).out), Words{key});
  }
  const Outcome missing = tool(with({"query"}, {"--skew", "one"}));
  EXPECT_TRUE(contains(missing.err, "--experts 16 --skew 100")) << missing.err;
  EXPECT_TRUE(contains(missing.out, "nearest: grouped_output/")) << missing.out;
  tool.expect_refused(1, with({"query"}, {"--map"}), {"--map", "--experts"});

  const Json good = tool.json({"explain", even.key(), "--db", file});
  EXPECT_EQ(good["convert"], true);
  EXPECT_EQ(good["evidence"], "measured");
  EXPECT_EQ(good["speedup"], 1.3);
  EXPECT_EQ(good["experts"], 16);
  EXPECT_EQ(good["skew"], 0);
  EXPECT_EQ(good["kernels"][0]["choice"], "generated 64x256s4c1x1w1g8");
  EXPECT_EQ(good["kernels"][0]["chosen_by"], "the tuning table's row of this shape");
  ASSERT_EQ(good["trials"].size(), 1u);
  const Outcome bad = tool({"explain", zipf.key(), "--db", file});
  EXPECT_TRUE(contains(bad.out, "KEEP BF16  (evidence: measured)")) << bad.out;
  const Outcome unknown = tool({"explain", even.key()});
  EXPECT_TRUE(contains(unknown.out, "KEEP BF16")) << unknown.out;
  EXPECT_TRUE(contains(unknown.out, "sweep --mnk 4096,1024,2048 --experts 16 --skew 0"));

  ASSERT_EQ(tool({"report", "-o", "r.html", "--db", file}).code, 0);
  const std::string page = read_file(tool.path() / "r.html").value();
  EXPECT_TRUE(contains(page, "Speedup of expert linears"));
  EXPECT_TRUE(contains(page, "64x256s4c1x1w1g8"));

  ASSERT_EQ(tool({"db", "export", "-o", "e.jsonl", "--db", file}).code, 0);
  ASSERT_EQ(tool({"db", "import", "e.jsonl", "--db", "copy.f8db"}).code, 0);
  const Json copied = tool.json({"query", "--problem", zipf.key(), "--db", "copy.f8db"});
  EXPECT_EQ(copied["results"][0]["best"]["uuid"], answer["best"]["uuid"]);
  EXPECT_EQ(tool({"compare", file, "copy.f8db"}).code, 0);

  const Json plan = tool.json({"plan", "--mnk", "4096,1024,2048", "--recipe", "rowwise",
                               "--experts", "16", "--skew", "zipf", "--db", file});
  ASSERT_EQ(plan["linears"].size(), 1u);
  EXPECT_EQ(plan["linears"][0]["problem"], zipf.key());
  EXPECT_EQ(plan["linears"][0]["experts"], 16);
  for (const Json& gemm : plan["linears"][0]["gemms"]) {
    EXPECT_TRUE(contains(gemm["problem"].get<std::string>(), "grouped_"));
    EXPECT_EQ(gemm["cublaslt"], 0);
    EXPECT_EQ(gemm["bf16_cublaslt"], 1);
  }
  tool.expect_refused(1, {"plan", "--model", "llama3-8b", "--tokens", "64", "--experts", "8"},
                      {"--experts", "--model"});
}

TEST(RoundTrip, AProblemMeansTheSameToAllCommands) {
  const Tool tool;
  const auto same = [&](const Words& a, const Words& b) {
    const Outcome x = tool(a);
    const Outcome y = tool(b);
    EXPECT_EQ(x.code, 0) << x.err;
    EXPECT_EQ(x.out, y.out);
  };
  const Words shape = {"--mnk", "8192,4096,4096", "--recipe", "rowwise"};
  const auto with_shape = [&](Words words) {
    words.insert(words.end(), shape.begin(), shape.end());
    return words;
  };
  same({"emit", "--problem", kGradInput}, with_shape({"emit", "--op", "grad_input"}));
  same({"plan", "--problem", kLinear}, with_shape({"plan"}));
  same({"plan", "--problem", kGradInput}, with_shape({"plan"}));
  const Words explained = {"explain", "8192,4096,4096", "--recipe", "rowwise"};
  same({"explain", kLinear}, explained);
  same({"explain", kGradInput, "--recipe", "rowwise"}, explained);
  same({"explain", "m8192n4096k4096", "--recipe", "rowwise"}, explained);  // as it names itself
  same({"query", "--mnk", "m8192n4096k4096", "--recipe", "rowwise"}, with_shape({"query"}));
}

// The lines of plan's table and the trials of explain.
TEST(RoundTrip, PlanAndExplainPrintWhatTheyTake) {
  const Tool tool;
  const Words plan = {"plan", "--mnk", "1024:2048:x2,4096,1024", "--recipe", "rowwise"};
  std::istringstream rows(tool(plan).out);
  std::string header, shape, recipe;
  std::getline(rows, header);
  for (const char* m : {"1024", "2048"}) {
    std::string row;
    std::getline(rows, row);
    std::istringstream(row) >> shape >> recipe;
    EXPECT_EQ(shape, std::string(m) + ",4096,1024");
    const Outcome one = tool({"plan", "--mnk", shape, "--recipe", recipe});
    EXPECT_EQ(one.code, 0) << one.err;
    EXPECT_TRUE(contains(one.out, shape));
  }
  const Outcome explained = tool({"explain", "8192,1024,4096", "--recipe", "rowwise"});
  const Words keys = keys_in(explained.out);
  ASSERT_FALSE(keys.empty());
  EXPECT_EQ(tool({"explain", keys.front()}).out, explained.out);
}

// filter prints a pattern for layers that are alike.
TEST(RoundTrip, ExplainTakesTheLayersThatFilterPrints) {
  const Tool tool;
  const Words model = {"--model", "llama3-8b", "--tokens", "8192", "--recipe", "rowwise"};
  Words filter = {"filter"};
  filter.insert(filter.end(), model.begin(), model.end());
  std::istringstream rows(tool(filter).out);
  std::string row;
  std::getline(rows, row);
  size_t count = 0;
  while (std::getline(rows, row) && !row.empty()) {
    std::string layer, times, n, k;
    std::istringstream(row) >> layer >> times >> n >> k;
    Words explain = {"explain", layer};
    explain.insert(explain.end(), model.begin(), model.end());
    const Outcome outcome = tool(explain);
    EXPECT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_TRUE(contains(outcome.out, " n=" + n + " k=" + k + " ")) << row << outcome.out;
    ++count;
  }
  EXPECT_GE(count, 8U);
}

TEST(RoundTrip, CompareAndCostModelPrintProblemsThatQueryTakes) {
  const Tool tool;
  for (const char* name : {"a.db", "b.db"}) {
    auto database = db::Database::open(tool.path() / name, db::OpenMode::kCreate).value();
    db::sweep(database, {{db::gemm(8192, 4096, 4096), db::generated("128x256s4c2x1w2g8")}},
              [](const db::TrialKey&) { return db::timed(1e5); });
  }
  for (const Words& words : {Words{"compare", "a.db", "b.db", "--all"}, {"cost-model", "score"}}) {
    const Words keys = keys_in(tool(words).out);
    ASSERT_FALSE(keys.empty()) << words.front();
    for (const std::string& key : keys) {
      EXPECT_EQ(tool.json({"query", "--problem", key, "--db", "a.db"})["results"][0]["problem"],
                key);
    }
  }
}

TEST(RoundTrip, AKernelIsTakenAsItIsPrinted) {
  const Tool tool;
  const Json explained = tool.json({"explain", kLinear});
  size_t generated = 0;
  for (const Json& kernel : explained["kernels"]) {
    const std::string text = kernel["choice"];
    const std::string op = kernel["op"];
    if (!text.starts_with("generated ")) continue;
    const std::string config = text.substr(text.find(' ') + 1);
    const Words shape = {"emit", "--mnk", "8192,4096,4096", "--recipe", "rowwise",
                         "--op", op,      "--json",         "--config"};
    const auto emitted = [&](const std::string& as) {
      Words words = shape;
      words.push_back(as);
      return tool(words).json()["kernels"][0];
    };
    EXPECT_EQ(emitted(text)["config"], config);
    EXPECT_EQ(emitted("generated:" + config), emitted(config));
    ++generated;
  }
  EXPECT_GT(generated, 0U);
  tool.expect_refused(1, {"emit", "--problem", kGradInput, "--config", "cublaslt h3"},
                      {"--config", "cublaslt h3", "generated"});
}

TEST(RoundTrip, AFailedTrialSaysWhy) {
  const Tool tool;
  {
    auto database = db::Database::open(tool.path() / "a.db", db::OpenMode::kCreate).value();
    const Problem gemm = db::gemm(8192, 4096, 4096);
    db::sweep(database, {{gemm, db::generated("128x256s4c2x1w2g8")}, {gemm, db::heuristic(3)}},
              [](const db::TrialKey& trial) -> db::TrialResult {
                if (trial.candidate.impl == db::Impl::kGenerated) return db::timed(1e5);
                return {.state = db::TrialState::kWrong, .reason = "rel_err 0.3 is above 0.01"};
              });
  }
  const Words query = {"query", "--db", "a.db", "--problem", db::gemm(8192, 4096, 4096).key()};
  EXPECT_TRUE(
      contains(tool(query).out, "  failed: cublaslt h3: wrong: rel_err 0.3 is above 0.01\n"));
  const Json failed = tool.json(query)["results"][0]["failed"];
  ASSERT_EQ(failed.size(), 1U);
  EXPECT_EQ(failed[0]["state"], "wrong");
  EXPECT_EQ(failed[0]["reason"], "rel_err 0.3 is above 0.01");
  Words few = query;
  few.insert(few.end(), {"--limit", "0"});
  EXPECT_TRUE(contains(tool(few).out, "  1 more failed; --limit shows them\n"));
}

TEST(RoundTrip, AProblemThatNoCommandMeansIsRefused) {
  const Tool tool;
  tool.expect_refused(1, {"query", "--problem", "linear/rowwise"}, {"--problem", "fields"});
  tool.expect_refused(1, {"query", "--problem", "linear/mine+fast/e4m3.e4m3.bf16/m16n16k16"},
                      {"--problem", "mine", "rowwise"});
  // Another accumulation than the recipe's: bench matmul alone measures it.
  tool.expect_refused(1, {"query", "--problem", "output/rowwise/e4m3.e4m3.bf16/m16n16k16"},
                      {"--problem", "output/rowwise+fast/e4m3.e4m3.bf16/m16n16k16"});
  tool.expect_refused(2,
                      {"bench", "matmul", "--problem", "output/rowwise/e4m3.e4m3.bf16/m16n16k16"},
                      {"work without a GPU"});
  for (const char* other : {"--mnk", "--recipe", "--op"}) {
    tool.expect_refused(1, {"query", "--problem", kLinear, other, "x"}, {"--problem", other});
  }
  tool.expect_refused(1, {"query", "--recipe", "rowwise"}, {"--mnk", "--problem"});
  tool.expect_refused(1, {"query", "--mnk", "16,16,16"}, {"--recipe", "--problem"});
  tool.expect_refused(1, {"explain", "16,16,16"}, {"--recipe"});
  tool.expect_refused(1, {"explain", kLinear, "--recipe", "tensorwise"},
                      {"--recipe", "tensorwise", "rowwise"});
}

}  // namespace
}  // namespace f8::testing
