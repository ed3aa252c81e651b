// A file descriptor that closes itself, and the words that messages have for files.
#pragma once

#include <sys/types.h>

#include <string>
#include <string_view>
#include <utility>

#include "base/error.hpp"

namespace f8 {

class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  Descriptor& operator=(Descriptor&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }
  ~Descriptor();
  [[nodiscard]] int get() const { return fd_; }
  [[nodiscard]] bool is_open() const { return fd_ >= 0; }
  [[nodiscard]] int close();  // as close(2)

 private:
  int fd_;
};

[[nodiscard]] std::string errno_text();
[[nodiscard]] std::string_view kind_of(mode_t mode);  // "a directory", "a fifo", ...
// Writes all bytes; `name` is for messages. A reader that has gone and a limit of size are errors too,
// and no signals.
[[nodiscard]] Status write_all(int fd, std::string_view name, std::string_view bytes);

}  // namespace f8
