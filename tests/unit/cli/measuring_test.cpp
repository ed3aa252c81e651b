// The commands that measure, on a machine without a GPU: doctor and plan work, sweep, resume and
// bench say in one line what is missing.
#include <dlfcn.h>
#include <gtest/gtest.h>
#include <link.h>

#include <algorithm>
#include <array>
#include <filesystem>

#include "tests/unit/cli/run_tool.hpp"

namespace f8::testing {
namespace {

using Json = nlohmann::json;

bool has_gpu(const Tool& tool) {
  return tool.json({"doctor"})["gpu"].value("usable", false);
}

TEST(Doctor, SaysWhatIsThereAndWhatWorks) {
  const Tool tool;
  const Json report = tool.json({"doctor"});
  for (const char* part : {"version", "gpu", "libraries", "cache", "databases", "environment",
                           "works", "does_not_work"}) {
    EXPECT_TRUE(report.contains(part)) << part;
  }
  EXPECT_TRUE(report["databases"]["builtin"]["ok"]);
  EXPECT_TRUE(report["environment"].contains("FLOAT8_CACHE_DIR"));
  const auto works = report["works"].get<std::vector<std::string>>();
  EXPECT_NE(std::ranges::find(works, "filter"), works.end());
  if (!report["gpu"]["found"].get<bool>()) {
    EXPECT_FALSE(report["gpu"]["reason"].get<std::string>().empty());
    const auto missing = report["does_not_work"].get<std::vector<std::string>>();
    EXPECT_NE(std::ranges::find(missing, "sweep"), missing.end());
  }
  for (const char* library : {"nvrtc", "cublaslt", "cudnn", "nccl"}) {
    EXPECT_TRUE(report["libraries"].contains(library)) << library;
  }
  const Outcome text = tool({"doctor"});
  EXPECT_EQ(text.code, 0);
  EXPECT_TRUE(contains(text.out, "works here:"));
}

std::string path_of_libm() {
  void* const handle = ::dlopen("libm.so.6", RTLD_NOW);
  link_map* map = nullptr;
  return handle != nullptr && ::dlinfo(handle, RTLD_DI_LINKMAP, &map) == 0 ? map->l_name : "";
}

// Each of these libraries is another one, without its functions.
TEST(Doctor, ALibraryWithoutASymbolIsNamedWithTheVersionThatHasIt) {
  Tool tool;
  const auto libraries = tool.path() / "libraries";
  std::filesystem::create_directory(libraries);
  const std::vector<std::array<std::string, 3>> known = {
      {"libnvrtc.so.13", "nvrtcVersion", "NVRTC of CUDA 13.0"},
      {"libcublasLt.so.13", "cublasLtCreate", "cuBLASLt of CUDA 13.0"},
      {"libcudnn.so.9", "cudnnGetVersion", "cuDNN 9.5.1"},
      {"libnccl.so.2", "ncclGetVersion", "NCCL 2.4"}};
  for (const auto& [soname, symbol, version] : known) {
    std::filesystem::create_symlink(path_of_libm(), libraries / soname);
  }
  tool.set("LD_LIBRARY_PATH", libraries.string());
  const Outcome text = tool({"doctor"});
  for (const auto& [soname, symbol, version] : known) {
    EXPECT_TRUE(contains(
        text.out, soname + " has no symbol " + symbol + ", which " + version + " has; install "))
        << text.out;
  }
}

TEST(Doctor, ABrokenDatabaseIsAFinding) {
  const Tool tool;
  const std::string file = tool.write("broken.f8db", "this is no database");
  const Json report = tool.json({"doctor", "--db", file});
  EXPECT_FALSE(report["databases"]["user"]["ok"]);
  EXPECT_TRUE(contains(report["databases"]["user"]["reason"].get<std::string>(), "broken.f8db"));
}

TEST(Doctor, ACacheThatOthersCanWriteIsAFinding) {
  Tool tool;
  const auto cache = tool.path() / "open-cache";
  std::filesystem::create_directory(cache);
  std::filesystem::permissions(cache, std::filesystem::perms::all);
  tool.set("FLOAT8_CACHE_DIR", cache.string());
  const Json report = tool.json({"doctor"});
  EXPECT_EQ(report["cache"]["state"], "unusable");
  EXPECT_TRUE(contains(report["cache"]["reason"].get<std::string>(), "open-cache"));
}

TEST(Doctor, SaysThatThereIsNoCache) {
  Tool tool;
  for (const char* variable : {"FLOAT8_CACHE_DIR", "XDG_CACHE_HOME", "HOME"})
    tool.set(variable, "");
  const Outcome outcome = tool({"doctor", "--json"});
  EXPECT_EQ(outcome.json()["cache"]["state"], "none") << outcome.err;
  EXPECT_TRUE(std::filesystem::is_empty(tool.path())) << "a cache in the working directory";
}

TEST(Plan, NamesWhatASweepWouldMeasure) {
  const Tool tool;
  const Json plan = tool.json({"plan", "--mnk", "8192,4096,4096;2048,1024,4096", "--recipe",
                               "tensorwise,rowwise", "--keep", "6", "--candidates"});
  ASSERT_EQ(plan["linears"].size(), 4u);
  EXPECT_GT(plan["predicted_s"].get<double>(), 0);
  EXPECT_LT(plan["predicted_s"].get<double>(), 60);
  int64_t pruned = 0;
  for (const Json& linear : plan["linears"]) {
    ASSERT_EQ(linear["gemms"].size(), 3u);
    for (const Json& gemm : linear["gemms"]) {
      // The best by the model, and what the built-in table would choose.
      EXPECT_GE(gemm["generated"], 6);
      EXPECT_LE(gemm["generated"], 7);
      pruned += gemm["pruned"].get<int64_t>();
      int64_t with_reason = 0;
      for (const Json& candidate : gemm["candidates"]) with_reason += candidate.contains("pruned");
      EXPECT_EQ(with_reason, gemm["pruned"].get<int64_t>());
    }
  }
  EXPECT_EQ(pruned, plan["pruned"].get<int64_t>());
  EXPECT_EQ(tool.json({"plan", "--mnk", "8192,4096,4096;2048,1024,4096", "--recipe",
                       "tensorwise,rowwise", "--keep", "6", "--candidates"}),
            plan);
}

// What a dry run lists is what a plan has; without a GPU it is for the device that answers elsewhere too.
TEST(Sweep, ADryRunListsItsOperationsWithoutAGpu) {
  const Tool tool;
  if (has_gpu(tool)) GTEST_SKIP() << "there is a GPU here";
  const std::vector<std::pair<std::vector<std::string>, const char*>> asked = {
      {{"--attention", "--shape", "s8192b1h32g8d128"}, "attentions"},
      {{"--attention", "--model", "llama3-8b", "--sequence", "8192"}, "attentions"},
      {{"--mnk", "8192,4096,4096", "--recipe", "rowwise"}, "linears"},
      {{"--mnk", "8192,4096,4096", "--gpus", "all"}, "linears"}};
  for (const auto& [words, list] : asked) {
    std::vector<std::string> sweep = {"sweep", "--dry-run"};
    std::vector<std::string> plan = {"plan"};
    for (const std::string& word : words) {
      sweep.push_back(word);
      if (word != "--gpus" && word != "all") plan.push_back(word);
    }
    const Outcome text = tool(sweep);
    EXPECT_EQ(text.code, 0) << text.err;
    EXPECT_TRUE(contains(text.out, " on NVIDIA H100 80GB HBM3\n")) << text.out;
    const Json dry = tool.json(sweep);
    const Json planned = tool.json(plan);
    EXPECT_EQ(dry["device"], planned["device"]);
    EXPECT_EQ(dry["cells"], planned["cells"]);
    ASSERT_GT(dry["problems"].size(), 0U);
    ASSERT_EQ(dry["problems"].size(), planned[list].size());
    for (size_t i = 0; i < dry["problems"].size(); ++i) {
      const auto key = dry["problems"][i]["problem"].get<std::string>();
      EXPECT_EQ(key, planned[list][i]["problem"]);
      EXPECT_TRUE(contains(text.out, key + "\n")) << text.out;
    }
  }
  tool.expect_refused(1, {"sweep", "--dry-run", "--attention"}, {"--shape"});
  tool.expect_refused(2, {"sweep", "--attention", "--shape", "s8192b1h32g8d128", "--db", "my.db"},
                      {"libcuda.so.1"});
}

TEST(Plan, TakesTheLinearsOfAModelOnce) {
  const Tool tool;
  const Json plan =
      tool.json({"plan", "--model", "llama3-8b", "--tokens", "8192", "--recipe", "tensorwise"});
  // wq and wo; wk and wv; w1 and w3; w2; the output head.
  EXPECT_EQ(plan["linears"].size(), 5u);
  for (const Json& linear : plan["linears"]) EXPECT_EQ(linear["m"], 8192);
}

// A per cent has its sign and a bare number is a fraction, in every option.
TEST(Plan, AndTheOthersTakeSharesInBothNotations) {
  const Tool tool;
  const auto same = [&](const std::vector<std::string>& words, const char* option,
                        const char* percent, const char* fraction) {
    const auto answer = [&](const char* share) {
      std::vector<std::string> all = words;
      all.insert(all.end(), {option, share, "--json"});
      const Outcome outcome = tool(all);
      EXPECT_EQ(outcome.code, 0) << outcome.err;
      return outcome.out;
    };
    EXPECT_EQ(answer(percent), answer(fraction)) << option;
  };
  const std::vector<std::string> plan = {"plan", "--mnk", "1024,1024,1024"};
  same(plan, "--max-ci", "0.5%", "0.005");
  same(plan, "--gemm-max-ci", "1%", "0.01");
  const std::vector<std::string> recipe = {"--recipe", "rowwise"};
  const auto with_recipe = [&](std::vector<std::string> words) {
    words.insert(words.end(), recipe.begin(), recipe.end());
    return words;
  };
  same(with_recipe({"filter", "--model", "llama3-8b", "--tokens", "8192"}), "--margin", "12%",
       "0.12");
  same(with_recipe({"explain", "8192,1024,4096"}), "--margin", "12%", "0.12");
  same(with_recipe({"thresholds"}), "--margin", "12%", "0.12");
}

TEST(Plan, AndSweepRefuseBadInputAndWriteNothing) {
  const Tool tool;
  for (const char* command : {"plan", "sweep"}) {
    tool.expect_refused(1, {command, "--db", "x.f8db"}, {"--mnk"});
    tool.expect_refused(1, {command, "--mnk", "0,16,16", "--db", "x.f8db"}, {"--mnk", "m"});
    tool.expect_refused(1, {command, "--mnk", "16,16,17", "--db", "x.f8db"}, {"k"});
    tool.expect_refused(1, {command, "--mnk", "64,64,64", "--recipe", "none", "--db", "x.f8db"},
                        {"--recipe", "none"});
    tool.expect_refused(1, {command, "--mnk", "64,64,64", "--max-ci", "much", "--db", "x.f8db"},
                        {"--max-ci", "much"});
    for (const char* option : {"--max-ci", "--gemm-max-ci"}) {
      tool.expect_refused(1, {command, "--mnk", "64,64,64", option, "0.5", "--db", "x.f8db"},
                          {option, "'0.5' is 50%", "0.0001% to 10%", "0.5%, or 0.005"});
    }
    tool.expect_refused(1, {command, "--model", "llama3-8b", "--db", "x.f8db"}, {"--tokens"});
  }
  tool.expect_refused(1, {"sweep", "--mnk", "64,64,64", "--budget", "soon", "--db", "x.f8db"},
                      {"--budget", "soon"});
  const auto on = [](const char* gpus) {
    return std::vector<std::string>{"sweep", "--mnk", "64,64,64", "--gpus", gpus, "--db", "x.f8db"};
  };
  tool.expect_refused(1, on("0,1,0"), {"--gpus", "GPU 0", "twice"});
  tool.expect_refused(1, on("0,one"), {"--gpus", "'one'", "all"});
  tool.expect_refused(1, on("0,"), {"--gpus", "''"});
  tool.expect_refused(1, on("-1"), {"--gpus", "'-1'"});
  tool.expect_refused(1, {"resume", "--gpus", "0,1"}, {"--db"});
  tool.expect_refused(1, {"resume", "--gpus", "0,1", "--db", "x.f8db"}, {"x.f8db", "--missing"});
  tool.expect_refused(1, {"sweep", "--mnk", "64,64,64"}, {"--db"});
  const std::string broken = tool.write("broken.f8db", "this is no database");
  tool.expect_refused(1, {"sweep", "--mnk", "64,64,64", "--db", broken}, {"broken.f8db"});
  tool.expect_refused(1, {"resume", "--db", "nowhere.f8db"}, {"nowhere.f8db"});
}

TEST(Bench, RefusesBadInputBeforeItLooksForADevice) {
  const Tool tool;
  const std::string no_columns = tool.write("columns.csv", "a,b,c\n1,2,3\n");
  const std::string bad_shape = tool.write("shape.csv", "m,n,k\n16,16,16\n16,16,15\n");
  for (const char* command : {"matmul", "epilogue", "linear", "cast"}) {
    tool.expect_refused(1, {"bench", command}, {"--mnk", "--shapes"});
    tool.expect_refused(1, {"bench", command, "--shapes", "nowhere.csv"}, {"nowhere.csv"});
    tool.expect_refused(1, {"bench", command, "--shapes", no_columns}, {"line 1", "no column m"});
    tool.expect_refused(1, {"bench", command, "--shapes", bad_shape}, {"line 3", "k"});
    tool.expect_refused(1, {"bench", command, "--mnk", "64,64,64", "--recipe", "rowwise,none"},
                        {"--recipe", "none"});
  }
}

TEST(Bench, EpiloguesAreCheckedBeforeItLooksForADevice) {
  const Tool tool;
  for (const char* list : {"", "bias,", "scale", "bias+", "bias+bias", "plain", "bias, amax"}) {
    tool.expect_refused(1, {"bench", "epilogue", "--mnk", "64,64,64", "--epilogue", list},
                        {"--epilogue"});
  }
  for (const char* type : {"e4m3", "int8", ""}) {
    tool.expect_refused(1, {"bench", "epilogue", "--mnk", "64,64,64", "--type", type}, {"--type"});
  }
  for (const char* command : {"matmul", "epilogue"}) {
    tool.expect_refused(1, {"bench", command, "--mnk", "64,64,64", "--op", "linear"},
                        {"--op linear", "bench linear"});
    tool.expect_refused(1, {"bench", command, "--mnk", "64,64,64", "--fast", "--precise"},
                        {"--fast", "--precise"});
  }
}

TEST(Bench, ExpertsAreCheckedBeforeItLooksForADevice) {
  const Tool tool;
  const std::string key = "experts/rowwise+fast/e4m3.e4m3.bf16/e8m64n64k64skew1";
  tool.expect_refused(1, {"bench", "experts", "--mnk", "64,64,64"}, {"--experts is required"});
  for (const char* count : {"0", "1025", "x"}) {
    tool.expect_refused(1, {"bench", "experts", "--mnk", "64,64,64", "--experts", count},
                        {"--experts", "1 to 1024"});
  }
  for (const char* skew : {"", "odd", "-1", "101", "1x"}) {
    tool.expect_refused(
        1, {"bench", "experts", "--mnk", "64,64,64", "--experts", "8", "--skew", skew}, {"--skew"});
  }
  tool.expect_refused(1, {"bench", "experts", "--problem", key, "--experts", "8"},
                      {"--problem", "--experts"});
  tool.expect_refused(1, {"bench", "linear", "--problem", key}, {"no expert linears"});
}

TEST(Bench, ListsOfWeightsAreCheckedBeforeItLooksForADevice) {
  const Tool tool;
  for (const char* list :
       {"", "4096", "4096x4096", "4096,4096;", "4096,4095", "4096,4096*0", "4096,4096*1000000"}) {
    tool.expect_refused(1, {"bench", "cast", "--list", list}, {"--list"});
  }
  tool.expect_refused(1, {"bench", "cast", "--list", "64,64;64,17"}, {"--list", "64,17", "k"});
  tool.expect_refused(1, {"bench", "cast", "--list", "64,64", "--recipe", "rowwise,none"},
                      {"--recipe", "none"});
  tool.expect_refused(1, {"bench", "cast", "--list", "64,64", "--mnk", "64,64,64"},
                      {"--list", "--mnk"});
  tool.expect_refused(1, {"bench", "cast", "--list", "64,64", "--shapes", "x.csv"},
                      {"--list", "--shapes"});
  tool.expect_refused(1, {"bench", "linear", "--list", "64,64"}, {"--list"});
}

TEST(Measuring, WithoutAGpuSaysWhatWorksWithout) {
  const Tool tool;
  if (has_gpu(tool)) GTEST_SKIP() << "there is a GPU here";
  for (const std::vector<std::string>& words :
       {std::vector<std::string>{"sweep", "--mnk", "64,64,64", "--db", "new.f8db"},
        {"bench", "matmul", "--mnk", "64,64,64"},
        {"bench", "epilogue", "--mnk", "64,64,64", "--type", "f32"},
        {"bench", "linear", "--mnk", "64,64,64", "--recipe", "rowwise"},
        {"bench", "experts", "--mnk", "64,64,64", "--experts", "8", "--skew", "one"},
        {"bench", "experts", "--problem", "experts/rowwise+fast/e4m3.e4m3.bf16/e8m64n64k64skew1"},
        {"bench", "attention", "--shape", "s128b1h4g2d128", "--masks", "causal,full"},
        {"sweep", "--attention", "--shape", "s128b1h4g2d128", "--db", "new.f8db"},
        {"sweep", "--model", "llama3-8b", "--attention", "--sequence", "8192", "--db", "new.f8db"},
        {"bench", "attention", "--shape", "s128b1h4g2d128", "--recipe", "fp8"},
        {"bench", "attention", "--problem",
         "attention_backward/fp8/e4m3.e4m3.bf16/s128b1h4g2d128causal1"},
        {"bench", "cast", "--mnk", "64,64,64"},
        {"bench", "cast", "--list", "4096,4096*4;1024,4096", "--recipe", "rowwise"}}) {
    tool.expect_refused(2, words, {"work without a GPU"});
  }
}

}  // namespace
}  // namespace f8::testing
