// A call of an expert linear is checked here, before anything is launched.
#include "runtime/device/calls/call_memory.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/experts/experts.hpp"
#include "runtime/experts/first_scale.hpp"
#include "runtime/linear/plan/call_arguments.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kForward = "float8_experts_forward";
constexpr const char* kForwardArgs = "float8_experts_forward_args";
constexpr const char* kBackward = "float8_experts_backward";
constexpr const char* kBackwardArgs = "float8_experts_backward_args";

// The memory that forward and backward have alike; forward writes `saved`, and backward reads it.
template <class Call>
void add_buffers(CallMemory& memory, const Experts& experts, const Call& call, Access saved) {
  memory.add("layout", call.layout.data, experts.layout_bytes(), Access::kRead);
  memory.add("saved", call.saved.data, experts.saved_bytes(), saved);
  experts.add_scales(memory, call.scales);
  memory.add("workspace", call.workspace.data, experts.workspace_bytes(), Access::kWrite);
}

}  // namespace

template <class Call>
Status Experts::check_common(const char* args, const Call& call) const {
  if (call.m < 0 || call.m > desc_.shape.m) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}.m is {}, the plan was made for 0 to {}", args,
                call.m, desc_.shape.m);
  }
  if (desc_.input != kernels::RowSource::kMatrix ||
      desc_.grad_output != kernels::RowSource::kMatrix) {
    return fail(
        ErrorCode::kInvalidArgument,
        "{}: the expert linear is that of an MLP (float8_moe_linear), whose casts compute what "
        "they "
        "read; call float8_moe_forward and float8_moe_backward, or plan a linear of its own",
        args);
  }
  if (call.m == 0) return {};
  F8_TRY(need(args, "layout.data", call.layout.data));
  return workspace_bytes() == 0 ? Status() : need(args, "workspace.data", call.workspace.data);
}

void Experts::add_scales(CallMemory& memory, const float8_scale_slots& scales) const {
  add_scale_slots(memory, slots_.size(), scales);
}

Status Experts::check_scales(const char* args, const char* name, const float8_scale_slots& scales,
                             const float8_step& step) const {
  if (slots_.empty()) return {};
  return check_scale_slots(*context_, desc_.recipe.name, args, name, scales, step);
}

Status Experts::add_maxima(CallMemory& memory, const char* args, runtime::Tensor tensor,
                           const uint32_t* amax, const uint32_t* row_amax, int64_t m,
                           const float8_step& step) const {
  if (!is_over_ranks(tensor)) return {};
  const bool is_x = tensor == runtime::Tensor::kInput;
  size_t of_groups = 0, of_rows = 0;
  for (const auto& casts : at(tensor).casts) {
    for (const Cast& cast : casts) {
      const codegen::CastSpec& spec = cast.plan.spec();
      const size_t words = cast.slot >= 0 ? (step.first_step != 0 ? 1 : 0)
                                          : GroupCastPlan::words_of_tensors(spec, desc_.experts);
      of_groups = std::max(of_groups, words);
      of_rows = std::max(of_rows, GroupCastPlan::words_of_rows(spec, m));
    }
  }
  const char* const names[] = {is_x ? "x_amax" : "dy_amax", is_x ? "x_row_amax" : "dy_row_amax"};
  if (of_groups > 0) F8_TRY(need(args, names[0], amax));
  if (of_rows > 0) F8_TRY(need(args, names[1], row_amax));
  memory.add(names[0], amax, of_groups * sizeof(uint32_t), Access::kRead, alignof(uint32_t));
  memory.add(names[1], row_amax, of_rows * sizeof(uint32_t), Access::kRead, alignof(uint32_t));
  return {};
}

Status Experts::check(const ExpertsForwardCall& call, Stream stream) const {
  F8_TRY(check_common(kForwardArgs, call));
  if (call.m == 0) return {};
  F8_TRY(need(kForwardArgs, "x.data", call.x.data));
  if (call.w.fp8 != nullptr) {
    F8_TRY(check_given(kForwardArgs, "w.fp8", *call.w.fp8, true, call.saved.data != nullptr));
  } else {
    F8_TRY(need(kForwardArgs, "w.data", call.w.data));
  }
  F8_TRY(need(kForwardArgs, "y.data", call.y.data));
  F8_TRY(check_scales(kForwardArgs, "scales", call.scales, step_of(call)));
  const auto [m, n, k] = desc_.shape;
  CallMemory memory(kForwardArgs);
  memory.add_rows("x", call.x.data, call.m, k, call.x.ld, desc_.tensor_dtype, Access::kRead);
  if (call.w.fp8 != nullptr) {
    add_given(memory, "w.fp8", *call.w.fp8, true);
  } else {
    memory.add_rows("w", call.w.data, desc_.experts * n, k, call.w.ld, desc_.tensor_dtype,
                    Access::kRead);
  }
  memory.add_rows("y", call.y.data, call.m, n, call.y.ld, desc_.tensor_dtype, Access::kWrite);
  F8_TRY(add_maxima(memory, kForwardArgs, runtime::Tensor::kInput, call.x_amax, call.x_row_amax,
                    call.m, step_of(call)));
  memory.add("w_amax", call.w_amax, sizeof(uint32_t), Access::kRead, alignof(uint32_t));
  add_buffers(memory, *this, call, Access::kWrite);
  return memory.check(kForward, *context_, stream);
}

Status Experts::check(const ExpertsBackwardCall& call, Stream stream) const {
  F8_TRY(check_common(kBackwardArgs, call));
  if (call.dx.data != nullptr && !desc_.needs_grad_input) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.dx is given, the plan was made with float8_experts_desc.no_grad_input",
                kBackwardArgs);
  }
  if (call.dw.data != nullptr && !desc_.needs_grad_weight) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.dw is given, the plan was made with float8_experts_desc.no_grad_weight",
                kBackwardArgs);
  }
  if (call.dw.data != nullptr && call.dw.accumulate != 0 && !desc_.accumulate_grad_weight) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.dw.accumulate is set, the plan has no GEMM that adds; set "
                "float8_experts_desc.accumulate_grad_weight",
                kBackwardArgs);
  }
  const auto [m, n, k] = desc_.shape;
  CallMemory memory(kBackwardArgs);
  memory.add_rows("dx", call.dx.data, call.m, k, call.dx.ld, desc_.tensor_dtype, Access::kWrite);
  memory.add_rows("dw", call.dw.data, desc_.experts * n, k, call.dw.ld, desc_.grad_weight_dtype,
                  Access::kWrite);
  F8_TRY(memory.check_alignment(kBackward));
  if (call.m == 0 || (call.dx.data == nullptr && call.dw.data == nullptr)) return {};
  F8_TRY(need(kBackwardArgs, "dy.data", call.dy.data));
  if (saved_bytes_ > 0) F8_TRY(need(kBackwardArgs, "saved.data", call.saved.data));
  const bool reads_x = call.dw.data != nullptr && reads_tensors(Gemm::kGradWeight);
  if (reads_x && call.x.data == nullptr) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.x.data is NULL, and recipe {} has grad_weight in high precision: give the "
                "forward's x",
                kBackwardArgs, desc_.recipe.name);
  }
  F8_TRY(check_scales(kBackwardArgs, "scales", call.scales, step_of(call)));
  const bool reads_weight = call.dx.data != nullptr && (recomputes(runtime::Tensor::kWeight) ||
                                                        reads_tensors(Gemm::kGradInput));
  const bool given = reads_weight && call.w.fp8 != nullptr;
  if (given) F8_TRY(check_given(kBackwardArgs, "w.fp8", *call.w.fp8, false, false));
  if (reads_weight && !given && call.w.data == nullptr) {
    return fail(
        ErrorCode::kInvalidArgument, "{}.w.data is NULL, {}: give the forward's w", kBackwardArgs,
        recomputes(runtime::Tensor::kWeight)
            ? "the plan was made with float8_experts_desc.recompute_weight"
            : f8::format("and recipe {} has grad_input in high precision", desc_.recipe.name));
  }
  memory.add_rows("dy", call.dy.data, call.m, n, call.dy.ld, desc_.tensor_dtype, Access::kRead);
  if (given) {
    add_given(memory, "w.fp8", *call.w.fp8, false);
  } else if (reads_weight) {
    memory.add_rows("w", call.w.data, desc_.experts * n, k, call.w.ld, desc_.tensor_dtype,
                    Access::kRead);
  }
  if (reads_x) {
    memory.add_rows("x", call.x.data, call.m, k, call.x.ld, desc_.tensor_dtype, Access::kRead);
  }
  F8_TRY(add_maxima(memory, kBackwardArgs, runtime::Tensor::kGradOutput, call.dy_amax,
                    call.dy_row_amax, call.m, step_of(call)));
  memory.add("w_amax", call.w_amax, sizeof(uint32_t), Access::kRead, alignof(uint32_t));
  add_buffers(memory, *this, call, Access::kRead);
  return memory.check(kBackward, *context_, stream);
}

}  // namespace f8::runtime
