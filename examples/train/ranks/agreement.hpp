// Ranks that agree: before a run's first step they compare what decides kernels and results, so that a
// rank with another shape, recipe or tuning table is an error of all ranks, and no hang.
#pragma once

#include <string>
#include <vector>

#include "device/backend.hpp"
#include "ranks/rank.hpp"

namespace train {

// What a rank has.
struct Fact {
  std::string topic;
  std::string text;
  std::string remedy;  // what to do where ranks differ
};

class Agreement {
 public:
  // Takes memory for `count` facts.
  Agreement(Backend& backend, const Rank& world, size_t count);
  // Throws the same error on all ranks where their facts differ, which names the first topic, a rank that
  // differs, and what it has. What most ranks have is right. All ranks have the same topics.
  void compare(const std::vector<Fact>& facts) const;

 private:
  Backend& backend_;
  Rank world_;
  size_t count_;
  void* own_ = nullptr;
  void* all_ = nullptr;
};

}  // namespace train
