#include "base/environment.hpp"

#include <cstdlib>

namespace f8 {
namespace {

std::string variable(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? std::string() : std::string(value);
}

std::filesystem::path default_cache_dir() {
  if (const std::string xdg = variable("XDG_CACHE_HOME"); !xdg.empty()) {
    return std::filesystem::path(xdg) / "float8";
  }
  const std::string home = variable("HOME");
  return (home.empty() ? std::filesystem::path(".") : std::filesystem::path(home)) / ".cache" /
         "float8";
}

Environment read_environment() {
  Environment env;
  env.cache_dir = variable("FLOAT8_CACHE_DIR");
  if (env.cache_dir.empty()) env.cache_dir = default_cache_dir();
  env.db = variable("FLOAT8_DB");
  env.log_level = variable("FLOAT8_LOG");
  if (env.log_level.empty()) env.log_level = "warning";
  return env;
}

}  // namespace

const Environment& environment() {
  static const Environment env = read_environment();
  return env;
}

}  // namespace f8
