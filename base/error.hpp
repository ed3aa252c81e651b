// Errors as values. A function that can fail returns Result<T> or Status, and F8_TRY propagates an
// error to the caller. A message says what happened, where (file, option, field) and what to do
// about it, in one line without a final newline. Whatever bytes a file or its name brings into a
// message, fail() escapes those that a terminal would act upon.
#pragma once

#include <expected>
#include <string>
#include <utility>

#include "base/format.hpp"
#include "base/text.hpp"

namespace f8 {

enum class ErrorCode {
  kInvalidArgument,  // the caller's input is wrong; another input is the remedy
  kNotFound,         // a file, row or kernel that should exist does not
  kUnsupported,      // this hardware or build cannot do it
  kEnvironment,      // the machine lacks a GPU, a driver or a library
  kIo,               // the operating system refused to read or write
  kCorrupt,          // the bytes of a file are not what they should be
  kCompile,          // NVRTC refused a source, or its log holds a C75xx line
  kCuda,             // a CUDA, cuBLASLt or NCCL call failed
  kOutOfMemory,
  kInterrupted,  // a signal stopped the work, which can be resumed
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
  return std::unexpected(
      Error{code, message_text(f8::format(format, std::forward<Args>(args)...))});
}

// Returns the value that F8_TRY yields. It is not constexpr, because g++ 12 yields the moved-from
// object where the whole statement expression could be a constant.
template <class T>
T take_value(std::expected<T, Error>&& result) {
  return *std::move(result);
}

// Evaluates a Result or Status; returns its error from the enclosing function, else yields the
// value. Do not use it inside the braces of an aggregate: g++ 12 leaks the members built so far.
#define F8_TRY(...)                                                               \
  ({                                                                              \
    auto f8_try_result = (__VA_ARGS__);                                           \
    if (!f8_try_result) return std::unexpected(std::move(f8_try_result).error()); \
    ::f8::take_value(std::move(f8_try_result));                                   \
  })

}  // namespace f8
