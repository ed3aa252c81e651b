#include "base/descriptor.hpp"

#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>

#include "base/write_signals.hpp"

namespace f8 {

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

int Descriptor::close() {
  return ::close(std::exchange(fd_, -1));
}

std::string errno_text() {
  return std::strerror(errno);
}

std::string_view kind_of(mode_t mode) {
  if (S_ISDIR(mode)) return "a directory";
  if (S_ISCHR(mode)) return "a character device";
  if (S_ISBLK(mode)) return "a block device";
  if (S_ISFIFO(mode)) return "a fifo";
  if (S_ISSOCK(mode)) return "a socket";
  return "a file";
}

Status write_all(int fd, std::string_view name, std::string_view bytes) {
  const WithoutWriteSignals without;
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return fail(ErrorCode::kIo, "cannot write {}: {}", name, errno_text());
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  return {};
}

}  // namespace f8
