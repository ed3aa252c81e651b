// Short trainings on GPUs: a model and a text.
#pragma once

#include "examples/train/error.hpp"
#include "examples/train/trainer.hpp"
#include "gpu_backend_test.hpp"

namespace train {

inline TrainConfig small(const std::string& recipe) {
  TrainConfig config;
  config.recipe = recipe;
  config.hidden = 256;
  config.ffn = 1024;
  config.layers = 2;
  config.context = 8;
  config.tokens = 1024;
  config.steps = 60;
  config.lr = 2e-3;
  return config;
}

inline Text sample_text() {
  Text text;
  for (int i = 0; i < 2000; ++i) {
    text.bytes += format("line %d: the quick brown fox jumps over the lazy dog.\n", i * i);
  }
  text.hash = "fixed";
  return text;
}

}  // namespace train
