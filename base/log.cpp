#include "base/log.hpp"

#include <unistd.h>

#include <mutex>

#include "base/descriptor.hpp"
#include "base/environment.hpp"
#include "base/text.hpp"

namespace f8 {
namespace {

std::mutex& sink_mutex() {
  static std::mutex mutex;
  return mutex;
}
LogSink& installed_sink() {
  static LogSink sink;
  return sink;
}

void default_sink(LogLevel level, std::string_view message) {
  static const LogLevel threshold = [] {
    const std::string& name = environment().log_level;
    return name == "info"    ? LogLevel::kInfo
           : name == "error" ? LogLevel::kError
                             : LogLevel::kWarning;
  }();
  if (level > threshold) return;
  constexpr const char* kNames[] = {"error", "warning", "info"};
  (void)write_all(
      STDERR_FILENO, "standard error",
      f8::format("float8: {}: {}\n", kNames[static_cast<int>(level)], printable(message)));
}

}  // namespace

void set_log_sink(LogSink sink) {
  const std::lock_guard lock(sink_mutex());
  installed_sink() = std::move(sink);
}

void log(LogLevel level, std::string_view message) {
  const std::lock_guard lock(sink_mutex());
  installed_sink() ? installed_sink()(level, message) : default_sink(level, message);
}

}  // namespace f8
