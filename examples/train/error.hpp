// What fails throws float8::Exception, as value() of the public header does: a status, and one line that
// says what happened and what to do about it.
#pragma once

#include <cstdio>
#include <float8/float8.hpp>

namespace train {

// Gives what printf would print.
template <class... Arguments>
[[nodiscard]] std::string format(const char* format, Arguments... arguments) {
  std::string text(static_cast<size_t>(std::snprintf(nullptr, 0, format, arguments...)), '\0');
  std::snprintf(text.data(), text.size() + 1, format, arguments...);
  return text;
}

[[noreturn]] inline void fail(float8_status code, std::string message) {
  throw float8::Exception({code, std::move(message)});
}

// Throws where a call of float8 has failed.
inline void check(const float8::Status& status) {
  if (!status) fail(status.code(), status.message());
}

}  // namespace train
