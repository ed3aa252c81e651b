// Which kernels a linear runs: from a recipe's cast settings to kernel specs. No GPU is needed, so
// `prewarm` compiles exactly what a trainer's plan will load.
//
// The kernels visit a tensor once and write both of its copies, so a recipe must ask for the same
// of a tensor's two uses: this is where recipes that need more are refused.
#pragma once

#include <vector>

#include "runtime/linear.hpp"

namespace f8::runtime {

struct LinearKernels {
  codegen::ScaleMode scale = codegen::ScaleMode::kTensor;  // kAxis: rows of q, columns of x as qt's
  codegen::AmaxSpec amax;                                  // of x, w and of a dy needed twice
  codegen::CastSpec cast;                                  // x and w, both copies
  codegen::AmaxSpec amax_unsaved;                          // x and w of a forward without backward
  codegen::CastSpec cast_unsaved;
  // dy: for both gradients; for that of the input alone (q); for that of the weight alone (qt)
  std::array<codegen::AmaxSpec, 3> amax_dy;
  std::array<codegen::CastSpec, 3> cast_dy;
  std::array<GemmDesc, 3> gemms;  // indexed by Gemm
};

// kUnsupported names the recipe and says what is supported.
[[nodiscard]] Result<LinearKernels> linear_kernels(const LinearDesc& desc);

// Every kernel of the linear, with the matmuls chosen as a plan would on a device of `sm_count` SMs
// (132: H100 SXM) with this table (null: none). Matmuls left to cuBLASLt are not among them.
[[nodiscard]] Result<std::vector<codegen::KernelSpec>> linear_kernel_specs(const LinearDesc& desc,
                                                                           const TuningTable* table,
                                                                           int sm_count);

}  // namespace f8::runtime
