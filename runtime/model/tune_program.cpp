#include "runtime/model/tune_program.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <spawn.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <thread>
#include <vector>

#include "base/environment.hpp"
#include "base/file.hpp"
#include "runtime/gemm/choose.hpp"
#include "runtime/model/first_use.hpp"

namespace f8::runtime {
namespace {

using Clock = std::chrono::steady_clock;
using std::chrono::milliseconds;

// A descriptor that is closed.
class File {
 public:
  explicit File(int fd) : fd_(fd) {}
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] int get() const { return fd_; }

 private:
  int fd_;
};

// The program is installed next to the library; a static library looks for it in PATH.
std::string program() {
  if (!environment().tune.empty()) return environment().tune;
  Dl_info info{};
  if (::dladdr(reinterpret_cast<const void*>(&measure_by_program), &info) != 0) {
    std::error_code error;
    const fs::path library = fs::canonical(info.dli_fname, error);
    const fs::path beside = library.parent_path().parent_path() / "bin" / "float8-tune";
    if (!error && fs::exists(beside, error)) return beside;
  }
  return "float8-tune";
}

// Waits until a time, then asks the process to end, and ends it.
Result<int> wait_until(pid_t pid, Clock::time_point end) {
  constexpr milliseconds kGrace{10'000};
  bool asked = false;
  while (true) {
    int status = 0;
    const pid_t ended = ::waitpid(pid, &status, WNOHANG);
    if (ended == pid) return status;
    if (ended < 0 && errno != EINTR) return fail(ErrorCode::kIo, "somebody else waited for it");
    if (Clock::now() >= end) {
      ::kill(pid, asked ? SIGKILL : SIGINT);
      asked = true;
      end = Clock::now() + kGrace;
    }
    std::this_thread::sleep_for(milliseconds(5));
  }
}

std::string last_line(std::string_view text) {
  while (!text.empty() && text.back() == '\n') text.remove_suffix(1);
  return std::string(text.substr(text.rfind('\n') + 1));
}

// Runs float8-tune and returns its standard output. Exit code 4 is a budget that was spent.
Result<std::string> run_program(std::vector<std::string> words, milliseconds most) {
  const File out(::memfd_create("float8-tune output", MFD_CLOEXEC));
  const File errors(::memfd_create("float8-tune errors", MFD_CLOEXEC));
  if (out.get() < 0 || errors.get() < 0) {
    return fail(ErrorCode::kIo, "no memory for its output: {}", std::strerror(errno));
  }
  words.insert(words.begin(), program());
  std::vector<char*> argv;
  for (std::string& word : words) argv.push_back(word.data());
  argv.push_back(nullptr);
  posix_spawn_file_actions_t actions;
  posix_spawn_file_actions_init(&actions);
  posix_spawn_file_actions_addopen(&actions, STDIN_FILENO, "/dev/null", O_RDONLY, 0);
  posix_spawn_file_actions_adddup2(&actions, out.get(), STDOUT_FILENO);
  posix_spawn_file_actions_adddup2(&actions, errors.get(), STDERR_FILENO);
  pid_t pid = -1;
  const int error = ::posix_spawnp(&pid, argv[0], &actions, nullptr, argv.data(), environ);
  posix_spawn_file_actions_destroy(&actions);
  if (error != 0) {
    return fail(ErrorCode::kNotFound, "{} cannot be started ({}); FLOAT8_TUNE names the program",
                argv[0], std::strerror(error));
  }
  const int status = F8_TRY(wait_until(pid, Clock::now() + most));
  const auto read = [](const File& file, const char* name) {
    ::lseek(file.get(), 0, SEEK_SET);
    return read_descriptor(file.get(), name, kMaxFileBytes);
  };
  if (WIFEXITED(status) && (WEXITSTATUS(status) == 0 || WEXITSTATUS(status) == 4)) {
    return read(out, "float8-tune's output");
  }
  const std::string told = last_line(read(errors, "float8-tune's errors").value_or(""));
  return fail(ErrorCode::kIo, "{} {} {}: {}", argv[0], argv[1],
              WIFSIGNALED(status) ? f8::format("was ended by signal {}", WTERMSIG(status))
                                  : f8::format("ended with status {}", WEXITSTATUS(status)),
              told.empty() ? "it says nothing" : told);
}

// Makes the context's table that of the database, with the built-in rows behind it.
Status read_database(Context& context) {
  const fs::path& database = context.options().database;
  std::error_code error;
  if (!fs::exists(database, error)) return {};
  constexpr milliseconds kMost{60'000};
  const std::string text = F8_TRY(run_program(
      {"db", "export", "--format", "table", "--db", database.string(), "-o", "-"}, kMost));
  context.set_table(F8_TRY(parse_table(text)));
  return {};
}

}  // namespace

Status measure_by_program(Context& context, const Recipe& recipe, Shape shape) {
  const ContextOptions& options = context.options();
  const std::string lock_name = options.database.string() + ".first-use";
  const File lock(::open(lock_name.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0666));
  if (lock.get() < 0) {
    return fail(ErrorCode::kIo, "cannot open {}: {}", lock_name, std::strerror(errno));
  }
  while (::flock(lock.get(), LOCK_EX) != 0) {
    if (errno == EINTR) continue;
    return fail(ErrorCode::kIo, "cannot lock {}: {}", lock_name, std::strerror(errno));
  }
  F8_TRY(read_database(context));
  if (is_measured(context.table().get(), context.device(), recipe, shape)) return {};
  constexpr milliseconds kStart{60'000};  // to start, to compile, and to write the last row
  const milliseconds budget(options.tune_on_first_use);
  F8_TRY(
      run_program({"sweep", "--mnk", f8::format("{},{},{}", shape.m, shape.n, shape.k), "--recipe",
                   settings_label(recipe), "--device", std::to_string(context.device().ordinal),
                   "--budget", f8::format("{:.3f}s", 1e-3 * static_cast<double>(budget.count())),
                   "--db", options.database.string(), "--quiet"},
                  budget + kStart));
  return read_database(context);
}

}  // namespace f8::runtime
