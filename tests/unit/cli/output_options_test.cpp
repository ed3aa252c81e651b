// Every option that writes a file goes through the one writer. The options are read from the manual,
// so a new one is a failure here until it has a row.
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <csignal>
#include <map>

#include "base/file.hpp"
#include "tests/unit/cli/run_tool.hpp"

namespace f8::testing {
namespace {

using Words = std::vector<std::string>;

struct Writing {
  Words words;       // {} stands for the path
  bool runs = true;  // false: it needs a GPU, or files that only a GPU's measurements fill
};

const std::string kShape = "16,4096,4096";

// The keys are a command and its option, as the manual has them.
const std::map<std::string, Writing> kWriting = {
    {"bench matmul --csv", {{"bench", "matmul", "--mnk", kShape, "--csv", "{}"}, false}},
    {"bench epilogue --csv", {{"bench", "epilogue", "--mnk", kShape, "--csv", "{}"}, false}},
    {"bench suggestions --csv", {{"bench", "suggestions", "--mnk", kShape, "--csv", "{}"}, false}},
    {"bench linear --csv", {{"bench", "linear", "--mnk", kShape, "--csv", "{}"}, false}},
    {"bench experts --csv",
     {{"bench", "experts", "--mnk", kShape, "--experts", "4", "--csv", "{}"}, false}},
    {"bench cast --csv", {{"bench", "cast", "--mnk", kShape, "--csv", "{}"}, false}},
    {"bench produce --csv", {{"bench", "produce", "--size", "8192,4096", "--csv", "{}"}, false}},
    {"filter --verdicts",
     {{"filter", "--model", "llama3-8b", "--recipe", "rowwise", "--tokens", "8192", "--verdicts",
       "{}"}}},
    {"filter -o",
     {{"filter", "--model", "llama3-8b", "--recipe", "rowwise", "--tokens", "8192", "-o", "{}"}}},
    {"compare --csv", {{"compare", "some.db", "copy.db", "--csv", "{}"}}},
    {"report -o", {{"report", "-o", "{}"}}},
    {"cost-model score --csv", {{"cost-model", "score", "--csv", "{}"}}},
    {"profile fit -o", {{"profile", "fit", "-o", "{}"}}},
    {"estimate score --csv", {{"estimate", "score", "--recipe", "rowwise", "--csv", "{}"}}},
    {"wire predict --csv",
     {{"wire", "predict", "--ranks", "8", "--weight", "4096,4096", "--csv", "{}"}}},
    {"wire fit -o", {{"wire", "fit", "--rows", "a.csv", "-o", "{}"}, false}},
    {"db export -o", {{"db", "export", "--db", "some.db", "-o", "{}"}}},
};
std::string without(std::string text, std::string_view part) {
  for (size_t at = text.find(part); at != std::string::npos; at = text.find(part)) {
    text.erase(at, part.size());
  }
  return text;
}

// "db export -o" for each option whose text says that - is standard output.
std::vector<std::string> options_in_manual(const std::string& manual) {
  std::vector<std::string> found;
  std::string command, option;
  std::string_view rest = manual;
  while (!rest.empty()) {
    const std::string line = without(std::string(take_until(rest, '\n')), "\\");
    constexpr std::string_view kCommand = ".SS float8-tune ";
    if (line.starts_with(kCommand)) command = line.substr(kCommand.size());
    if (line.starts_with("fB-")) option = line.substr(2, line.find_first_of(", f", 4) - 2);
    if (contains(line, "- is standard output, for this alone")) {
      found.push_back(command + " " + option);
    }
  }
  std::ranges::sort(found);
  return found;
}

TEST(OutputOptions, AllAreKnownHere) {
  const Tool tool;
  std::vector<std::string> known;
  for (const auto& [name, writing] : kWriting) known.push_back(name);
  EXPECT_EQ(options_in_manual(tool({"man"}).out), known);
}

TEST(OutputOptions, WhatCannotBeWrittenIsRefusedAtOnce) {
  const Tool tool;
  tool.write("a.csv", "");
  for (const auto& [name, writing] : kWriting) {
    tool.expect_refused(1, to(writing.words, "no/folder"), {"cannot create a file in no"});
  }
}

// A full disk leaves the old bytes, under both of the file's names; then the new ones take its place,
// and another link keeps the old ones.
TEST(OutputOptions, ReplaceAFileWholeOrNotAtAll) {
  const ToolWithTrials tool;
  fs::copy(tool.path() / "some.db", tool.path() / "copy.db");
  const fs::path target = tool.path() / "target";
  for (const auto& [name, writing] : kWriting) {
    if (!writing.runs) continue;
    SCOPED_TRACE(name);
    fs::remove(target);
    fs::remove(tool.path() / "other");
    tool.write("target", "old");
    fs::create_hard_link(target, tool.path() / "other");
    rlimit before{};
    ::getrlimit(RLIMIT_FSIZE, &before);
    rlimit limited = before;
    limited.rlim_cur = 64;
    const auto handler = std::signal(SIGXFSZ, SIG_IGN);
    ::setrlimit(RLIMIT_FSIZE, &limited);
    const Outcome full = tool(to(writing.words, "target"));
    ::setrlimit(RLIMIT_FSIZE, &before);
    std::signal(SIGXFSZ, handler);
    EXPECT_EQ(full.code, 1);
    EXPECT_TRUE(contains(full.err, "File too large")) << full.err;
    EXPECT_EQ(read_file(target).value(), "old");
    const Outcome done = tool(to(writing.words, "target"));
    EXPECT_EQ(done.code, 0) << done.err;
    EXPECT_GT(read_file(target).value().size(), 64u);
    EXPECT_EQ(read_file(tool.path() / "other").value(), "old");
  }
  for (const auto& entry : fs::directory_iterator(tool.path())) {
    EXPECT_FALSE(entry.path().filename().string().starts_with(".")) << entry.path();
  }
}

TEST(OutputOptions, AReaderThatLeavesIsOneLine) {
  Tool tool;
  tool.lose_reader();
  const Outcome outcome = tool({"db", "export", "--format", "db", "-o", "-"});
  EXPECT_EQ(outcome.code, 1);
  EXPECT_EQ(std::ranges::count(outcome.err, '\n'), 1) << outcome.err;
  EXPECT_TRUE(contains(outcome.err, "Broken pipe")) << outcome.err;
}

TEST(OutputOptions, ALongNameOfADatabaseIsMade) {
  const Tool tool;
  for (const size_t length : {242u, 247u}) {
    const std::string name = std::string(length - 3, 'n') + ".db";
    const Outcome made = tool({"db", "import", kSomeTrials, "--db", name});
    EXPECT_EQ(made.code, 0) << made.err;
    EXPECT_EQ(tool({"db", "check", "--db", name}).code, 0);
  }
}

TEST(OutputOptions, TemporaryFilesWithoutAFolderAreOneLine) {
  Tool tool;
  tool.set("TMPDIR", "/nonexistent");
  tool.expect_refused(1, {"db", "export", "--format", "db", "-o", "-"}, {"TMPDIR", "/nonexistent"});
}

TEST(OutputOptions, AFolderIsMadeWhereALinkLeads) {
  const Tool tool;
  fs::create_symlink("made", tool.path() / "link");
  const Outcome outcome = tool({"emit", "--kernel", "amax/bf16/tensor", "-o", "link"});
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_FALSE(fs::is_empty(tool.path() / "made"));
}

}  // namespace
}  // namespace f8::testing
