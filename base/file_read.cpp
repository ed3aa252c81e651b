// Reading: see file.hpp.
#include <fcntl.h>
#include <poll.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>

#include "base/descriptor.hpp"
#include "base/file.hpp"

namespace f8 {
namespace {

// A named fifo that nobody has open for writing is given up after so long.
constexpr std::chrono::milliseconds kWriterPatience{10'000};

Status too_large(std::string_view name, size_t max_bytes) {
  return fail(ErrorCode::kInvalidArgument, "{} is larger than {}; is it the right file?", name,
              max_bytes >= size_t{1} << 20 ? f8::format("{} MiB", max_bytes >> 20)
                                           : f8::format("{} bytes", max_bytes));
}

Status check_kind(const struct stat& info, std::string_view name, Pipes pipes) {
  if (S_ISREG(info.st_mode) || (S_ISFIFO(info.st_mode) && pipes == Pipes::kWelcome)) return {};
  if (S_ISDIR(info.st_mode)) {
    return fail(ErrorCode::kInvalidArgument, "{} is a directory; name a file in it", name);
  }
  return fail(ErrorCode::kInvalidArgument, "{} is {}, not a regular file", name,
              kind_of(info.st_mode));
}

// True if the pipe can be read, false after `patience` without anything.
bool wait_for(int fd, std::chrono::milliseconds patience) {
  pollfd one{fd, POLLIN, 0};
  return ::poll(&one, 1, static_cast<int>(patience.count())) > 0 && (one.revents & POLLIN) != 0;
}

Result<std::string> read_pipe(int fd, std::string_view name, size_t max_bytes) {
  std::string bytes;
  char buffer[1 << 16];
  bool has_writer = false;
  while (true) {
    const ssize_t n = ::read(fd, buffer, sizeof buffer);
    if (n > 0) {
      has_writer = true;
      bytes.append(buffer, static_cast<size_t>(n));
      if (bytes.size() > max_bytes) return std::unexpected(too_large(name, max_bytes).error());
    } else if (n == 0) {
      if (has_writer) return bytes;
      if (!wait_for(fd, kWriterPatience)) {
        return fail(ErrorCode::kIo, "{} is a fifo that nobody writes into", name);
      }
      has_writer = true;
    } else if (errno == EAGAIN) {
      has_writer = true;
      // A writer that closes its end makes the pipe readable too.
      pollfd one{fd, POLLIN, 0};
      if (::poll(&one, 1, static_cast<int>(std::chrono::milliseconds(kPipePatience).count())) ==
          0) {
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
  F8_TRY(check_kind(file.info, path.string(), pipes));
  file.descriptor = Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY));
  if (!file.descriptor.is_open() || ::fstat(file.descriptor.get(), &file.info) != 0)
    return cannot();
  F8_TRY(check_kind(file.info, path.string(), pipes));
  return file;
}

// Appends up to `max_bytes` of the descriptor, or all there are.
Status read_some(int fd, std::string_view name, size_t max_bytes, std::string& bytes) {
  char buffer[1 << 16];
  while (bytes.size() < max_bytes) {
    const ssize_t n = ::read(fd, buffer, std::min(sizeof buffer, max_bytes - bytes.size()));
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return fail(ErrorCode::kIo, "cannot read {}: {}", name, errno_text());
    if (n == 0) break;
    bytes.append(buffer, static_cast<size_t>(n));
  }
  return {};
}

}  // namespace

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

}  // namespace f8
