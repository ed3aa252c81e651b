#include "tests/unit/cli/run_tool.hpp"

#include <fcntl.h>
#include <fmt/ranges.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>

#include "base/format.hpp"

namespace f8::testing {
namespace {

namespace fs = std::filesystem;

struct Pipe {
  std::array<int, 2> ends{-1, -1};
  Pipe() { EXPECT_EQ(::pipe(ends.data()), 0); }
};

// Reads both pipes to their ends; a child that fills one does not wait for the other.
void drain(int out, int err, Outcome& outcome) {
  std::array<pollfd, 2> polls{{{out, POLLIN, 0}, {err, POLLIN, 0}}};
  std::array<std::string*, 2> texts{&outcome.out, &outcome.err};
  int open = 2;
  while (open > 0) {
    if (::poll(polls.data(), polls.size(), -1) < 0) continue;
    for (size_t i = 0; i < polls.size(); ++i) {
      if (polls[i].fd < 0 || polls[i].revents == 0) continue;
      std::array<char, 1 << 14> buffer{};
      const ssize_t n = ::read(polls[i].fd, buffer.data(), buffer.size());
      if (n > 0) {
        texts[i]->append(buffer.data(), static_cast<size_t>(n));
      } else {
        ::close(polls[i].fd);
        polls[i].fd = -1;
        --open;
      }
    }
  }
}

}  // namespace

bool contains(std::string_view text, std::string_view part) {
  return text.find(part) != std::string_view::npos;
}

nlohmann::json Outcome::json() const {
  auto parsed = nlohmann::json::parse(out, nullptr, /*allow_exceptions=*/false);
  EXPECT_FALSE(parsed.is_discarded()) << out << err;
  return parsed;
}

Outcome Tool::operator()(const std::vector<std::string>& arguments) const {
  std::vector<std::string> words{FLOAT8_TUNE};
  words.insert(words.end(), arguments.begin(), arguments.end());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  Pipe out;
  Pipe err;
  const pid_t child = ::fork();
  if (child == 0) {
    ::dup2(out.ends[1], STDOUT_FILENO);
    ::dup2(err.ends[1], STDERR_FILENO);
    for (const Pipe* pipe : {&out, &err}) {
      for (const int end : pipe->ends) ::close(end);
    }
    ::unsetenv("FLOAT8_DB");
    ::unsetenv("FLOAT8_LOG");
    ::setenv("FLOAT8_CACHE_DIR", (path() / "cache").c_str(), 1);
    ::setenv("CUDA_VISIBLE_DEVICES", "", 1);  // the same on a machine with a GPU
    for (const auto& [name, value] : variables_) ::setenv(name.c_str(), value.c_str(), 1);
    if (::chdir(path().c_str()) != 0) ::_exit(126);
    if (reader_is_gone_) {
      const Pipe gone;
      ::dup2(gone.ends[1], STDOUT_FILENO);
      for (const int end : gone.ends) ::close(end);
    }
    if (!input_.empty() && ::dup2(::open(input_.c_str(), O_RDONLY), STDIN_FILENO) < 0) ::_exit(126);
    ::execv(argv[0], argv.data());
    ::_exit(127);
  }
  ::close(out.ends[1]);
  ::close(err.ends[1]);
  Outcome outcome;
  drain(out.ends[0], err.ends[0], outcome);
  int status = 0;
  ::waitpid(child, &status, 0);
  outcome.code = WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  return outcome;
}

nlohmann::json Tool::json(std::vector<std::string> arguments) const {
  arguments.emplace_back("--json");
  const Outcome outcome = (*this)(arguments);
  EXPECT_EQ(outcome.code, 0) << f8::format("{}\n{}", fmt::join(arguments, " "), outcome.err);
  return outcome.json();
}

std::map<std::string, std::string> Tool::contents() const {
  std::map<std::string, std::string> files;
  for (const auto& entry : fs::recursive_directory_iterator(path())) {
    // SQLite's index of its write-ahead log, which a reader makes too.
    if (entry.path().extension() == ".db-shm" || entry.path().extension() == ".db-wal") continue;
    std::error_code error;
    files[entry.path().string()] =
        entry.is_directory() ? "folder"
                             : f8::format("{} {}", entry.file_size(error),
                                          entry.last_write_time(error).time_since_epoch().count());
  }
  return files;
}

void Tool::expect_refused(int code, const std::vector<std::string>& arguments,
                          const std::vector<std::string>& parts) const {
  SCOPED_TRACE(f8::format("float8-tune {}", fmt::join(arguments, " ")));
  const auto before = contents();
  const Outcome outcome = (*this)(arguments);
  EXPECT_EQ(outcome.code, code) << outcome.err;
  EXPECT_EQ(outcome.out, "");
  EXPECT_EQ(std::ranges::count(outcome.err, '\n'), 1) << outcome.err;
  EXPECT_TRUE(outcome.err.starts_with("float8-tune: ")) << outcome.err;
  EXPECT_FALSE(outcome.err.starts_with("float8-tune: :")) << outcome.err;
  for (const std::string& part : parts) {
    EXPECT_TRUE(contains(outcome.err, part)) << "no \"" << part << "\" in: " << outcome.err;
  }
  EXPECT_EQ(contents(), before);
}

ToolWithTrials::ToolWithTrials() {
  const Outcome made = (*this)({"db", "import", kSomeTrials, "--db", "some.db"});
  EXPECT_EQ(made.code, 0) << made.err;
}

std::vector<std::string> operator+(std::vector<std::string> a, const std::vector<std::string>& b) {
  a.insert(a.end(), b.begin(), b.end());
  return a;
}

std::vector<std::string> to(std::vector<std::string> words, const std::string& path) {
  std::ranges::replace(words, std::string("{}"), path);
  return words;
}

}  // namespace f8::testing
