// The configurations that won for the grouped GEMMs of known models: what the cost model's choice
// leans on, since it was fitted to GEMMs of one group.
#pragma once

#include <vector>

#include "runtime/gemm/cost_model.hpp"

namespace f8::runtime {

// `group` is the shape of one group of average size as a GEMM of its own, and `spec` that of the grouped
// GEMM, without a configuration. There are none for scales of blocks.
[[nodiscard]] std::vector<NearbyWinner> grouped_winners(const codegen::GemmSpec& spec, Shape group);

}  // namespace f8::runtime
