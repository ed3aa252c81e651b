// Writing: see file.hpp.
#include "base/file.hpp"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <charconv>
#include <cstdlib>
#include <ctime>
#include <optional>

#include "base/descriptor.hpp"

namespace f8 {
namespace {

constexpr mode_t kModeBits = 0777;
constexpr int kMaxLinks = 40;  // as the kernel's own limit

fs::path folder_of(const fs::path& path) {
  return path.has_parent_path() ? path.parent_path() : fs::path(".");
}

// What a path names once its symbolic links are followed.
struct Target {
  fs::path path;
  std::optional<mode_t> mode = std::nullopt;  // nothing: there is no such file yet
  uid_t owner = 0;
  gid_t group = 0;
  Descriptor own = Descriptor();  // a copy of this process's descriptor, where the path names one

  [[nodiscard]] bool is_replaced() const { return !own.is_open() && (!mode || S_ISREG(*mode)); }
};

// The number of this process's descriptor that `link` stands for, as /proc/self/fd/1 does: such a
// link's text is no path to open.
std::optional<int> own_descriptor(const fs::path& link) {
  std::error_code error;
  const fs::path folder = fs::canonical(folder_of(link), error);
  if (error || folder != fs::canonical("/proc/self/fd", error)) return std::nullopt;
  const std::string name = link.filename().string();
  int number = 0;
  const auto [end, failed] = std::from_chars(name.data(), name.data() + name.size(), number);
  if (failed != std::errc() || end != name.data() + name.size()) return std::nullopt;
  return number;
}

Result<Target> find_target(const fs::path& path) {
  const auto cannot = [&path](std::string_view why) {
    return fail(ErrorCode::kIo, "cannot write {}: {}", path.string(), why);
  };
  Target target{.path = path};
  for (int links = 0; links < kMaxLinks; ++links) {
    if (!target.path.has_filename()) return cannot("it is no name of a file");
    struct stat info {};
    if (::lstat(target.path.c_str(), &info) != 0) {
      if (errno != ENOENT) return cannot(errno_text());
      return target;
    }
    if (!S_ISLNK(info.st_mode)) {
      target.mode = info.st_mode;
      target.owner = info.st_uid;
      target.group = info.st_gid;
      if (S_ISREG(info.st_mode) || S_ISCHR(info.st_mode) || S_ISFIFO(info.st_mode)) return target;
      return cannot(f8::format("it is {}; name a file", kind_of(info.st_mode)));
    }
    if (const auto number = own_descriptor(target.path)) {
      target.own = Descriptor(::fcntl(*number, F_DUPFD_CLOEXEC, 0));
      if (!target.own.is_open()) return cannot(errno_text());
      return target;
    }
    std::error_code error;
    const fs::path link = fs::read_symlink(target.path, error);
    if (error) return cannot(error.message());
    target.path = folder_of(target.path) / link;
  }
  return cannot("too many symbolic links");
}

// The device, fifo or own descriptor, open for writing.
Result<Descriptor> open_stream(Target target) {
  if (target.own.is_open()) return std::move(target.own);
  Descriptor stream(::open(target.path.c_str(), O_WRONLY | O_NOCTTY | O_CLOEXEC));
  struct stat info {};
  if (!stream.is_open() || ::fstat(stream.get(), &info) != 0) {
    return fail(ErrorCode::kIo, "cannot write {}: {}", target.path.string(), errno_text());
  }
  if (!S_ISCHR(info.st_mode) && !S_ISFIFO(info.st_mode)) {
    return fail(ErrorCode::kIo, "cannot write {}: another file took its place meanwhile",
                target.path.string());
  }
  return stream;
}

// The names of new files beside the target are this and 16 hex digits.
std::string temporary_prefix(const fs::path& target) {
  constexpr size_t kLongest = 128;  // of the target's name, so that ours is no longer than allowed
  return f8::format(".{}.", target.filename().string().substr(0, kLongest));
}

// A new file beside `target`, under a name that no file has.
Result<Descriptor> create_beside(const fs::path& target, mode_t mode, fs::path& path) {
  while (true) {
    uint64_t random = 0;
    if (::getrandom(&random, sizeof random, 0) != sizeof random) continue;
    path = folder_of(target) / f8::format("{}{:016x}", temporary_prefix(target), random);
    Descriptor file(::open(path.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode));
    if (file.is_open()) return file;
    if (errno != EEXIST) {
      return fail(ErrorCode::kIo, "cannot create a file in {}: {}", folder_of(target).string(),
                  errno_text());
    }
  }
}

// Gives the new file the mode and the owner of the one whose place it takes. Only root may give a
// file away; then it stays the writer's. Where its group is out of reach too, what the mode allows
// that group is not for another one.
Status keep_mode(int fd, const Target& target) {
  if (!target.mode) return {};
  const bool keeps_group = ::fchown(fd, target.owner, target.group) == 0 ||
                           ::fchown(fd, static_cast<uid_t>(-1), target.group) == 0;
  const mode_t kept = keeps_group ? kModeBits : kModeBits & ~mode_t{S_IRWXG};
  if (::fchmod(fd, *target.mode & kept) == 0) return {};
  return fail(ErrorCode::kIo, "cannot set the mode of {}: {}", target.path.string(), errno_text());
}

void remove_leftovers(const fs::path& target) {
  const std::string prefix = temporary_prefix(target);
  remove_stale_files(folder_of(target), [&prefix](std::string_view name) {
    return name.size() == prefix.size() + 16 && name.starts_with(prefix) &&
           name.find_first_not_of("0123456789abcdef", prefix.size()) == std::string_view::npos;
  });
}

using Fill = std::function<Status(int fd, const fs::path& path)>;

Status fill_and_rename(const Target& target, const Fill& fill) {
  if (target.mode && ::faccessat(AT_FDCWD, target.path.c_str(), W_OK, AT_EACCESS) != 0) {
    return fail(ErrorCode::kIo, "cannot write {}: {}", target.path.string(), errno_text());
  }
  fs::path temporary;
  Descriptor file = F8_TRY(create_beside(target.path, target.mode ? 0600 : 0666, temporary));
  const auto complete = [&]() -> Status {
    F8_TRY(fill(file.get(), temporary));
    F8_TRY(keep_mode(file.get(), target));
    if (::fsync(file.get()) != 0) {
      return fail(ErrorCode::kIo, "cannot flush {} to disk: {}", target.path.string(),
                  errno_text());
    }
    if (::rename(temporary.c_str(), target.path.c_str()) != 0) {
      return fail(ErrorCode::kIo, "cannot rename {} to {}: {}", temporary.string(),
                  target.path.string(), errno_text());
    }
    return {};
  };
  const Status written = complete();
  if (!written) {
    ::unlink(temporary.c_str());
    return written;
  }
  remove_leftovers(target.path);
  return sync_directory(folder_of(target.path));
}

// Copies a finished file into a stream.
Status copy(const fs::path& from, int to, std::string_view name) {
  const Descriptor file(::open(from.c_str(), O_RDONLY | O_CLOEXEC));
  char buffer[1 << 16];
  while (true) {
    const ssize_t n = ::read(file.get(), buffer, sizeof buffer);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      return fail(ErrorCode::kIo, "cannot read {}: {}", from.string(), errno_text());
    }
    if (n == 0) return {};
    F8_TRY(write_all(to, name, {buffer, static_cast<size_t>(n)}));
  }
}

}  // namespace

fs::path output_path(const fs::path& path) {
  return is_standard_stream(path) ? "/dev/stdout" : path;
}

Status write_file_atomic(const fs::path& path, std::string_view bytes) {
  Target target = F8_TRY(find_target(path));
  if (!target.is_replaced()) {
    const Descriptor stream = F8_TRY(open_stream(std::move(target)));
    return write_all(stream.get(), path.string(), bytes);
  }
  return fill_and_rename(
      target, [&](int fd, const fs::path&) { return write_all(fd, path.string(), bytes); });
}

Status replace_file(const fs::path& path,
                    const std::function<Status(const fs::path& empty)>& fill) {
  Target target = F8_TRY(find_target(path));
  if (target.is_replaced()) {
    return fill_and_rename(target, [&](int, const fs::path& temporary) { return fill(temporary); });
  }
  const Descriptor stream = F8_TRY(open_stream(std::move(target)));
  const fs::path folder = F8_TRY(make_temp_directory(fs::temp_directory_path(), "float8-"));
  const fs::path temporary = folder / "file";
  Status written = write_file_synced(temporary, {});
  if (written) written = fill(temporary);
  if (written) written = copy(temporary, stream.get(), path.string());
  std::error_code ignored;
  fs::remove_all(folder, ignored);
  return written;
}

Status write_file_synced(const fs::path& path, std::string_view bytes) {
  Descriptor file(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
  if (!file.is_open()) {
    return fail(ErrorCode::kIo, "cannot create {}: {}", path.string(), errno_text());
  }
  F8_TRY(write_all(file.get(), path.string(), bytes));
  if (::fsync(file.get()) != 0) {
    return fail(ErrorCode::kIo, "cannot flush {} to disk: {}", path.string(), errno_text());
  }
  if (file.close() != 0) {
    return fail(ErrorCode::kIo, "cannot close {}: {}", path.string(), errno_text());
  }
  return {};
}

void remove_stale_files(const fs::path& folder,
                        const std::function<bool(std::string_view name)>& is_temporary) {
  constexpr time_t kStaleSeconds = 24 * 60 * 60;
  std::error_code error;
  fs::directory_iterator entry(folder.empty() ? fs::path(".") : folder, error);
  for (; !error && entry != fs::directory_iterator(); entry.increment(error)) {
    if (!is_temporary(entry->path().filename().string())) continue;
    struct stat info {};
    if (::lstat(entry->path().c_str(), &info) != 0 || !S_ISREG(info.st_mode)) continue;
    if (info.st_uid != ::geteuid() || ::time(nullptr) - info.st_mtime < kStaleSeconds) continue;
    ::unlink(entry->path().c_str());
  }
}

Status sync_directory(const fs::path& path) {
  const Descriptor directory(::open(path.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!directory.is_open() || ::fsync(directory.get()) != 0) {
    return fail(ErrorCode::kIo, "cannot flush the directory {}: {}", path.string(), errno_text());
  }
  return {};
}

Result<fs::path> make_temp_directory(const fs::path& parent, std::string_view prefix) {
  std::string name = (parent / (std::string(prefix) + "XXXXXX")).string();
  if (::mkdtemp(name.data()) == nullptr) {
    return fail(ErrorCode::kIo, "cannot create a directory in {}: {}", parent.string(),
                errno_text());
  }
  return fs::path(name);
}

}  // namespace f8
