#include "error.hpp"

#include <cstdarg>
#include <cstdio>

namespace train {
namespace {

std::string format_list(const char* format, std::va_list arguments) {
  std::va_list again;
  va_copy(again, arguments);
  std::string text(static_cast<size_t>(std::vsnprintf(nullptr, 0, format, again)), '\0');
  va_end(again);
  std::vsnprintf(text.data(), text.size() + 1, format, arguments);
  return text;
}

}  // namespace

std::string format(const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  std::string text = format_list(format, arguments);
  va_end(arguments);
  return text;
}

void fail(float8_status code, const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  float8::Error error{code, format_list(format, arguments)};
  va_end(arguments);
  throw float8::Exception(std::move(error));
}

void fail_on_all(float8_status code, const char* format, ...) {
  std::va_list arguments;
  va_start(arguments, format);
  float8::Error error{code, format_list(format, arguments)};
  va_end(arguments);
  throw CommonException(std::move(error));
}

void check(const float8::Status& status) {
  if (!status) throw float8::Exception({status.code(), status.message()});
}

}  // namespace train
