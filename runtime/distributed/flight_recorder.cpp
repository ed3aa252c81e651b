#include "runtime/distributed/flight_recorder.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <vector>

#include "base/format.hpp"

namespace f8::runtime {
namespace {

constexpr size_t kKept = 64;
constexpr size_t kMostRanks = 1024;

// A call as one word: kind in bits 0-3, type in 4-7, op in 8-11, count above.
uint64_t packed(const CollectiveCall& call) {
  return uint64_t{call.count} << 12 | static_cast<uint64_t>(call.op) << 8 |
         static_cast<uint64_t>(call.type) << 4 | static_cast<uint64_t>(call.kind);
}
CollectiveCall unpacked(uint64_t word) {
  return {static_cast<CollectiveKind>(word & 15), static_cast<size_t>(word >> 12),
          static_cast<ncclDataType_t>(word >> 4 & 15), static_cast<ncclRedOp_t>(word >> 8 & 15)};
}

enum class Presence : uint8_t { kHere, kDestroyed, kAborted };

// The calls and waits of a rank, as another rank reads them.
struct RankState {
  uint64_t calls = 0;
  uint64_t waits = 0;
  Presence presence = Presence::kHere;
  uint64_t first_kept = 0;  // calls from this number on are in `recent`
  std::array<uint64_t, kKept> recent{};

  [[nodiscard]] bool has(uint64_t number) const { return number >= first_kept && number < calls; }
  [[nodiscard]] uint64_t call(uint64_t number) const { return recent[number % kKept]; }
};

std::string joined(const std::vector<size_t>& ranks) {
  std::string out = ranks.size() == 1 ? "rank " : "ranks ";
  for (size_t i = 0; i < ranks.size(); ++i) out += f8::format("{}{}", i == 0 ? "" : ", ", ranks[i]);
  return out;
}

}  // namespace

class FlightRecorder {
 public:
  explicit FlightRecorder(size_t ranks) : ranks_(ranks) {}
  [[nodiscard]] size_t ranks() const { return ranks_.size(); }

  // A rank makes its calls one after the other.
  void add_call(size_t rank, const CollectiveCall& call) {
    Rank& own = ranks_[rank];
    const uint64_t number = own.calls.load(std::memory_order_relaxed);
    own.recent[number % kKept].store(packed(call), std::memory_order_relaxed);
    own.calls.store(number + 1, std::memory_order_release);
  }
  void add_wait(size_t rank) { ranks_[rank].waits.fetch_add(1, std::memory_order_relaxed); }
  void set_presence(size_t rank, Presence presence) {
    ranks_[rank].presence.store(presence, std::memory_order_release);
  }
  [[nodiscard]] Presence presence(size_t rank) const {
    return ranks_[rank].presence.load(std::memory_order_acquire);
  }
  [[nodiscard]] RankState state(size_t rank) const {
    const Rank& from = ranks_[rank];
    RankState out;
    out.presence = presence(rank);
    out.waits = from.waits.load(std::memory_order_relaxed);
    out.calls = from.calls.load(std::memory_order_acquire);
    for (size_t i = 0; i < kKept; ++i) out.recent[i] = from.recent[i].load();
    // The rank may go on meanwhile, and is then about to replace one more.
    const uint64_t after = from.calls.load(std::memory_order_acquire);
    out.first_kept = after < kKept ? 0 : after - kKept + 1;
    return out;
  }

 private:
  struct alignas(64) Rank {
    std::atomic<uint64_t> calls{0};
    std::atomic<uint64_t> waits{0};
    std::atomic<Presence> presence{Presence::kHere};
    std::array<std::atomic<uint64_t>, kKept> recent{};
  };
  std::vector<Rank> ranks_;
};

namespace {

// A slot's recorder and rank change only while its communicator is null, and under the mutex.
struct Slot {
  std::atomic<const ncclComm*> communicator{nullptr};
  std::shared_ptr<FlightRecorder> recorder;
  size_t rank = 0;
};
std::array<Slot, kMostRanks> g_slots;
std::atomic<size_t> g_used{0};  // slots behind these were never used
std::mutex g_mutex;

Slot* slot_of(const ncclComm* communicator) {
  const size_t used = g_used.load(std::memory_order_acquire);
  for (size_t i = 0; i < used; ++i) {
    if (g_slots[i].communicator.load(std::memory_order_acquire) == communicator) {
      return &g_slots[i];
    }
  }
  return nullptr;
}

std::vector<Slot*> free_slots(size_t count) {
  std::vector<Slot*> out;
  for (size_t i = 0; i < g_slots.size() && out.size() < count; ++i) {
    if (g_slots[i].communicator.load(std::memory_order_relaxed) == nullptr) {
      out.push_back(&g_slots[i]);
    }
  }
  return out;
}

// The first call, of those that are known of both ranks, in which they differ.
std::optional<uint64_t> first_difference(const RankState& a, const RankState& b) {
  const uint64_t end = std::min(a.calls, b.calls);
  for (uint64_t number = std::max(a.first_kept, b.first_kept); number < end; ++number) {
    if (a.call(number) != b.call(number)) return number;
  }
  return std::nullopt;
}

std::string left(const std::vector<RankState>& ranks, const std::vector<size_t>& missing) {
  const bool all = std::ranges::all_of(
      missing, [&](size_t rank) { return ranks[rank].presence == Presence::kDestroyed; });
  return all ? " and left the communicator" : "";
}

std::string diagnose(const std::vector<RankState>& ranks, size_t self) {
  const RankState& own = ranks[self];
  uint64_t fewest = own.calls;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    fewest = std::min(fewest, ranks[rank].calls);
    const auto number = first_difference(own, ranks[rank]);
    if (!number) continue;
    return f8::format("operation {} of the communicator: rank {} calls {}, rank {} calls {}",
                      *number, self, in_words(unpacked(own.call(*number))), rank,
                      in_words(unpacked(ranks[rank].call(*number))));
  }
  std::vector<size_t> missing;
  if (fewest < own.calls) {
    for (size_t rank = 0; rank < ranks.size(); ++rank) {
      if (ranks[rank].calls == fewest) missing.push_back(rank);
    }
    return f8::format("operation {} of the communicator{}{}: {} did not come{}", fewest,
                      own.has(fewest) ? ", " : "",
                      own.has(fewest) ? in_words(unpacked(own.call(fewest))) : "", joined(missing),
                      left(ranks, missing));
  }
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    if (ranks[rank].waits < own.waits) missing.push_back(rank);
  }
  if (!missing.empty()) {
    return f8::format("all ranks have made its calls ({}), and {} did not come to this wait{}",
                      own.calls, joined(missing), left(ranks, missing));
  }
  return f8::format(
      "all ranks have made its calls ({}) and come to this wait; a device is behind, or graphs "
      "that are replayed have different calls",
      own.calls);
}

}  // namespace

void start_recording(std::span<ncclComm* const> ranks) {
  const auto recorder = std::make_shared<FlightRecorder>(ranks.size());
  const std::lock_guard lock(g_mutex);
  const std::vector<Slot*> slots = free_slots(ranks.size());
  if (slots.size() < ranks.size()) return;
  for (size_t rank = 0; rank < ranks.size(); ++rank) {
    slots[rank]->recorder = recorder;
    slots[rank]->rank = rank;
    slots[rank]->communicator.store(ranks[rank], std::memory_order_release);
  }
  const auto used = static_cast<size_t>(slots.back() - g_slots.data()) + 1;
  g_used.store(std::max(used, g_used.load()), std::memory_order_release);
}

void stop_recording(const ncclComm* communicator, bool aborted) {
  const std::lock_guard lock(g_mutex);
  Slot* const slot = slot_of(communicator);
  if (slot == nullptr) return;
  slot->recorder->set_presence(slot->rank, aborted ? Presence::kAborted : Presence::kDestroyed);
  slot->communicator.store(nullptr, std::memory_order_release);
  slot->recorder.reset();
}

void record_call(const ncclComm* communicator, const CollectiveCall& call) {
  if (const Slot* slot = slot_of(communicator)) slot->recorder->add_call(slot->rank, call);
}

RecordedWait::RecordedWait(const ncclComm* communicator) {
  const std::lock_guard lock(g_mutex);
  const Slot* const slot = slot_of(communicator);
  if (slot == nullptr) return;
  slot->recorder->add_wait(slot->rank);
  recorder_ = slot->recorder;
  rank_ = static_cast<int>(slot->rank);
}

std::optional<int> RecordedWait::aborted_rank() const {
  for (size_t rank = 0; recorder_ != nullptr && rank < recorder_->ranks(); ++rank) {
    if (std::cmp_not_equal(rank, rank_) && recorder_->presence(rank) == Presence::kAborted) {
      return static_cast<int>(rank);
    }
  }
  return std::nullopt;
}

std::string RecordedWait::diagnosis() const {
  if (recorder_ == nullptr) {
    return "another rank did not come, or makes other calls; which one is known only of "
           "communicators that float8_comms_create made";
  }
  std::vector<RankState> ranks;
  for (size_t rank = 0; rank < recorder_->ranks(); ++rank) ranks.push_back(recorder_->state(rank));
  return diagnose(ranks, static_cast<size_t>(rank_));
}

}  // namespace f8::runtime
