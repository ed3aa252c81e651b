// Runs of a tiny model on several ranks, each an emulated device and a thread.
#pragma once

#include "examples/train/trainer.hpp"
#include "train_test.hpp"

namespace train {

inline TrainConfig tiny(const std::string& recipe, int64_t fsdp, int64_t micro_batches,
                        int64_t tp = 1) {
  TrainConfig config;
  config.recipe = recipe;
  // Blocks of 128 rows are not cut.
  config.hidden = recipe == "blockwise" ? 128 : 64;
  config.ffn = recipe == "blockwise" ? std::max<int64_t>(256, 128 * tp) : tp == 3 ? 192 : 128;
  config.layers = 2;
  config.context = 4;
  config.tokens = 192;
  config.steps = 6;
  config.lr = 1e-2;
  config.fsdp = fsdp;
  config.micro_batches = micro_batches;
  config.tp = tp;
  return config;
}

inline Text sample_text() {
  Text text;
  for (int i = 0; i < 200; ++i) text.bytes += "the quick brown fox jumps over the lazy dog. ";
  text.hash = "fixed";
  return text;
}

inline std::vector<float> losses(const TrainConfig& config, const RunOptions& options = {}) {
  return train_on_ranks([](int rank) { return make_host_backend(rank); }, config, sample_text(),
                        options)
      .curve.loss;
}

}  // namespace train
