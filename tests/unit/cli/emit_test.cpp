// emit and prewarm: sources that re-create themselves, and a cache that a second start finds warm.
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>

#include <algorithm>
#include <set>

#include "base/file.hpp"
#include "tests/unit/cli/run_tool.hpp"

namespace f8::testing {
namespace {

using Json = nlohmann::json;
using Words = std::vector<std::string>;

// The line of `source` that tells how to make it, as arguments.
Words command_of(const std::string& source) {
  constexpr std::string_view kMark = "re-create: float8-tune ";
  const size_t at = source.find(kMark);
  EXPECT_NE(at, std::string::npos);
  const size_t begin = at + kMark.size();
  std::string line = source.substr(begin, source.find('\n', begin) - begin);
  Words words;
  while (!line.empty()) {
    const size_t space = line.find(' ');
    words.push_back(line.substr(0, space));
    line.erase(0, space == std::string::npos ? line.size() : space + 1);
  }
  return words;
}

TEST(Emit, PrintsASourceThatItsOwnCommandRecreates) {
  const Tool tool;
  for (const Words& words :
       {Words{"emit", "--mnk", "8192,4096,4096", "--recipe", "tensorwise"},
        {"emit", "--mnk", "8192,4096,4096", "--recipe", "rowwise", "--op", "wgrad"},
        {"emit", "--mnk", "1,16,48", "--recipe", "rowwise", "--op", "grad_input"},
        {"emit", "--kernel", "amax/bf16/tensor"}}) {
    const Outcome outcome = tool(words);
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    EXPECT_EQ(outcome.err, "");
    EXPECT_TRUE(contains(outcome.out, "__global__"));
    const Outcome again = tool(command_of(outcome.out));
    const auto kernel = [](const std::string& text) {
      return text.substr(text.find("// kernel:"));
    };
    EXPECT_EQ(kernel(again.out), kernel(outcome.out));
  }
}

TEST(Emit, NamesTheProblem) {
  const Tool tool;
  const Json result = tool.json({"emit", "--mnk", "8192,4096,4096", "--recipe", "tensorwise"});
  const Json& kernel = result["kernels"][0];
  EXPECT_EQ(kernel["problem"], "output/tensorwise+fast/e4m3.e4m3.bf16/m8192n4096k4096");
  EXPECT_TRUE(contains(kernel["source"].get<std::string>(), kernel["problem"].get<std::string>()));
  const auto config = kernel["config"].get<std::string>();
  EXPECT_TRUE(kernel["kernel"].get<std::string>().ends_with(
      config.substr(0, config.rfind('g'))));  // the group is an argument of the launch
}

TEST(Emit, AGivenConfigurationIsTaken) {
  const Tool tool;
  const Json any = tool.json({"emit", "--mnk", "8192,4096,4096", "--recipe", "tensorwise"});
  const std::string config = any["kernels"][0]["config"];
  const Json result =
      tool.json({"emit", "--mnk", "64,64,64", "--recipe", "tensorwise", "--config", config});
  EXPECT_EQ(result["kernels"][0]["config"], config);
  EXPECT_EQ(result["kernels"][0]["chosen_by"], "option");
}

TEST(Emit, AllKernelsOfALinearIntoAFolder) {
  const Tool tool;
  const Json result = tool.json(
      {"emit", "--mnk", "8192,4096,4096", "--recipe", "rowwise", "--op", "linear", "-o", "out/a"});
  EXPECT_GE(result["kernels"].size(), 5U);
  for (const Json& kernel : result["kernels"]) {
    ASSERT_EQ(kernel["files"].size(), 1U);
    const auto text = read_file(tool.path() / kernel["files"][0].get<std::string>());
    ASSERT_TRUE(text.has_value());
    EXPECT_EQ(*text, kernel["source"].get<std::string>());
  }
}

// The list is what scripts/kernel-ptx compares two trees by, so a kernel that a plan loads must not
// be missing: every kernel of a linear with a configuration that the cost model chooses is in it.
TEST(Emit, ListsTheKernelsOfEveryRecipe) {
  const Tool tool;
  const Json listed = tool.json({"emit", "--list"});
  const auto keys = listed["kernels"].get<std::set<std::string>>();
  for (const char* recipe :
       {"tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed", "blockwise"}) {
    const std::string op = std::string_view(recipe) == "rowwise_with_gw_hp" ? "output" : "linear";
    const Json one = tool.json({"emit", "--mnk", "8192,4096,4096", "--recipe", recipe, "--op", op});
    for (const Json& kernel : one["kernels"]) {
      EXPECT_TRUE(keys.contains(kernel["kernel"].get<std::string>())) << kernel["kernel"];
    }
  }
  // The epilogues, the grouped GEMMs, the lists, and what runs beside the casts.
  for (const char* key :
       {"gemm/e4m3.e4m3.bf16/tensor/fast/64x64s8c1x1w1/+bias",
        "gemm/e5m2.e4m3.f32/tensor/precise/64x64s8c1x1w1/+add",
        "gemm/e4m3.e4m3.bf16/axis/precise/64x64s8c1x1w1/+add+pow2",
        "gemm/e4m3.e4m3.f32/block1x128/precise/64x64s8c1x1w1/+add",
        "gemm/e4m3.e4m3.bf16/block128x128/precise/64x64s8c1x1w1/+amax",
        "gemm2/e5m2.e4m3.bf16/tensor/precise/64x64s8c1x1w1", "amax/f32/rowcol/flag/list",
        "cast/bf16.e5m2/delayed/q+qt/count/sums", "quantize/bf16.e4m3/axis/q/pow2", "scale_update",
        "column_sums/bf16", "bias_grad/f32", "glu_amax/silu/bf16/rowcol",
        "glu_backward_cast/silu/bf16.e4m3/axis/q+qt/pow2", "glu_backward_amax/silu/bf16/tensor",
        "glu_backward_cast/silu/bf16.e5m2/delayed/q+qt"}) {
    EXPECT_TRUE(keys.contains(key)) << key;
  }
  const Outcome text = tool({"emit", "--list"});
  ASSERT_EQ(text.code, 0) << text.err;
  EXPECT_EQ(static_cast<size_t>(std::ranges::count(text.out, '\n')), keys.size());
  tool.expect_refused(1, {"emit", "--list", "-o", "folder"}, {"--list", "--output"});
}

TEST(Emit, PtxAndCubinByNvrtc) {
  const Tool tool;
  const Words amax = {"emit", "--kernel", "amax/bf16/tensor"};
  Words ptx = amax;
  ptx.emplace_back("--ptx");
  const Outcome printed = tool(ptx);
  if (printed.code == 2) GTEST_SKIP() << printed.err;
  ASSERT_EQ(printed.code, 0) << printed.err;
  EXPECT_TRUE(contains(printed.out, ".target sm_90a"));
  EXPECT_FALSE(contains(printed.out, "__global__"));
  const Json both =
      tool.json({"emit", "--kernel", "amax/bf16/tensor", "--ptx", "--cubin", "-o", "o"});
  EXPECT_EQ(both["kernels"][0]["files"].size(), 3U);
  EXPECT_GT(both["kernels"][0]["registers"].get<int>(), 0);
  const auto cubin = read_file(tool.path() / "o/amax-bf16-tensor.cubin");
  ASSERT_TRUE(cubin.has_value());
  EXPECT_TRUE(
      cubin->starts_with("\x7f"
                         "ELF"));
}

TEST(Prewarm, CompilesOnceAndFindsItAgain) {
  const Tool tool;
  tool.write("m.json", R"([{"fqn": "a", "in_features": 4096, "out_features": 4096},
                           {"fqn": "b", "in_features": 4096, "out_features": 4096},
                           {"fqn": "odd", "in_features": 4096, "out_features": 1000}])");
  const Words words = {"prewarm",    "--model",  "m.json", "--recipe",
                       "tensorwise", "--tokens", "4096",   "--json"};
  const Outcome cold = tool(words);
  if (cold.code == 2) GTEST_SKIP() << cold.err;
  ASSERT_EQ(cold.code, 0) << cold.err;
  const Json first = cold.json();
  EXPECT_EQ(first["shapes"], 1);
  EXPECT_EQ(first["skipped_layers"], Json::array({"odd"}));
  EXPECT_TRUE(contains(cold.err, "odd"));
  EXPECT_GE(first["total"].get<int>(), 5);
  EXPECT_EQ(first["compiled"], first["total"]);
  EXPECT_EQ(first["cache_dir"], (tool.path() / "cache").string());
  for (const Json& kernel : first["kernels"]) {
    EXPECT_GT(kernel["registers"].get<int>(), 0);
    EXPECT_EQ(kernel["spill_bytes"], 0) << kernel["kernel"];
    EXPECT_GT(kernel["compile_ms"].get<double>(), 0);
    EXPECT_EQ(kernel["from_cache"], false);
    EXPECT_FALSE(kernel["roles"].empty());
  }
  const Json second = tool(words).json();
  EXPECT_EQ(second["from_cache"], first["total"]);
  EXPECT_EQ(second["compiled"], 0);
  EXPECT_EQ(second["not_stored"], 0);
  EXPECT_EQ(second["store_error"], nullptr);
}

// Files of at most 100 bytes, as on a disk that is full: kernels are compiled and cannot be stored.
TEST(Prewarm, ThatStoresNothingFailsAndSaysSo) {
  Tool tool;
  tool.write("m.json", R"([{"fqn": "a", "in_features": 4096, "out_features": 4096}])");
  const Words words = {"prewarm",    "--model",  "m.json", "--recipe",
                       "tensorwise", "--tokens", "4096",   "--json"};
  rlimit before{};
  ASSERT_EQ(::getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = ::signal(SIGXFSZ, SIG_IGN);
  const rlimit full{100, before.rlim_max};
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &full), 0);
  const Outcome outcome = tool(words);
  ASSERT_EQ(::setrlimit(RLIMIT_FSIZE, &before), 0);
  ::signal(SIGXFSZ, handler);
  if (outcome.code == 2) GTEST_SKIP() << outcome.err;
  EXPECT_EQ(outcome.code, 1);
  const Json report = outcome.json();
  EXPECT_GE(report["total"].get<int>(), 5);
  EXPECT_EQ(report["not_stored"], report["total"]);
  EXPECT_TRUE(contains(report["store_error"].get<std::string>(), "File too large"));
  EXPECT_TRUE(contains(outcome.err, "kernels are not in the cache: ")) << outcome.err;

  tool.set("FLOAT8_CACHE_DIR", "");
  tool.set("XDG_CACHE_HOME", "");
  tool.set("HOME", "");
  tool.expect_refused(2, words, {"there is no cache to fill", "--cache-dir"});
}

}  // namespace
}  // namespace f8::testing
