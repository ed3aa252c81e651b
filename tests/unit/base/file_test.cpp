#include "base/file.hpp"

#include <sys/resource.h>

#include <atomic>
#include <csignal>
#include <thread>
#include <vector>

#include "tests/unit/base/file_testing.hpp"

namespace f8 {
namespace {

// While it lives, no file of this process grows past `bytes`: what a full disk looks like.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    ::getrlimit(RLIMIT_FSIZE, &before_);
    rlimit limited = before_;
    limited.rlim_cur = bytes;
    handler_ = std::signal(SIGXFSZ, SIG_IGN);
    ::setrlimit(RLIMIT_FSIZE, &limited);
  }
  ~FileSizeLimit() {
    ::setrlimit(RLIMIT_FSIZE, &before_);
    std::signal(SIGXFSZ, handler_);
  }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
  void (*handler_)(int) = nullptr;
};

std::string bytes_of_every_kind() {
  std::string bytes;
  for (int i = 0; i < 300'000; ++i) bytes += static_cast<char>(i * 7);
  return bytes;
}

TEST_F(FileTest, WhatIsWrittenIsRead) {
  for (const std::string& bytes : {std::string(), std::string("x"), bytes_of_every_kind()}) {
    ASSERT_TRUE(write_file_atomic(directory_ / "a", bytes));
    EXPECT_EQ(read_file(directory_ / "a").value(), bytes);
    ASSERT_TRUE(write_file_synced(directory_ / "s", bytes));
    EXPECT_EQ(read_file(directory_ / "s").value(), bytes);
  }
  EXPECT_EQ(names(), (std::vector<std::string>{"a", "s"}));
}

TEST_F(FileTest, ReadErrorsNameTheFileAndTheReason) {
  expect_error(read_file(directory_ / "none"), ErrorCode::kNotFound,
               (directory_ / "none").string() + ": No such file");
  expect_error(read_file(directory_), ErrorCode::kInvalidArgument, "is a directory");
  ASSERT_TRUE(write_file_atomic(directory_ / "file", "x"));
  expect_error(read_file(directory_ / "file" / "below"), ErrorCode::kIo, "Not a directory");
}

TEST_F(FileTest, WriteErrorsNameTheFileAndTheReason) {
  const fs::path nowhere = directory_ / "none" / "file";
  expect_error(write_file_atomic(nowhere, "x"), ErrorCode::kIo, (directory_ / "none").string());
  expect_error(write_file_synced(nowhere, "x"), ErrorCode::kIo, nowhere.string());
  expect_error(make_temp_directory(directory_ / "none", "t"), ErrorCode::kIo, "none");
}

TEST_F(FileTest, AFullDeviceIsAnError) {
  if (!fs::exists("/dev/full")) GTEST_SKIP() << "no /dev/full here";
  expect_error(write_file_synced("/dev/full", "x"), ErrorCode::kIo, "No space left on device");
}

TEST_F(FileTest, AFullDiskLeavesTheOldBytesAndNothingElse) {
  const fs::path path = directory_ / "table";
  ASSERT_TRUE(write_file_atomic(path, "old bytes"));
  Status written;
  {
    const FileSizeLimit limit(4096);
    written = write_file_atomic(path, std::string(100'000, 'n'));
  }
  expect_error(written, ErrorCode::kIo, "cannot write");
  EXPECT_EQ(read_file(path).value(), "old bytes");
  EXPECT_EQ(names(), std::vector<std::string>{"table"});
}

TEST_F(FileTest, ATargetThatCannotBeReplacedLeavesNothingBehind) {
  fs::create_directory(directory_ / "target");
  expect_error(write_file_atomic(directory_ / "target", "x"), ErrorCode::kIo, "is a directory");
  EXPECT_EQ(names(), std::vector<std::string>{"target"});
}

TEST_F(FileTest, AReaderSeesTheOldBytesOrTheNewOnes) {
  const fs::path path = directory_ / "file";
  const std::string a(50'000, 'a');
  const std::string b(70'000, 'b');
  ASSERT_TRUE(write_file_atomic(path, a));
  std::atomic<bool> done = false;
  std::thread writer([&] {
    for (int i = 0; i < 40; ++i) EXPECT_TRUE(write_file_atomic(path, i % 2 == 0 ? b : a));
    done = true;
  });
  while (!done) {
    const auto bytes = read_file(path);
    EXPECT_TRUE(bytes && (*bytes == a || *bytes == b));
    if (HasFailure()) break;
  }
  writer.join();
  EXPECT_EQ(names(), std::vector<std::string>{"file"});
}

TEST_F(FileTest, ARelativeNameIsWrittenInTheWorkingDirectory) {
  const fs::path before = fs::current_path();
  fs::current_path(directory_);
  const Status written = write_file_atomic("plain", "x");
  fs::current_path(before);
  EXPECT_TRUE(written);
  EXPECT_EQ(read_file(directory_ / "plain").value(), "x");
}

TEST_F(FileTest, TempDirectoriesArePrivateAndDistinct) {
  const auto one = make_temp_directory(directory_, "t-");
  const auto two = make_temp_directory(directory_, "t-");
  ASSERT_TRUE(one && two);
  EXPECT_NE(*one, *two);
  struct stat info {};
  ASSERT_EQ(::stat(one->c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777U, 0700U);
}

}  // namespace
}  // namespace f8
