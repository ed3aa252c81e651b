// Attention in a sweep, and its method there and in `bench attention`. Of each recipe and shape these are measured, with
// all casts: attention_forward and under kFp8 attention_backward, each by itself, and attention, which is both together,
// beside cuDNN's in bf16. There is nothing to choose, since the kernels follow from the shape.
#pragma once

#include <vector>

#include "codegen/kernel_spec.hpp"
#include "recipes/attention.hpp"
#include "tools/tuner/measure/interleaved_group.hpp"

namespace f8::tuner {

inline constexpr int64_t kAccuracyTokens = 1024;

struct AttentionRequest {
  std::vector<AttentionShape> shapes;  // with their masks
  std::vector<AttentionRecipe> recipes;
  int64_t accuracy_tokens = kAccuracyTokens;  // of the data that is compared with fp64; 0: none is
};
// The operations, small shapes first.
[[nodiscard]] Result<std::vector<Problem>> problems_of(const AttentionRequest& request);

struct AttentionMethod {
  double batch_us = 400;
  StopRule stop{};
  int retry_noisy = 0;
  int64_t accuracy_tokens = kAccuracyTokens;
  Conditions conditions{};
};
[[nodiscard]] tuning_db::Method to_method(const AttentionMethod& method);

// The kernels that a plan of attention loads.
[[nodiscard]] std::vector<codegen::KernelSpec> attention_kernels(AttentionRecipe recipe,
                                                                 const AttentionShape& shape);
// float8's trial of an operation, and bf16's beside it.
[[nodiscard]] tuning_db::TrialKey attention_trial(const Problem& operation);
[[nodiscard]] tuning_db::TrialKey bf16_attention_trial(const Problem& operation);
// Adds to a time in bf16 of which version cuDNN is, which no toolchain says.
void name_library(tuning_db::TrialResult& bf16);
// The seconds that measuring an operation takes on an H100 or an H200, its accuracy included.
[[nodiscard]] double predicted_s(const Problem& operation, const AttentionMethod& method);

}  // namespace f8::tuner
