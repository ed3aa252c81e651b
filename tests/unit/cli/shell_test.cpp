// Completions and the manual page, which are made of the command line's own tree.
#include <gtest/gtest.h>

#include <cstdio>
#include <memory>
#include <sstream>

#include "tests/unit/cli/run_tool.hpp"

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

}  // namespace
}  // namespace f8::testing
