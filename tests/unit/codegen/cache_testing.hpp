// Helpers of the tests of the cubin cache: a directory that goes away, kernels that cost nothing to
// compile, a compiler that counts, the warnings that were logged, and code run in a child process.
#pragma once

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <mutex>
#include <string>
#include <vector>

#include "base/file.hpp"
#include "base/log.hpp"
#include "codegen/cubin_cache.hpp"

namespace f8::codegen::testing {

class TempDirectory {
 public:
  TempDirectory() : path_(make_temp_directory(fs::temp_directory_path(), "float8-test-").value()) {
    fs::permissions(path_, fs::perms(0755));  // tests that give up root still reach into it
  }
  TempDirectory(const TempDirectory&) = delete;
  TempDirectory& operator=(const TempDirectory&) = delete;
  ~TempDirectory() {
    std::error_code ignored;
    fs::remove_all(path_, ignored);
  }
  [[nodiscard]] const fs::path& path() const { return path_; }
  [[nodiscard]] fs::path operator/(const std::string& name) const { return path_ / name; }

 private:
  fs::path path_;
};

inline KernelSource test_kernel(int i = 0) {
  return {f8::format("test/kernel{}", i),
          f8::format("kernel{}", i),
          f8::format("extern \"C\" __global__ void kernel{}() {{}}\n", i),
          {"--gpu-architecture=sm_90a", "--ptxas-options=-v"}};
}

inline Cubin test_cubin(const KernelSource& source) {
  Cubin cubin;
  cubin.key = source.key;
  cubin.entry = source.entry;
  for (const char c : "image of " + source.source) cubin.image.push_back(static_cast<std::byte>(c));
  cubin.log = "ptxas info    : Used 8 registers\nchecksum 0\n\nlast line without an end";
  cubin.registers = 168;
  cubin.spill_bytes = 12;
  cubin.smem_bytes = 1024;
  cubin.compile_ms = 203.125;
  return cubin;
}

inline void expect_same(const Cubin& got, const Cubin& want) {
  EXPECT_EQ(got.key, want.key);
  EXPECT_EQ(got.entry, want.entry);
  EXPECT_EQ(got.image, want.image);
  EXPECT_EQ(got.log, want.log);
  EXPECT_EQ(got.registers, want.registers);
  EXPECT_EQ(got.spill_bytes, want.spill_bytes);
  EXPECT_EQ(got.smem_bytes, want.smem_bytes);
  EXPECT_DOUBLE_EQ(got.compile_ms, want.compile_ms);
}

struct CountingCompiler {
  std::shared_ptr<std::atomic<int>> count = std::make_shared<std::atomic<int>>(0);
  Result<Cubin> operator()(const KernelSource& source) const {
    ++*count;
    return test_cubin(source);
  }
};

// Collects warnings and errors while it lives.
class CapturedLog {
 public:
  CapturedLog() {
    set_log_sink([this](LogLevel level, std::string_view message) {
      if (level != LogLevel::kInfo) warnings_.emplace_back(message);
    });
  }
  CapturedLog(const CapturedLog&) = delete;
  CapturedLog& operator=(const CapturedLog&) = delete;
  ~CapturedLog() { set_log_sink({}); }
  [[nodiscard]] const std::vector<std::string>& warnings() const { return warnings_; }

 private:
  std::vector<std::string> warnings_;  // the log's own lock guards it
};

// A forked process that runs `body`, whose text is its verdict: empty is well.
class Child {
 public:
  explicit Child(const std::function<std::string()>& body) {
    int ends[2];
    if (::pipe(ends) != 0) std::abort();
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(ends[0]);
      const std::string verdict = body();
      const bool told = ::write(ends[1], verdict.data(), verdict.size()) >= 0;
      ::_exit(told ? 0 : 2);
    }
    ::close(ends[1]);
    read_end_ = ends[0];
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;
  ~Child() {
    if (pid_ > 0) kill();
    ::close(read_end_);
  }

  [[nodiscard]] pid_t pid() const { return pid_; }
  void kill() {
    ::kill(pid_, SIGKILL);
    ::waitpid(std::exchange(pid_, 0), nullptr, 0);
  }
  [[nodiscard]] std::string verdict() {
    std::string text;
    char buffer[512];
    for (ssize_t n = 0; (n = ::read(read_end_, buffer, sizeof buffer)) > 0;) {
      text.append(buffer, static_cast<size_t>(n));
    }
    int status = 0;
    ::waitpid(std::exchange(pid_, 0), &status, 0);
    if (!WIFEXITED(status) || WEXITSTATUS(status) != 0) text += f8::format(" status {}", status);
    return text;
  }

 private:
  pid_t pid_ = 0;
  int read_end_ = -1;
};

constexpr uid_t kNobody = 65534;

// Permissions do not bind root; a child that calls this is bound by them.
inline bool give_up_root() {
  return ::geteuid() != 0 || (::setgid(kNobody) == 0 && ::setuid(kNobody) == 0);
}

}  // namespace f8::codegen::testing
