// What bench attention prints.
#pragma once

#include <string>
#include <vector>

#include "tools/float8-tune/output.hpp"
#include "tools/tuner/search/bench/bench.hpp"

namespace f8::cli {

using Accuracies = std::vector<tuning_db::Accuracy>;

[[nodiscard]] Json to_json(const tuner::AttentionBench& bench, const Accuracies& accuracy);
[[nodiscard]] std::string text_of(const tuner::AttentionBench& bench, bool color);
// The accuracy of data of this shape.
[[nodiscard]] std::string text_of(const AttentionShape& shape, const Accuracies& accuracy,
                                  bool color);

}  // namespace f8::cli
