// The configuration decides the bits of a training run. Here it is checked, and named.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "device/kernels/args.cuh"

namespace train {

// The others are compared with the first, in which no operand of any linear is fp8.
[[nodiscard]] const std::vector<std::string>& recipe_names();
[[nodiscard]] std::string recipe_list();  // the names in one line

struct TrainConfig {
  std::string recipe = "bf16";
  int64_t hidden = 2048;  // width of the residual stream
  int64_t ffn = 8192;     // width inside a block
  int64_t layers = 4;
  int64_t context = 16;       // bytes that a prediction sees
  int64_t tokens = 8192;      // predictions of a step
  int64_t micro_batches = 1;  // of each rank, whose gradients are added up
  int64_t fsdp = 1;           // ranks that share the weights out, and the tokens
  int64_t tp = 1;             // ranks that share out the inner width of a block
  int64_t steps = 2000;
  uint32_t seed = 1;
  // The highest rate; it is reached in a hundred steps and falls in a cosine to a tenth of it.
  double lr = 3e-4;

  [[nodiscard]] int64_t ranks() const { return fsdp * tp; }
  // Predictions of one forward.
  [[nodiscard]] int64_t batch_tokens() const { return tokens / (fsdp * micro_batches); }
};

// Throws where an option is out of its range; the message names it and says what it may be.
void validate(const TrainConfig& config);
// Names the configuration and the text's hash in one line: runs with equal identities give equal
// bits, up to the order of sums over ranks and micro-batches.
[[nodiscard]] std::string identity(const TrainConfig& config, const std::string& text_hash);

struct AdamConfig {
  float beta1 = 0.9F;
  float beta2 = 0.95F;
  float epsilon = 1e-8F;
  float weight_decay = 0.1F;
  float max_norm = 1.0F;  // of the gradient
};

// Gives the scalars of each step.
[[nodiscard]] std::vector<StepScalars> make_schedule(const TrainConfig& config,
                                                     const AdamConfig& adam);

}  // namespace train
