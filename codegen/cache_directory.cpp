#include "codegen/cache_directory.hpp"

#include <fcntl.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <chrono>
#include <cstring>

#include "base/log.hpp"

namespace f8::codegen {
namespace {

constexpr std::chrono::hours kStaleAge(1);

// The process of "tmp.<pid>.XXXXXX", else 0.
pid_t owner_of_temporary(std::string_view name) {
  constexpr std::string_view kPrefix = "tmp.";
  if (!name.starts_with(kPrefix)) return 0;
  name.remove_prefix(kPrefix.size());
  pid_t pid = 0;
  const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), pid);
  const bool whole = error == std::errc() && end != name.data() + name.size() && *end == '.';
  return whole ? pid : 0;
}

bool is_dead(pid_t pid) {
  return ::kill(pid, 0) != 0 && errno == ESRCH;
}

}  // namespace

Status make_private_directories(const fs::path& directory) {
  std::error_code error;
  if (fs::is_directory(directory, error)) return {};
  if (directory.has_parent_path() && directory.parent_path() != directory) {
    F8_TRY(make_private_directories(directory.parent_path()));
  }
  if (::mkdir(directory.c_str(), 0700) == 0 || errno == EEXIST) return {};
  return fail(ErrorCode::kIo, "cannot create {}: {}", directory.string(), std::strerror(errno));
}

Result<fs::path> open_cache_directory(const fs::path& directory) {
  if (directory.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "the cache directory has no name; set FLOAT8_CACHE_DIR to a directory of yours");
  }
  std::error_code error;
  fs::path path = fs::absolute(directory, error).lexically_normal();
  if (error) path = directory;
  if (!path.has_filename()) path = path.parent_path();  // a final slash
  const Status made = make_private_directories(path);

  struct stat info {};
  if (::stat(path.c_str(), &info) != 0) {
    return fail(ErrorCode::kIo,
                "no cache directory {} ({}); set FLOAT8_CACHE_DIR to a directory of yours",
                path.string(), made ? std::strerror(errno) : made.error().message);
  }
  if (!S_ISDIR(info.st_mode)) {
    return fail(
        ErrorCode::kIo,
        "the cache directory {} is a file; remove it or set FLOAT8_CACHE_DIR to a directory",
        path.string());
  }
  if (info.st_uid != ::geteuid() && info.st_uid != 0) {
    return fail(ErrorCode::kEnvironment,
                "the cache directory {} belongs to user {}, and loading a kernel from it would run "
                "their code; set FLOAT8_CACHE_DIR to a directory of yours",
                path.string(), info.st_uid);
  }
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return fail(ErrorCode::kEnvironment,
                "others can write the cache directory {} (mode {:04o}), and loading a kernel from "
                "it would run their code; empty it if you do not trust them, then run: chmod go-w "
                "'{}'",
                path.string(), info.st_mode & 07777, path.string());
  }
  return path;
}

void remove_stale_temporaries(const fs::path& directory) {
  std::error_code error;
  for (fs::directory_iterator it(directory, error), end; !error && it != end; it.increment(error)) {
    const pid_t pid = owner_of_temporary(it->path().filename().native());
    if (pid <= 0 || !is_dead(pid)) continue;
    std::error_code ignored;  // another process may be removing it too
    const auto written = it->last_write_time(ignored);
    if (ignored || fs::file_time_type::clock::now() - written < kStaleAge) continue;
    fs::remove_all(it->path(), ignored);
  }
}

KeyLock::KeyLock(const fs::path& file)
    : fd_(::open(file.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600)) {
  if (fd_ < 0 || ::flock(fd_, LOCK_EX | LOCK_NB) == 0 || errno != EWOULDBLOCK) return;
  log_info("waiting for another process that compiles the same kernel ({})", file.string());
  while (::flock(fd_, LOCK_EX) != 0 && errno == EINTR) {
  }
}

KeyLock::~KeyLock() {
  if (fd_ < 0) return;
  ::flock(fd_, LOCK_UN);  // a forked child may share the descriptor, and closing would not unlock
  ::close(fd_);
}

}  // namespace f8::codegen
