// format is fmt::format with the formatting itself compiled once, in format.cpp. fmt is used
// header-only; a file that calls fmt::format directly compiles all of fmt's formatting anew, which
// takes 3 s, while a call of f8::format only collects its arguments.
#pragma once

#include <fmt/format.h>

#include <cstdio>
#include <string>
#include <utility>

namespace f8 {

[[nodiscard]] std::string vformat(fmt::string_view format, fmt::format_args args);

template <class... Args>
[[nodiscard]] std::string format(fmt::format_string<Args...> text, Args&&... args) {
  return f8::vformat(text, fmt::make_format_args(args...));
}

// print writes the formatted text to `file`, as fmt::print does.
template <class... Args>
void print(std::FILE* file, fmt::format_string<Args...> text, Args&&... args) {
  const std::string bytes = f8::vformat(text, fmt::make_format_args(args...));
  std::fwrite(bytes.data(), 1, bytes.size(), file);
}

template <class... Args>
void print(fmt::format_string<Args...> text, Args&&... args) {
  f8::print(stdout, text, std::forward<Args>(args)...);
}

}  // namespace f8
