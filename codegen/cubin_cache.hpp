// Compiled kernels on disk, shared by processes and ranks.
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

  // From memory, else from disk, else compiled and kept. Thread-safe; processes that want the same
  // kernel at once compile it once.
  [[nodiscard]] Result<std::shared_ptr<const Cubin>> get(const KernelSource& source);
  // All of them, compiled in parallel on `threads` (0: all cores); `progress(done, total)` after
  // each.
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
