// The gate between fork() and calls of the library. A child of fork() has the forking thread alone: a
// lock that another thread held is never released there, and what it guards may be half written. So
// fork() waits until the other threads have left their calls, and keeps them out until the child is
// made. It does not wait for ever, since a call may wait for the forking thread (a rank of an emulated
// device in a collective): the child of a fork() that gave up refuses every call.
#pragma once

#include <atomic>

namespace f8::c_abi {

class ForkGate {
 public:
  // Begins a call of this thread, which may be one inside of another. Returns false, and begins none,
  // where this process was forked in the middle of a call of another thread.
  [[nodiscard]] static bool enter() noexcept {
    if (depth_++ > 0) return true;
    // The count comes before the look at `closed_`; fork() does the two the other way around.
    inside_.fetch_add(1);
    if (closed_.load() == 0 && !torn_.load(std::memory_order_relaxed)) [[likely]] {
      return true;
    }
    return enter_slowly();
  }
  static void leave() noexcept {
    if (--depth_ == 0) inside_.fetch_sub(1, std::memory_order_release);
  }

  static constexpr const char* kTorn =
      "this process was forked while another thread was inside of a call of float8, which will "
      "never end here; fork before other threads use float8, or start the process anew "
      "(multiprocessing's start method \"spawn\")";

 private:
  friend struct ForkHandlers;

  static bool enter_slowly() noexcept;

  static inline constinit std::atomic<int> inside_ = 0;  // threads that are in a call
  static inline constinit std::atomic<int> closed_ = 0;  // threads that are in fork()
  static inline constinit std::atomic<bool> torn_ = false;
  static inline constinit thread_local int depth_ = 0;  // calls that this thread is in
};

}  // namespace f8::c_abi
