// Workspaces by device and stream.
#include "python/shim/plans/workspace.hpp"

#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <cstring>
#include <exception>
#include <map>
#include <memory>
#include <shared_mutex>
#include <thread>
#include <tuple>
#include <utility>

#include "python/shim/base/cuda.hpp"

namespace float8_torch {
namespace {

// Larger calls take so long that an allocation of their own is lost in it.
constexpr size_t kMostKept = size_t{16} << 20;

constexpr size_t kMostCaptures = 64;  // that have launch counts of their own, of 2 MB each

struct Entry {
  std::mutex mutex;
  Tensor memory;
  size_t bytes = 0;
};

Entry& entry_of(const Place& place) {
  using Key = std::pair<int32_t, float8_stream>;
  static auto* const mutex = new std::shared_mutex;
  static auto* const entries = new std::map<Key, std::unique_ptr<Entry>>;
  const Key key{place.key(), place.stream};
  {
    const std::shared_lock lock(*mutex);
    if (const auto found = entries->find(key); found != entries->end()) return *found->second;
  }
  const std::unique_lock lock(*mutex);
  auto& entry = (*entries)[key];
  if (entry == nullptr) entry = std::make_unique<Entry>();
  return *entry;
}

size_t bytes_of_counts(const Place& place) {
  return float8_workspace_reserved_bytes(context_of(place.key()));
}

// The front becomes a new workspace's (float8.h, convention 6).
void clear_counts(Tensor memory, const Place& place) {
  const auto counts = std::min(static_cast<int64_t>(bytes_of_counts(place)), memory.numel());
  if (place.emulated) {
    // PyTorch would start threads for it, of which there are none in a child of fork().
    std::memset(memory.mutable_data_ptr(), 0, static_cast<size_t>(counts));
    return;
  }
  Tensor front = torch::stable::narrow(memory, 0, 0, counts);
  torch::stable::zero_(front);
}

// The launch counts of captured calls. A stream of a capture has some of its own, for as long as the
// process runs, since a graph may run again at any time; the graph clears them once, where it begins.
// Null where earlier captures have taken all that there may be.
void* counts_of_capture(const Place& place) {
  using Key = std::tuple<int32_t, uint64_t, float8_stream>;
  static auto* const mutex = new std::mutex;
  static auto* const captures = new std::map<Key, Tensor>;
  const std::lock_guard lock(*mutex);
  const Key key{place.key(), capture_id(place.stream), place.stream};
  if (const auto at = captures->find(key); at != captures->end()) {
    return at->second.mutable_data_ptr();
  }
  if (captures->size() == kMostCaptures) return nullptr;
  const Tensor memory = allocate_kept(place, bytes_of_counts(place));
  clear_counts(memory, place);
  return captures->emplace(key, memory).first->second.mutable_data_ptr();
}

}  // namespace

Tensor allocate_kept(const Place& place, size_t bytes) {
  Tensor memory;
  std::exception_ptr error;
  std::thread([&] {
    try {
      if (place.capturing) {
        allow_allocation_in_captures();
      } else if (!place.emulated) {
        set_current_stream(place.device.index, place.stream);
      }
      memory = empty_bytes(static_cast<int64_t>(bytes), place.device);
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
  return memory;
}

Workspace::Workspace(const Place& place, size_t bytes, Counts counts) {
  if (bytes == 0) return;
  const bool is_large = bytes > kMostKept;
  if (place.capturing || is_large) {
    own_ = empty_bytes(static_cast<int64_t>(bytes), place.device);
    data_ = own_.mutable_data_ptr();
    if (counts == Counts::kNone) return;
    if (counts == Counts::kInFront) {
      clear_counts(own_, place);
      return;
    }
  }
  if (place.capturing) {
    counts_ = counts_of_capture(place);
    if (counts_ == nullptr) clear_counts(own_, place);
    return;
  }
  Entry& entry = entry_of(place);
  lock_ = std::unique_lock(entry.mutex);
  // The buffer begins behind the counts, on a line of its own.
  const size_t before = counts == Counts::kNone ? (bytes_of_counts(place) + 255) / 256 * 256 : 0;
  const size_t kept = is_large ? bytes_of_counts(place) : before + bytes;
  if (entry.bytes < kept) [[unlikely]] {
    entry.memory = Tensor();  // freed in stream order, and then perhaps taken again
    entry.bytes = 0;
    entry.memory = allocate_kept(place, kept);
    entry.bytes = kept;
    // The allocator may give an earlier workspace's memory, to which others have written since.
    clear_counts(entry.memory, place);
  }
  void* const front = entry.memory.mutable_data_ptr();
  (is_large ? counts_ : data_) = static_cast<uint8_t*>(front) + before;
}

}  // namespace float8_torch
