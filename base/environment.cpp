#include "base/environment.hpp"

#include <cstdlib>

namespace f8 {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

// A relative path would make a cache in whatever directory a program runs in.
std::filesystem::path default_cache_dir() {
  if (const std::filesystem::path xdg = variable("XDG_CACHE_HOME"); xdg.is_absolute()) {
    return xdg / "float8";
  }
  const std::filesystem::path home = variable("HOME");
  return home.is_absolute() ? home / ".cache" / "float8" : std::filesystem::path();
}

Environment read_environment() {
  Environment env;
  env.cache_dir = variable("FLOAT8_CACHE_DIR");
  if (env.cache_dir.empty()) env.cache_dir = default_cache_dir();
  env.db = variable("FLOAT8_DB");
  env.log_level = variable("FLOAT8_LOG");
  if (env.log_level.empty()) env.log_level = "warning";
  env.tune = variable("FLOAT8_TUNE");
  return env;
}

}  // namespace

const Environment& environment() {
  static const Environment env = read_environment();
  return env;
}

}  // namespace f8
