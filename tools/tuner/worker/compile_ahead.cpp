#include "tools/tuner/worker/compile_ahead.hpp"

#include <algorithm>
#include <chrono>

#include "base/without_exceptions.hpp"

namespace f8::tuner {

using namespace std::chrono_literals;

CompileAhead::CompileAhead(codegen::CubinCache cache, int threads) : cache_(std::move(cache)) {
  const auto wanted = threads > 0 ? static_cast<unsigned>(threads)
                                  : std::max(1u, std::thread::hardware_concurrency());
  for (unsigned i = 0; i < wanted; ++i) threads_.emplace_back([this] { work(); });
}

CompileAhead::~CompileAhead() {
  {
    const std::lock_guard lock(mutex_);
    stop_ = true;
  }
  queued_.notify_all();
  threads_.clear();  // joins: a compile that has begun ends first
}

void CompileAhead::want(const codegen::KernelSpec& spec) {
  std::string key = codegen::key(spec);
  {
    const std::lock_guard lock(mutex_);
    const auto [entry, added] = entries_.try_emplace(key, Entry{.spec = spec, .result = nullptr});
    if (!added) return;
    queue_.push_back(std::move(key));
  }
  queued_.notify_one();
}

void CompileAhead::work() {
  std::unique_lock lock(mutex_);
  while (true) {
    queued_.wait(lock, [this] { return stop_ || !queue_.empty(); });
    if (stop_) return;
    const std::string key = std::move(queue_.front());
    queue_.pop_front();
    const codegen::KernelSpec spec = entries_.at(key).spec;
    lock.unlock();
    auto result = without_exceptions([&]() -> Result<CubinPtr> {
      const codegen::KernelSource source = F8_TRY(codegen::emit(spec));
      return cache_.get(source);
    });
    lock.lock();
    entries_.at(key).result = std::make_unique<Result<CubinPtr>>(std::move(result));
    ++done_;
    finished_.notify_all();
  }
}

Result<CompileAhead::CubinPtr> CompileAhead::wait(const codegen::KernelSpec& spec,
                                                  const std::function<bool()>& tick) {
  want(spec);
  const std::string key = codegen::key(spec);
  std::unique_lock lock(mutex_);
  const Entry& entry = entries_.at(key);
  while (!finished_.wait_for(lock, 200ms, [&] { return entry.result != nullptr; })) {
    if (!tick) continue;
    lock.unlock();
    if (tick()) return fail(ErrorCode::kInterrupted, "interrupted");
    lock.lock();
  }
  return *entry.result;
}

CompileAhead::Count CompileAhead::count() const {
  const std::lock_guard lock(mutex_);
  return {.wanted = entries_.size(), .done = done_};
}

}  // namespace f8::tuner
