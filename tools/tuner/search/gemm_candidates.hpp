// Which candidates the tuning of a GEMM measures: all legal generated configurations are ranked by
// the cost model, the best are measured and the others are pruned with their bound as the reason.
// All of cuBLASLt's suggestions are always measured, so that tuning cannot lose to the library.
#pragma once

#include <span>
#include <string>
#include <vector>

#include "runtime/gemm/cost_model.hpp"
#include "tools/tuner/backend/candidate.hpp"

namespace f8::tuner {

struct Generated {
  codegen::GemmSpec spec;
  double predicted_ns = 0;
  std::string pruned;  // why it is not measured; empty: it is
};
// The configurations in the cost model's order, best first. The first `keep` are measured, and
// those of `also` that are generated.
[[nodiscard]] Result<std::vector<Generated>> generated_candidates(
    const Problem& problem, const runtime::DeviceInfo& device, int keep,
    std::span<const runtime::GemmChoice> also = {}, const Epilogue& epilogue = {},
    const runtime::CostModel& model = runtime::CostModel::fitted());

// The choices that a plan makes without a search, each once: the cost model's and the table's.
[[nodiscard]] Result<std::vector<runtime::GemmChoice>> prior_choices(
    const Problem& problem, const runtime::DeviceInfo& device, const TuningTable& table);

}  // namespace f8::tuner
