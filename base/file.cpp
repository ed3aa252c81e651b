#include "base/file.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>

namespace f8 {
namespace {

std::string errno_text() {
  return std::strerror(errno);
}

class Descriptor {
 public:
  explicit Descriptor(int fd) : fd_(fd) {}
  Descriptor(const Descriptor&) = delete;
  Descriptor& operator=(const Descriptor&) = delete;
  ~Descriptor() {
    if (fd_ >= 0) ::close(fd_);
  }
  [[nodiscard]] int get() const { return fd_; }
  [[nodiscard]] int close() { return ::close(std::exchange(fd_, -1)); }

 private:
  int fd_;
};

Status write_all(int fd, const fs::path& path, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t n = ::write(fd, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return fail(ErrorCode::kIo, "cannot write {}: {}", path.string(), errno_text());
    bytes.remove_prefix(static_cast<size_t>(n));
  }
  if (::fsync(fd) != 0) {
    return fail(ErrorCode::kIo, "cannot flush {} to disk: {}", path.string(), errno_text());
  }
  return {};
}

}  // namespace

Result<std::string> read_file(const fs::path& path) {
  Descriptor file(::open(path.c_str(), O_RDONLY | O_CLOEXEC));
  if (file.get() < 0) {
    const ErrorCode code = errno == ENOENT ? ErrorCode::kNotFound : ErrorCode::kIo;
    return fail(code, "cannot open {}: {}", path.string(), errno_text());
  }
  std::string bytes;
  char buffer[1 << 16];
  while (true) {
    const ssize_t n = ::read(file.get(), buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return fail(ErrorCode::kIo, "cannot read {}: {}", path.string(), errno_text());
    if (n == 0) return bytes;
    bytes.append(buffer, static_cast<size_t>(n));
  }
}

Status write_file_synced(const fs::path& path, std::string_view bytes) {
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (file.get() < 0) {
    return fail(ErrorCode::kIo, "cannot create {}: {}", path.string(), errno_text());
  }
  F8_TRY(write_all(file.get(), path, bytes));
  if (file.close() != 0) {
    return fail(ErrorCode::kIo, "cannot close {}: {}", path.string(), errno_text());
  }
  return {};
}

Status write_file_atomic(const fs::path& path, std::string_view bytes) {
  const fs::path parent = path.has_parent_path() ? path.parent_path() : fs::path(".");
  std::string temporary = (parent / f8::format(".{}.XXXXXX", path.filename().string())).string();
  Descriptor file(::mkostemp(temporary.data(), O_CLOEXEC));
  if (file.get() < 0) {
    return fail(ErrorCode::kIo, "cannot create a file in {}: {}", parent.string(), errno_text());
  }
  Status written = write_all(file.get(), temporary, bytes);
  if (written && ::fchmod(file.get(), 0644) != 0) {
    written = fail(ErrorCode::kIo, "cannot set the mode of {}: {}", temporary, errno_text());
  }
  if (written && ::rename(temporary.c_str(), path.c_str()) != 0) {
    written =
        fail(ErrorCode::kIo, "cannot rename {} to {}: {}", temporary, path.string(), errno_text());
  }
  if (!written) {
    ::unlink(temporary.c_str());
    return written;
  }
  return sync_directory(parent);
}

Status sync_directory(const fs::path& path) {
  const Descriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (directory.get() < 0 || ::fsync(directory.get()) != 0) {
    return fail(ErrorCode::kIo, "cannot flush the directory {}: {}", path.string(), errno_text());
  }
  return {};
}

Result<fs::path> make_temp_directory(const fs::path& parent, std::string_view prefix) {
  std::string name = (parent / (std::string(prefix) + "XXXXXX")).string();
  if (::mkdtemp(name.data()) == nullptr) {
    return fail(ErrorCode::kIo, "cannot create a directory in {}: {}", parent.string(),
                errno_text());
  }
  return fs::path(name);
}

}  // namespace f8
