// Writing: see file.hpp.
#include "base/file.hpp"

#include <fcntl.h>
#include <sys/random.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <ctime>
#include <optional>
#include <vector>

#include "base/descriptor.hpp"
#include "base/number.hpp"

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
// link's text is no path to open. The standard streams are known by name, since a container's /dev may
// lack them: a new file there is nothing that anybody asks for.
std::optional<int> own_descriptor(const fs::path& link) {
  if (link == "/dev/stdout") return STDOUT_FILENO;
  if (link == "/dev/stderr") return STDERR_FILENO;
  const auto number = number_of<int>(link.filename().string());
  if (!number) return std::nullopt;
  std::error_code error;
  const fs::path folder = fs::canonical(folder_of(link), error);
  if (error || folder != fs::canonical("/proc/self/fd", error)) return std::nullopt;
  return number;
}

Result<Target> find_target(const fs::path& path) {
  const auto cannot = [&path](std::string_view why) {
    return fail(ErrorCode::kIo, "cannot write {}: {}", path.string(), why);
  };
  Target target{.path = path};
  for (int links = 0; links < kMaxLinks; ++links) {
    if (!target.path.has_filename()) return cannot("it is no name of a file");
    if (const auto number = own_descriptor(target.path)) {
      target.own = Descriptor(::fcntl(*number, F_DUPFD_CLOEXEC, 0));
      if (!target.own.is_open()) return cannot(errno_text());
      return target;
    }
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

// The names of new files next to the target are this and 16 hex digits.
std::string temporary_prefix(const fs::path& target) {
  constexpr size_t kLongest = 128;  // of the target's name, so that ours is no longer than allowed
  return f8::format(".{}.", target.filename().string().substr(0, kLongest));
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

// SQLite puts a file with this ending next to one that it makes.
constexpr std::string_view kJournal = "-journal";

// Removes what killed processes left next to the target.
void remove_leftovers(const fs::path& target) {
  const std::string prefix = temporary_prefix(target);
  remove_stale_files(folder_of(target), [&prefix](std::string_view name) {
    if (name.ends_with(kJournal)) name.remove_suffix(kJournal.size());
    return name.size() == prefix.size() + 16 && name.starts_with(prefix) &&
           name.find_first_not_of("0123456789abcdef", prefix.size()) == std::string_view::npos;
  });
}

Status may_write(const Target& target) {
  if (target.own.is_open()) return {};
  if (target.mode && ::faccessat(AT_FDCWD, target.path.c_str(), W_OK, AT_EACCESS) != 0) {
    return fail(ErrorCode::kIo, "cannot write {}: {}", target.path.string(), errno_text());
  }
  const fs::path folder = folder_of(target.path);
  if (!target.is_replaced() ||
      ::faccessat(AT_FDCWD, folder.c_str(), W_OK | X_OK, AT_EACCESS) == 0) {
    return {};
  }
  return fail(ErrorCode::kIo, "cannot create a file in {}: {}", folder.string(), errno_text());
}

// A file next to its target, under a name that no other has, until it takes the target's place. It
// goes at the end where it did not.
class NewFile {
 public:
  static Result<NewFile> create(Target target) {
    F8_TRY(may_write(target));
    const fs::path folder = folder_of(target.path);
    const mode_t mode = target.mode ? 0600 : 0666;
    NewFile made(std::move(target));
    while (true) {
      uint64_t random = 0;
      if (::getrandom(&random, sizeof random, 0) != sizeof random) continue;
      made.path_ = folder / f8::format("{}{:016x}", temporary_prefix(made.target_.path), random);
      made.journal_ = made.path_.string() + std::string(kJournal);
      made.file_ =
          Descriptor(::open(made.path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, mode));
      made.is_there_ = made.file_.is_open();
      if (made.is_there_) return made;
      if (errno != EEXIST) {
        return fail(ErrorCode::kIo, "cannot create a file in {}: {}", folder.string(),
                    errno_text());
      }
    }
  }
  NewFile(NewFile&& other) noexcept
      : target_(std::move(other.target_)),
        file_(std::move(other.file_)),
        path_(std::move(other.path_)),
        journal_(std::move(other.journal_)),
        is_there_(std::exchange(other.is_there_, false)) {}
  NewFile& operator=(NewFile&&) = delete;
  ~NewFile() {
    if (!is_there_) return;
    ::unlink(path_.c_str());
    ::unlink(journal_.c_str());
  }

  [[nodiscard]] int fd() const { return file_.get(); }
  [[nodiscard]] const fs::path& path() const { return path_; }

  // The last of it is on the disk.
  Status finish() {
    F8_TRY(keep_mode(file_.get(), target_));
    if (::fsync(file_.get()) == 0 && file_.close() == 0) return {};
    return fail(ErrorCode::kIo, "cannot flush {} to disk: {}", target_.path.string(), errno_text());
  }

  Status take_place() {
    const fs::path folder = folder_of(target_.path);
    const auto cannot_flush = [&folder] {
      return fail(ErrorCode::kIo, "cannot flush the directory {}: {}", folder.string(),
                  errno_text());
    };
    // A folder that may be written but not read is flushed with all of its file system.
    Descriptor flushed(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
    const bool is_folder = flushed.is_open();
    if (!is_folder) flushed = Descriptor(::open(path_.c_str(), O_RDONLY | O_CLOEXEC));
    if (!flushed.is_open()) return cannot_flush();
    if (::rename(path_.c_str(), target_.path.c_str()) != 0) {
      return fail(ErrorCode::kIo, "cannot rename {} to {}: {}", path_.string(),
                  target_.path.string(), errno_text());
    }
    is_there_ = false;
    if ((is_folder ? ::fsync(flushed.get()) : ::syncfs(flushed.get())) != 0) return cannot_flush();
    remove_leftovers(target_.path);
    return {};
  }

 private:
  explicit NewFile(Target target) : target_(std::move(target)) {}
  Target target_;
  Descriptor file_;
  fs::path path_, journal_;
  bool is_there_ = false;
};

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

Status check_writable(const fs::path& path) {
  return may_write(F8_TRY(find_target(path)));
}

Status write_file_atomic(const fs::path& path, std::string_view bytes) {
  Target target = F8_TRY(find_target(path));
  if (!target.is_replaced()) {
    const Descriptor stream = F8_TRY(open_stream(std::move(target)));
    return write_all(stream.get(), path.string(), bytes);
  }
  NewFile file = F8_TRY(NewFile::create(std::move(target)));
  F8_TRY(write_all(file.fd(), path.string(), bytes));
  F8_TRY(file.finish());
  return file.take_place();
}

Status write_files_atomic(std::span<const NamedBytes> files) {
  std::vector<NewFile> complete;
  std::vector<const NamedBytes*> streams;
  for (const NamedBytes& one : files) {
    Target target = F8_TRY(find_target(one.path));
    if (!target.is_replaced()) {
      F8_TRY(may_write(target));
      streams.push_back(&one);
      continue;
    }
    NewFile file = F8_TRY(NewFile::create(std::move(target)));
    F8_TRY(write_all(file.fd(), one.path.string(), one.bytes));
    F8_TRY(file.finish());
    complete.push_back(std::move(file));
  }
  for (NewFile& file : complete) F8_TRY(file.take_place());
  for (const NamedBytes* one : streams) F8_TRY(write_file_atomic(one->path, one->bytes));
  return {};
}

Status replace_file(const fs::path& path, const FillFile& fill) {
  Target target = F8_TRY(find_target(path));
  if (target.is_replaced()) {
    NewFile file = F8_TRY(NewFile::create(std::move(target)));
    F8_TRY(fill(file.path(), path));
    F8_TRY(file.finish());
    return file.take_place();
  }
  const TemporaryFolder folder = F8_TRY(TemporaryFolder::make("float8-"));
  const fs::path temporary = folder.path() / "file";
  F8_TRY(write_file_synced(temporary, {}));
  F8_TRY(fill(temporary, temporary));
  const Descriptor stream = F8_TRY(open_stream(std::move(target)));
  return copy(temporary, stream.get(), path.string());
}

Result<GrowingFile> GrowingFile::open(const fs::path& path) {
  Target target = F8_TRY(find_target(path));
  F8_TRY(may_write(target));
  GrowingFile file;
  file.path_ = path;
  if (!target.is_replaced()) file.stream_ = F8_TRY(open_stream(std::move(target)));
  return file;
}

Status GrowingFile::append(std::string_view bytes) {
  if (stream_.is_open()) return write_all(stream_.get(), path_.string(), bytes);
  bytes_ += bytes;
  return write_file_atomic(path_, bytes_);
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
  FolderNames names(folder);
  while (const char* name = names.next()) {
    if (!is_temporary(name)) continue;
    struct stat info {};
    if (::fstatat(names.directory(), name, &info, AT_SYMLINK_NOFOLLOW) != 0) continue;
    if (!S_ISREG(info.st_mode) || info.st_uid != ::geteuid()) continue;
    if (::time(nullptr) - info.st_mtime < kStaleSeconds) continue;
    ::unlinkat(names.directory(), name, 0);
  }
}

}  // namespace f8
