// Compiled kernels on disk, shared by processes and ranks. Loading a cubin is running code, so only
// its owner (or root) may be able to write the directory.
//
//   cache     := DIR "/" (entry | lock | temporary)*
//   entry     := key "/" { "kernel.cubin", "manifest" }     complete as soon as it exists
//   lock      := key ".lock"                                flock'ed while key is compiled
//                [ pid " " host LF ]                        who locked it last
//   temporary := "tmp." pid "." random                      becomes an entry by one rename
//   key       := 32 hex digits, cache_key() below
//   manifest  := "float8 cubin 1" LF
//                "key " key LF  "kernel " spec-key LF  "entry " name LF
//                "cubin_bytes " int LF  "cubin_checksum " hash LF
//                "registers " int LF  "spill_bytes " int LF  "smem_bytes " int LF
//                "compile_ms " decimal LF  "log_bytes " int LF  log LF
//                "checksum " hash LF                        of all bytes before this line
//   hash      := 32 hex digits, hash_hex() of base/hash.hpp
//
// The directory is opened once and used by descriptor, so that what was checked is what is used.
// An entry whose checksums do not hold, or that somebody else could have written, is compiled again,
// with a warning. A kernel that cannot be stored (full disk, read-only directory) is returned from
// memory, with one warning for all of them.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "codegen/cache_lock.hpp"
#include "codegen/nvrtc.hpp"

namespace f8::codegen {

class CubinCache {
 public:
  using Compiler = std::function<Result<Cubin>(const KernelSource&)>;

  // Creates the directory (0700) where it is missing; refuses one that others can write. An empty
  // path is no directory: kernels are kept in memory alone, and a warning says so once a process.
  // `compiler` and `patience` are for tests; the default compiler is compile().
  [[nodiscard]] static Result<CubinCache> open(const std::filesystem::path& directory,
                                               Compiler compiler = nullptr,
                                               LockPatience patience = {});

  // Returns a kernel from memory, else from disk, else compiles and keeps it. It is thread-safe,
  // and processes that want the same kernel at once compile it once.
  [[nodiscard]] Result<std::shared_ptr<const Cubin>> get(const KernelSource& source);
  // Returns all of them, compiled in parallel on `threads` (0: all cores); `progress(done, total)`
  // is called after each. Processes that want the same kernels share out the compiling.
  [[nodiscard]] Result<std::vector<std::shared_ptr<const Cubin>>> get_all(
      std::span<const KernelSource> sources, int threads = 0,
      const std::function<void(size_t, size_t)>& progress = nullptr);

  [[nodiscard]] const std::filesystem::path& directory() const;  // empty: in memory alone

  // The kernels that get() compiled and could not store, and the reason of the first of them.
  struct NotStored {
    size_t kernels = 0;
    std::string reason;
  };
  [[nodiscard]] NotStored not_stored() const;

 private:
  struct State;
  explicit CubinCache(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

// The identity of a compiled kernel: hash of source, sorted options, NVRTC version and generator
// version.
[[nodiscard]] Result<std::string> cache_key(const KernelSource& source);

}  // namespace f8::codegen
