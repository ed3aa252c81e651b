#include "codegen/cache_directory.hpp"

#include <signal.h>

#include <cerrno>
#include <charconv>
#include <ctime>

namespace f8::codegen {
namespace {

constexpr time_t kStaleSeconds = 3600;

// The process of "tmp.<pid>.<random>", else 0.
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

Status make_private_directories(const fs::path& directory) {
  std::error_code error;
  if (fs::is_directory(directory, error)) return {};
  if (directory.has_parent_path() && directory.parent_path() != directory) {
    F8_TRY(make_private_directories(directory.parent_path()));
  }
  if (::mkdir(directory.c_str(), 0700) == 0 || errno == EEXIST) return {};
  return fail(ErrorCode::kIo, "cannot create {}: {}", directory.string(), errno_text());
}

Status check_owner_and_mode(const fs::path& path, const struct stat& info) {
  const std::string why = why_untrusted(info);
  if (why.empty()) return {};
  if (info.st_uid != ::geteuid() && info.st_uid != 0) {
    return fail(ErrorCode::kEnvironment,
                "the cache directory {} {}, and loading a kernel from it would run their code; set "
                "FLOAT8_CACHE_DIR to a directory of yours",
                path.string(), why);
  }
  return fail(ErrorCode::kEnvironment,
              "others can write the cache directory {} (mode {:04o}), and loading a kernel from it "
              "would run their code; empty it if you do not trust them, then run: chmod go-w '{}'",
              path.string(), info.st_mode & 07777, path.string());
}

}  // namespace

Result<CacheDirectory> open_cache_directory(const fs::path& given) {
  std::error_code error;
  fs::path path = fs::absolute(given, error).lexically_normal();
  if (error) path = given;
  if (!path.has_filename()) path = path.parent_path();  // a final slash
  const Status made = make_private_directories(path);

  // The last part of the path may be a link that its user made: what it leads to is checked.
  Descriptor fd(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!fd.is_open()) {
    if (errno == ENOTDIR && fs::exists(path, error)) {
      return fail(ErrorCode::kIo,
                  "the cache directory {} is a file; remove it or set FLOAT8_CACHE_DIR to a "
                  "directory",
                  path.string());
    }
    if (errno == EACCES) {
      return fail(ErrorCode::kEnvironment,
                  "the cache directory {} cannot be read ({}); set FLOAT8_CACHE_DIR to a directory "
                  "of yours, or ask its owner to run: chmod 755 '{}'",
                  path.string(), errno_text(), path.string());
    }
    return fail(ErrorCode::kIo,
                "no cache directory {} ({}); set FLOAT8_CACHE_DIR to a directory of yours",
                path.string(), made ? errno_text() : made.error().message);
  }
  struct stat info {};
  if (::fstat(fd.get(), &info) != 0) {
    return fail(ErrorCode::kIo, "cannot look at the cache directory {}: {}", path.string(),
                errno_text());
  }
  F8_TRY(check_owner_and_mode(path, info));
  return CacheDirectory{std::move(fd), std::move(path)};
}

void remove_stale_temporaries(const CacheDirectory& cache) {
  for (const std::string& name : names_in(cache.fd.get())) {
    const pid_t pid = owner_of_temporary(name);
    if (pid <= 0 || !is_dead(pid)) continue;
    struct stat info {};
    if (::fstatat(cache.fd.get(), name.c_str(), &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (::time(nullptr) - info.st_mtime < kStaleSeconds) continue;
    remove_tree_at(cache.fd.get(), name.c_str());
  }
}

}  // namespace f8::codegen
