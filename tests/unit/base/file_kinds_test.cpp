// Paths that name something else than a regular file, and the modes and names of new files.
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/sysmacros.h>
#include <sys/un.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "base/descriptor.hpp"
#include "base/log.hpp"
#include "tests/bytes_read.hpp"
#include "tests/unit/base/file_testing.hpp"

namespace f8 {
namespace {

using f8::testing::bytes_read;

// Makes the device in the test's folder, so that nothing that fails can harm the machine's own.
bool make_device(const fs::path& path, mode_t kind, unsigned minor_number) {
  return ::mknod(path.c_str(), kind | 0666, makedev(1, minor_number)) == 0;
}
constexpr unsigned kNull = 3, kZero = 5, kFull = 7;

class Umask {
 public:
  explicit Umask(mode_t mask) : before_(::umask(mask)) {}
  ~Umask() { ::umask(before_); }
  Umask(const Umask&) = delete;
  Umask& operator=(const Umask&) = delete;

 private:
  mode_t before_;
};

Status fill_with(const fs::path& empty, std::string_view bytes) {
  return write_file_synced(empty, bytes);
}

// --- writing

TEST_F(FileTest, ANewFileHeedsTheUmaskAndAnOldOneKeepsItsMode) {
  for (const mode_t mask : {022U, 077U, 0U}) {
    const Umask umask(mask);
    const fs::path path = directory_ / f8::format("new-{:o}", mask);
    ASSERT_TRUE(write_file_atomic(path, "x"));
    EXPECT_EQ(mode_of(path), S_IFREG | (0666 & ~mask));
  }
  for (const mode_t mode : {0600U, 0640U, 0664U, 0755U}) {
    const fs::path path = directory_ / f8::format("old-{:o}", mode);
    ASSERT_TRUE(write_file_atomic(path, "old"));
    ASSERT_EQ(::chmod(path.c_str(), mode), 0);
    ASSERT_TRUE(write_file_atomic(path, "new"));
    EXPECT_EQ(mode_of(path), S_IFREG | mode);
    ASSERT_TRUE(replace_file(
        path, [](const fs::path& empty, const fs::path&) { return fill_with(empty, "3"); }));
    EXPECT_EQ(mode_of(path), S_IFREG | mode);
    EXPECT_EQ(read_file(path).value(), "3");
  }
}

TEST_F(FileTest, AnOwnerIsKept) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root gives files away";
  const fs::path path = directory_ / "theirs";
  ASSERT_TRUE(write_file_atomic(path, "old"));
  ASSERT_EQ(::chown(path.c_str(), 12345, 23456), 0);
  ASSERT_EQ(::chmod(path.c_str(), 0600), 0);
  ASSERT_TRUE(write_file_atomic(path, "new"));
  struct stat info {};
  ASSERT_EQ(::stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_uid, 12345U);
  EXPECT_EQ(info.st_gid, 23456U);
  EXPECT_EQ(info.st_mode, S_IFREG | 0600U);
}

TEST_F(FileTest, AWriteProtectedFileIsNotReplaced) {
  const fs::path path = directory_ / "protected";
  ASSERT_TRUE(write_file_atomic(path, "old"));
  ASSERT_EQ(::chmod(path.c_str(), 0444), 0);
  constexpr uid_t kNobody = 65534;  // root may write to every file
  const bool is_root = ::geteuid() == 0;
  if (is_root) {
    ASSERT_EQ(::chown(directory_.c_str(), kNobody, kNobody), 0);
    ASSERT_EQ(::seteuid(kNobody), 0);
  }
  const Status written = write_file_atomic(path, "new");
  if (is_root) {
    ASSERT_EQ(::seteuid(0), 0);
  }
  expect_error(written, ErrorCode::kIo, "Permission denied");
  EXPECT_EQ(read_file(path).value(), "old");
}

TEST_F(FileTest, ALinkIsFollowed) {
  fs::create_directory(directory_ / "other");
  ASSERT_TRUE(write_file_atomic(directory_ / "other" / "file", "old"));
  ASSERT_EQ(::chmod((directory_ / "other" / "file").c_str(), 0600), 0);
  fs::create_symlink("other/file", directory_ / "relative");
  fs::create_symlink(directory_ / "relative", directory_ / "absolute");
  ASSERT_TRUE(write_file_atomic(directory_ / "absolute", "new"));
  EXPECT_TRUE(S_ISLNK(mode_of(directory_ / "absolute")));
  EXPECT_TRUE(S_ISLNK(mode_of(directory_ / "relative")));
  EXPECT_EQ(mode_of(directory_ / "other" / "file"), S_IFREG | 0600U);
  EXPECT_EQ(read_file(directory_ / "other" / "file").value(), "new");

  fs::create_symlink("other/none", directory_ / "dangling");
  ASSERT_TRUE(write_file_atomic(directory_ / "dangling", "made"));
  EXPECT_TRUE(S_ISLNK(mode_of(directory_ / "dangling")));
  EXPECT_EQ(read_file(directory_ / "other" / "none").value(), "made");

  fs::create_symlink("circle", directory_ / "circle");
  expect_error(write_file_atomic(directory_ / "circle", "x"), ErrorCode::kIo, "symbolic links");
  EXPECT_TRUE(S_ISLNK(mode_of(directory_ / "circle")));
}

TEST_F(FileTest, ADeviceIsWrittenIntoAndStaysADevice) {
  const fs::path null = directory_ / "null";
  if (!make_device(null, S_IFCHR, kNull)) GTEST_SKIP() << "mknod is refused here";
  fs::create_symlink("null", directory_ / "link");
  for (const fs::path& path : {null, directory_ / "link"}) {
    ASSERT_TRUE(write_file_atomic(path, "x"));
    ASSERT_TRUE(replace_file(
        path, [](const fs::path& empty, const fs::path&) { return fill_with(empty, "x"); }));
    EXPECT_TRUE(S_ISCHR(mode_of(null)));
    EXPECT_TRUE(S_ISLNK(mode_of(directory_ / "link")));
  }
  ASSERT_TRUE(make_device(directory_ / "full", S_IFCHR, kFull));
  expect_error(write_file_atomic(directory_ / "full", "x"), ErrorCode::kIo, "No space left");
  EXPECT_EQ(names(), (std::vector<std::string>{"full", "link", "null"}));
}

TEST_F(FileTest, ABlockDeviceAndASocketAreRefused) {
  const int fd = ::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_un address{.sun_family = AF_UNIX, .sun_path = {}};
  const std::string socket = (directory_ / "socket").string();
  ASSERT_LT(socket.size(), sizeof address.sun_path);
  std::ranges::copy(socket, address.sun_path);
  ASSERT_EQ(::bind(fd, reinterpret_cast<const sockaddr*>(&address), sizeof address), 0);
  expect_error(write_file_atomic(socket, "x"), ErrorCode::kIo, "is a socket");
  expect_error(read_file(socket), ErrorCode::kInvalidArgument, "is a socket");
  EXPECT_TRUE(S_ISSOCK(mode_of(socket)));
  ::close(fd);
  const fs::path disk = directory_ / "disk";
  if (!make_device(disk, S_IFBLK, 255)) GTEST_SKIP() << "mknod is refused here";
  expect_error(write_file_atomic(disk, "x"), ErrorCode::kIo, "is a block device");
  expect_error(read_file(disk), ErrorCode::kInvalidArgument, "is a block device");
  EXPECT_TRUE(S_ISBLK(mode_of(disk)));
}

TEST_F(FileTest, AFifoIsWrittenIntoAndReadWhereItIsWelcome) {
  const fs::path fifo = directory_ / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const std::string bytes(300'000, 'p');  // more than a pipe holds
  std::thread writer([&] { EXPECT_TRUE(write_file_atomic(fifo, bytes)); });
  EXPECT_EQ(read_file(fifo, kMaxFileBytes, Pipes::kWelcome).value(), bytes);
  writer.join();
  EXPECT_TRUE(S_ISFIFO(mode_of(fifo)));
  EXPECT_EQ(names(), std::vector<std::string>{"fifo"});
}

TEST_F(FileTest, AnOwnDescriptorIsWrittenWhereItStands) {
  const fs::path path = directory_ / "out";
  const int fd = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_GE(fd, 0);
  ASSERT_EQ(::write(fd, "head ", 5), 5);
  for (const char* folder : {"/dev/fd", "/proc/self/fd"}) {
    ASSERT_TRUE(write_file_atomic(f8::format("{}/{}", folder, fd), "tail "));
  }
  fs::create_symlink(f8::format("/proc/self/fd/{}", fd), directory_ / "stdout");
  ASSERT_TRUE(write_file_atomic(directory_ / "stdout", "end"));
  EXPECT_TRUE(S_ISLNK(mode_of(directory_ / "stdout")));
  ::close(fd);
  EXPECT_EQ(read_file(path).value(), "head tail tail end");
}

TEST_F(FileTest, NoFileBesideTheTargetIsTouched) {
  for (const char* name : {"table.new", "table.tmp", ".table.new", "table~"}) {
    ASSERT_TRUE(write_file_atomic(directory_ / name, name));
  }
  const auto before = names();
  ASSERT_TRUE(write_file_atomic(directory_ / "table", "1"));
  ASSERT_TRUE(replace_file(directory_ / "table", [](const fs::path& empty, const fs::path&) {
    return fill_with(empty, "2");
  }));
  const Status failed =
      replace_file(directory_ / "table", [](const fs::path& empty, const fs::path&) -> Status {
        F8_TRY(fill_with(empty, "half"));
        return fail(ErrorCode::kIo, "no more");
      });
  expect_error(failed, ErrorCode::kIo, "no more");
  for (const std::string& name : before) EXPECT_EQ(read_file(directory_ / name).value(), name);
  EXPECT_EQ(read_file(directory_ / "table").value(), "2");
  EXPECT_EQ(names().size(), before.size() + 1);
}

TEST_F(FileTest, WritersAtOnceAllSucceedAndLeaveOneWholeFile) {
  const fs::path path = directory_ / "file";
  std::vector<std::thread> writers;
  for (const char c : {'a', 'b', 'c', 'd'}) {
    writers.emplace_back([&path, c] {
      for (int i = 0; i < 20; ++i) EXPECT_TRUE(write_file_atomic(path, std::string(40'000, c)));
    });
  }
  for (std::thread& writer : writers) writer.join();
  const std::string bytes = read_file(path).value();
  EXPECT_EQ(bytes, std::string(40'000, bytes.front()));
  EXPECT_EQ(names(), std::vector<std::string>{"file"});
}

TEST_F(FileTest, ANameAsLongAsItMayBeIsWritten) {
  const fs::path path = directory_ / std::string(255, 'n');
  ASSERT_TRUE(write_file_atomic(path, "x"));
  EXPECT_EQ(read_file(path).value(), "x");
}

TEST_F(FileTest, NamesOfFoldersAreRefused) {
  for (const fs::path& path : {fs::path(), directory_ / "new/", fs::path("/"), fs::path(".")}) {
    EXPECT_FALSE(write_file_atomic(path, "x")) << path;
  }
  EXPECT_TRUE(names().empty());
}

TEST_F(FileTest, WhatAKillLeftBesideTheTargetGoesAfterADay) {
  const fs::path folder = directory_ / "folder";
  fs::create_directory(folder);
  const auto age = [&](const fs::path& path, int hours) {
    const timespec then{::time(nullptr) - hours * 3600, 0};
    const timespec times[] = {then, then};
    ASSERT_EQ(::utimensat(AT_FDCWD, path.c_str(), times, AT_SYMLINK_NOFOLLOW), 0);
  };
  const std::vector<std::string> left = {".table.0123456789abcdef", ".table.ffffffffffffffff"};
  const std::vector<std::string> other = {".table.0123456789abcde",  ".table.0123456789abcdef0",
                                          ".table.0123456789ABCDEF", ".tables.0123456789abcdef",
                                          "table.0123456789abcdef",  "x.table.0123456789abcdef"};
  for (const std::string& name : left) ASSERT_TRUE(write_file_synced(folder / name, "half"));
  for (const std::string& name : other) ASSERT_TRUE(write_file_synced(folder / name, "mine"));
  const std::string recent = ".table.1123456789abcdef";
  const std::string link = ".table.2123456789abcdef";
  ASSERT_TRUE(write_file_synced(folder / recent, "half"));
  fs::create_symlink("table.0123456789abcdef", folder / link);
  for (const auto& entry : fs::directory_iterator(folder)) age(entry.path(), 25);
  age(folder / recent, 23);
  ASSERT_TRUE(write_file_atomic(folder / "table", "1"));
  for (const std::string& name : left) EXPECT_FALSE(fs::exists(folder / name)) << name;
  for (const std::string& name : other) EXPECT_TRUE(fs::exists(folder / name)) << name;
  EXPECT_TRUE(fs::exists(folder / recent));
  EXPECT_TRUE(fs::is_symlink(folder / link));
}

// --- reading

// Collects what the log is told while it lives.
class HeardLog {
 public:
  HeardLog() {
    set_log_sink([this](LogLevel, std::string_view message) { lines_.emplace_back(message); });
  }
  HeardLog(const HeardLog&) = delete;
  HeardLog& operator=(const HeardLog&) = delete;
  ~HeardLog() { set_log_sink({}); }
  [[nodiscard]] const std::vector<std::string>& lines() const { return lines_; }

 private:
  std::vector<std::string> lines_;
};

// Puts a descriptor in standard input's place while it lives.
class StandardInput {
 public:
  explicit StandardInput(int fd) : before_(::dup(STDIN_FILENO)) {
    EXPECT_EQ(::dup2(fd, STDIN_FILENO), STDIN_FILENO);
  }
  StandardInput(const StandardInput&) = delete;
  StandardInput& operator=(const StandardInput&) = delete;
  ~StandardInput() {
    ::dup2(before_, STDIN_FILENO);
    ::close(before_);
  }

 private:
  int before_;
};

TEST_F(FileTest, ADashIsAStandardStreamAndALongerNameAFile) {
  EXPECT_EQ(output_path("-"), "/dev/stdout");
  EXPECT_EQ(output_path("./-"), "./-");
  EXPECT_EQ(input_name("-"), "standard input");
  ASSERT_TRUE(write_file_atomic(directory_ / "-", "a file"));
  EXPECT_EQ(read_input(directory_ / "-").value(), "a file");
  const Descriptor file(::open((directory_ / "-").c_str(), O_RDONLY | O_CLOEXEC));
  const StandardInput redirected(file.get());
  EXPECT_EQ(read_input("-").value(), "a file");
  ASSERT_EQ(::lseek(file.get(), 0, SEEK_SET), 0);
  expect_error(read_input("-", 5), ErrorCode::kInvalidArgument,
               "standard input is larger than 5 bytes");
}

TEST_F(FileTest, StandardInputIsNoDeviceAndNoFolder) {
  if (!make_device(directory_ / "zero", S_IFCHR, kZero)) GTEST_SKIP() << "mknod is refused here";
  for (const auto& [name, is] : {std::pair{"zero",
                                           "standard input is a character device; a regular "
                                           "file or a pipe is needed"},
                                 {".", "standard input is a directory"}}) {
    const Descriptor file(::open((directory_ / name).c_str(), O_RDONLY | O_CLOEXEC));
    const StandardInput redirected(file.get());
    expect_error(read_input("-"), ErrorCode::kInvalidArgument, is);
  }
}

TEST_F(FileTest, AReaderOfASilentPipeSaysOnceThatItWaits) {
  const HeardLog log;
  int ends[2];
  ASSERT_EQ(::pipe2(ends, O_CLOEXEC), 0);
  std::thread writer([&] {
    for (int i = 0; i < 2; ++i) {
      std::this_thread::sleep_for(kSilence + std::chrono::milliseconds(200));
      EXPECT_EQ(::write(ends[1], "x", 1), 1);
    }
    ::close(ends[1]);
  });
  EXPECT_EQ(read_descriptor(ends[0], "the pipe", 10).value(), "xx");
  writer.join();
  ::close(ends[0]);
  ASSERT_EQ(log.lines().size(), 1U);
  EXPECT_EQ(log.lines()[0], "waiting for what is written into the pipe: nothing came for 2 s");
}

TEST_F(FileTest, AReaderStopsAtItsLimit) {
  ASSERT_TRUE(write_file_atomic(directory_ / "ten", "0123456789"));
  EXPECT_EQ(read_file(directory_ / "ten", 10).value(), "0123456789");
  expect_error(read_file(directory_ / "ten", 9), ErrorCode::kInvalidArgument,
               "larger than 9 bytes");
  const auto front = read_front(directory_ / "ten", 4).value();
  EXPECT_EQ(front.bytes, "0123");
  EXPECT_EQ(front.file_bytes, 10U);
  EXPECT_EQ(read_front(directory_ / "ten", 40).value().bytes, "0123456789");
  // Sparse: a reader that went by the bytes alone would read them first.
  fs::resize_file(directory_ / "ten", uint64_t{60} << 30);
  const uint64_t before = bytes_read();
  expect_error(read_file(directory_ / "ten"), ErrorCode::kInvalidArgument, "larger than 256 MiB");
  EXPECT_EQ(read_front(directory_ / "ten", 4).value().bytes, "0123");
  EXPECT_LT(bytes_read() - before, uint64_t{1} << 20);
}

TEST_F(FileTest, ALinkToADeviceThatNeverEndsIsRefused) {
  if (!make_device(directory_ / "zero", S_IFCHR, kZero)) GTEST_SKIP() << "mknod is refused here";
  fs::create_symlink("zero", directory_ / "link");
  for (const Pipes pipes : {Pipes::kRefused, Pipes::kWelcome}) {
    expect_error(read_file(directory_ / "link", kMaxFileBytes, pipes), ErrorCode::kInvalidArgument,
                 pipes == Pipes::kRefused
                     ? "is a character device; a regular file is needed"
                     : "is a character device; a regular file or a pipe is needed");
  }
  expect_error(read_front(directory_ / "link", 8), ErrorCode::kInvalidArgument, "device");
}

TEST_F(FileTest, AFifoDoesNotMakeAReaderWait) {
  const fs::path fifo = directory_ / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  const HeardLog log;
  expect_error(read_file(fifo), ErrorCode::kInvalidArgument, "is a fifo; a regular file is needed");
  expect_error(read_front(fifo, 8), ErrorCode::kInvalidArgument, "is a fifo");
  expect_error(read_file(fifo, kMaxFileBytes, Pipes::kWelcome), ErrorCode::kIo,
               "nobody writes into");
  ASSERT_EQ(log.lines().size(), 1U);
  EXPECT_NE(log.lines()[0].find(fifo.string()), std::string::npos);
}

TEST_F(FileTest, APipeIsReadToItsEndAndNoFurtherThanItsLimit) {
  const auto through_pipe = [](std::string_view bytes, size_t limit) {
    int ends[2];
    EXPECT_EQ(::pipe2(ends, O_CLOEXEC), 0);
    std::thread writer([&] {
      size_t written = 0;
      while (written < bytes.size()) {
        const ssize_t n = ::write(ends[1], bytes.data() + written, bytes.size() - written);
        if (n <= 0) break;
        written += static_cast<size_t>(n);
      }
      ::close(ends[1]);
    });
    auto read = read_file(f8::format("/proc/self/fd/{}", ends[0]), limit, Pipes::kWelcome);
    char rest[4096];
    while (::read(ends[0], rest, sizeof rest) > 0) {  // a refused writer ends too
    }
    writer.join();
    ::close(ends[0]);
    return read;
  };
  const std::string bytes(500'000, 'q');
  EXPECT_EQ(through_pipe(bytes, bytes.size()).value(), bytes);
  expect_error(through_pipe(bytes, bytes.size() - 1), ErrorCode::kInvalidArgument, "larger than");
}

TEST_F(FileTest, NoControlByteOfANameIsInAMessage) {
  const fs::path path = directory_ / "a\x1b[31m\nb\xc2\x9b";
  const auto read = read_file(path);
  expect_error(read, ErrorCode::kNotFound, "a\\x1b[31m\\x0ab\\xc2\\x9b");
}

}  // namespace
}  // namespace f8
