// Completions and the manual page, which are made of the command line's own tree.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <sstream>

#include "recipes/attention.hpp"
#include "tests/unit/cli/run_tool.hpp"
#include "tests/unit/tuning_db/sample.hpp"

namespace f8::testing {
namespace {

struct Shell {
  int code = 0;
  std::string out;
};

Shell shell(const std::string& command) {
  Shell result;
  const std::unique_ptr<std::FILE, int (*)(std::FILE*)> pipe(
      ::popen((command + " 2>&1").c_str(), "r"), [](std::FILE*) { return 0; });
  char part[4096];
  for (size_t n = 0; (n = std::fread(part, 1, sizeof part, pipe.get())) > 0;) {
    result.out.append(part, n);
  }
  result.code = ::pclose(pipe.get());
  return result;
}

class Completion : public ::testing::Test {
 protected:
  Completion() { script_ = tool_.write("float8-tune.bash", tool_({"completion", "bash"}).out); }

  // What bash offers for the last word.
  [[nodiscard]] std::string offers(const std::vector<std::string>& words) const {
    std::string line = "float8-tune";
    for (const std::string& word : words) line += " '" + word + "'";
    const Shell done = shell("cd " + tool_.path().string() + " && bash -uc '" +
                             "source \"$1\"; shift; COMP_WORDS=(\"$@\"); COMP_CWORD=$(($# - 1)); "
                             "COMPREPLY=(); _float8_tune; "
                             "[[ ${#COMPREPLY[@]} == 0 ]] || printf \"%s \" \"${COMPREPLY[@]}\"' "
                             "bash " +
                             script_ + " " + line);
    EXPECT_EQ(done.code, 0) << done.out;
    return done.out;
  }

  Tool tool_;
  std::string script_;
};

TEST_F(Completion, BashOffersWhatFits) {
  const std::string commands = offers({""});
  for (const char* command : {"doctor ", "sweep ", "filter ", "db ", "completion "}) {
    EXPECT_TRUE(contains(commands, command)) << commands;
  }
  EXPECT_EQ(offers({"db", "ex"}), "export ");
  EXPECT_EQ(offers({"db", "export", "--for"}), "--format ");
  EXPECT_EQ(offers({"filter", "--color", ""}), "auto always never ");
  EXPECT_EQ(offers({"filter", "--color", "=", "n"}), "never ");
  EXPECT_EQ(offers({"filter", "--model", "llama3-4"}), "llama3-405b ");
  EXPECT_EQ(offers({"filter", "--recipe", "row"}), "rowwise rowwise_with_gw_hp ");
  EXPECT_EQ(offers({"sweep", "--recipe", "delayed,bl"}), "delayed,blockwise ");
  EXPECT_EQ(offers({"query", "--mnk", ""}), "");
  EXPECT_EQ(offers({"completion", "f"}), "fish ");
}

TEST_F(Completion, BashOffersFiles) {
  (void)tool_.write("a model.json", "[]");
  EXPECT_EQ(offers({"query", "--db", "a"}), "a model.json ");
  EXPECT_EQ(offers({"filter", "--model", "a"}), "a model.json ");
}

TEST_F(Completion, OtherShellsHaveTheSameCommands) {
  const std::string zsh = tool_({"completion", "zsh"}).out;
  EXPECT_TRUE(zsh.starts_with("#compdef float8-tune\n"));
  const std::string fish = tool_({"completion", "fish"}).out;
  EXPECT_TRUE(contains(fish, "-n '__fish_seen_subcommand_from filter' -l recipe -x -a '"));
  EXPECT_TRUE(contains(fish,
                       "-n '__fish_seen_subcommand_from db; and "
                       "__fish_seen_subcommand_from export'"));
  for (const auto& [name, script] : {std::pair("zsh", zsh), std::pair("fish", fish)}) {
    if (shell(std::string("command -v ") + name).code != 0) continue;
    const std::string file = tool_.write(std::string("script.") + name, script);
    const Shell checked = shell(std::string(name) + " -n " + file);
    EXPECT_EQ(checked.code, 0) << checked.out;
  }
  tool_.expect_refused(1, {"completion", "tcsh"}, {"tcsh", "bash"});
  tool_.expect_refused(1, {"completion"}, {"shell", "completion --help"});
}

TEST(ManualPage, IsWellFormedAndHasEveryCommand) {
  const Tool tool;
  const std::string page = tool({"man"}).out;
  EXPECT_TRUE(page.starts_with(".TH "));
  for (const char* section : {"NAME", "SYNOPSIS", "OPTIONS", "COMMANDS", "EXIT STATUS"}) {
    EXPECT_TRUE(contains(page, std::string("\n.SH ") + section + "\n")) << section;
  }
  for (const char* command : {"sweep", "filter", "db export", "bench linear"}) {
    EXPECT_TRUE(contains(page, std::string("\n.SS float8\\-tune ") + command + "\n")) << command;
  }
  // A line that opens with a dot is a request of roff's.
  std::istringstream lines(page);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(".")) continue;
    const std::string request = line.substr(0, line.find(' '));
    EXPECT_TRUE(contains(".TH .SH .SS .TP .PP .B .nf .fi", request)) << line;
  }
  if (shell("command -v groff").code != 0) GTEST_SKIP() << "there is no groff";
  const std::string file = tool.write("float8-tune.1", page);
  const Shell checked = shell("groff -man -ww -Tascii -z " + file);
  EXPECT_EQ(checked.code, 0);
  EXPECT_EQ(checked.out, "");
}

// The example lines of every command's --help.
std::vector<std::string> examples(const Tool& tool) {
  std::vector<std::string> lines;
  bool inside = false;
  std::istringstream page(tool({"man"}).out);
  for (std::string line; std::getline(page, line);) {
    inside = line == "Examples:" || (inside && line.starts_with("  "));
    if (!inside || line == "Examples:") continue;
    std::string text = line.substr(2);
    for (size_t at = 0; (at = text.find("\\-", at)) != std::string::npos;) text.erase(at, 1);
    lines.push_back(text);
  }
  return lines;
}

TEST(Examples, WorkAsTheyStand) {
  const Tool tool;
  {
    namespace db = tuning_db;
    auto tuned = db::Database::open(tool.path() / "tuned.f8db", db::OpenMode::kCreate).value();
    db::sweep_linears(
        tuned, "rowwise", db::measured_shapes(), [](Shape) { return 1e6; },
        [](Shape) { return 1.3; });
    const Problem attention =
        attention_problem(Op::kAttentionForward, AttentionRecipe::kFp8, {.tokens = 8192}).value();
    db::sweep(tuned, {{attention, {db::Impl::kFloat8, "{}", ""}}},
              [](const db::TrialKey&) { return db::timed(1e5); });
  }
  for (const char* copy : {"before.f8db", "after.f8db"}) {
    const std::string out = copy;
    ASSERT_EQ(tool({"db", "export", "--db", "tuned.f8db", "--format", "db", "-o", out}).code, 0);
  }
  ASSERT_EQ(tool({"db", "export", "--db", "tuned.f8db", "-o", "tuned.jsonl"}).code, 0);
  std::filesystem::copy(FLOAT8_DATA_DIR "/held_out.jsonl", tool.path() / "exhaustive.jsonl");
  std::filesystem::copy(FLOAT8_DATA_DIR "/left_out.csv", tool.path() / "suggestions.csv");
  const std::string folder = std::filesystem::path(FLOAT8_TUNE).parent_path();
  // These want a GPU, or compile for a minute.
  const std::vector<std::string> left = {"bench ",   "sweep ", "resume ", "verify-dist --gpus",
                                         "prewarm ", "man "};
  size_t ran = 0;
  for (const std::string& line : examples(tool)) {
    const auto starts = [&](const std::string& command) {
      return contains(line, "float8-tune " + command);
    };
    if (std::ranges::any_of(left, starts)) continue;
    const Shell done = shell("cd " + tool.path().string() + " && PATH=" + folder +
                             ":$PATH bash -c '" + line + " > out.txt'");
    EXPECT_EQ(done.code, 0) << line << "\n" << done.out;
    ++ran;
  }
  EXPECT_GE(ran, 25U);
}

// A database that cannot be opened is an error of every command: none takes --db without effect.
TEST(Examples, RefuseADatabaseThatIsMissing) {
  const Tool tool;
  const std::string folder = std::filesystem::path(FLOAT8_TUNE).parent_path();
  // These want a GPU, or make the database, or say that it is missing.
  const std::vector<std::string> left = {"bench linear",    "bench experts", "bench cast",
                                         "bench attention", "sweep ",        "db merge",
                                         "db import",       "doctor"};
  size_t ran = 0;
  for (const std::string& line : examples(tool)) {
    const auto starts = [&](const std::string& command) {
      return contains(line, "float8-tune " + command);
    };
    if (std::ranges::any_of(left, starts) || contains(line, "--db") || contains(line, "|") ||
        contains(line, "source <")) {
      continue;
    }
    const Shell done = shell("cd " + tool.path().string() + " && PATH=" + folder + ":$PATH " +
                             line + " --db missing.f8db");
    EXPECT_NE(done.code, 0) << line;
    EXPECT_TRUE(contains(done.out, "--db")) << line << "\n" << done.out;
    ++ran;
  }
  EXPECT_GE(ran, 20U);
}

TEST(Examples, AreInEveryCommandsHelp) {
  const Tool tool;
  const std::string page = tool({"man"}).out;
  size_t commands = 0;
  for (size_t at = page.find("\n.SS "); at != std::string::npos; at = page.find("\n.SS ", at + 1)) {
    const size_t end = std::min(page.find("\n.SS ", at + 1), page.find("\n.SH ", at + 1));
    const std::string part = page.substr(at, end - at);
    if (!contains(part, "\n.TP\n")) continue;                  // a group of commands
    if (contains(part, "float8\\-tune wire fit\n")) continue;  // its rows come from GPUs
    EXPECT_TRUE(contains(part, "\nExamples:\n  ")) << part.substr(0, 40);
    ++commands;
  }
  EXPECT_GE(commands, 25U);
}

}  // namespace
}  // namespace f8::testing
