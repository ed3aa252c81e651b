// A write into a pipe without a reader raises SIGPIPE, and one beyond the limit of a file's size
// SIGXFSZ; either ends the process by default. While one of these lives, the calling thread has
// neither: the write fails with EPIPE or EFBIG alone. The process's own handlers, masks and pending
// signals are as they were afterwards.
#pragma once

#include <csignal>

namespace f8 {

class WithoutWriteSignals {
 public:
  WithoutWriteSignals();
  ~WithoutWriteSignals();  // errno stays
  WithoutWriteSignals(const WithoutWriteSignals&) = delete;
  WithoutWriteSignals& operator=(const WithoutWriteSignals&) = delete;

 private:
  sigset_t held_{};
  sigset_t before_{};
};

}  // namespace f8
