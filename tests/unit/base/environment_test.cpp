// environment() is read once a process, so each case runs in a process of its own: a death test in
// the threadsafe style starts the program again with the variables that are set here.
#include "base/environment.hpp"

#include <gtest/gtest.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>

#include "base/log.hpp"

namespace f8 {
namespace {

class EnvironmentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    GTEST_FLAG_SET(death_test_style, "threadsafe");
    for (const char* name : kNames) {
      if (const char* value = std::getenv(name)) before_[name] = value;
      ::unsetenv(name);
    }
  }
  void TearDown() override {
    for (const char* name : kNames) ::unsetenv(name);
    for (const auto& [name, value] : before_) ::setenv(name.c_str(), value.c_str(), 1);
  }

  [[noreturn]] static void print_and_exit() {
    const Environment& env = environment();
    f8::print(stderr, "cache={} db={} log={}\n", env.cache_dir.string(), env.db.string(),
              env.log_level);
    std::exit(0);
  }
  [[noreturn]] static void log_and_exit() {
    log(LogLevel::kError, "an error");
    log_warning("a {}", "warning");
    log_info("{} info", "an");
    std::exit(0);
  }

 private:
  static constexpr const char* kNames[] = {"FLOAT8_CACHE_DIR", "FLOAT8_DB", "FLOAT8_LOG",
                                           "XDG_CACHE_HOME", "HOME"};
  std::map<std::string, std::string> before_;
};
using EnvironmentDeathTest = EnvironmentTest;

void set(const char* name, const char* value) {
  ::setenv(name, value, 1);
}

TEST_F(EnvironmentDeathTest, DefaultsAreUnderHome) {
  set("HOME", "/home/someone");
  EXPECT_EXIT(print_and_exit(), ::testing::ExitedWithCode(0),
              "cache=/home/someone/.cache/float8 db= log=warning");
}

TEST_F(EnvironmentDeathTest, XdgCacheHomeGoesBeforeHome) {
  set("HOME", "/home/someone");
  set("XDG_CACHE_HOME", "/var/xdg");
  EXPECT_EXIT(print_and_exit(), ::testing::ExitedWithCode(0), "cache=/var/xdg/float8 db= ");
}

TEST_F(EnvironmentDeathTest, OwnVariablesGoBeforeAll) {
  set("XDG_CACHE_HOME", "/var/xdg");
  set("FLOAT8_CACHE_DIR", "/scratch/cubins");
  set("FLOAT8_DB", "/scratch/my.f8db");
  set("FLOAT8_LOG", "info");
  EXPECT_EXIT(print_and_exit(), ::testing::ExitedWithCode(0),
              "cache=/scratch/cubins db=/scratch/my.f8db log=info");
}

TEST_F(EnvironmentDeathTest, WithoutHomeThereIsNoCacheInTheWorkingDirectory) {
  EXPECT_EXIT(print_and_exit(), ::testing::ExitedWithCode(0), "^cache= db= ");
  set("HOME", "");
  EXPECT_EXIT(print_and_exit(), ::testing::ExitedWithCode(0), "^cache= db= ");
  set("HOME", ".");
  set("XDG_CACHE_HOME", "relative/cache");
  EXPECT_EXIT(print_and_exit(), ::testing::ExitedWithCode(0), "^cache= db= ");
}

TEST_F(EnvironmentDeathTest, LogShowsItsLevelAndAbove) {
  EXPECT_EXIT(log_and_exit(), ::testing::ExitedWithCode(0),
              "^float8: error: an error\nfloat8: warning: a warning\n$");
  set("FLOAT8_LOG", "error");
  EXPECT_EXIT(log_and_exit(), ::testing::ExitedWithCode(0), "^float8: error: an error\n$");
  set("FLOAT8_LOG", "info");
  EXPECT_EXIT(log_and_exit(), ::testing::ExitedWithCode(0),
              "warning: a warning\nfloat8: info: an info\n$");
}

TEST(Log, AnInstalledSinkTakesEveryMessage) {
  std::vector<std::string> seen;
  set_log_sink([&seen](LogLevel level, std::string_view message) {
    seen.push_back(f8::format("{} {}", static_cast<int>(level), message));
  });
  log_info("one {}", 1);
  log_warning("two");
  set_log_sink(nullptr);
  EXPECT_EQ(seen, (std::vector<std::string>{"2 one 1", "1 two"}));
}

}  // namespace
}  // namespace f8
