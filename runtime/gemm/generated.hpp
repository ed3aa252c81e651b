// The generated kernel as a provider of GEMMs.
#pragma once

#include "runtime/gemm/provider.hpp"

namespace f8::runtime {

// Gives kUnsupported where operands are in high precision.
[[nodiscard]] Result<GemmPlanPtr> create_generated(const std::shared_ptr<Context>& context,
                                                   const GemmDesc& desc, const GemmChoice& choice);

// The blocks of a persistent grid: clusters that take work tiles of cluster_m x cluster_n tiles in
// turn, so more of them than work tiles, or than fit at once, would find nothing to do.
[[nodiscard]] int64_t persistent_grid(const Kernel& kernel, int64_t work_tiles, int sm_limit);
// Tells whether a launch of so many work tiles overlaps the previous kernel by programmatic dependent
// launch; `work` is the sum of their K.
[[nodiscard]] bool overlaps_previous(const Kernel& kernel, const GemmConfig& config,
                                     int64_t work_tiles, int64_t work);

}  // namespace f8::runtime
