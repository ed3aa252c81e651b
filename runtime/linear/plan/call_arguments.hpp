// The arguments of a call of a linear by slot, and addresses in them that a plan knows before any
// call.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "float8/float8.h"
#include "runtime/quantize/delayed_scales.hpp"

namespace f8::runtime {

enum class Slot : uint8_t {
  kNone,  // its refs are null
  kX,     // from here to kStrided their rows may be further apart than they are long
  kW,
  kY,
  kDy,
  kDx,
  kDw,
  kStrided,
  kBias = kStrided,
  kDb,
  kSaved,
  kTensor,      // the copies of a tensor that a quantizer fills
  kTransposed,  // qt of a tensor whose copies are apart
  kWorkspace,
  kLaunchCounts,  // the reserved bytes, wherever they are
  // The GEMMs read x, w and dy in fp8 from these, wherever they lie.
  kInputQ,
  kInputQInverse,
  kInputQt,
  kInputQtInverse,
  kWeightQ,
  kWeightQInverse,
  kWeightQt,
  kWeightQtInverse,
  kGradOutputQ,
  kGradOutputQInverse,
  kGradOutputQt,
  kGradOutputQtInverse,
  kInputScale,  // which forward found, where backward casts again
  kWeightScale,
  kRankAmax,  // of a shard: the words that ranks reduce
  kRowAmax,   // and those of its own rows
  kAmax,      // ScaleSlots::amax
  kScale,     // ScaleSlots::scale
  kCounters,
  kNoopFlag,
  kCount
};

// An address in an argument, null where the argument is; packed, for a plan keeps many.
class Ref {
 public:
  constexpr Ref(Slot slot = Slot::kNone, size_t offset = 0)  // NOLINT: a slot is a ref to its start
      : packed_(static_cast<uint64_t>(slot) << kOffsetBits | offset) {}
  [[nodiscard]] size_t slot() const { return packed_ >> kOffsetBits; }
  [[nodiscard]] size_t offset() const { return packed_ & ((uint64_t{1} << kOffsetBits) - 1); }
  [[nodiscard]] Ref operator+(size_t bytes) const {
    Ref ref = *this;
    ref.packed_ += bytes;
    return ref;
  }

 private:
  static constexpr int kOffsetBits = 56;
  uint64_t packed_;
};

[[nodiscard]] inline Ref word_at(Ref words, int64_t index) {
  return words + sizeof(uint32_t) * static_cast<size_t>(index);
}

// What a call has in common with the others of its step.
template <class Call>
[[nodiscard]] const float8_step& step_of(const Call& call) {
  static constexpr float8_step kOrdinary;
  return call.step != nullptr ? *call.step : kOrdinary;
}

// Where a call's launch counts are: apart, if its step says so, else at the front of the workspace.
template <class Call>
[[nodiscard]] void* launch_counts(const Call& call) {
  void* apart = step_of(call).launch_counts.data;
  return apart != nullptr ? apart : call.workspace.data;
}

// The arguments of one call.
struct CallArguments {
  std::array<void*, static_cast<size_t>(Slot::kCount)> pointer = {};
  std::array<int64_t, static_cast<size_t>(Slot::kStrided)> ld = {};  // 0: dense
  int64_t m = 0;
  int64_t first_row = 0;      // of a shard, in the whole tensor
  int64_t weight_shards = 1;  // of qt
  bool accumulate_bias = false;
  ScaleSlots scales = {};
  float8_nccl_comm ranks = nullptr;
  AmaxReducer reduce = nullptr;

  void set(Slot slot, const void* to) {
    pointer[static_cast<size_t>(slot)] = const_cast<void*>(to);
  }
  void set(Slot slot, const void* to, int64_t stride) {
    set(slot, to);
    ld[static_cast<size_t>(slot)] = stride;
  }
  [[nodiscard]] int64_t stride(Ref ref) const {
    return ref.slot() < ld.size() ? ld[ref.slot()] : 0;
  }
  template <class T>
  [[nodiscard]] T* at(Ref ref) const {
    auto* base = static_cast<uint8_t*>(pointer[ref.slot()]);
    return reinterpret_cast<T*>(base == nullptr ? nullptr : base + ref.offset());
  }
};

}  // namespace f8::runtime
