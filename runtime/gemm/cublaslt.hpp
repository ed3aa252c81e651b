// cuBLASLt as a provider of GEMMs, opened when the first plan needs it.
#pragma once

#include "runtime/gemm/provider.hpp"

namespace f8::runtime {

// Gives kUnsupported where cuBLASLt cannot compute the GEMM at any shape.
[[nodiscard]] Status check_cublaslt(const GemmDesc& desc);
[[nodiscard]] Result<GemmPlanPtr> create_cublaslt(const std::shared_ptr<Context>& context,
                                                  const GemmDesc& desc, const GemmChoice& choice);

}  // namespace f8::runtime
