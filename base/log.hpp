// The logging hook. The library logs what an operator should know (a rebuilt cache entry, a
// fallback); forward and backward log nothing. The default sink writes messages of the level
// FLOAT8_LOG and above to standard error.
#pragma once

#include <functional>
#include <string_view>

#include "base/format.hpp"

namespace f8 {

enum class LogLevel { kError, kWarning, kInfo };
using LogSink = std::function<void(LogLevel, std::string_view)>;

// An empty sink restores the default one. Any thread may call it.
void set_log_sink(LogSink sink);
void log(LogLevel level, std::string_view message);

template <class... Args>
void log_warning(fmt::format_string<Args...> format, Args&&... args) {
  log(LogLevel::kWarning, f8::format(format, std::forward<Args>(args)...));
}
template <class... Args>
void log_info(fmt::format_string<Args...> format, Args&&... args) {
  log(LogLevel::kInfo, f8::format(format, std::forward<Args>(args)...));
}

}  // namespace f8
