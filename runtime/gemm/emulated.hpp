// The stand-in for cuBLASLt on an emulated device: the same GEMM, computed on the CPU.
#pragma once

#include "runtime/gemm/provider.hpp"

namespace f8::runtime {

[[nodiscard]] Result<GemmPlanPtr> create_emulated(const std::shared_ptr<Context>& context,
                                                  const GemmDesc& desc, const GemmChoice& choice);

}  // namespace f8::runtime
