#include "base/folder.hpp"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>

#include "base/descriptor.hpp"

namespace f8 {
namespace {

constexpr int kOpenDirectory = O_RDONLY | O_DIRECTORY | O_CLOEXEC;
constexpr int kDeepestTree = 16;  // our own trees have a depth of 2
constexpr int kMostLinks = 40;    // as the kernel's own limit

void remove_tree(int parent, const char* name, int depth) noexcept {
  if (::unlinkat(parent, name, 0) == 0 || depth == kDeepestTree) return;
  if (errno != EISDIR && errno != EPERM) return;  // POSIX says EPERM for a directory
  const Descriptor directory(::openat(parent, name, kOpenDirectory | O_NOFOLLOW));
  if (directory.is_open()) {
    FolderNames names(directory.get());
    while (const char* inner = names.next()) remove_tree(directory.get(), inner, depth + 1);
  }
  ::unlinkat(parent, name, AT_REMOVEDIR);
}

Result<fs::path> temporary_parent() {
  const char* value = std::getenv("TMPDIR");
  const bool given = value != nullptr && *value != '\0';
  fs::path folder = given ? value : "/tmp";
  struct stat info {};
  if (::stat(folder.c_str(), &info) == 0 && S_ISDIR(info.st_mode)) return folder;
  return fail(ErrorCode::kIo, "{}{} is no folder for temporary files; name one by TMPDIR",
              given ? "TMPDIR: " : "", quote(folder.native()));
}

}  // namespace

FolderNames::FolderNames(int directory) {
  // A stream closes its descriptor and moves its offset, so it gets one of its own.
  begin(::openat(directory, ".", kOpenDirectory));
}

FolderNames::FolderNames(const fs::path& folder) {
  begin(::open(folder.empty() ? "." : folder.c_str(), kOpenDirectory));
}

void FolderNames::begin(int own) {
  stream_ = own < 0 ? nullptr : ::fdopendir(own);
  if (stream_ == nullptr && own >= 0) ::close(own);
}

FolderNames::~FolderNames() {
  if (stream_ != nullptr) ::closedir(stream_);
}

int FolderNames::directory() const {
  return stream_ == nullptr ? -1 : ::dirfd(stream_);
}

const char* FolderNames::next() {
  while (const dirent* entry = stream_ == nullptr ? nullptr : ::readdir(stream_)) {
    const std::string_view name = entry->d_name;
    if (name != "." && name != "..") return entry->d_name;
  }
  return nullptr;
}

void remove_tree_at(int parent, const char* name) noexcept {
  remove_tree(parent, name, 0);
}

Status make_folders(const fs::path& folder) {
  const auto cannot = [&folder](std::string_view why) {
    return fail(ErrorCode::kIo, "cannot create the folder {}: {}; name another", folder.string(),
                why);
  };
  fs::path path = folder.has_filename() ? folder : folder.parent_path();
  struct stat info {};
  for (int links = 0; ::stat(path.c_str(), &info) != 0 && ::lstat(path.c_str(), &info) == 0;) {
    if (++links > kMostLinks) return cannot("too many symbolic links");
    std::error_code error;
    const fs::path link = fs::read_symlink(path, error);
    if (error) return cannot(error.message());
    path = path.parent_path() / link;
  }
  std::error_code error;
  fs::create_directories(path, error);
  if (error) return cannot(error.message());
  if (::stat(path.c_str(), &info) != 0) return cannot(errno_text());
  if (!S_ISDIR(info.st_mode)) return cannot(f8::format("it is {}", kind_of(info.st_mode)));
  return {};
}

Result<fs::path> make_temp_directory(const fs::path& parent, std::string_view prefix) {
  std::string name = (parent / (std::string(prefix) + "XXXXXX")).string();
  if (::mkdtemp(name.data()) == nullptr) {
    return fail(ErrorCode::kIo, "cannot create a directory in {}: {}", parent.string(),
                errno_text());
  }
  return fs::path(std::move(name));
}

Result<TemporaryFolder> TemporaryFolder::make(std::string_view prefix) {
  const fs::path parent = F8_TRY(temporary_parent());
  return TemporaryFolder(F8_TRY(make_temp_directory(parent, prefix)));
}

TemporaryFolder::~TemporaryFolder() {
  if (!path_.empty()) remove_tree_at(AT_FDCWD, path_.c_str());
}

}  // namespace f8
