// The generated kernel as a provider of GEMMs.
#pragma once

#include "runtime/gemm/provider.hpp"

namespace f8::runtime {

// Gives kUnsupported where operands are in high precision.
[[nodiscard]] Result<GemmPlanPtr> create_generated(const std::shared_ptr<Context>& context,
                                                   const GemmDesc& desc, const GemmChoice& choice);

}  // namespace f8::runtime
