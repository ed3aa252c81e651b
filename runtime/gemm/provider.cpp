#include "runtime/gemm/provider.hpp"

#include "codegen/kernels/kernel_args.cuh"

namespace f8::runtime {

Status validate(const GemmDesc& desc) {
  F8_TRY(validate_shape(desc.shape));
  const bool fp8 = is_fp8(desc.a) && is_fp8(desc.b);
  if (!fp8 && desc.a != desc.b) {
    return fail(ErrorCode::kUnsupported,
                "gemm {}: operands {} and {}; both must be fp8 (e4m3, e5m2) or of one type",
                to_string(desc.gemm), to_string(desc.a), to_string(desc.b));
  }
  if (is_fp8(desc.d)) {
    return fail(ErrorCode::kUnsupported, "gemm {}: output type {}; bf16, f16 or f32",
                to_string(desc.gemm), to_string(desc.d));
  }
  if (!fp8 && desc.d != desc.a && desc.d != Dtype::kF32) {
    return fail(ErrorCode::kUnsupported,
                "gemm {}: operands in {} give a result in {} or f32, not {}; change the result's "
                "type, or let the recipe cast both operands to fp8",
                to_string(desc.gemm), to_string(desc.a), to_string(desc.a), to_string(desc.d));
  }
  return {};
}

OperandExtents high_precision_extents(Gemm gemm, Shape linear) {
  switch (gemm) {
    case Gemm::kOutput:
      return {{linear.m, linear.k}, {linear.n, linear.k}};
    case Gemm::kGradInput:
      return {{linear.m, linear.n}, {linear.n, linear.k}};
    case Gemm::kGradWeight:
      return {{linear.m, linear.n}, {linear.m, linear.k}};
  }
  return {};
}

namespace {

Status validate_strides(const GemmDesc& desc, const GemmCall& call) {
  const OperandExtents extents = high_precision_extents(desc.gemm, call_shape(desc, call));
  struct {
    const char* name;
    int64_t ld, cols;
    Dtype type;
  } const all[] = {{"a", call.ld_a, extents.a.cols, desc.a},
                   {"b", call.ld_b, extents.b.cols, desc.b},
                   {"d", call.ld_d, gemm_shape(desc.shape, desc.gemm).n, desc.d}};
  for (const auto& [name, ld, cols, type] : all) {
    if (is_fp8(type) ? ld == 0 : is_row_stride(ld, cols, type)) [[likely]] {
      continue;
    }
    return fail(ErrorCode::kInvalidArgument,
                "gemm {}: ld_{} is {}; rows of {} {} elements: at least as many apart, in whole 16 "
                "bytes{}",
                to_string(desc.gemm), name, ld, cols, to_string(type),
                is_fp8(type) ? "; of fp8 operands it is fixed, give 0" : "");
  }
  return {};
}

}  // namespace

Status validate(const GemmDesc& desc, const GemmCall& call, const void* workspace,
                size_t workspace_bytes) {
  const auto invalid = [&](const char* what) {
    return fail(ErrorCode::kInvalidArgument, "gemm {}: {}", to_string(desc.gemm), what);
  };
  if (call.m < 0 || call.m > desc.shape.m) {
    return fail(ErrorCode::kInvalidArgument, "gemm {}: m is {}, the plan was made for 0 to {}",
                to_string(desc.gemm), call.m, desc.shape.m);
  }
  if (call.m == 0 && desc.gemm != Gemm::kGradWeight) return {};
  F8_TRY(validate_strides(desc, call));
  if (call.d == nullptr) return invalid("d is null");
  if (!is_aligned(call.d)) return invalid("d is not aligned to 16 bytes");
  if (call.m == 0) return {};
  if (call.a == nullptr) return invalid("a is null");
  if (call.b == nullptr) return invalid("b is null");
  if (!is_aligned(call.a)) return invalid("a is not aligned to 16 bytes");
  if (!is_aligned(call.b)) return invalid("b is not aligned to 16 bytes");
  if (is_fp8(desc.a) && (call.inv_scale_a == nullptr || call.inv_scale_b == nullptr)) {
    return invalid("inv_scale_a or inv_scale_b is null; fp8 operands need both");
  }
  if (is_fp8(desc.a) && is_block(desc.scale) &&
      (!is_aligned(call.inv_scale_a) || !is_aligned(call.inv_scale_b))) {
    return invalid(
        "inv_scale_a or inv_scale_b is not aligned to 16 bytes, as block scales must be");
  }
  if (call.shards != 1) [[unlikely]] {
    const int64_t k = gemm_shape(call_shape(desc, call), desc.gemm).k;
    if (!desc.shards) return invalid("b lies in shards, and the plan reads one piece");
    if (call.shards < 1 || k % (call.shards * kernels::kStageK) != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "gemm {}: b lies in {} shards of K {}; each has whole {}s of it",
                  to_string(desc.gemm), call.shards, k, kernels::kStageK);
    }
  }
  if (desc.bias) {
    if (call.bias == nullptr) return invalid("bias is null; the plan adds one");
    if (!is_aligned(call.bias)) return invalid("bias is not aligned to 16 bytes");
  }
  if (desc.amax && call.amax == nullptr) return invalid("amax is null; the plan leaves one");
  if (workspace_bytes > 0) {
    if (workspace == nullptr) return invalid("workspace is null; see workspace_bytes()");
    if (!is_aligned(workspace)) return invalid("workspace is not aligned to 16 bytes");
  }
  return {};
}

Status run_empty(Context& context, const GemmDesc& desc, const GemmCall& call, Stream stream) {
  if (desc.gemm != Gemm::kGradWeight || desc.add) return {};
  const size_t element = size_bytes(desc.d);
  const auto row = static_cast<size_t>(desc.shape.k);
  const size_t pitch = call.ld_d == 0 ? row : static_cast<size_t>(call.ld_d);
  return zero(context.state().driver, context.state().primary, call.d, desc.shape.n, row * element,
              pitch * element, stream);
}

ScaleStrides scale_strides(const GemmDesc& desc, Shape own) {
  switch (desc.scale) {
    case codegen::ScaleMode::kTensor:
      return {0, 0};
    case codegen::ScaleMode::kAxis:
      return {desc.scalar_a ? 0 : 1, desc.scalar_b ? 0 : 1};
    case codegen::ScaleMode::kBlock1x128:
      return {kernels::padded_scales(own.m), kernels::padded_scales(own.n)};
    case codegen::ScaleMode::kBlock128x128:
      return {kernels::padded_scales(own.m), kernels::padded_scales(ceil_div(own.k, 128))};
  }
  return {0, 0};
}

}  // namespace f8::runtime
