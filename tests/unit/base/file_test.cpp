#include "base/file.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
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

// SIGPIPE and SIGXFSZ end a process by default; the writer blocks them in its own thread.
TEST_F(FileTest, AWriteThatFailsRaisesNoSignal) {
  ASSERT_EQ(std::signal(SIGPIPE, SIG_DFL), SIG_DFL);
  const fs::path fifo = directory_ / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  std::thread reader([&fifo] {
    const Descriptor end(::open(fifo.c_str(), O_RDONLY | O_CLOEXEC));
    char one = 0;
    EXPECT_EQ(::read(end.get(), &one, 1), 1);
  });
  const Status written = write_file_atomic(fifo, std::string(1 << 20, 'x'));
  reader.join();
  expect_error(written, ErrorCode::kIo, "Broken pipe");
  sigset_t left{};
  ::sigpending(&left);
  EXPECT_EQ(::sigismember(&left, SIGPIPE), 0);
  sigset_t mask{};
  ::pthread_sigmask(SIG_BLOCK, nullptr, &mask);
  EXPECT_EQ(::sigismember(&mask, SIGPIPE), 0);

  ASSERT_TRUE(write_file_atomic(directory_ / "file", "old"));
  Status large;
  {
    const FileSizeLimit limit(1000);
    std::signal(SIGXFSZ, SIG_DFL);
    large = write_file_atomic(directory_ / "file", std::string(5000, 'n'));
  }
  expect_error(large, ErrorCode::kIo, "File too large");
  EXPECT_EQ(read_file(directory_ / "file").value(), "old");
}

TEST_F(FileTest, ASignalThatWasPendingStaysPending) {
  sigset_t pipe{};
  ::sigemptyset(&pipe);
  ::sigaddset(&pipe, SIGPIPE);
  ::pthread_sigmask(SIG_BLOCK, &pipe, nullptr);
  ::pthread_kill(::pthread_self(), SIGPIPE);
  EXPECT_TRUE(write_file_atomic(directory_ / "file", "x"));
  int taken = 0;
  EXPECT_EQ(::sigwait(&pipe, &taken), 0);
  EXPECT_EQ(taken, SIGPIPE);
  ::pthread_sigmask(SIG_UNBLOCK, &pipe, nullptr);
}

TEST_F(FileTest, FilesThatBelongTogetherAppearTogether) {
  ASSERT_TRUE(write_file_atomic(directory_ / "a", "old"));
  const std::vector<NamedBytes> files = {{directory_ / "a", "new"},
                                         {directory_ / "b", std::string(5000, 'n')}};
  Status written;
  {
    const FileSizeLimit limit(1000);
    written = write_files_atomic(files);
  }
  expect_error(written, ErrorCode::kIo, "File too large");
  EXPECT_EQ(read_file(directory_ / "a").value(), "old");
  EXPECT_EQ(names(), std::vector<std::string>{"a"});
  ASSERT_TRUE(write_files_atomic(files));
  EXPECT_EQ(read_file(directory_ / "a").value(), "new");
}

TEST_F(FileTest, AGrowingFileIsWholeAtAnyMoment) {
  ASSERT_TRUE(write_file_atomic(directory_ / "rows", "old"));
  fs::create_hard_link(directory_ / "rows", directory_ / "other");
  auto rows = GrowingFile::open(directory_ / "rows");
  ASSERT_TRUE(rows) << rows.error().message;
  EXPECT_EQ(read_file(directory_ / "rows").value(), "old");
  ASSERT_TRUE(rows->append("1\n"));
  ASSERT_TRUE(rows->append("2\n"));
  EXPECT_EQ(read_file(directory_ / "rows").value(), "1\n2\n");
  EXPECT_EQ(read_file(directory_ / "other").value(), "old");
  expect_error(GrowingFile::open(directory_ / "none" / "rows"), ErrorCode::kIo, "none");
}

TEST_F(FileTest, AFailedFillLeavesNoJournal) {
  const Status failed =
      replace_file(directory_ / "a", [](const fs::path& empty, const fs::path& name) -> Status {
        F8_TRY(write_file_synced(empty.string() + "-journal", "j"));
        return fail(ErrorCode::kIo, "{}: full", name.string());
      });
  expect_error(failed, ErrorCode::kIo, (directory_ / "a").string() + ": full");
  EXPECT_TRUE(names().empty());
}

// Root reads every folder, so a child gives its rights away.
TEST_F(FileTest, AFolderThatCannotBeReadTakesAFile) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root becomes another user";
  ASSERT_EQ(::chmod(directory_.c_str(), 0333), 0);
  const pid_t child = ::fork();
  if (child == 0) {
    if (::setuid(65534) != 0) ::_exit(2);
    ::_exit(write_file_atomic(directory_ / "file", "x") ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(::waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(read_file(directory_ / "file").value(), "x");
}

TEST_F(FileTest, WithoutAFolderForTemporaryFilesSaysSo) {
  const char* before = std::getenv("TMPDIR");
  const std::string kept = before == nullptr ? "" : before;
  ::setenv("TMPDIR", (directory_ / "none").c_str(), 1);
  const auto made = TemporaryFolder::make("t-");
  kept.empty() ? ::unsetenv("TMPDIR") : ::setenv("TMPDIR", kept.c_str(), 1);
  expect_error(made, ErrorCode::kIo, "TMPDIR");
}

TEST_F(FileTest, FoldersAreMadeWhereALinkLeads) {
  fs::create_symlink("gone/below", directory_ / "link");
  ASSERT_TRUE(make_folders(directory_ / "link"));
  EXPECT_TRUE(fs::is_directory(directory_ / "gone" / "below"));
  ASSERT_TRUE(write_file_atomic(directory_ / "file", "x"));
  expect_error(make_folders(directory_ / "file"), ErrorCode::kIo, "file");
}

}  // namespace
}  // namespace f8
