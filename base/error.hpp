// Errors as values. A function that can fail returns Result<T> or Status; F8_TRY propagates. A
// message says what happened, where (file, option, field) and what to do about it, in one line
// without a final newline.
#pragma once

#include <fmt/format.h>

#include <expected>
#include <string>
#include <utility>

namespace f8 {

enum class ErrorCode {
  kInvalidArgument,  // the caller's input; the remedy is a different input
  kNotFound,         // a file, row or kernel that should exist does not
  kUnsupported,      // legal to ask, not possible on this hardware or build
  kEnvironment,      // no GPU, no driver, missing library, unfit machine
  kIo,               // the operating system refused a read or write
  kCorrupt,          // bytes that do not say what they should
  kCompile,          // NVRTC refused a source, or its log holds a C75xx line
  kCuda,             // a CUDA, cuBLASLt or NCCL call failed
  kOutOfMemory,
  kInterrupted,  // stopped by a signal; the work can be resumed
  kInternal,
};

struct Error {
  ErrorCode code = ErrorCode::kInternal;
  std::string message;
};

template <class T>
using Result = std::expected<T, Error>;
using Status = std::expected<void, Error>;

template <class... Args>
[[nodiscard]] std::unexpected<Error> fail(ErrorCode code, fmt::format_string<Args...> format,
                                          Args&&... args) {
  return std::unexpected(Error{code, fmt::format(format, std::forward<Args>(args)...)});
}

// What F8_TRY yields. Not constexpr: where all of a statement expression could be a constant, g++
// 12 yields what its end has been moved from.
template <class T>
T take_value(std::expected<T, Error>&& result) {
  return *std::move(result);
}

// Evaluates a Result or Status; returns its error from the enclosing function, else yields the
// value. Not inside the braces of an aggregate: g++ 12 then leaks the members already built.
#define F8_TRY(...)                                                               \
  ({                                                                              \
    auto f8_try_result = (__VA_ARGS__);                                           \
    if (!f8_try_result) return std::unexpected(std::move(f8_try_result).error()); \
    ::f8::take_value(std::move(f8_try_result));                                   \
  })

}  // namespace f8
