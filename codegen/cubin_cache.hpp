// Compiled kernels on disk, shared by processes and ranks. Loading a cubin is running code, so only
// its owner (or root) may be able to write the directory.
//
//   cache     := DIR "/" (entry | lock | temporary)*
//   entry     := key "/" { "kernel.cubin", "manifest" }     complete as soon as it exists
//   lock      := key ".lock"                                empty; flock'ed while key is compiled
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
// An entry whose checksums do not hold is compiled again, with a warning. A kernel that cannot be
// stored (full disk, read-only directory) is returned from memory, with a warning.
#pragma once

#include <filesystem>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "codegen/nvrtc.hpp"

namespace f8::codegen {

class CubinCache {
 public:
  using Compiler = std::function<Result<Cubin>(const KernelSource&)>;

  // Creates the directory (0700) where it is missing; refuses one that others can write.
  // `compiler` is for tests; the default is compile().
  [[nodiscard]] static Result<CubinCache> open(const std::filesystem::path& directory,
                                               Compiler compiler = nullptr);

  // Returns a kernel from memory, else from disk, else compiles and keeps it. It is thread-safe,
  // and processes that want the same kernel at once compile it once.
  [[nodiscard]] Result<std::shared_ptr<const Cubin>> get(const KernelSource& source);
  // Returns all of them, compiled in parallel on `threads` (0: all cores); `progress(done, total)`
  // is called after each.
  [[nodiscard]] Result<std::vector<std::shared_ptr<const Cubin>>> get_all(
      std::span<const KernelSource> sources, int threads = 0,
      const std::function<void(size_t, size_t)>& progress = nullptr);

  [[nodiscard]] const std::filesystem::path& directory() const;

 private:
  struct State;
  explicit CubinCache(std::shared_ptr<State> state) : state_(std::move(state)) {}
  std::shared_ptr<State> state_;
};

// The identity of a compiled kernel: hash of source, sorted options, NVRTC version and generator
// version.
[[nodiscard]] Result<std::string> cache_key(const KernelSource& source);

}  // namespace f8::codegen
