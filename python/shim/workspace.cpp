// Workspaces by device and stream.
#include "python/shim/workspace.hpp"

#include <torch/csrc/stable/ops.h>

#include <exception>
#include <map>
#include <memory>
#include <shared_mutex>
#include <thread>
#include <utility>

#include "python/shim/cuda.hpp"

namespace float8_torch {
namespace {

// Clearing takes 2 us, which a call with more than this does not notice.
constexpr size_t kMostKept = size_t{16} << 20;

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

// Memory that is kept must not come from a pool that the calling thread allocates from for a while,
// as inductor's CUDA graphs do before they capture, so another thread takes it.
Tensor allocate(const Place& place, size_t bytes) {
  Tensor memory;
  std::exception_ptr error;
  std::thread([&] {
    try {
      if (!place.emulated) set_current_stream(place.device.index, place.stream);
      memory = empty_bytes(static_cast<int64_t>(bytes), place.device);
    } catch (...) {
      error = std::current_exception();
    }
  }).join();
  if (error) std::rethrow_exception(error);
  return memory;
}

}  // namespace

Workspace::Workspace(const Place& place, size_t bytes) {
  if (bytes == 0) return;
  if (place.capturing || bytes > kMostKept) {
    // The pool may give this memory to others between calls, so the reserved bytes are cleared,
    // which makes it a new workspace (float8.h, convention 6).
    own_ = empty_bytes(static_cast<int64_t>(bytes), place.device);
    data_ = own_.mutable_data_ptr();
    const size_t reserved = float8_workspace_reserved_bytes(context_of(place.key()));
    Tensor front = own_;
    front = torch::stable::narrow(front, 0, 0, static_cast<int64_t>(reserved));
    torch::stable::zero_(front);
    return;
  }
  Entry& entry = entry_of(place);
  lock_ = std::unique_lock(entry.mutex);
  if (entry.bytes < bytes) [[unlikely]] {
    entry.memory = Tensor();  // freed in stream order, and then perhaps taken again
    entry.bytes = 0;
    entry.memory = allocate(place, bytes);
    entry.bytes = bytes;
  }
  data_ = entry.memory.mutable_data_ptr();
}

}  // namespace float8_torch
