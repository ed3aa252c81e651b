// Databases of strangers through the command line: every command that reads one answers with one
// line that names the file, exit code 1 and nothing on standard output, and never waits.
#include <gtest/gtest.h>

#include <algorithm>

#include "base/log.hpp"
#include "tests/unit/cli/run_tool.hpp"
#include "tests/unit/tuning_db/hostile.hpp"

namespace f8::testing {
namespace {

namespace db = tuning_db;
using Words = std::vector<std::string>;

const std::vector<Words> kCommands = {
    {"query", "--mnk", "8192,4096,4096", "--recipe", "rowwise", "--db", "hostile.db"},
    {"filter", "--model", "llama3-8b", "--recipe", "rowwise", "--tokens", "8192", "--db",
     "hostile.db"},
    {"explain", "8192,4096,4096", "--recipe", "rowwise", "--db", "hostile.db"},
    {"thresholds", "--recipe", "rowwise", "--db", "hostile.db"},
    {"prewarm", "--model", "llama3-8b", "--recipe", "rowwise", "--tokens", "8192", "--db",
     "hostile.db"},
    {"resume", "--db", "hostile.db"},
    {"compare", "built-in", "hostile.db"},
    {"db", "diff", "hostile.db", "built-in"},
    {"db", "info", "--db", "hostile.db"},
    {"db", "check", "--db", "hostile.db"},
    {"db", "migrate", "--db", "hostile.db"},
    {"db", "export", "-o", "out", "--db", "hostile.db"},
    {"db", "export", "--format", "db", "-o", "out", "--db", "hostile.db"},
    {"db", "export", "--format", "table", "-o", "out", "--db", "hostile.db"},
    {"db", "merge", "hostile.db", "--db", "out"},
    {"db", "import", "good.jsonl", "--db", "hostile.db"},
};

std::vector<db::Hostile> some() {
  std::vector<db::Hostile> all = db::hostile_files();
  for (const std::vector<db::Hostile>& more : {db::hostile_schemas(), db::hostile_values()}) {
    all.insert(all.end(), more.begin(), more.end());
  }
  const std::vector<std::string> names = {"view for a table",
                                          "a trigger that goes on and on",
                                          "a virtual table for a table",
                                          "a changed number",
                                          "a giant text",
                                          "sparse, 60 GB",
                                          "a fifo",
                                          "a link to a device",
                                          "a fifo for a -wal",
                                          "cut off",
                                          "no SQL"};
  std::erase_if(
      all, [&](const db::Hostile& h) { return std::ranges::find(names, h.name) == names.end(); });
  EXPECT_EQ(all.size(), names.size());
  return all;
}

TEST(HostileDb, EveryCommandRefusesIt) {
  const Tool tool;
  const fs::path path = tool.path() / "hostile.db";
  db::make_good(path);
  const std::string good = db::bytes_of(path);
  ASSERT_EQ(tool({"db", "export", "-o", "good.jsonl", "--db", "hostile.db"}).code, 0);
  for (const db::Hostile& hostile : some()) {
    db::remove_database(path);
    ASSERT_TRUE(write_file_atomic(path, good));
    hostile.make(path);
    for (const Words& command : kCommands) {
      SCOPED_TRACE(hostile.name + ": " + command[0] + " " + command[1]);
      const Outcome outcome = tool(command);
      EXPECT_EQ(outcome.code, 1) << outcome.err;
      EXPECT_EQ(outcome.out, "");
      EXPECT_EQ(std::ranges::count(outcome.err, '\n'), 1) << outcome.err;
      EXPECT_TRUE(contains(outcome.err, "hostile.db")) << outcome.err;
      EXPECT_EQ(outcome.err.find('\x1b'), std::string::npos) << outcome.err;
      EXPECT_FALSE(fs::exists(tool.path() / "out"));
    }
  }
}

TEST(HostileDb, AnEmptyNameIsRefused) {
  const Tool tool;
  tool.expect_refused(1, {"db", "check", "--db", ""}, {"--db", "empty"});
}

TEST(HostileDb, AUriIsTheNameOfAFile) {
  const Tool tool;
  db::make_good(tool.path() / "file:a.db");
  EXPECT_EQ(tool.json({"db", "check", "--db", "file:a.db"})["ok"], true);
  tool.expect_refused(1, {"db", "check", "--db", ":memory:"}, {":memory:", "no such database"});
  tool.expect_refused(1, {"db", "check", "--db", "file::memory:"}, {"no such database"});
}

}  // namespace
}  // namespace f8::testing
