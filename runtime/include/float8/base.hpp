// Errors of C++ calls: Status and Result, which cannot be overlooked.
#pragma once

#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <variant>

#include "float8/base.h"

namespace float8 {

struct Error {
  float8_status code = FLOAT8_INTERNAL;
  std::string message = {};
};

// The result of a call that gives nothing back. Making one for a success allocates nothing.
class [[nodiscard]] Status {
 public:
  Status() = default;
  explicit Status(float8_status code) : code_(code) {
    if (code != FLOAT8_OK) message_ = float8_last_error();
  }
  [[nodiscard]] bool ok() const { return code_ == FLOAT8_OK; }
  explicit operator bool() const { return ok(); }
  [[nodiscard]] float8_status code() const { return code_; }
  [[nodiscard]] const std::string& message() const { return message_; }  // "" for a success

 private:
  float8_status code_ = FLOAT8_OK;
  std::string message_;
};

// A value, or why there is none. value() of an error throws it where exceptions are enabled, and
// else ends the program with its message.
template <class T>
class [[nodiscard]] Result {
 public:
  Result(T value) : content_(std::move(value)) {}      // NOLINT: implicit on purpose
  Result(Error error) : content_(std::move(error)) {}  // NOLINT
  [[nodiscard]] bool ok() const { return content_.index() == 0; }
  explicit operator bool() const { return ok(); }
  [[nodiscard]] const Error& error() const { return *std::get_if<1>(&content_); }
  [[nodiscard]] T& value() & { return checked(); }
  [[nodiscard]] const T& value() const& { return const_cast<Result*>(this)->checked(); }
  [[nodiscard]] T value() && { return std::move(checked()); }

 private:
  T& checked();
  std::variant<T, Error> content_;
};

class Exception : public std::exception {
 public:
  explicit Exception(Error error) : error_(std::move(error)) {}
  [[nodiscard]] const char* what() const noexcept override { return error_.message.c_str(); }
  [[nodiscard]] float8_status code() const noexcept { return error_.code; }

 private:
  Error error_;
};

template <class T>
T& Result<T>::checked() {
  if (T* value = std::get_if<0>(&content_)) return *value;
#if defined(__cpp_exceptions)
  throw Exception(error());
#else
  std::fprintf(stderr, "float8: %s\n", error().message.c_str());
  std::abort();
#endif
}

namespace detail {
// The text that a call copies into a buffer.
template <class Call>
Result<std::string> text(Call call) {
  std::size_t needed = 0;
  float8_status status = call(nullptr, 0, &needed);
  std::string text(needed, ' ');
  if (status == FLOAT8_OK) status = call(&text[0], needed, nullptr);
  if (status != FLOAT8_OK) return Error{status, float8_last_error()};
  text.pop_back();
  return text;
}

template <class T, void (*destroy)(T*)>
struct Destroy {
  void operator()(T* handle) const { destroy(handle); }
};
template <class T, void (*destroy)(T*)>
using Handle = std::unique_ptr<T, Destroy<T, destroy>>;
}  // namespace detail

[[nodiscard]] inline std::string version() {
  return float8_version();
}

}  // namespace float8
