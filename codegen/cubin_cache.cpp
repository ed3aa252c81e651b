#include "codegen/cubin_cache.hpp"

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <future>
#include <mutex>
#include <thread>
#include <unordered_map>

#include "base/hash.hpp"
#include "base/log.hpp"
#include "base/without_exceptions.hpp"
#include "codegen/cubin_entry.hpp"

namespace f8::codegen {
namespace {

using SharedCubin = std::shared_ptr<const Cubin>;

constexpr std::string_view kNoDirectory =
    "compiled kernels are not kept, since neither FLOAT8_CACHE_DIR nor XDG_CACHE_HOME nor HOME "
    "names "
    "an absolute directory; set FLOAT8_CACHE_DIR to a directory of yours";

std::string_view option_name(std::string_view option) {
  return option.substr(0, option.find('='));
}

// The order is by name alone and stable: of two values for one name the last counts.
std::vector<std::string> sorted_options(const KernelSource& source) {
  std::vector<std::string> options = source.options;
  std::ranges::stable_sort(options, {}, option_name);
  return options;
}

Status check_source(const KernelSource& source) {
  if (source.entry.empty() || (source.key + source.entry).find('\n') != std::string::npos) {
    return fail(ErrorCode::kInvalidArgument,
                "kernel {}: its key and entry must be one line each, and the entry not empty",
                source.key);
  }
  for (const std::string& option : source.options) {
    if (option.starts_with('-')) continue;
    return fail(ErrorCode::kInvalidArgument,
                "kernel {}: the option '{}' does not start with '-'; write name and value as one "
                "word, --name=value",
                source.key, option);
  }
  return {};
}

}  // namespace

struct CubinCache::State {
  std::filesystem::path path;  // empty: in memory alone
  Compiler compiler;
  LockPatience patience;
  std::atomic_flag warned_of_store;
  std::atomic_flag warned_of_reading;
  mutable std::mutex mutex;                         // of what follows
  std::shared_ptr<const CacheDirectory> directory;  // as it was opened last
  NotStored not_stored;
  std::unordered_map<std::string, std::shared_future<Result<SharedCubin>>> kernels;

  [[nodiscard]] Result<SharedCubin> load_or_compile(const KernelSource& source,
                                                    const std::string& key);
  [[nodiscard]] std::shared_ptr<const CacheDirectory> opened() const {
    const std::lock_guard lock(mutex);
    return directory;
  }
  [[nodiscard]] Result<std::shared_ptr<const CacheDirectory>> open_again();
  [[nodiscard]] Result<SharedCubin> compile_unstored(const KernelSource& source,
                                                     const Error& reason);
  void count_unstored(const Error& reason);
};

Result<std::string> cache_key(const KernelSource& source) {
  F8_TRY(check_source(source));
  const NvrtcVersion version = F8_TRY(nvrtc_version());
  std::string identity =
      f8::format("entry format {}\ngenerator {}\nnvrtc {}.{}\n{}\n{}\n", kEntryFormat,
                 kGeneratorVersion, version.major, version.minor, source.key, source.entry);
  for (const std::string& option : sorted_options(source)) {
    identity += f8::format("{} {}\n", option.size(), option);
  }
  identity += f8::format("source {}\n{}", source.source.size(), source.source);
  return hash_hex(identity);
}

Result<CubinCache> CubinCache::open(const std::filesystem::path& directory, Compiler compiler,
                                    LockPatience patience) {
  auto state = std::make_shared<State>();
  state->compiler = compiler ? std::move(compiler) : Compiler(&compile);
  state->patience = patience;
  if (directory.empty()) {
    static std::atomic_flag said;
    if (!said.test_and_set()) log_warning("{}", kNoDirectory);
    return CubinCache(std::move(state));
  }
  state->directory =
      std::make_shared<const CacheDirectory>(F8_TRY(open_cache_directory(directory)));
  state->path = state->directory->path;
  remove_stale_temporaries(*state->directory);
  return CubinCache(std::move(state));
}

const std::filesystem::path& CubinCache::directory() const {
  return state_->path;
}

CubinCache::NotStored CubinCache::not_stored() const {
  const std::lock_guard lock(state_->mutex);
  return state_->not_stored;
}

// The directory was deleted while it was in use.
Result<std::shared_ptr<const CacheDirectory>> CubinCache::State::open_again() {
  auto fresh = std::make_shared<const CacheDirectory>(F8_TRY(open_cache_directory(path)));
  const std::lock_guard lock(mutex);
  directory = fresh;
  return fresh;
}

void CubinCache::State::count_unstored(const Error& reason) {
  const std::lock_guard lock(mutex);
  if (not_stored.kernels++ == 0) not_stored.reason = reason.message;
}

Result<SharedCubin> CubinCache::State::compile_unstored(const KernelSource& source,
                                                        const Error& reason) {
  auto cubin = std::make_shared<Cubin>(F8_TRY(compiler(source)));
  count_unstored(reason);
  return cubin;
}

Result<SharedCubin> CubinCache::State::load_or_compile(const KernelSource& source,
                                                       const std::string& key) {
  auto cache = opened();
  if (!cache) {
    return compile_unstored(source, {ErrorCode::kEnvironment, std::string(kNoDirectory)});
  }
  if (auto found = load_entry(*cache, key)) return std::make_shared<Cubin>(std::move(*found));

  auto lock = KeyLock::take(*cache, key, source.key, patience);
  if (!lock) {
    auto again = open_again();
    if (!again) {
      if (!warned_of_store.test_and_set()) {
        log_warning("kernels compiled now are not kept for the next start: {}",
                    again.error().message);
      }
      return compile_unstored(source, again.error());
    }
    cache = std::move(*again);
    lock = KeyLock::take(*cache, key, source.key, patience);
  }
  auto found = load_entry(*cache, key);  // another process may have been faster
  if (found) return std::make_shared<Cubin>(std::move(*found));
  if (found.error().code == ErrorCode::kEnvironment) {
    if (!warned_of_reading.test_and_set()) {
      log_warning("cached kernels of {} cannot be read and are compiled again: {}", path.string(),
                  found.error().message);
    }
    return compile_unstored(source, found.error());
  }
  if (found.error().code != ErrorCode::kNotFound) {
    log_warning("the cached kernel {} in {} is damaged ({}); compiling it again", source.key,
                (path / key).string(), found.error().message);
    if (Status removed = remove_entry(*cache, key); !removed) {
      log_info("{}", removed.error().message);
    }
  }

  Cubin cubin = F8_TRY(compiler(source));
  auto stored = store_entry(*cache, key, cubin);
  if (!stored) {
    count_unstored(stored.error());
    if (!warned_of_store.test_and_set()) {
      log_warning("kernels compiled now are not kept for the next start: {}",
                  stored.error().message);
    }
  }
  if (stored && *stored) return std::make_shared<Cubin>(std::move(**stored));
  return std::make_shared<Cubin>(std::move(cubin));
}

Result<SharedCubin> CubinCache::get(const KernelSource& source) {
  const std::string key = F8_TRY(cache_key(source));
  std::promise<Result<SharedCubin>> promise;
  {
    std::unique_lock lock(state_->mutex);
    if (const auto it = state_->kernels.find(key); it != state_->kernels.end()) {
      const auto kernel = it->second;
      lock.unlock();
      return kernel.get();
    }
    state_->kernels.emplace(key, promise.get_future().share());
  }
  Result<SharedCubin> kernel =
      without_exceptions([&] { return state_->load_or_compile(source, key); });
  if (!kernel) {  // a later call tries again
    const std::lock_guard lock(state_->mutex);
    state_->kernels.erase(key);
  }
  promise.set_value(kernel);
  return kernel;
}

namespace {

// The kernel that a process begins with. Ranks that want the same kernels begin far from each other,
// so that they share out the compiling instead of waiting for one of them.
size_t first_of(size_t kernels) {
  constexpr uint64_t kGoldenRatio = 0x9e3779b97f4a7c15u;
  const uint64_t spread = static_cast<uint64_t>(::getpid()) * kGoldenRatio >> 32;
  return static_cast<size_t>(spread * kernels >> 32);
}

}  // namespace

Result<std::vector<SharedCubin>> CubinCache::get_all(
    std::span<const KernelSource> sources, int threads,
    const std::function<void(size_t, size_t)>& progress) {
  if (threads < 0) {
    return fail(ErrorCode::kInvalidArgument, "{} threads to compile with; 0 means all cores",
                threads);
  }
  std::vector<Result<SharedCubin>> results(sources.size());
  std::atomic<size_t> next = 0;
  std::mutex progress_mutex;
  size_t done = 0;
  const size_t first = first_of(sources.size());
  const auto work = [&] {
    for (size_t n = next++; n < sources.size(); n = next++) {
      const size_t i = (first + n) % sources.size();
      results[i] = without_exceptions([&] { return get(sources[i]); });
      const Status told = without_exceptions([&]() -> Status {
        const std::lock_guard lock(progress_mutex);
        ++done;
        if (progress) progress(done, sources.size());
        return {};
      });
      if (!told) results[i] = std::unexpected(told.error());
    }
  };
  {
    const size_t wanted = threads > 0 ? static_cast<size_t>(threads)
                                      : std::max(1u, std::thread::hardware_concurrency());
    std::vector<std::jthread> pool;  // joins; the calling thread works too
    const Status started = without_exceptions([&]() -> Status {
      for (size_t i = 1; i < std::min(wanted, sources.size()); ++i) pool.emplace_back(work);
      return {};
    });
    if (!started) log_info("kernels are compiled by fewer threads: {}", started.error().message);
    work();
  }
  std::vector<SharedCubin> kernels;
  for (Result<SharedCubin>& result : results) {
    if (!result) return std::unexpected(std::move(result).error());
    kernels.push_back(std::move(*result));
  }
  return kernels;
}

}  // namespace f8::codegen
