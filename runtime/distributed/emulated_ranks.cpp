#include "runtime/distributed/emulated_ranks.hpp"

#include <algorithm>
#include <array>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <span>
#include <string>
#include <utility>

#include "base/format.hpp"
#include "recipes/dtype.hpp"
#include "runtime/distributed/collective_call.hpp"
#include "runtime/emulation/stream.hpp"

namespace f8::runtime {
namespace {

using Clock = std::chrono::steady_clock;

// What a rank asks for.
struct Operation {
  CollectiveCall call;
  const void* send = nullptr;
  void* receive = nullptr;
  int root = 0;

  [[nodiscard]] bool fits(const Operation& other) const {
    return call == other.call && root == other.root;
  }
};

// Reduces `count` elements of all ranks, from element `first` of each on.
std::vector<std::byte> reduce(std::span<const Operation> ranks, size_t first, size_t count) {
  const CollectiveCall& any = ranks.front().call;
  const size_t bytes = element_bytes(any.type);
  std::vector<std::byte> out(count * bytes);
  std::memcpy(out.data(), static_cast<const std::byte*>(ranks.front().send) + first * bytes,
              out.size());
  for (const Operation& rank : ranks.subspan(1)) {
    const auto* from = static_cast<const std::byte*>(rank.send) + first * bytes;
    if (any.type == ncclUint32) {
      for (size_t i = 0; i < count; ++i) {
        uint32_t a = 0, b = 0;
        std::memcpy(&a, out.data() + i * 4, 4);
        std::memcpy(&b, from + i * 4, 4);
        a = any.op == ncclMax ? std::max(a, b) : a + b;
        std::memcpy(out.data() + i * 4, &a, 4);
      }
      continue;
    }
    const Dtype type = any.type == ncclFloat32    ? Dtype::kF32
                       : any.type == ncclBfloat16 ? Dtype::kBf16
                                                  : Dtype::kF16;
    for (size_t i = 0; i < count; ++i) {
      const auto at = static_cast<int64_t>(i);
      const float a = load_element(out.data(), at, type);
      const float b = load_element(from, at, type);
      store_element(out.data(), at, any.op == ncclMax ? std::max(a, b) : a + b, type);
    }
  }
  return out;
}

void execute(std::span<const Operation> ranks) {
  const CollectiveCall& any = ranks.front().call;
  const size_t bytes = any.count * element_bytes(any.type);
  if (bytes == 0) return;
  const auto receive = [](const Operation& rank, size_t at, const void* from, size_t size) {
    std::memmove(static_cast<std::byte*>(rank.receive) + at, from, size);
  };
  switch (any.kind) {
    case CollectiveKind::kAllReduce: {
      const std::vector<std::byte> sum = reduce(ranks, 0, any.count);
      for (const Operation& rank : ranks) receive(rank, 0, sum.data(), bytes);
      return;
    }
    case CollectiveKind::kReduceScatter: {
      const std::vector<std::byte> sum = reduce(ranks, 0, any.count * ranks.size());
      for (size_t r = 0; r < ranks.size(); ++r) {
        receive(ranks[r], 0, sum.data() + r * bytes, bytes);
      }
      return;
    }
    case CollectiveKind::kAllGather:
      for (const Operation& to : ranks) {
        for (size_t r = 0; r < ranks.size(); ++r) receive(to, r * bytes, ranks[r].send, bytes);
      }
      return;
    case CollectiveKind::kBroadcast:
      for (const Operation& to : ranks) {
        receive(to, 0, ranks[static_cast<size_t>(to.root)].send, bytes);
      }
  }
}

// The ranks of a communicator, and the operations that not all of them have left yet.
class World {
 public:
  World(int ranks, std::chrono::milliseconds timeout)
      : timeout_(timeout), next_(static_cast<size_t>(ranks)), gone_(next_.size()) {}
  [[nodiscard]] int ranks() const { return static_cast<int>(next_.size()); }

  // Brings a rank's next operation, and carries it out for all of them where the rank is the last
  // to come. Gives its number.
  uint64_t post(int rank, const Operation& operation) {
    const std::lock_guard lock(mutex_);
    const uint64_t number = next_[static_cast<size_t>(rank)]++;
    if (!failure_.empty()) return number;
    while (first_ + rounds_.size() <= number) rounds_.emplace_back(next_.size());
    Round& round = at(number);
    for (size_t other = 0; other < next_.size(); ++other) {
      if (!round.operations[other] || round.operations[other]->fits(operation)) continue;
      fail(ncclInvalidArgument,
           f8::format("operation {} of the communicator: rank {} calls {}, rank {} calls {}",
                      number, rank, in_words(operation.call), other,
                      in_words(round.operations[other]->call)));
      return number;
    }
    round.operations[static_cast<size_t>(rank)] = operation;
    if (++round.arrived < next_.size()) return number;
    std::vector<Operation> all;
    for (const auto& one : round.operations) all.push_back(*one);
    execute(all);
    round.done = true;
    changed_.notify_all();
    return number;
  }

  // Waits until all ranks have brought the operation.
  ncclResult_t wait(uint64_t number, std::string& why) {
    std::unique_lock lock(mutex_);
    const auto deadline = Clock::now() + timeout_;
    while (!is_done(number) && failure_.empty()) {
      if (const auto rank = missing(number, true)) {
        fail(ncclRemoteError,
             f8::format("{}: rank {} has left the communicator", name_of(number), *rank));
      } else if (changed_.wait_until(lock, deadline) == std::cv_status::timeout &&
                 !is_done(number) && failure_.empty()) {
        fail(ncclRemoteError, f8::format("{}: rank {} did not come within {} ms", name_of(number),
                                         missing(number, false).value_or(0), timeout_.count()));
      }
    }
    if (is_done(number)) {
      leave(number);
      return ncclSuccess;
    }
    why = failure_;
    return code_;
  }

  // The rank brings no more operations.
  void go(int rank, const char* how) {
    const std::lock_guard lock(mutex_);
    gone_[static_cast<size_t>(rank)] = true;
    if (how != nullptr && failure_.empty()) {
      fail(ncclRemoteError, f8::format("rank {} {} the communicator", rank, how));
    }
    changed_.notify_all();
  }
  [[nodiscard]] ncclResult_t state() {
    const std::lock_guard lock(mutex_);
    return failure_.empty() ? ncclSuccess : code_;
  }

 private:
  struct Round {
    explicit Round(size_t ranks) : operations(ranks) {}
    std::vector<std::optional<Operation>> operations;
    size_t arrived = 0;
    size_t left = 0;
    bool done = false;
  };

  Round& at(uint64_t number) { return rounds_[number - first_]; }
  [[nodiscard]] bool is_done(uint64_t number) {
    return number < first_ + rounds_.size() && at(number).done;
  }
  void leave(uint64_t number) {
    ++at(number).left;
    while (!rounds_.empty() && rounds_.front().left == next_.size()) {
      rounds_.pop_front();
      ++first_;
    }
  }
  void fail(ncclResult_t code, std::string why) {
    code_ = code;
    failure_ = std::move(why);
    changed_.notify_all();
  }
  // The first rank that has not brought the operation (`gone`: and never will).
  std::optional<size_t> missing(uint64_t number, bool gone) {
    for (size_t rank = 0; rank < next_.size(); ++rank) {
      if (!at(number).operations[rank] && (!gone || gone_[rank])) return rank;
    }
    return std::nullopt;
  }
  std::string name_of(uint64_t number) {
    for (const auto& one : at(number).operations) {
      if (one)
        return f8::format("operation {} of the communicator, {}", number, in_words(one->call));
    }
    return f8::format("operation {} of the communicator", number);
  }

  const std::chrono::milliseconds timeout_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<uint64_t> next_;  // the number of each rank's next operation
  std::vector<bool> gone_;
  std::deque<Round> rounds_;
  uint64_t first_ = 0;  // the number of rounds_.front()
  std::string failure_;
  ncclResult_t code_ = ncclSuccess;
};

struct Rank {
  std::shared_ptr<World> world;
  int rank = 0;
};

// A handle is the address of a byte of this array, so that telling it from one of NCCL's takes no
// lock. A byte is not used again before all others were.
std::array<char, 4096> g_handles;
struct Handles {
  std::mutex mutex;
  std::array<Rank, g_handles.size()> ranks;
  size_t next = 0;
};
Handles& handles() {
  static Handles all;
  return all;
}

thread_local std::string g_failure;

ncclResult_t refuse(ncclResult_t result, std::string why) {
  g_failure = std::move(why);
  return result;
}

size_t index_of(const ncclComm* communicator) {
  return static_cast<size_t>(reinterpret_cast<const char*>(communicator) - g_handles.data());
}

Rank rank_of(const ncclComm* communicator) {
  Handles& all = handles();
  const std::lock_guard lock(all.mutex);
  return all.ranks[index_of(communicator)];
}

Rank take(const ncclComm* communicator) {
  Handles& all = handles();
  const std::lock_guard lock(all.mutex);
  return std::exchange(all.ranks[index_of(communicator)], {});
}

ncclResult_t no_communicator() {
  return refuse(ncclInvalidArgument, "the communicator was destroyed");
}

// --- operations
struct Pending {
  Rank rank;
  Operation operation;
  emulation::Graph* graph = nullptr;  // of a stream under capture
};
struct Group {
  int depth = 0;
  std::vector<Pending> pending;
};
thread_local Group g_group;

CUresult run_in_graph(const Rank& rank, const Operation& operation) {
  std::string why;
  const ncclResult_t result = rank.world->wait(rank.world->post(rank.rank, operation), why);
  return result == ncclSuccess ? CUDA_SUCCESS : emulation::refuse(CUDA_ERROR_UNKNOWN, why);
}

ncclResult_t run(const std::vector<Pending>& pending) {
  std::vector<std::pair<World*, uint64_t>> posted;
  for (const Pending& one : pending) {
    if (one.graph != nullptr) {
      one.graph->operations.emplace_back(
          [rank = one.rank, operation = one.operation] { return run_in_graph(rank, operation); });
      continue;
    }
    posted.emplace_back(one.rank.world.get(), one.rank.world->post(one.rank.rank, one.operation));
  }
  ncclResult_t result = ncclSuccess;
  for (const auto& [world, number] : posted) {
    const ncclResult_t one = world->wait(number, g_failure);
    if (result == ncclSuccess) result = one;
  }
  return result;
}

ncclResult_t enqueue(const Operation& operation, ncclComm_t communicator, cudaStream_t stream) {
  Pending pending{rank_of(communicator), operation};
  if (pending.rank.world == nullptr) return no_communicator();
  if (emulation::capture_of(stream, pending.graph) != CUDA_SUCCESS) {
    return refuse(ncclInvalidArgument, emulation::last_refusal());
  }
  if (g_group.depth == 0) return run({std::move(pending)});
  g_group.pending.push_back(std::move(pending));
  return ncclSuccess;
}

ncclResult_t all_reduce(const void* send, void* receive, size_t count, ncclDataType_t type,
                        ncclRedOp_t op, ncclComm_t communicator, cudaStream_t stream) {
  return enqueue({{CollectiveKind::kAllReduce, count, type, op}, send, receive}, communicator,
                 stream);
}
ncclResult_t all_gather(const void* send, void* receive, size_t count, ncclDataType_t type,
                        ncclComm_t communicator, cudaStream_t stream) {
  return enqueue({{CollectiveKind::kAllGather, count, type}, send, receive}, communicator, stream);
}
ncclResult_t reduce_scatter(const void* send, void* receive, size_t count, ncclDataType_t type,
                            ncclRedOp_t op, ncclComm_t communicator, cudaStream_t stream) {
  return enqueue({{CollectiveKind::kReduceScatter, count, type, op}, send, receive}, communicator,
                 stream);
}
ncclResult_t broadcast(const void* send, void* receive, size_t count, ncclDataType_t type, int root,
                       ncclComm_t communicator, cudaStream_t stream) {
  return enqueue({{CollectiveKind::kBroadcast, count, type}, send, receive, root}, communicator,
                 stream);
}
ncclResult_t group_start() {
  ++g_group.depth;
  return ncclSuccess;
}
ncclResult_t group_end() {
  if (g_group.depth == 0) return refuse(ncclInvalidUsage, "no group was started");
  if (--g_group.depth > 0) return ncclSuccess;
  return run(std::exchange(g_group.pending, {}));
}

// --- communicators
ncclResult_t comm_count(const ncclComm_t communicator, int* count) {
  const Rank rank = rank_of(communicator);
  if (rank.world == nullptr) return no_communicator();
  *count = rank.world->ranks();
  return ncclSuccess;
}
ncclResult_t comm_user_rank(const ncclComm_t communicator, int* out) {
  const Rank rank = rank_of(communicator);
  if (rank.world == nullptr) return no_communicator();
  *out = rank.rank;
  return ncclSuccess;
}
ncclResult_t comm_async_error(ncclComm_t communicator, ncclResult_t* out) {
  const Rank rank = rank_of(communicator);
  if (rank.world == nullptr) return no_communicator();
  *out = rank.world->state();
  return ncclSuccess;
}
ncclResult_t comm_destroy(ncclComm_t communicator) {
  const Rank rank = take(communicator);
  if (rank.world == nullptr) return no_communicator();
  rank.world->go(rank.rank, nullptr);
  return ncclSuccess;
}
ncclResult_t comm_abort(ncclComm_t communicator) {
  const Rank rank = take(communicator);
  if (rank.world == nullptr) return no_communicator();
  rank.world->go(rank.rank, "has aborted");
  return ncclSuccess;
}
const char* get_error_string(ncclResult_t) {
  return g_failure.c_str();
}

}  // namespace

Result<std::vector<ncclComm*>> make_emulated_ranks(int ranks, std::chrono::milliseconds timeout) {
  if (ranks < 1 || ranks > kMostEmulatedRanks) {
    return f8::fail(ErrorCode::kInvalidArgument,
                    "a communicator of {} emulated ranks; there are 1 to {}", ranks,
                    kMostEmulatedRanks);
  }
  const auto world = std::make_shared<World>(ranks, timeout);
  Handles& all = handles();
  const std::lock_guard lock(all.mutex);
  std::vector<ncclComm*> out;
  for (size_t tried = 0; tried < g_handles.size() && std::cmp_less(out.size(), ranks); ++tried) {
    const size_t i = all.next++ % g_handles.size();
    if (all.ranks[i].world != nullptr) continue;
    all.ranks[i] = {world, static_cast<int>(out.size())};
    out.push_back(reinterpret_cast<ncclComm*>(&g_handles[i]));
  }
  if (std::cmp_equal(out.size(), ranks)) return out;
  for (ncclComm* one : out) all.ranks[index_of(one)] = {};
  return f8::fail(ErrorCode::kOutOfMemory,
                  "there are {} emulated ranks already; destroy communicators that are done",
                  g_handles.size());
}

bool is_emulated(const ncclComm* communicator) {
  const auto at = reinterpret_cast<uintptr_t>(communicator);
  const auto first = reinterpret_cast<uintptr_t>(g_handles.data());
  return at >= first && at < first + g_handles.size();
}

const Nccl& emulated_nccl() {
  static const Nccl table = [] {
    Nccl made;
    made.all_reduce = all_reduce;
    made.all_gather = all_gather;
    made.reduce_scatter = reduce_scatter;
    made.broadcast = broadcast;
    made.comm_destroy = comm_destroy;
    made.comm_abort = comm_abort;
    made.comm_count = comm_count;
    made.comm_user_rank = comm_user_rank;
    made.comm_async_error = comm_async_error;
    made.group_start = group_start;
    made.group_end = group_end;
    made.get_error_string = get_error_string;
    made.hint = "";
    return made;
  }();
  return table;
}

}  // namespace f8::runtime
