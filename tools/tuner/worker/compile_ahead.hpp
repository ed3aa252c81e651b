// Compiles kernels on all cores ahead of the device: they are asked for in the order in which they
// will be needed, threads compile them into the cubin cache, and the sweep waits for the one that
// it needs next. The worker process finds them in the cache.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "codegen/cubin_cache.hpp"
#include "codegen/kernel_spec.hpp"

namespace f8::tuner {

class CompileAhead {
 public:
  using CubinPtr = std::shared_ptr<const codegen::Cubin>;

  explicit CompileAhead(codegen::CubinCache cache, int threads = 0);  // 0: all cores
  ~CompileAhead();
  CompileAhead(const CompileAhead&) = delete;
  CompileAhead& operator=(const CompileAhead&) = delete;

  void want(const codegen::KernelSpec& spec);  // a second time has no effect
  // Waits until the kernel is compiled; `tick`, called a few times a second, gives up by true.
  [[nodiscard]] Result<CubinPtr> wait(const codegen::KernelSpec& spec,
                                      const std::function<bool()>& tick = nullptr);

  struct Count {
    size_t wanted = 0, done = 0;
  };
  [[nodiscard]] Count count() const;

 private:
  struct Entry {
    codegen::KernelSpec spec;
    std::unique_ptr<Result<CubinPtr>> result;  // null: not yet
  };
  void work();

  codegen::CubinCache cache_;
  mutable std::mutex mutex_;
  std::condition_variable queued_, finished_;
  std::map<std::string, Entry> entries_;
  std::deque<std::string> queue_;
  size_t done_ = 0;
  bool stop_ = false;
  std::vector<std::jthread> threads_;
};

}  // namespace f8::tuner
