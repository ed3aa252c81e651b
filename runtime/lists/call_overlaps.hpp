// The overlaps between the calls of a list, such as one weight's cache and another weight. A list of
// n regions is checked in n log n steps, and in n where its addresses are those of the run before.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "runtime/device/calls/call_memory.hpp"

namespace f8::runtime {

class CallOverlaps {
 public:
  void reserve(size_t regions);
  void clear() { regions_.clear(); }
  // Calls may have one region in common where `repeats` says so: slots that all of them add to.
  void add(const Region& region, size_t call, bool repeats) {
    regions_.push_back({region, call, repeats});
  }
  // The error names both tensors and the calls that they are of.
  [[nodiscard]] Status check(const char* name);

 private:
  struct OfCall {
    Region region;
    size_t call;
    bool repeats;
  };
  [[nodiscard]] uintptr_t end(size_t i) const {
    return regions_[i].region.begin + regions_[i].region.bytes();
  }
  [[nodiscard]] bool is_repeated(size_t i, size_t j) const;
  [[nodiscard]] std::unexpected<Error> refuse(const char* name, size_t a, size_t b) const;

  std::vector<OfCall> regions_;
  std::vector<uint32_t> order_;  // of the regions by address, as it was when they were checked last
};

// The memory of a plan's check. A second thread that runs the plan at the same time, which is rare,
// allocates its own.
class SharedOverlaps {
 public:
  explicit SharedOverlaps(size_t regions) { overlaps_.reserve(regions); }

  template <class Body>
  Status with(Body&& body) {
    if (taken_.test_and_set(std::memory_order_acquire)) {
      CallOverlaps own;
      return body(own);
    }
    const Release release{taken_};
    overlaps_.clear();
    return body(overlaps_);
  }

 private:
  struct Release {
    std::atomic_flag& taken;
    ~Release() { taken.clear(std::memory_order_release); }
  };
  std::atomic_flag taken_;
  CallOverlaps overlaps_;
};

}  // namespace f8::runtime
