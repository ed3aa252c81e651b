// The command replay, on stored exhaustive sweeps.
#include <gtest/gtest.h>

#include <cstdlib>

#include "base/file.hpp"
#include "base/format.hpp"
#include "tests/unit/cli/run_tool.hpp"

namespace f8::testing {
namespace {

const std::string kSet = FLOAT8_DATA_DIR "/fitted_to.jsonl," FLOAT8_DATA_DIR "/held_out.jsonl";

// The sweep's own search loses little on layers that the cost model has not seen.
TEST(Replay, TheSearchLosesLittleOnStoredSweeps) {
  const Tool tool;
  const auto rows =
      tool.json({"replay", "--set", kSet, "--recipe", "tensorwise,rowwise", "--seeds", "1",
                 "--strategy", "untuned,race,auto,exhaustive", "--json"})["strategies"];
  std::map<std::string, nlohmann::json> of;
  for (const auto& row : rows) {
    if (row["recipe"] == "all") of[row["strategy"]] = row;
  }
  ASSERT_EQ(of.size(), 4U);
  for (const char* search : {"auto", "race"}) {
    EXPECT_GE(of[search]["shapes"], 12);
    EXPECT_LE(of[search]["regret_median"], 0.01) << search;
    EXPECT_LE(of[search]["regret_p95"], 0.03) << search;
  }
  EXPECT_GE(of["race"]["exhaustive_over_gpu_s"], 9);
  EXPECT_GE(of["auto"]["exhaustive_over_gpu_s"], 2);
  EXPECT_EQ(of["untuned"]["gpu_s"], 0);
  EXPECT_GT(of["untuned"]["regret_p95"], of["auto"]["regret_p95"]);
  EXPECT_EQ(of["exhaustive"]["exhaustive_over_gpu_s"], 1);
}

TEST(Replay, TheMethodsFiguresAndACurveMayBeGiven) {
  const Tool tool;
  const std::string set = FLOAT8_DATA_DIR "/held_out.jsonl";
  const auto rows =
      tool.json({"replay", "--set", set, "--recipe", "rowwise", "--strategy", "auto", "--curve",
                 "--heuristics", "1", "--seeds", "1", "--json"})["strategies"];
  std::vector<double> measured;
  for (const auto& row : rows) {
    if (row["recipe"] == "rowwise" && row["strategy"] != "auto") {
      measured.push_back(row["candidates_per_gemm"]);
    }
  }
  ASSERT_EQ(measured.size(), 6U);
  EXPECT_TRUE(std::ranges::is_sorted(measured));
  EXPECT_LE(measured.front(), 4);
  EXPECT_TRUE(contains(
      tool({"replay", "--set", set, "--recipe", "rowwise", "--strategy", "auto", "--seeds", "1"})
          .out,
      "GPU s"));
}

// The lines of docs/command-line.md, pasted into a shell in the tree.
TEST(Replay, TheDocumentsExampleRunsAsItStands) {
  const Tool tool;
  const fs::path source = FLOAT8_SOURCE_DIR;
  const std::string tour = read_file(source / "docs/command-line.md").value();
  const size_t replay = tour.find("\nfloat8-tune replay ");
  ASSERT_NE(replay, std::string::npos);
  const size_t begin = tour.rfind('\n', replay - 1) + 1;  // the line before says how to unpack
  const size_t end = tour.find('\n', replay + 1);
  fs::create_directory_symlink(source / "tuning_db", tool.path() / "tuning_db");
  const std::string command =
      f8::format("cd {} && PATH={}:$PATH && set -e && {{ {}\n}} > replay.txt", tool.path().string(),
                 fs::path(FLOAT8_TUNE).parent_path().string(), tour.substr(begin, end - begin));
  EXPECT_EQ(std::system(command.c_str()), 0) << command;
  EXPECT_TRUE(contains(read_file(tool.path() / "replay.txt").value(), "exhaustive"));
}

TEST(Replay, SaysWhatItCannotReplay) {
  const Tool tool;
  tool.expect_refused(1, {"replay"}, {"--set", "sweep --exhaustive"});
  tool.expect_refused(1, {"replay", "--set", "nothing.jsonl"}, {"--set", "nothing.jsonl"});
  tool.expect_refused(1, {"replay", "--set", "builtin"}, {"--set", "70 %", "sweep --exhaustive"});
  const std::string set = FLOAT8_DATA_DIR "/held_out.jsonl";
  tool.expect_refused(1, {"replay", "--set", set, "--strategy", "genetic"},
                      {"--strategy", "genetic", "halving"});
  tool.expect_refused(1, {"replay", "--set", set, "--recipe", "delayed"}, {"--recipe delayed"});
}

}  // namespace
}  // namespace f8::testing
