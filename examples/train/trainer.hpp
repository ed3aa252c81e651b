// One run leads from a configuration to a loss curve, with checkpoints on the way.
#pragma once

#include <filesystem>
#include <functional>

#include "config.hpp"
#include "data.hpp"
#include "device/backend.hpp"
#include "report/curve.hpp"

namespace train {

struct RunOptions {
  std::filesystem::path checkpoint;  // where it is written
  int64_t save_every = 0;            // steps; 0: never
  std::filesystem::path resume;      // empty: the run begins at its start
  int64_t stop_after = 0;            // steps in all; 0: config.steps. The schedule is config's.
  int rank_timeout_ms = 0;           // after which a rank counts as gone; 0: 60 s
  int64_t report_every = 20;         // steps between two looks at the device
  std::function<void(const Curve&)> progress;  // after each look
};

struct RunResult {
  Curve curve;
  double tokens_per_second = 0;  // by the median time of a step; 0: there are too few steps
};

[[nodiscard]] RunResult train(Backend& backend, const TrainConfig& config, const Text& text,
                              const RunOptions& options);

using MakeBackend = std::function<std::unique_ptr<Backend>(int rank)>;

// Trains on config.ranks() ranks, a thread and a backend each, which `make_backend` gives by rank. The
// result is rank 0's, which reports and saves. Where a rank fails, all of them stop, and the first error
// is thrown, with the rank and what it did. The checkpoint is then that of the last step that was saved.
[[nodiscard]] RunResult train_on_ranks(const MakeBackend& make_backend, const TrainConfig& config,
                                       const Text& text, const RunOptions& options);
// Each rank has a configuration of its own, as if it were a process of its own; they are to agree.
[[nodiscard]] RunResult train_on_ranks(const MakeBackend& make_backend,
                                       const std::vector<TrainConfig>& configs, const Text& text,
                                       const RunOptions& options);

}  // namespace train
