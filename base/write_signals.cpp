#include "base/write_signals.hpp"

#include <cerrno>
#include <ctime>
#include <initializer_list>

namespace f8 {

WithoutWriteSignals::WithoutWriteSignals() {
  // One that is pending already is somebody else's, and is blocked in this thread.
  sigset_t pending{};
  ::sigpending(&pending);
  ::sigemptyset(&held_);
  for (const int signal : {SIGPIPE, SIGXFSZ}) {
    if (::sigismember(&pending, signal) == 0) ::sigaddset(&held_, signal);
  }
  ::pthread_sigmask(SIG_BLOCK, &held_, &before_);
}

WithoutWriteSignals::~WithoutWriteSignals() {
  const int error = errno;
  const timespec at_once{};
  while (::sigtimedwait(&held_, nullptr, &at_once) > 0 || errno == EINTR) {
  }
  ::pthread_sigmask(SIG_SETMASK, &before_, nullptr);
  errno = error;
}

}  // namespace f8
