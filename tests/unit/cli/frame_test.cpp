// Tests of what all commands share: help, the split of the two streams, colours, exit codes without
// a GPU.
#include <gtest/gtest.h>

#include "tests/unit/cli/run_tool.hpp"

namespace f8::testing {
namespace {

using Words = std::vector<std::string>;

TEST(Frame, HelpAndVersionAreData) {
  const Tool tool;
  for (const Words& words : {Words{"--help"}, {"filter", "--help"}, {"db", "merge", "--help"}}) {
    const Outcome outcome = tool(words);
    EXPECT_EQ(outcome.code, 0);
    EXPECT_TRUE(contains(outcome.out, "Usage:"));
    EXPECT_EQ(outcome.err, "");
  }
  const Outcome version = tool({"--version"});
  EXPECT_EQ(version.code, 0);
  EXPECT_TRUE(contains(version.out, "."));
}

TEST(Frame, EveryCommandTakesTheCommonOptions) {
  const Tool tool;
  for (const Words& words : {Words{"query"},
                             {"filter"},
                             {"thresholds"},
                             {"compare"},
                             {"explain"},
                             {"emit"},
                             {"prewarm"},
                             {"doctor"},
                             {"plan"},
                             {"sweep"},
                             {"resume"},
                             {"bench", "matmul"},
                             {"bench", "linear"},
                             {"bench", "epilogue"},
                             {"bench", "cast"},
                             {"db", "info"},
                             {"db", "check"},
                             {"db", "diff"},
                             {"db", "schema"},
                             {"db", "migrate"},
                             {"db", "merge"},
                             {"db", "export"},
                             {"db", "import"}}) {
    Words help = words;
    help.emplace_back("--help");
    const Outcome outcome = tool(help);
    EXPECT_EQ(outcome.code, 0) << words.front();
    for (const char* option : {"--json", "--db", "--quiet", "--color"}) {
      EXPECT_TRUE(contains(outcome.out, option)) << words.back() << " " << option;
    }
  }
}

TEST(Frame, NoEscapesInAPipeUnlessAsked) {
  const Tool tool;
  Words words = {"filter", "--model", "llama3-8b", "--recipe", "rowwise", "--tokens", "8192"};
  const Outcome plain = tool(words);
  EXPECT_EQ(plain.code, 0) << plain.err;
  EXPECT_FALSE(contains(plain.out + plain.err, "\x1b"));
  words.emplace_back("--color=always");
  const Outcome coloured = tool(words);
  EXPECT_TRUE(contains(coloured.out, "\x1b["));
  EXPECT_FALSE(contains(coloured.err, "\x1b"));
  words.emplace_back("--json");
  EXPECT_FALSE(contains(tool(words).out, "\x1b"));
}

TEST(Frame, QuietSilencesNotesAndNotErrors) {
  const Tool tool;
  const Words words = {"filter",   "--model", "mixtral-8x7b", "--recipe",     "rowwise",
                       "--tokens", "8192",    "--verdicts",   "verdicts.json"};
  Words quiet = words;
  quiet.emplace_back("--quiet");
  EXPECT_TRUE(contains(tool(words).err, "verdicts.json"));
  EXPECT_EQ(tool(quiet).err, "");
  EXPECT_EQ(tool(words).out, tool(quiet).out);
  tool.expect_refused(
      1, {"filter", "--model", "gone", "--recipe", "rowwise", "--tokens", "1", "--quiet"},
      {"gone"});
}

TEST(Frame, WithoutAGpuOneLineNamesWhatWorks) {
  const Tool tool;
  const Words shape = {"--mnk", "1024,1024,1024", "--recipe", "rowwise"};
  for (Words words : {Words{"sweep"}, {"bench", "matmul"}, {"bench", "linear"}}) {
    words.insert(words.end(), shape.begin(), shape.end());
    if (words.front() == "sweep") words.insert(words.end(), {"--db", "new.db"});
    tool.expect_refused(2, words, {"filter", "prewarm", "emit", "without a GPU"});
  }
}

TEST(Frame, AFullDiskIsAnErrorAndNoSilentLoss) {
  if (!std::filesystem::exists("/dev/full")) GTEST_SKIP() << "no /dev/full";
  const std::string command = std::string(FLOAT8_TUNE) + " db schema >/dev/full 2>/dev/null";
  const int status = std::system(command.c_str());
  EXPECT_EQ(WEXITSTATUS(status), 1);
}

}  // namespace
}  // namespace f8::testing
