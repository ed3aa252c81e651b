// The gradient of a step is the sum of those of its micro-batches: first over the ranks, in their
// order, then over the micro-batches of a rank. So a run on n ranks has the bits of one on a device
// with n micro-batches.
#pragma once

#include "device/backend.hpp"
#include "ranks/rank.hpp"

namespace train {

class GradSum {
 public:
  // `most` is the largest count of a sharded gradient on a rank.
  GradSum(Backend& backend, const Rank& rank, int64_t micro_batches, int64_t most)
      : backend_(backend), rank_(rank) {
    if (!rank.is_alone() && micro_batches > 1) {
      reduced_ = static_cast<float*>(backend.allocate(static_cast<size_t>(most) * sizeof(float)));
    }
  }

  // Where micro-batch `batch` leaves a gradient before add(): in its place, or in `scratch`.
  [[nodiscard]] float* target(float* grad, float* scratch, int64_t batch) const {
    return rank_.is_alone() && batch == 0 ? grad : scratch;
  }
  // Adds what target() gave to `grad`, which has `count` elements. A sharded gradient has that many
  // of each rank in scratch.
  void add(float* grad, float* scratch, int64_t count, bool sharded, int64_t batch);

 private:
  Backend& backend_;
  const Rank& rank_;
  float* reduced_ = nullptr;
};

}  // namespace train
