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
                             {"explain"},
                             {"emit"},
                             {"prewarm"},
                             {"doctor"},
                             {"plan"},
                             {"sweep"},
                             {"resume"},
                             {"bench", "linear"},
                             {"bench", "cast"},
                             {"db", "info"},
                             {"db", "check"},
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

TEST(Frame, EachBenchHasItsOwnOptionsInItsHelp) {
  const Tool tool;
  const std::vector<std::pair<std::string, Words>> own = {
      {"matmul", {"--mnk M,N,K", "--op"}},
      {"epilogue", {"--mnk M,N,K", "--epilogue"}},
      {"suggestions", {"--mnk M,N,K"}},
      {"linear", {"--mnk M,N,K", "--recipe"}},
      {"experts", {"--experts", "--skew"}},
      {"cast", {"--list"}},
      {"attention", {"--shape", "--masks", "--recipe RECIPE", "--length INT", "--seconds"}}};
  for (const auto& [name, options] : own) {
    const Outcome help = tool({"bench", name, "--help"});
    EXPECT_TRUE(contains(help.out, "Usage: float8-tune bench " + name + " [OPTIONS]")) << help.out;
    for (const std::string& option : options) {
      EXPECT_TRUE(contains(help.out, "  " + option)) << name << option << help.out;
    }
    EXPECT_TRUE(contains(tool({"bench", "--help"}).out, "  " + name + " ")) << name;
  }
  EXPECT_TRUE(contains(tool({"bench", "--help"}).out, "bench SUBCOMMAND --help has the options"));
  EXPECT_TRUE(contains(tool({"bench", "attention", "--help"}).out, "0: none is (default: 1024)"));
}

// An option that is accepted and has no effect would let someone believe in the answer.
TEST(Frame, DbIsRefusedWhereNoDatabaseIsAsked) {
  Tool tool;
  struct Case {
    Words words;
    const char* remedy;
  };
  const Case cases[] = {{{"compare", "built-in", "built-in"}, "compare A B"},
                        {{"compare", "built-in"}, "compare A B"},
                        {{"db", "diff", "built-in", "built-in"}, "db diff A B"},
                        {{"db", "schema"}, "db check"},
                        {{"bench", "matmul", "--mnk", "16,16,16"}, "query"},
                        {{"bench", "epilogue", "--mnk", "16,16,16"}, "query"},
                        {{"cost-model", "score"}, "--train"},
                        {{"replay"}, "--set"},
                        {{"wire", "predict", "--weight", "16,16", "--ranks", "2"}, "--wire-rows"},
                        {{"wire", "fit", "--rows", "rows.csv"}, "--rows"},
                        {{"verify-dist", "--emulate"}, "--table"},
                        {{"emit", "--list"}, "--list"},
                        {{"emit", "--kernel", "amax/bf16/tensor"}, "--kernel"},
                        {{"emit", "--op", "cast", "--recipe", "rowwise"}, "leave it out"}};
  for (const Case& one : cases) {
    Words words = one.words;
    words.insert(words.end(), {"--db", "mine.f8db"});
    tool.expect_refused(1, words, {"--db", one.remedy});
  }
  EXPECT_FALSE(contains(tool({"compare", "--help"}).out, "FLOAT8_DB"));
  // The variable is there for the other commands.
  tool.set("FLOAT8_DB", "mine.f8db");
  EXPECT_EQ(tool({"db", "diff", "built-in", "built-in"}).code, 0);
  EXPECT_EQ(tool({"db", "schema"}).code, 0);
  EXPECT_EQ(tool({"emit", "--list"}).code, 0);
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

TEST(Frame, AReaderThatHasGoneIsNoFullDisk) {
  Tool tool;
  tool.lose_reader();
  const Words filter = {
      "filter",   "--model", "llama3-8b", "--recipe", "rowwise",
      "--tokens", "8192",    "--quiet",   "--json"};  // more than the buffer holds
  for (const Words& words : {Words{"db", "schema"}, {"--version"}, {"--help"}, filter}) {
    tool.expect_refused(1, words, {"standard output", "its reader has gone"});
    EXPECT_FALSE(contains(tool(words).err, "space"));
  }
  for (const char* output : {"-o", "--verdicts"}) {
    Words words(filter.begin(), filter.end() - 1);
    words.insert(words.end(), {output, "-"});
    tool.expect_refused(1, words, {output, "/dev/stdout", "Broken pipe"});
  }
}

}  // namespace
}  // namespace f8::testing
