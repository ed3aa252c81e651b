// The cache directory: who may write it, what a crash left in it, and the lock of a key.
#pragma once

#include <string>

#include "base/file.hpp"

namespace f8::codegen {

// The absolute path of a directory that exists and that nobody else can write, or the one thing to
// do about it.
[[nodiscard]] Result<fs::path> open_cache_directory(const fs::path& directory);

// Makes what is missing of the path, with mode 0700. An existing directory is left as it is.
[[nodiscard]] Status make_private_directories(const fs::path& directory);

// Removes the temporary directories of dead processes that are older than an hour.
void remove_stale_temporaries(const fs::path& directory);

// A lock on a file (flock), which ends with the process that has it, even if that is killed. Where
// the directory cannot be written or the file system has no locks, it locks nothing: work may then
// be done twice, never wrongly, because entries appear by a rename.
class KeyLock {
 public:
  explicit KeyLock(const fs::path& file);
  KeyLock(const KeyLock&) = delete;
  KeyLock& operator=(const KeyLock&) = delete;
  ~KeyLock();

 private:
  int fd_ = -1;
};

}  // namespace f8::codegen
