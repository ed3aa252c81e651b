// Reading: see file.hpp.
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/descriptor.hpp"
#include "base/file.hpp"
#include "base/log.hpp"

namespace f8 {
namespace {

// A named fifo that nobody has open for writing is given up after so long.
constexpr std::chrono::milliseconds kWriterPatience{10'000};

Status too_large(std::string_view name, size_t max_bytes) {
  return fail(ErrorCode::kInvalidArgument, "{} is larger than {}; is it the right file?", name,
              max_bytes >= size_t{1} << 20 ? f8::format("{} MiB", max_bytes >> 20)
                                           : f8::format("{} bytes", max_bytes));
}

// Waits until a descriptor has bytes or has come to its end; a regular file always has.
class Waiter {
 public:
  Waiter(int fd, std::string_view name) : fd_(fd), name_(name) {}
  // False after `patience`; kForEver has no end.
  bool wait(std::chrono::milliseconds patience) {
    if (!said_) {
      if (poll(kSilence)) return true;
      said_ = true;
      log_warning("waiting for what is written into {}: nothing came for {} s", name_,
                  kSilence.count());
      if (patience != kForEver) patience -= kSilence;
    }
    return poll(patience);
  }
  static constexpr std::chrono::milliseconds kForEver{-1};

 private:
  [[nodiscard]] bool poll(std::chrono::milliseconds patience) const {
    pollfd one{fd_, POLLIN, 0};
    int ready = 0;
    do {
      ready = ::poll(&one, 1, static_cast<int>(patience.count()));
    } while (ready < 0 && errno == EINTR);
    return ready != 0;
  }

  int fd_;
  std::string_view name_;
  bool said_ = false;
};

Result<std::string> read_pipe(int fd, std::string_view name, size_t max_bytes) {
  std::string bytes;
  char buffer[1 << 16];
  bool has_writer = false;
  Waiter waiter(fd, name);
  while (true) {
    const ssize_t n = ::read(fd, buffer, sizeof buffer);
    if (n > 0) {
      has_writer = true;
      bytes.append(buffer, static_cast<size_t>(n));
      if (bytes.size() > max_bytes) return std::unexpected(too_large(name, max_bytes).error());
    } else if (n == 0) {
      if (has_writer) return bytes;
      if (!waiter.wait(kWriterPatience)) {
        return fail(ErrorCode::kIo, "{} is a fifo that nobody writes into", name);
      }
      has_writer = true;
    } else if (errno == EAGAIN) {
      has_writer = true;
      if (!waiter.wait(kPipePatience)) {
        return fail(ErrorCode::kIo, "{}: nothing came through this pipe for {} s", name,
                    kPipePatience.count());
      }
    } else if (errno != EINTR) {
      return fail(ErrorCode::kIo, "cannot read {}: {}", name, errno_text());
    }
  }
}

struct OpenFile {
  Descriptor descriptor;
  struct stat info {};
};

Result<OpenFile> open_file(const fs::path& path, Pipes pipes) {
  const auto cannot = [&path] {
    const ErrorCode code = errno == ENOENT ? ErrorCode::kNotFound : ErrorCode::kIo;
    return fail(code, "cannot open {}: {}", path.string(), errno_text());
  };
  OpenFile file;
  // Opening a device may already do something, so its kind is looked at first, and again after.
  if (::stat(path.c_str(), &file.info) != 0) return cannot();
  F8_TRY(check_kind(file.info.st_mode, path.string(), pipes));
  file.descriptor = Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file.descriptor.is_open() || ::fstat(file.descriptor.get(), &file.info) != 0)
    return cannot();
  F8_TRY(check_kind(file.info.st_mode, path.string(), pipes));
  return file;
}

// Appends up to `max_bytes` of the descriptor, or all there are.
Status read_some(int fd, std::string_view name, size_t max_bytes, std::string& bytes) {
  char buffer[1 << 16];
  Waiter waiter(fd, name);
  while (bytes.size() < max_bytes) {
    waiter.wait(Waiter::kForEver);
    const ssize_t n = ::read(fd, buffer, std::min(sizeof buffer, max_bytes - bytes.size()));
    if (n < 0 && (errno == EINTR || errno == EAGAIN)) continue;
    if (n < 0) return fail(ErrorCode::kIo, "cannot read {}: {}", name, errno_text());
    if (n == 0) break;
    bytes.append(buffer, static_cast<size_t>(n));
  }
  return {};
}

}  // namespace

Status check_kind(mode_t mode, std::string_view name, Pipes pipes) {
  const bool pipe_is_welcome = pipes == Pipes::kWelcome;
  if (S_ISREG(mode) || (S_ISFIFO(mode) && pipe_is_welcome)) return {};
  if (S_ISDIR(mode)) {
    return fail(ErrorCode::kInvalidArgument, "{} is a directory; name a file in it", name);
  }
  return fail(ErrorCode::kInvalidArgument, "{} is {}; a regular file{} is needed", name,
              kind_of(mode), pipe_is_welcome ? " or a pipe" : "");
}

Result<std::string> read_descriptor(int fd, std::string_view name, size_t max_bytes) {
  std::string bytes;
  F8_TRY(read_some(fd, name, max_bytes + 1, bytes));
  if (bytes.size() > max_bytes) return std::unexpected(too_large(name, max_bytes).error());
  return bytes;
}

Result<FileFront> read_front(const fs::path& path, size_t max_bytes) {
  const OpenFile file = F8_TRY(open_file(path, Pipes::kRefused));
  FileFront front{.bytes = {}, .file_bytes = static_cast<uint64_t>(file.info.st_size)};
  F8_TRY(read_some(file.descriptor.get(), path.string(), max_bytes, front.bytes));
  return front;
}

Result<std::string> read_file(const fs::path& path, size_t max_bytes, Pipes pipes) {
  const OpenFile file = F8_TRY(open_file(path, pipes));
  const std::string name = path.string();
  if (S_ISFIFO(file.info.st_mode)) return read_pipe(file.descriptor.get(), name, max_bytes);
  if (std::cmp_greater(file.info.st_size, max_bytes)) {
    return std::unexpected(too_large(name, max_bytes).error());
  }
  return read_descriptor(file.descriptor.get(), name, max_bytes);
}

std::string input_name(const fs::path& path) {
  return is_standard_stream(path) ? "standard input" : path.string();
}

Result<std::string> read_input(const fs::path& path, size_t max_bytes) {
  if (!is_standard_stream(path)) return read_file(path, max_bytes, Pipes::kWelcome);
  const std::string name = input_name(path);
  struct stat info {};
  if (::fstat(STDIN_FILENO, &info) != 0) {
    return fail(ErrorCode::kIo, "cannot read {}: {}", name, errno_text());
  }
  if (!S_ISSOCK(info.st_mode) && ::isatty(STDIN_FILENO) == 0) {
    F8_TRY(check_kind(info.st_mode, name, Pipes::kWelcome));
  }
  return read_descriptor(STDIN_FILENO, name, max_bytes);
}

}  // namespace f8
