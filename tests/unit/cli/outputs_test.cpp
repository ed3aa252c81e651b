// Where the program writes: devices, links and pipes stay what they are, modes are kept, and names
// that hold control characters reach neither a terminal nor a file.
#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <unistd.h>

#include <thread>

#include "base/file.hpp"
#include "base/text.hpp"
#include "tests/unit/cli/run_tool.hpp"

namespace f8::testing {
namespace {

using Words = std::vector<std::string>;

const Words kFilterRowwise = {"filter",  "--model",  "llama3-8b", "--recipe",
                              "rowwise", "--tokens", "8192",      "--quiet"};

Words with(Words words, const Words& more) {
  words.insert(words.end(), more.begin(), more.end());
  return words;
}

// What each output option writes; {} stands for the path.
const std::vector<Words> kOutputs = {
    with(kFilterRowwise, {"-o", "{}"}),
    with(kFilterRowwise, {"--verdicts", "{}"}),
    {"db", "export", "--db", "some.db", "-o", "{}"},
    {"db", "export", "--db", "some.db", "--format", "db", "-o", "{}"},
    {"db", "export", "--db", "some.db", "--format", "table", "-o", "{}"},
};

TEST(Outputs, GoIntoADeviceAndNotInItsPlace) {
  const ToolWithTrials tool;
  const std::string null = (tool.path() / "null").string();
  if (::mknod(null.c_str(), S_IFCHR | 0666, makedev(1, 3)) != 0) {
    GTEST_SKIP() << "mknod is refused here";
  }
  std::filesystem::create_symlink("null", tool.path() / "link");
  for (const Words& output : kOutputs) {
    for (const char* path : {"null", "link"}) {
      const Outcome outcome = tool(to(output, path));
      EXPECT_EQ(outcome.code, 0) << outcome.err;
      EXPECT_TRUE(fs::is_character_file(fs::symlink_status(tool.path() / "null")));
      EXPECT_TRUE(fs::is_symlink(tool.path() / "link"));
    }
  }
}

TEST(Outputs, GoThroughALinkAndKeepTheMode) {
  const ToolWithTrials tool;
  for (const Words& output : kOutputs) {
    tool.write("target", "old");
    ASSERT_EQ(::chmod((tool.path() / "target").c_str(), 0600), 0);
    std::error_code ignored;
    fs::create_symlink("target", tool.path() / "link", ignored);
    tool.write("target.new", "mine");
    EXPECT_EQ(tool(to(output, "link")).code, 0);
    EXPECT_TRUE(fs::is_symlink(tool.path() / "link"));
    EXPECT_EQ(fs::status(tool.path() / "target").permissions(), fs::perms(0600));
    EXPECT_NE(read_file(tool.path() / "target").value(), "old");
    EXPECT_EQ(read_file(tool.path() / "target.new").value(), "mine");
  }
}

TEST(Outputs, StandardOutputIsAFileOfThisProcess) {
  const ToolWithTrials tool;
  const auto before = fs::symlink_status("/dev/stdout").type();  // a container may have none
  ASSERT_EQ(tool(to(kOutputs[1], "verdicts")).code, 0);
  const Outcome outcome = tool(with(to(kOutputs[1], "/dev/stdout"), {"--json"}));
  EXPECT_EQ(outcome.code, 0) << outcome.err;
  EXPECT_TRUE(outcome.out.starts_with(read_file(tool.path() / "verdicts").value()));
  EXPECT_EQ(fs::symlink_status("/dev/stdout").type(), before);
  const Outcome text = tool(to(kOutputs[2], "/dev/stdout"));
  EXPECT_EQ(text.code, 0) << text.err;
  EXPECT_TRUE(text.out.starts_with("{\"float8_tuning_db\""));
}

TEST(Outputs, ADashIsStandardOutputForThatAlone) {
  const ToolWithTrials tool;
  for (const Words& output : kOutputs) {
    const Outcome outcome = tool(to(output, "-"));
    ASSERT_EQ(outcome.code, 0) << outcome.err;
    ASSERT_EQ(tool(to(output, "file")).code, 0);
    EXPECT_EQ(outcome.out, read_file(tool.path() / "file").value());
    EXPECT_FALSE(fs::exists(tool.path() / "-"));
    ASSERT_EQ(tool(to(output, "./-")).code, 0);
    EXPECT_TRUE(fs::remove(tool.path() / "-"));
  }
  EXPECT_EQ(tool(with(kFilterRowwise, {"-o", "-", "--json"})).out,
            tool(with(kFilterRowwise, {"--json"})).out);
  const Words emit = {"emit", "--kernel", "amax/bf16/tensor"};
  EXPECT_TRUE(contains(tool(emit).out, "__global__"));
  EXPECT_EQ(tool(with(emit, {"-o", "-"})).out, tool(emit).out);
  EXPECT_TRUE(tool({"cost-model", "score", "--csv", "-"}).out.starts_with("set,number,"));
}

TEST(Outputs, TwoThatWantStandardOutputAreRefused) {
  const Tool tool;
  tool.expect_refused(1, with(kFilterRowwise, {"-o", "-", "--verdicts", "-"}),
                      {"-o", "--verdicts"});
  tool.expect_refused(1, with(kFilterRowwise, {"--verdicts", "-", "--json"}),
                      {"--verdicts", "--json"});
  tool.expect_refused(1, {"db", "export", "-o", "-", "--json"}, {"-o", "--json"});
  tool.expect_refused(1, {"cost-model", "score", "--csv", "-", "--json"}, {"--csv", "--json"});
  tool.expect_refused(1, with(kFilterRowwise, {"--db", "-"}), {"--db", "database is a file"});
  tool.expect_refused(1, {"db", "merge", "-", "--db", "new.db"}, {"database is a file"});
  tool.expect_refused(1, {"emit", "--kernel", "amax/bf16/tensor", "--cubin", "-o", "-"},
                      {"--cubin"});
}

TEST(Outputs, TheHelpSaysWhatADashIs) {
  const Tool tool;
  for (const Words& words :
       {Words{"--help"}, {"db", "import", "--help"}, {"bench", "linear", "--help"}}) {
    EXPECT_TRUE(contains(tool(words).out, "- is standard input")) << words.front();
  }
}

TEST(Outputs, ADirectoryIsRefusedInOneLine) {
  const ToolWithTrials tool;
  fs::create_directory(tool.path() / "folder");
  for (const Words& output : kOutputs) {
    tool.expect_refused(1, to(output, "folder"), {"folder", "directory"});
  }
}

TEST(Outputs, ExportsAtOnceAllSucceed) {
  const ToolWithTrials tool;
  std::vector<std::thread> exports;
  for (int i = 0; i < 4; ++i) {
    exports.emplace_back([&tool] {
      const Outcome outcome = tool(to(kOutputs[3], "copy.db"));
      EXPECT_EQ(outcome.code, 0) << outcome.err;
    });
  }
  for (std::thread& one : exports) one.join();
  EXPECT_EQ(tool.json({"db", "check", "--db", "copy.db"})["ok"], true);
}

TEST(Inputs, ADeepConfigurationIsRefusedInOneLine) {
  const ToolWithTrials tool;
  ASSERT_EQ(tool(to(kOutputs[2], "all.jsonl")).code, 0);
  std::string text = read_file(tool.path() / "all.jsonl").value();
  const size_t at = text.find("\"config\":{");
  const size_t end = text.find('}', at) + 1;
  text.replace(at, end - at, "\"config\":" + std::string(80'000, '['));
  tool.write("deep.jsonl", text);
  tool.expect_refused(1, {"db", "import", "deep.jsonl", "--db", "new.db"},
                      {"deep.jsonl", "nested"});
}

TEST(Inputs, APipeAndStandardInputAreImported) {
  ToolWithTrials tool;
  ASSERT_EQ(::mkfifo((tool.path() / "fifo").c_str(), 0600), 0);
  std::thread writer([&tool] { EXPECT_EQ(tool(to(kOutputs[2], "fifo")).code, 0); });
  const auto piped = tool.json({"db", "import", "fifo", "--db", "a.db"});
  writer.join();
  EXPECT_GT(piped["added"], 100);
  ASSERT_EQ(tool(to(kOutputs[2], "all.jsonl")).code, 0);
  tool.set_input("all.jsonl");
  EXPECT_EQ(tool.json({"db", "import", "-", "--db", "b.db"})["added"], piped["added"]);
}

TEST(Inputs, ADashIsStandardInputInEveryCommandThatReadsAFile) {
  Tool tool;
  tool.write("model.json", R"([{"fqn": "a", "in_features": 4096, "out_features": 4096}])");
  tool.write("model.safetensors",
             safetensors(R"({"a.weight": {"dtype": "BF16", "shape": [1024, 4096]}})"));
  tool.write("shapes.csv", "m,n,k\n16,16,17\n");
  const auto from = [&tool](const std::string& input, const Words& words) {
    tool.set_input(input);
    return tool(words);
  };
  const Words model = {"--model", "-", "--recipe", "rowwise", "--tokens", "8192"};
  for (const char* file : {"model.json", "model.safetensors"}) {
    for (const Words& command : {Words{"filter"}, {"plan"}, {"explain", "a"}}) {
      const Outcome outcome = from(file, with(command, model));
      EXPECT_EQ(outcome.code, 0) << command.front() << outcome.err;
    }
  }
  const Words score = {"cost-model", "score", "--json", "--train"};
  const Outcome scored = from(kSomeTrials, with(score, {"-"}));
  EXPECT_EQ(scored.code, 0) << scored.err;
  EXPECT_EQ(scored.out, from("", with(score, {kSomeTrials})).out);
  const Outcome shapes = from("shapes.csv", {"bench", "matmul", "--shapes", "-"});
  EXPECT_TRUE(contains(shapes.err, "standard input: line 2")) << shapes.err;
  const Outcome none = from("shapes.csv", with({"filter"}, model));
  EXPECT_TRUE(contains(none.err, "--model: standard input is not valid JSON")) << none.err;
}

TEST(Inputs, AFileOfAnotherKindIsNamed) {
  const ToolWithTrials tool;
  ASSERT_EQ(tool(to(kOutputs[2], "all.jsonl")).code, 0);
  ASSERT_EQ(tool(to(kOutputs[3], "a.db")).code, 0);
  ASSERT_EQ(tool(to(kOutputs[4], "table")).code, 0);
  ASSERT_EQ(tool(to(kOutputs[1], "verdicts")).code, 0);
  const auto import = [](const char* file) {
    return Words{"db", "import", file, "--db", "new.db"};
  };
  tool.expect_refused(1, import("a.db"), {"a.db", "is a database", "db merge"});
  tool.expect_refused(1, import("table"), {"table", "tuning table", "db export"});
  tool.expect_refused(1, import("verdicts"), {"verdicts", "filter file"});
  tool.expect_refused(1, {"db", "merge", "all.jsonl", "--db", "new.db"},
                      {"all.jsonl", "an export", "db import"});
  tool.expect_refused(1, {"db", "info", "--db", "table"}, {"table", "tuning table"});
  tool.expect_refused(1, {"db", "info", "--db", "gone.db"},
                      {"gone.db", "sweep", "db import", "db merge"});
}

TEST(Inputs, ADeviceIsNamedInTheSameWordsByEveryCommand) {
  Tool tool;
  const std::string is = "is a character device; a regular file";
  for (const Words& words :
       {Words{"db", "import", "/dev/zero", "--db", "new.db"},
        {"db", "merge", "/dev/zero", "--db", "new.db"},
        {"db", "info", "--db", "/dev/zero"},
        {"query", "--mnk", "16,16,16", "--recipe", "rowwise", "--db", "/dev/zero"},
        {"filter", "--model", "/dev/zero", "--recipe", "rowwise", "--tokens", "1"},
        {"cost-model", "score", "--train", "/dev/zero"},
        {"bench", "linear", "--shapes", "/dev/zero"}}) {
    tool.expect_refused(1, words, {"/dev/zero " + is});
  }
  tool.set_input("/dev/zero");
  tool.expect_refused(1, {"db", "import", "-", "--db", "new.db"}, {"standard input " + is});
  tool.expect_refused(1, {"filter", "--model", "-", "--recipe", "rowwise", "--tokens", "1"},
                      {"standard input " + is});
}

TEST(Inputs, AFifoOrADeviceIsRefusedAndNotWaitedFor) {
  const Tool tool;
  ASSERT_EQ(::mkfifo((tool.path() / "fifo").c_str(), 0600), 0);
  std::filesystem::create_symlink("/dev/zero", tool.path() / "zero");
  const Words filter = {"--recipe", "rowwise", "--tokens", "8192"};
  tool.expect_refused(1, {"db", "import", "zero", "--db", "new.db"}, {"zero"});
  tool.expect_refused(1, with({"filter", "--model", "zero"}, filter), {"zero"});
  tool.expect_refused(1, with({"filter", "--db", "fifo", "--model", "llama3-8b"}, filter),
                      {"fifo is a fifo; a regular file is needed"});
  const Outcome waited = tool({"db", "import", "fifo", "--db", "new.db"});
  EXPECT_EQ(waited.code, 1);
  EXPECT_EQ(waited.out, "");
  EXPECT_EQ(waited.err,
            "float8: warning: waiting for what is written into fifo: nothing came for 2 s\n"
            "float8-tune: fifo is a fifo that nobody writes into\n");
  EXPECT_FALSE(fs::exists(tool.path() / "new.db"));
}

TEST(Inputs, NoControlByteOfAFileNameReachesTheTerminal) {
  const Tool tool;
  const std::string name = "a\x1b]0;title\x07\n\xc2\x9b";
  tool.write(name, "no model");
  for (const Words& words :
       {Words{"filter", "--model", name, "--recipe", "rowwise", "--tokens", "8192"},
        {"db", "import", name, "--db", "new.db"},
        {"db", "info", "--db", name},
        {name}}) {
    const Outcome outcome = tool(words);
    EXPECT_EQ(outcome.code, 1);
    std::string_view rest = outcome.err;
    EXPECT_FALSE(has_control(take_until(rest, '\n'))) << outcome.err;
    EXPECT_TRUE(rest.empty()) << outcome.err;
  }
}

}  // namespace
}  // namespace f8::testing
