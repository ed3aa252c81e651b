// Counts the allocations of the calling thread while it lives: run must make none.
#pragma once

namespace f8::runtime::testing {

class CountAllocations {
 public:
  CountAllocations();
  ~CountAllocations();
  CountAllocations(const CountAllocations&) = delete;
  CountAllocations& operator=(const CountAllocations&) = delete;
  [[nodiscard]] int count() const;
};

}  // namespace f8::runtime::testing
