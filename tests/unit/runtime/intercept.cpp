#include "tests/unit/runtime/intercept.hpp"

#include <dlfcn.h>
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <time.h>

#include <cstddef>

#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
#define F8_INTERCEPTS 0
#else
#define F8_INTERCEPTS 1
#endif

namespace f8::runtime::testing {
namespace {

// No initialiser runs for these, so that they serve before main() and in any thread.
thread_local bool g_counting = false;
thread_local SystemCalls g_calls;

}  // namespace

Intercept::Intercept() {
  g_calls = {};
  g_counting = true;
}
Intercept::~Intercept() {
  g_counting = false;
}
SystemCalls Intercept::calls() const {
  return g_calls;
}
bool Intercept::works() {
  return F8_INTERCEPTS != 0;
}

#if F8_INTERCEPTS
namespace {

void count(int SystemCalls::*kind) {
  if (g_counting) ++(g_calls.*kind);
}

template <class Function>
Function* next(const char* name) {
  return reinterpret_cast<Function*>(dlsym(RTLD_NEXT, name));
}

}  // namespace
#endif

}  // namespace f8::runtime::testing

#if F8_INTERCEPTS
using f8::runtime::testing::count;
using f8::runtime::testing::next;
using f8::runtime::testing::SystemCalls;

#define F8_EXPORTED extern "C" __attribute__((visibility("default")))

extern "C" void* __libc_malloc(size_t);
extern "C" void* __libc_calloc(size_t, size_t);
extern "C" void* __libc_realloc(void*, size_t);

F8_EXPORTED void* malloc(size_t bytes) {
  count(&SystemCalls::allocations);
  return __libc_malloc(bytes);
}
F8_EXPORTED void* calloc(size_t elements, size_t bytes) {
  count(&SystemCalls::allocations);
  return __libc_calloc(elements, bytes);
}
F8_EXPORTED void* realloc(void* old, size_t bytes) {
  count(&SystemCalls::allocations);
  return __libc_realloc(old, bytes);
}

F8_EXPORTED int pthread_mutex_lock(pthread_mutex_t* mutex) {
  count(&SystemCalls::locks);
  static const auto real = next<int(pthread_mutex_t*)>("pthread_mutex_lock");
  return real(mutex);
}
F8_EXPORTED int pthread_rwlock_rdlock(pthread_rwlock_t* lock) {
  count(&SystemCalls::locks);
  static const auto real = next<int(pthread_rwlock_t*)>("pthread_rwlock_rdlock");
  return real(lock);
}
F8_EXPORTED int pthread_rwlock_wrlock(pthread_rwlock_t* lock) {
  count(&SystemCalls::locks);
  static const auto real = next<int(pthread_rwlock_t*)>("pthread_rwlock_wrlock");
  return real(lock);
}

F8_EXPORTED int pthread_mutex_trylock(pthread_mutex_t* mutex) {
  count(&SystemCalls::locks);
  static const auto real = next<int(pthread_mutex_t*)>("pthread_mutex_trylock");
  return real(mutex);
}

F8_EXPORTED int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex) {
  count(&SystemCalls::waits);
  static const auto real = next<int(pthread_cond_t*, pthread_mutex_t*)>("pthread_cond_wait");
  return real(condition, mutex);
}
F8_EXPORTED int nanosleep(const timespec* time, timespec* left) {
  count(&SystemCalls::waits);
  static const auto real = next<int(const timespec*, timespec*)>("nanosleep");
  return real(time, left);
}
F8_EXPORTED int clock_nanosleep(clockid_t clock, int flags, const timespec* time, timespec* left) {
  count(&SystemCalls::waits);
  static const auto real = next<int(clockid_t, int, const timespec*, timespec*)>("clock_nanosleep");
  return real(clock, flags, time, left);
}
F8_EXPORTED int sched_yield() {
  count(&SystemCalls::waits);
  static const auto real = next<int()>("sched_yield");
  return real();
}

F8_EXPORTED int vsnprintf(char* to, size_t bytes, const char* format, va_list arguments) {
  count(&SystemCalls::texts);
  static const auto real = next<int(char*, size_t, const char*, va_list)>("vsnprintf");
  return real(to, bytes, format, arguments);
}
F8_EXPORTED int snprintf(char* to, size_t bytes, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int written = vsnprintf(to, bytes, format, arguments);
  va_end(arguments);
  return written;
}

// Distributions that fortify (Ubuntu) compile snprintf and vsnprintf to these.
F8_EXPORTED int __vsnprintf_chk(char* to, size_t bytes, int, size_t, const char* format,
                                va_list arguments) {
  return vsnprintf(to, bytes, format, arguments);
}
F8_EXPORTED int __snprintf_chk(char* to, size_t bytes, int, size_t, const char* format, ...) {
  va_list arguments;
  va_start(arguments, format);
  const int written = vsnprintf(to, bytes, format, arguments);
  va_end(arguments);
  return written;
}

F8_EXPORTED int open(const char* path, int flags, ...) {
  count(&SystemCalls::files);
  va_list arguments;
  va_start(arguments, flags);
  const mode_t mode = (flags & O_CREAT) != 0 ? va_arg(arguments, mode_t) : 0;
  va_end(arguments);
  static const auto real = next<int(const char*, int, ...)>("open");
  return real(path, flags, mode);
}
F8_EXPORTED FILE* fopen(const char* path, const char* mode) {
  count(&SystemCalls::files);
  static const auto real = next<FILE*(const char*, const char*)>("fopen");
  return real(path, mode);
}

F8_EXPORTED char* getenv(const char* name) {
  count(&SystemCalls::environment);
  static const auto real = next<char*(const char*)>("getenv");
  return real(name);
}
#endif
