// The bf16 baseline of an expert linear: each of its GEMMs is one grouped kernel, or cuBLASLt's with a call
// for each expert, and the fastest linear of these is what fp8 is compared with.
#pragma once

#include <vector>

#include "tools/tuner/search/gemm_candidates.hpp"
#include "tools/tuner/search/linear_search.hpp"

namespace f8::tuner {

struct ExpertBaseline {
  // A plan's grouped kernel first, then the cost model's best. The prior choice is the call for each expert.
  KernelShortlists kernels;
  std::vector<codegen::KernelSpec> specs;  // of the grouped ones
};
[[nodiscard]] Result<ExpertBaseline> expert_baseline(const Problem& experts,
                                                     const runtime::DeviceInfo& device,
                                                     const TuningTable& table);
// Measures them as search_linear does; at least one of each kind takes part.
[[nodiscard]] Result<LinearChoices> search_expert_baseline(const ExpertBaseline& baseline,
                                                           InterleavedGroup group,
                                                           LinearSearchOptions options,
                                                           const MeasureGroup& measure);

}  // namespace f8::tuner
