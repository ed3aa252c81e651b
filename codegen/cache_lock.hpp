// The lock of a key: the processes that want the same kernel at once compile it once.
#pragma once

#include <chrono>
#include <optional>
#include <string>

#include "codegen/cache_directory.hpp"

namespace f8::codegen {

// How long a process waits for another one's lock: it says so, and later it compiles the kernel
// itself. A process that is stopped keeps its locks, and one that is killed does not.
struct LockPatience {
  std::chrono::milliseconds say_after{2000};
  std::chrono::milliseconds give_up_after{30000};
};

// A lock on the file "<key>.lock" (flock), which ends with the process that has it, even if that is
// killed. The file holds the process and the machine that locked it last, for messages. Where the
// directory cannot be written or the file system has no locks, and where patience ends, nothing is
// locked: work may then be done twice, never wrongly, because entries appear by a rename.
class KeyLock {
 public:
  // Nothing where the directory was deleted. `kernel` names the kernel in messages.
  [[nodiscard]] static std::optional<KeyLock> take(const CacheDirectory& cache,
                                                   const std::string& key,
                                                   const std::string& kernel,
                                                   const LockPatience& patience);
  KeyLock(KeyLock&&) = default;
  KeyLock& operator=(KeyLock&&) = default;
  ~KeyLock();

 private:
  explicit KeyLock(Descriptor file) : file_(std::move(file)) {}
  Descriptor file_;
};

}  // namespace f8::codegen
