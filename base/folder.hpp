// Folders: the names in one, its removal with all that is in it, and private ones for temporary
// files. The standard library's directory iterators end the process where memory is short, since
// they allocate inside of functions that are noexcept; nothing here does.
#pragma once

#include <dirent.h>

#include <filesystem>
#include <string_view>

#include "base/error.hpp"

namespace f8 {

namespace fs = std::filesystem;

// The names in a directory, without "." and ".."; there are none where it cannot be read.
class FolderNames {
 public:
  explicit FolderNames(int directory);  // an open one, whose offset stays
  explicit FolderNames(const fs::path& folder);
  FolderNames(const FolderNames&) = delete;
  FolderNames& operator=(const FolderNames&) = delete;
  ~FolderNames();
  [[nodiscard]] int directory() const;  // its descriptor; -1: it cannot be read
  [[nodiscard]] const char* next();     // null after the last
 private:
  void begin(int own);
  DIR* stream_ = nullptr;
};

// Removes a file, or a directory with all that is in it, as far as that can be done. Links are not
// followed.
void remove_tree_at(int parent, const char* name) noexcept;

// Makes a folder and those above it; what a link names may not exist yet.
[[nodiscard]] Status make_folders(const fs::path& folder);

// Creates the private (mode 0700) directory `<parent>/<prefix>XXXXXX` and returns its path.
[[nodiscard]] Result<fs::path> make_temp_directory(const fs::path& parent, std::string_view prefix);

// A private folder below TMPDIR, or /tmp, that is removed with all that is in it at the end.
class TemporaryFolder {
 public:
  [[nodiscard]] static Result<TemporaryFolder> make(std::string_view prefix);
  TemporaryFolder(TemporaryFolder&& other) noexcept { path_.swap(other.path_); }
  TemporaryFolder& operator=(TemporaryFolder&&) = delete;
  ~TemporaryFolder();
  [[nodiscard]] const fs::path& path() const { return path_; }

 private:
  explicit TemporaryFolder(fs::path path) : path_(std::move(path)) {}
  fs::path path_;
};

}  // namespace f8
