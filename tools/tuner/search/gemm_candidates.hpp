// Which candidates the tuning of a GEMM measures: all legal generated configurations are ranked by
// the cost model, the best are measured and the others are pruned with their bound as the reason.
// cuBLASLt's suggestions are always measured, so that tuning cannot lose to the library.
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
// Configurations in the cost model's order, best first. The first `keep` are measured, and those of
// `also` that are generated.
[[nodiscard]] std::vector<Generated> in_order(
    const codegen::GemmSpec& family, Shape own, std::span<const GemmConfig> configs,
    const runtime::DeviceInfo& device, int keep, std::span<const runtime::GemmChoice> also,
    const runtime::CostModel& model = runtime::CostModel::fitted());
// All that there are of a GEMM.
[[nodiscard]] Result<std::vector<Generated>> generated_candidates(
    const Problem& problem, const runtime::DeviceInfo& device, int keep,
    std::span<const runtime::GemmChoice> also = {}, const Epilogue& epilogue = {});

// The choices that a plan makes without a search, each once: the cost model's and the table's.
// `unmeasured` is the suggestion of cuBLASLt's that it takes for a GEMM in bf16 where it ranks them.
[[nodiscard]] Result<std::vector<runtime::GemmChoice>> prior_choices(
    const Problem& problem, const runtime::DeviceInfo& device, const TuningTable& table,
    int unmeasured);

}  // namespace f8::tuner
