#include "runtime/c_abi/fork_gate.hpp"

#include <pthread.h>

#include <chrono>
#include <thread>

#include "runtime/c_abi/common.hpp"

namespace f8::c_abi {
namespace {

using std::chrono::steady_clock;

constexpr auto kPatience = std::chrono::seconds(2);  // of fork() with the calls of other threads
constexpr auto kPause = std::chrono::microseconds(100);

}  // namespace

bool ForkGate::enter_slowly() noexcept {
  while (closed_.load() > 0) {
    inside_.fetch_sub(1);
    while (closed_.load() > 0) std::this_thread::sleep_for(kPause);
    inside_.fetch_add(1);
  }
  if (!torn_.load()) return true;
  leave();
  return false;
}

struct ForkHandlers {
  static inline thread_local bool gave_up = false;

  static int own_calls() { return ForkGate::depth_ > 0 ? 1 : 0; }

  static void before() {
    ForkGate::closed_.fetch_add(1);
    const auto until = steady_clock::now() + kPatience;
    while (ForkGate::inside_.load() > own_calls() && steady_clock::now() < until) {
      std::this_thread::sleep_for(kPause);
    }
    gave_up = ForkGate::inside_.load() > own_calls();
  }
  static void in_parent() { ForkGate::closed_.fetch_sub(1); }
  static void in_child() {
    ForkGate::closed_.store(0);
    ForkGate::inside_.store(own_calls());
    if (gave_up) ForkGate::torn_.store(true);
  }

  ForkHandlers() { pthread_atfork(before, in_parent, in_child); }
};

// glibc drops the handlers of a library that is unloaded.
static const ForkHandlers g_handlers;

}  // namespace f8::c_abi

float8_status float8_calls_begin(void) {
  if (f8::c_abi::ForkGate::enter()) return FLOAT8_OK;
  f8::c_abi::last_error() = f8::c_abi::ForkGate::kTorn;
  return FLOAT8_ENVIRONMENT;
}

void float8_calls_end(void) {
  f8::c_abi::ForkGate::leave();
}
