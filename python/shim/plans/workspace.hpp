// The scratch memory of a call. A stream of a device has one workspace for small calls, which grows
// and is kept. A large call takes memory of its own, which is free for tensors after it, and so does
// a captured one: from the graph's own pool, which lives and is reused as the graph's other memory
// is. Their launch counts lie apart, in memory that nothing else uses.
#pragma once

#include <mutex>

#include "python/shim/plans/plans.hpp"

namespace float8_torch {

// Bytes that are kept for the life of the process. They must not come from a pool that the calling thread
// or a captured stream allocates from for a while, as inductor's CUDA graphs do before they capture, so
// another thread takes them: on the stream, or on the default one for a capture.
[[nodiscard]] Tensor allocate_kept(const Place& place, size_t bytes);

// Where the launch counts of a call may lie. Calls of lists have theirs at the front; those of experts
// have none, and their scratch is behind those of others.
enum class Counts { kAnywhere, kInFront, kNone };

// Holds the workspace for one call: the launches of two threads on one stream do not interleave.
class Workspace {
 public:
  Workspace(const Place& place, size_t bytes, Counts counts = Counts::kAnywhere);
  [[nodiscard]] void* data() const { return data_; }
  [[nodiscard]] void* launch_counts() const { return counts_; }  // null: at the front of `data`

 private:
  std::unique_lock<std::mutex> lock_;
  Tensor own_;
  void* data_ = nullptr;
  void* counts_ = nullptr;
};

}  // namespace float8_torch
