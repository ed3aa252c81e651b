// The parts that the providers of a GEMM share: the checks of a GEMM and of a call, the layout of
// the operands, and the empty batch.
#pragma once

#include <algorithm>

#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/gemm/gemm.hpp"

namespace f8::runtime {

// How many suggestions cuBLASLt is always asked for, so that one index means one algorithm.
inline constexpr int kHeuristics = 8;

// The suggestion of cuBLASLt's that a plan takes where none was measured: of a grad_weight in 16 bits
// the one ranked first, 2.6 % behind the fastest in the mean where the library's first is 5.6 %
// behind (left-out layers, docs/method.md). For other GEMMs the first is behind by 2 to 3 %.
[[nodiscard]] inline int unmeasured_suggestion(const GemmDesc& desc) {
  return desc.gemm == Gemm::kGradWeight && size_bytes(desc.a) == 2 ? kRankedFirst : 0;
}

// How many of a device's SMs a GEMM takes.
[[nodiscard]] inline int usable_sms(const GemmDesc& desc, int sm_count) {
  return desc.sm_limit > 0 ? std::min(sm_count, desc.sm_limit) : sm_count;
}

// Checks that the shape is in range, that the operands are both fp8 or both of one type, and that d
// is in high precision: with operands in high precision it has their type or f32.
[[nodiscard]] Status validate(const GemmDesc& desc);
// Checks that pointers are given and aligned and that m is within the plan. `workspace` matters
// where `workspace_bytes` > 0.
[[nodiscard]] Status validate(const GemmDesc& desc, const GemmCall& call, const void* workspace,
                              size_t workspace_bytes);

// The tensors that are a and b of a GEMM in high precision, in their own layout.
struct Extent {
  int64_t rows, cols;
};
struct OperandExtents {
  Extent a, b;
};
[[nodiscard]] OperandExtents high_precision_extents(Gemm gemm, Shape linear);

// Runs a call with m = 0: the gradient of the weight becomes zero (with `add` it stays as it was),
// and other GEMMs have no result.
[[nodiscard]] Status run_empty(Context& context, const GemmDesc& desc, const GemmCall& call,
                               Stream stream);

// The strides of the inverse scales of fp8 operands, as kernels::GemmProblem has them.
struct ScaleStrides {
  int64_t a, b;
};
[[nodiscard]] ScaleStrides scale_strides(const GemmDesc& desc, Shape own);

// The linear's shape, with the m of a call.
[[nodiscard]] inline Shape call_shape(const GemmDesc& desc, const GemmCall& call) {
  return {call.m, desc.shape.n, desc.shape.k};
}

}  // namespace f8::runtime
