// Assigns the linears of a plan to the GPUs that measure them, so that all end at about the same time.
// Linears of one shape go to one GPU, which measures their common bf16 GEMMs once; the groups that
// are predicted to take longest go first. Where no group is left, a GPU takes from the one with the
// most left. A linear is with one GPU alone, since its candidates are compared with each other.
// Every function may be called from any thread.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "tools/tuner/search/plan/sweep_plan.hpp"

namespace f8::tuner {

// A linear under which so many GPUs were lost is assigned no more.
inline constexpr int kLossesToGiveUp = 2;

class Dispatcher {
 public:
  // Assigns the linears of `plan` whose problem keys are in `wanted`.
  Dispatcher(const SweepPlan& plan, const std::set<std::string>& wanted, size_t gpus);

  // The plan's linears in the order in which they are assigned.
  [[nodiscard]] std::vector<size_t> order() const;
  // The next linear of a GPU. It waits where all are assigned and not all are measured, since another
  // GPU may be lost. Nothing: all are measured or given up, or `ended` says true.
  [[nodiscard]] std::optional<size_t> next(size_t gpu, const std::function<bool()>& ended);
  // The linear that the GPU was assigned is measured. Failed ones are assigned again if the GPU is lost
  // before it measures another well.
  void measured(size_t gpu, bool failed);
  // Other GPUs take over what this one was assigned. Returns the failed ones, which it had measured.
  std::vector<size_t> lose(size_t gpu);

  struct Left {
    size_t linears = 0;  // not measured
    double predicted_s = 0, measured_s = 0;
  };
  [[nodiscard]] Left left() const;

 private:
  struct Share {  // of a GPU
    std::deque<size_t> linears;
    std::optional<size_t> running;
    std::vector<size_t> failed;  // since one was measured well
  };
  [[nodiscard]] double predicted_s(const std::deque<size_t>& linears) const;
  [[nodiscard]] std::optional<size_t> take(size_t gpu);

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<double> predicted_s_;  // by linear
  std::deque<std::deque<size_t>> groups_;
  std::vector<Share> shares_;
  std::vector<int> losses_;  // by linear
  Left left_;
  size_t given_up_ = 0;
};

}  // namespace f8::tuner
