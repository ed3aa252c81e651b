#include "runtime/norm/rms_norm.hpp"

#include <bit>
#include <cmath>

#include "codegen/kernels/norm/norm_args.cuh"
#include "recipes/fp8_layout.hpp"
#include "recipes/problem.hpp"
#include "runtime/device/calls/call_memory.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/element_type.hpp"
#include "runtime/device/launch.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/quantize/bias_grad.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kRmsNorm = "float8_rms_norm";
constexpr const char* kRmsNormArgs = "float8_rms_norm_args";
constexpr const char* kRmsNormBackward = "float8_rms_norm_backward";
constexpr const char* kRmsNormBackwardArgs = "float8_rms_norm_backward_args";

[[nodiscard]] bool are_norm_sizes(int64_t rows, int64_t cols) {
  return rows >= 0 && rows <= kMaxDim && cols >= 8 && cols <= kernels::kMaxNormCols &&
         cols % 8 == 0;
}

// Checks what both calls have.
template <class Args>
Status check_norm_options(const char* name, const Args& args) {
  if (!are_norm_sizes(args.rows, args.cols)) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: rows is {} and cols is {}; rows are 0 to {}, cols a multiple of 8, up to {}",
                name, args.rows, args.cols, kMaxDim, kernels::kMaxNormCols);
  }
  for (const auto& [field, type] :
       {std::pair{"weight_dtype", args.weight_dtype}, {"out_dtype", args.out_dtype}}) {
    if (type == args.dtype || type == FLOAT8_F32) continue;
    return fail(ErrorCode::kInvalidArgument,
                "{}.{} is {} and dtype is {}; it is dtype or FLOAT8_F32", name, field, type,
                args.dtype);
  }
  const bool normalized = args.rounding == FLOAT8_ROUND_NORMALIZED;
  if (std::isfinite(args.weight_offset) && !(normalized && args.weight_offset != 0)) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}.weight_offset is {}; it is finite, and 0 with FLOAT8_ROUND_NORMALIZED", name,
              args.weight_offset);
}

template <class Args>
void add_norm_rows(const Args& args, const char* name, const void* data, int64_t ld, int32_t dtype,
                   Access access, CallMemory& memory) {
  memory.add_rows(name, data, args.rows, args.cols, ld, element_type(dtype), access);
}

// x, the weight and rstd, which both calls have.
template <class Args>
void add_norm_operands(const Args& args, Access of_rstd, CallMemory& memory) {
  add_norm_rows(args, "x", args.x.data, args.x.ld, args.dtype, Access::kRead, memory);
  memory.add("weight", args.weight,
             static_cast<size_t>(args.cols) * size_bytes(element_type(args.weight_dtype)),
             Access::kRead);
  memory.add("rstd", args.rstd, static_cast<size_t>(args.rows) * sizeof(float), of_rstd,
             sizeof(float));
}

template <class Args>
Result<const Kernel*> norm_kernel(Context& context, const Args& args, bool backward) {
  const codegen::RmsNormSpec spec{.in = element_type(args.dtype),
                                  .weight = element_type(args.weight_dtype),
                                  .out = element_type(args.out_dtype),
                                  .cols = kernels::norm_kernel_cols(args.cols),
                                  .normalized = args.rounding == FLOAT8_ROUND_NORMALIZED,
                                  .backward = backward};
  size_t index = static_cast<size_t>(args.dtype);
  for (const bool bit :
       {spec.weight == Dtype::kF32, spec.out == Dtype::kF32, spec.normalized, backward}) {
    index = 2 * index + (bit ? 1 : 0);
  }
  constexpr size_t kSizes =
      std::countr_zero(static_cast<unsigned>(kernels::kMaxNormCols / kernels::kMinNormCols)) + 1;
  static_assert(3 * 16 * kSizes == std::tuple_size_v<decltype(Context::State::norm_kernels)>);
  const auto size = static_cast<unsigned>(spec.cols / kernels::kMinNormCols);
  index = index * kSizes + static_cast<size_t>(std::countr_zero(size));
  return kept_kernel(context, context.state().norm_kernels[index], spec);
}

// A sum of a weight and -0 has the weight's bits, also those of -0.
template <class Args>
float norm_offset(const Args& args) {
  return args.weight_offset == 0 ? -0.0F : args.weight_offset;
}

int64_t row_stride(int64_t ld, int64_t cols) {
  return ld == 0 ? cols : ld;
}

Status check_backward(Context& context, const float8_rms_norm_backward_args& args, Stream stream) {
  constexpr const char* kArgs = kRmsNormBackwardArgs;
  CallMemory memory(kArgs);
  if (args.rows > 0) {
    F8_TRY(need(kArgs, "dy.data", args.dy.data));
    F8_TRY(need(kArgs, "x.data", args.x.data));
    F8_TRY(need(kArgs, "weight", args.weight));
    F8_TRY(need(kArgs, "rstd", args.rstd));
    if (args.dweight.data != nullptr) F8_TRY(need(kArgs, "workspace.data", args.workspace.data));
    add_norm_operands(args, Access::kRead, memory);
    add_norm_rows(args, "dy", args.dy.data, args.dy.ld, args.out_dtype, Access::kRead, memory);
    add_norm_rows(args, "dx", args.dx.data, args.dx.ld, args.dtype, Access::kWrite, memory);
    memory.add("workspace", args.workspace.data,
               rms_norm_backward_workspace_bytes(context, args.rows, args.cols), Access::kWrite);
  }
  memory.add("dweight", args.dweight.data,
             static_cast<size_t>(args.cols) * size_bytes(element_type(args.weight_dtype)),
             Access::kWrite);
  return memory.check(kRmsNormBackward, context, stream);
}

}  // namespace

Status rms_norm(Context& context, const float8_rms_norm_args& args, Stream stream) {
  F8_TRY(check_norm_options(kRmsNormArgs, args));
  if (!std::isfinite(args.eps) || args.eps < 0) {
    return fail(ErrorCode::kInvalidArgument, "{}.eps is {}; it is finite, 0 or more", kRmsNormArgs,
                args.eps);
  }
  if (args.rows == 0) return {};
  F8_TRY(need(kRmsNormArgs, "x.data", args.x.data));
  F8_TRY(need(kRmsNormArgs, "weight", args.weight));
  F8_TRY(need(kRmsNormArgs, "y.data", args.y.data));
  CallMemory memory(kRmsNormArgs);
  add_norm_operands(args, Access::kWrite, memory);
  add_norm_rows(args, "y", args.y.data, args.y.ld, args.out_dtype, Access::kWrite, memory);
  F8_TRY(memory.check(kRmsNorm, context, stream));
  const Kernel* kernel = F8_TRY(norm_kernel(context, args, false));
  const Context::State& state = context.state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const kernels::RmsNormArgs launch{.x = args.x.data,
                                    .weight = args.weight,
                                    .y = args.y.data,
                                    .rstd = args.rstd,
                                    .ld_x = row_stride(args.x.ld, args.cols),
                                    .ld_y = row_stride(args.y.ld, args.cols),
                                    .rows = static_cast<int32_t>(args.rows),
                                    .cols = static_cast<int32_t>(args.cols),
                                    .eps = args.eps,
                                    .weight_offset = norm_offset(args)};
  const kernels::NormThreads threads =
      kernels::norm_threads(kernels::norm_kernel_cols(args.cols), false);
  return launch_with(launch, state.driver, *kernel, ceil_div(args.rows, threads.rows_of_block()),
                     state.options.programmatic_launch, stream);
}

size_t rms_norm_backward_workspace_bytes(const Context& context, int64_t rows, int64_t cols) {
  if (!are_norm_sizes(rows, cols)) return 0;
  const int64_t blocks = kernels::norm_backward_blocks(rows, kernels::norm_kernel_cols(cols),
                                                       context.device().sm_count);
  return static_cast<size_t>(blocks * cols) * sizeof(float);
}

Status rms_norm_backward(Context& context, const float8_rms_norm_backward_args& args,
                         Stream stream) {
  F8_TRY(check_norm_options(kRmsNormBackwardArgs, args));
  const bool has_dweight = args.dweight.data != nullptr;
  if (args.dx.data == nullptr && !has_dweight) return {};
  F8_TRY(check_backward(context, args, stream));
  const Context::State& state = context.state();
  const Dtype of_weight = element_type(args.weight_dtype);
  if (args.rows == 0) {
    if (!has_dweight || args.dweight.accumulate != 0) return {};
    const size_t bytes = static_cast<size_t>(args.cols) * size_bytes(of_weight);
    return zero(state.driver, state.primary, args.dweight.data, 1, bytes, bytes, stream);
  }
  const Kernel* kernel = F8_TRY(norm_kernel(context, args, true));
  const Kernel* sums = nullptr;
  if (has_dweight) {
    sums = F8_TRY(kept_kernel(
        context, context.state().bias_grad_kernels[static_cast<size_t>(args.weight_dtype)],
        codegen::BiasGradSpec{of_weight}));
  }
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  auto* const partials = has_dweight ? static_cast<float*>(args.workspace.data) : nullptr;
  const kernels::RmsNormBackwardArgs launch{.dy = args.dy.data,
                                            .x = args.x.data,
                                            .weight = args.weight,
                                            .rstd = args.rstd,
                                            .dx = args.dx.data,
                                            .partials = partials,
                                            .ld_dy = row_stride(args.dy.ld, args.cols),
                                            .ld_x = row_stride(args.x.ld, args.cols),
                                            .ld_dx = row_stride(args.dx.ld, args.cols),
                                            .rows = static_cast<int32_t>(args.rows),
                                            .cols = static_cast<int32_t>(args.cols),
                                            .weight_offset = norm_offset(args),
                                            .padding = 0};
  const int64_t blocks = kernels::norm_backward_blocks(
      args.rows, kernels::norm_kernel_cols(args.cols), state.info.sm_count);
  const bool programmatic = state.options.programmatic_launch;
  F8_TRY(launch_with(launch, state.driver, *kernel, blocks, programmatic, stream));
  if (!has_dweight) return {};
  const kernels::BiasGradArgs add{.sums = partials,
                                  .out = args.dweight.data,
                                  .count = static_cast<int32_t>(blocks),
                                  .cols = static_cast<int32_t>(args.cols),
                                  .add = args.dweight.accumulate != 0 ? 1 : 0,
                                  .padding = 0};
  return launch_bias_grad(state.driver, *sums, add, programmatic, stream);
}

}  // namespace f8::runtime
