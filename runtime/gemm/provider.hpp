// What the providers of a GEMM share: the checks of a problem and of a call, where its operands lie,
// and the empty batch.
#pragma once

#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/gemm/gemm.hpp"

namespace f8::runtime {

// How many suggestions cuBLASLt is always asked for, so that one index means one algorithm.
inline constexpr int kHeuristics = 8;

// Shape in range; operands both fp8 or both of one type; d in high precision, where they are not
// fp8 of theirs or f32.
[[nodiscard]] Status validate(const GemmDesc& desc);
// Pointers present and aligned, m within the plan. `workspace` matters where `workspace_bytes` > 0.
[[nodiscard]] Status validate(const GemmDesc& desc, const GemmCall& call, const void* workspace,
                              size_t workspace_bytes);

// The tensors that are a and b of a product in high precision, as they lie.
struct Extent {
  int64_t rows, cols;
};
struct OperandExtents {
  Extent a, b;
};
[[nodiscard]] OperandExtents high_precision_extents(Gemm gemm, Shape linear);

// m = 0: the gradient of the weight is zero (with `add` what it was), other products are empty.
[[nodiscard]] Status run_empty(Context& context, const GemmDesc& desc, const GemmCall& call,
                               Stream stream);

// Where the inverse scales of an fp8 operand's rows lie: kernels::GemmProblem's strides.
struct ScaleStrides {
  int64_t a, b;
};
[[nodiscard]] ScaleStrides scale_strides(const GemmDesc& desc, Shape own);

// The linear's shape of a call.
[[nodiscard]] inline Shape call_shape(const GemmDesc& desc, const GemmCall& call) {
  return {call.m, desc.shape.n, desc.shape.k};
}

}  // namespace f8::runtime
