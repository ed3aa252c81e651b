// The makers of plans, one for each provider, and what both of them check.
#pragma once

#include "runtime/context_state.hpp"
#include "runtime/gemm.hpp"
#include "runtime/launch.hpp"

namespace f8::runtime {

// How many suggestions cuBLASLt is always asked for, so that one index means one algorithm.
inline constexpr int kHeuristics = 8;

using GemmPlanPtr = std::shared_ptr<const GemmPlan>;

[[nodiscard]] Result<GemmPlanPtr> create_generated(const std::shared_ptr<Context>& context,
                                                   const GemmDesc& desc, const GemmChoice& choice);
// What cuBLASLt cannot do whatever the shape.
[[nodiscard]] Status check_cublaslt(const GemmDesc& desc);
[[nodiscard]] Result<GemmPlanPtr> create_cublaslt(const std::shared_ptr<Context>& context,
                                                  const GemmDesc& desc, const GemmChoice& choice);

// Shape in range; operands both fp8 or both of one type; d in high precision, where they are not
// fp8 of theirs or f32.
[[nodiscard]] Status validate(const GemmDesc& desc);
// Pointers present and aligned, m within the plan. `workspace` matters where `workspace_bytes` > 0.
[[nodiscard]] Status validate(const GemmDesc& desc, const GemmCall& call, const void* workspace,
                              size_t workspace_bytes);

// Rows to zero, in stream order: the gradient of the weight of an empty batch.
[[nodiscard]] Status zero(const Driver& driver, CUcontext primary, void* d, int64_t rows,
                          size_t row_bytes, size_t pitch_bytes, Stream stream);

// The tensors that are a and b of a product in high precision, as they lie.
struct Extent {
  int64_t rows, cols;
};
struct OperandExtents {
  Extent a, b;
};
[[nodiscard]] OperandExtents high_precision_extents(Gemm gemm, Shape linear);

// 0, or at least a row in whole 16 bytes: what bulk copies and 16-byte accesses need.
[[nodiscard]] bool is_row_stride(int64_t ld, int64_t cols, Dtype type);

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

[[nodiscard]] inline bool is_aligned(const void* pointer, size_t bytes = 16) {
  return reinterpret_cast<uintptr_t>(pointer) % bytes == 0;
}

}  // namespace f8::runtime
