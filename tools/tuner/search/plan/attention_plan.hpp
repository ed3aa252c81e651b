// Attention in a sweep, and its method there and in `bench attention`. Of each recipe and shape the parts are measured,
// with all their casts, each by itself: attention_forward, and under kFp8 attention_backward. There is nothing to choose,
// since the kernels follow from the shape, and no baseline: bf16 has no implementation in float8 (docs/attention.md says
// what measures both).
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
// The parts, small shapes first.
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
// float8's trial of a part.
[[nodiscard]] tuning_db::TrialKey attention_trial(const Problem& part);
// The seconds that measuring a part takes on an H100 or an H200, its accuracy included.
[[nodiscard]] double predicted_s(const Problem& part, const AttentionMethod& method);

}  // namespace f8::tuner
