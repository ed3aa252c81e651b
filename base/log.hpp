// The logging hook. Libraries say what an operator should know (a rebuilt cache entry, a fallback);
// nothing is logged from `run`. The default sink writes to standard error at FLOAT8_LOG and above.
#pragma once

#include <fmt/format.h>

#include <functional>
#include <string_view>

namespace f8 {

enum class LogLevel { kError, kWarning, kInfo };
using LogSink = std::function<void(LogLevel, std::string_view)>;

void set_log_sink(LogSink sink);  // empty: the default sink. Thread-safe.
void log(LogLevel level, std::string_view message);

template <class... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  log(LogLevel::kWarning, fmt::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  log(LogLevel::kInfo, fmt::format(format, std::forward<Args>(args)...));
}

}  // namespace f8
