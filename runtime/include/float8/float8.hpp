// float8 for C++17: handles that clean up after themselves, and errors that cannot be overlooked.
// Header-only over float8.h, which says what every argument means.
//
//   auto context = float8::Context::create(0).value();
//   auto linear  = float8::Linear::plan(context, {.m_max = 16384, .n = 4096, .k = 4096}).value();
//   float8::Status status = linear.forward({.x = x, .w = w, .y = y}, workspace, stream);
// (designated initialisers are C++20; in C++17 set the fields by name)
#pragma once

#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <memory>
#include <string>
#include <utility>
#include <variant>

#include "float8/float8.h"

namespace float8 {

struct Error {
  float8_status code = FLOAT8_INTERNAL;
  std::string message;
};

// What a call that gives nothing back returns. Making one for a success allocates nothing.
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

// How operands are cast: a named recipe.
class Recipe {
 public:
  static Recipe tensorwise() { return Recipe("tensorwise"); }
  static Recipe rowwise() { return Recipe("rowwise"); }
  static Recipe named(std::string name) { return Recipe(std::move(name)); }
  [[nodiscard]] const std::string& name() const { return name_; }

 private:
  explicit Recipe(std::string name) : name_(std::move(name)) {}
  std::string name_;
};

struct ContextOptions {
  std::string cache_dir;  // empty: the default
  bool serial_launch = false;
};

class Context {
 public:
  static Result<Context> create(int device, const ContextOptions& options = {}) {
    float8_context_options c{};
    c.struct_size = sizeof c;
    c.cache_dir = options.cache_dir.empty() ? nullptr : options.cache_dir.c_str();
    c.serial_launch = options.serial_launch ? 1 : 0;
    float8_context* handle = nullptr;
    const float8_status status = float8_context_create(device, &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return Context(handle);
  }
  // Gives the table's hash, for ranks to compare.
  Result<std::uint64_t> load_table(const std::string& path) {
    std::uint64_t hash = 0;
    const float8_status status = float8_context_load_table(handle_.get(), path.c_str(), &hash);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return hash;
  }
  [[nodiscard]] float8_context* get() const { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(float8_context* handle) const { float8_context_destroy(handle); }
  };
  explicit Context(float8_context* handle) : handle_(handle) {}
  std::unique_ptr<float8_context, Destroy> handle_;
};

struct LinearDesc {
  std::int64_t m_max = 0;
  std::int64_t n = 0;  // out_features
  std::int64_t k = 0;  // in_features
  Recipe recipe = Recipe::tensorwise();
  float8_dtype grad_weight_dtype = FLOAT8_BF16;
};

struct ForwardArgs {
  const void* x = nullptr;
  const void* w = nullptr;
  void* y = nullptr;
  void* saved = nullptr;  // null: there will be no backward
  std::int64_t m = -1;    // -1: m_max
};

struct BackwardArgs {
  const void* dy = nullptr;
  const void* saved = nullptr;
  void* dx = nullptr;   // null: not wanted
  void* dw = nullptr;   // null: not wanted
  std::int64_t m = -1;  // -1: m_max
};

class Linear {
 public:
  static Result<Linear> plan(const Context& context, const LinearDesc& desc) {
    float8_linear_desc c{};
    c.struct_size = sizeof c;
    c.m_max = desc.m_max;
    c.n = desc.n;
    c.k = desc.k;
    c.recipe = desc.recipe.name().c_str();
    c.grad_weight_dtype = desc.grad_weight_dtype;
    float8_linear* handle = nullptr;
    const float8_status status = float8_linear_plan(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return Linear(handle, desc.m_max);
  }

  [[nodiscard]] std::size_t workspace_bytes() const {
    return float8_linear_workspace_bytes(handle_.get());
  }
  [[nodiscard]] std::size_t saved_bytes() const { return float8_linear_saved_bytes(handle_.get()); }

  Status forward(const ForwardArgs& args, void* workspace, float8_stream stream) const {
    float8_forward_args c{};
    c.struct_size = sizeof c;
    c.x = args.x;
    c.w = args.w;
    c.y = args.y;
    c.saved = args.saved;
    c.m = args.m < 0 ? m_max_ : args.m;
    return Status(float8_linear_forward(handle_.get(), &c, workspace, stream));
  }
  Status backward(const BackwardArgs& args, void* workspace, float8_stream stream) const {
    float8_backward_args c{};
    c.struct_size = sizeof c;
    c.dy = args.dy;
    c.saved = args.saved;
    c.dx = args.dx;
    c.dw = args.dw;
    c.m = args.m < 0 ? m_max_ : args.m;
    return Status(float8_linear_backward(handle_.get(), &c, workspace, stream));
  }
  [[nodiscard]] float8_linear* get() const { return handle_.get(); }

 private:
  struct Destroy {
    void operator()(float8_linear* handle) const { float8_linear_destroy(handle); }
  };
  Linear(float8_linear* handle, std::int64_t m_max) : handle_(handle), m_max_(m_max) {}
  std::unique_ptr<float8_linear, Destroy> handle_;
  std::int64_t m_max_;
};

[[nodiscard]] inline std::string version() {
  return float8_version();
}

}  // namespace float8
