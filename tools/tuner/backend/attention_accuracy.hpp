// The accuracy of attention on a device: its results on operands of each kind against fp64.
#pragma once

#include "tools/tuner/backend/backend.hpp"

namespace f8::tuner {

// The shape of the operands for a problem, whose heads are of its size, and whose mask is its own.
inline constexpr int64_t kAccuracyHeads = 4;
[[nodiscard]] AttentionShape accuracy_shape(const Problem& problem, int64_t tokens);

// The accuracy of O, and where the backend has a backward of dQ, dK and dV, on operands of one kind.
[[nodiscard]] Result<std::vector<tuning_db::Accuracy>> attention_accuracy(
    Backend& backend, AttentionRecipe recipe, const AttentionShape& shape, std::string_view kind,
    uint64_t seed);

// Returns what the row of a part keeps: a forward has the accuracy of O, a backward that of the gradients, and both
// together have all.
[[nodiscard]] std::vector<tuning_db::Accuracy> accuracy_of_part(
    Op part, const std::vector<tuning_db::Accuracy>& accuracy);

}  // namespace f8::tuner
