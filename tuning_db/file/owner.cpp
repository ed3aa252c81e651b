// Process identity from /proc: see owner.hpp.
#include "tuning_db/file/owner.hpp"

#include <unistd.h>

#include <fstream>
#include <sstream>

#include "base/format.hpp"

namespace f8::tuning_db {
namespace {

// The start time of a process; empty if it is gone or only waits to be reaped.
std::string start_time(const std::string& pid) {
  std::ifstream in("/proc/" + pid + "/stat");
  std::string stat;
  if (!std::getline(in, stat)) return {};
  // The name, in parentheses, may hold anything; the fields after it are state (3) to starttime
  // (22).
  const size_t end = stat.rfind(')');
  if (end == std::string::npos) return {};
  std::istringstream fields(stat.substr(end + 1));
  std::string field;
  for (int i = 3; i <= 22 && fields >> field; ++i) {
    if (i == 3 && (field == "Z" || field == "X")) return {};
  }
  return field;
}

std::string boot_id() {
  std::ifstream in("/proc/sys/kernel/random/boot_id");
  std::string id;
  std::getline(in, id);
  return id;
}

std::string owner_of(const std::string& pid) {
  const std::string start = start_time(pid);
  return start.empty() ? "" : f8::format("{} {} {}", boot_id(), pid, start);
}

}  // namespace

std::string this_owner() {
  return owner_of(std::to_string(::getpid()));
}

std::string owner_pid(std::string_view owner) {
  const size_t first = owner.find(' ');
  const size_t last = owner.rfind(' ');
  if (first == std::string_view::npos || first == last) return {};
  return std::string(owner.substr(first + 1, last - first - 1));
}

bool is_living(std::string_view owner) {
  const std::string pid = owner_pid(owner);
  return !pid.empty() && owner_of(pid) == owner;
}

bool is_living_other(std::string_view owner) {
  return is_living(owner) && owner != this_owner();
}

}  // namespace f8::tuning_db
