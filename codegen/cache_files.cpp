#include "codegen/cache_files.hpp"

#include <cerrno>
#include <random>

#include "base/file.hpp"

namespace f8::codegen {
namespace {

constexpr int kOpenDirectory = O_RDONLY | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC;
constexpr mode_t kFileMode = 0644;

std::string random_letters() {
  constexpr std::string_view kLetters = "abcdefghijklmnopqrstuvwxyz0123456789";
  std::random_device random;
  std::string text;
  for (int i = 0; i < 10; ++i) text += kLetters[random() % kLetters.size()];
  return text;
}

std::unexpected<Error> cannot_open(const char* name) {
  switch (errno) {
    case ENOENT:
      return fail(ErrorCode::kNotFound, "there is no {}", name);
    case ELOOP:
    case ENOTDIR:
    case ENXIO:
      return fail(ErrorCode::kCorrupt, "cannot open {}: {}", name, errno_text());
    case EACCES:
      return fail(ErrorCode::kEnvironment,
                  "cannot open {}: {}; its owner can open it to others: chmod -R a+rX", name,
                  errno_text());
    default:
      return fail(ErrorCode::kEnvironment, "cannot open {}: {}", name, errno_text());
  }
}

}  // namespace

Result<Descriptor> open_directory_at(int parent, const char* name) {
  Descriptor directory(::openat(parent, name, kOpenDirectory));
  if (!directory.is_open()) return cannot_open(name);
  return directory;
}

std::string why_untrusted(const struct stat& info) {
  if (info.st_uid != ::geteuid() && info.st_uid != 0) {
    return f8::format("belongs to user {}", info.st_uid);
  }
  if ((info.st_mode & (S_IWGRP | S_IWOTH)) != 0) {
    return f8::format("can be written by others (mode {:04o})", info.st_mode & 07777);
  }
  return "";
}

Result<std::string> read_file_at(int directory, const char* name, size_t max_bytes) {
  // A fifo opens at once and is refused by its kind.
  const Descriptor file(
      ::openat(directory, name, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC));
  if (!file.is_open()) return cannot_open(name);
  struct stat info {};
  if (::fstat(file.get(), &info) != 0) {
    return fail(ErrorCode::kCorrupt, "cannot look at {}: {}", name, errno_text());
  }
  if (!S_ISREG(info.st_mode)) return fail(ErrorCode::kCorrupt, "{} is no regular file", name);
  if (const std::string why = why_untrusted(info); !why.empty()) {
    return fail(ErrorCode::kCorrupt, "{} {}", name, why);
  }
  if (info.st_size < 0 || static_cast<size_t>(info.st_size) > max_bytes) {
    return fail(ErrorCode::kCorrupt, "{} has {} bytes, {} at most are accepted", name, info.st_size,
                max_bytes);
  }
  return read_descriptor(file.get(), name, max_bytes);
}

Status write_file_at(int directory, const char* name, std::string_view bytes) {
  const Descriptor file(
      ::openat(directory, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600));
  if (!file.is_open()) {
    return fail(ErrorCode::kIo, "cannot create {}: {}", name, errno_text());
  }
  F8_TRY(write_all(file.get(), name, bytes));
  if (::fchmod(file.get(), kFileMode) != 0) {
    return fail(ErrorCode::kIo, "cannot set the mode of {}: {}", name, errno_text());
  }
  if (::fsync(file.get()) != 0) {
    return fail(ErrorCode::kIo, "cannot flush {} to disk: {}", name, errno_text());
  }
  return {};
}

Result<std::string> make_temporary_at(int directory) {
  constexpr int kTries = 20;
  for (int i = 0; i < kTries; ++i) {
    std::string name = f8::format("tmp.{}.{}", ::getpid(), random_letters());
    if (::mkdirat(directory, name.c_str(), 0700) == 0) return name;
    if (errno != EEXIST) break;
  }
  return fail(ErrorCode::kIo, "cannot create a directory in it: {}", errno_text());
}

std::vector<std::string> names_in(int directory) {
  std::vector<std::string> names;
  FolderNames each(directory);
  while (const char* name = each.next()) names.emplace_back(name);
  return names;
}

}  // namespace f8::codegen
