// Linears.
#include "runtime/c_abi/linear.hpp"

#include "runtime/c_abi/common.hpp"
#include "runtime/c_abi/ranks.hpp"
#include "runtime/c_abi/recipe.hpp"
#include "runtime/linear/plan/layout.hpp"
#include "runtime/model/first_use.hpp"
#include "runtime/model/info.hpp"

using namespace f8::c_abi;
using f8::ErrorCode;

namespace {

// The caller's step and tensors in fp8 as this version knows them.
struct Held {
  float8_step step;
  float8_tensor x, w, dy;
};

// The reduction of a call: a first step takes the scales of delayed operands from all ranks.
f8::Result<f8::runtime::AmaxReducer> reducer_of(const f8::runtime::Linear& plan,
                                                const float8_step& step, bool evaluates) {
  const bool reduces = step.first_step != 0 && !plan.scale_slots().empty() && !evaluates;
  return amax_reducer(*plan.context(), "float8_step.ranks", step.ranks, reduces);
}

f8::Status check_results(const float8_forward_args& known) {
  return check_result("float8_forward_args", "y", known.y, false);
}
f8::Status check_results(const float8_backward_args& known) {
  constexpr const char* kArgs = "float8_backward_args";
  F8_TRY(check_result(kArgs, "dx", known.dx, true));
  F8_TRY(check_result(kArgs, "dw", known.dw, true));
  return check_result(kArgs, "db", known.db, true, true);
}

// Begins a forward or a backward.
template <class Args>
f8::Status open_call(const char* type, const float8_linear* linear, const Args* args, Args& known,
                     Held& held) {
  F8_TRY(need(linear, "linear"));
  F8_TRY(read_struct(args, type, known));
  F8_TRY(read_step(known.step, held.step));
  F8_TRY(read_tensor("x.fp8", known.x.fp8, held.x));
  F8_TRY(read_tensor("w.fp8", known.w.fp8, held.w));
  if constexpr (requires { known.dy; }) F8_TRY(read_tensor("dy.fp8", known.dy.fp8, held.dy));
  F8_TRY(check_results(known));
  const f8::runtime::Linear& plan = *linear->linear;
  F8_TRY(check_launch_counts(held.step, *plan.context()));
  F8_TRY(check_bytes(type, "workspace", known.workspace, plan.workspace_bytes(known)));
  return check_bytes(type, "saved", known.saved,
                     plan.saved_bytes(known.w.fp8 != nullptr, known.x.fp8 != nullptr));
}

}  // namespace

namespace f8::c_abi {

Result<runtime::LinearDesc> linear_options(const float8_linear_desc& known) {
  runtime::LinearDesc converted;
  converted.grad_weight_dtype =
      F8_TRY(dtype_of("float8_linear_desc.grad_weight_dtype", known.grad_weight_dtype));
  converted.tensor_dtype = F8_TRY(dtype_of("float8_linear_desc.tensor_dtype", known.tensor_dtype));
  converted.bias_grad_dtype =
      F8_TRY(dtype_of("float8_linear_desc.bias_grad_dtype", known.bias_grad_dtype));
  F8_TRY(check_enum("float8_linear_desc.non_finite", known.non_finite, FLOAT8_SATURATE));
  converted.non_finite = non_finite_of(known.non_finite);
  converted.bias_grad = known.bias_grad != 0;
  converted.count = known.count != 0;
  converted.bias = known.bias != 0;
  converted.accumulate_grad_weight = known.accumulate_grad_weight != 0;
  converted.needs_grad_input = known.no_grad_input == 0;
  converted.recompute = known.recompute != 0;
  converted.accumulate_grad_input = known.accumulate_grad_input != 0;
  converted.weight_shards = known.weight_shards != 0;
  converted.needs_grad_weight = known.no_grad_weight == 0;
  converted.sm_limit = F8_TRY(sm_limit_of("float8_linear_desc.sm_limit", known.sm_limit));
  return converted;
}

Result<runtime::LinearDesc> linear_desc(const float8_linear_desc* desc) {
  float8_linear_desc known;
  F8_TRY(read_struct(desc, "float8_linear_desc", known));
  runtime::LinearDesc converted = F8_TRY(linear_options(known));
  converted.shape = {known.m_max, known.n, known.k};
  converted.recipe = F8_TRY(one_recipe("float8_linear_desc", known.recipe, known.custom_recipe));
  return converted;
}

}  // namespace f8::c_abi

float8_status float8_linear_sizes(const float8_linear_desc* desc, float8_saved_bytes* sizes) {
  return guarded([&]() -> f8::Status {
    const f8::runtime::LinearDesc converted = F8_TRY(f8::c_abi::linear_desc(desc));
    const auto saved = F8_TRY(f8::runtime::saved_bytes_of(converted));
    return write_struct("float8_saved_bytes", float8_saved_bytes{0, saved.x, saved.w}, sizes);
  });
}

float8_status float8_linear_plan(float8_context* context, const float8_linear_desc* desc,
                                 float8_linear** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    const f8::runtime::LinearDesc converted = F8_TRY(f8::c_abi::linear_desc(desc));
    f8::runtime::tune_first_use(*context->context, converted.recipe, converted.shape);
    auto linear = F8_TRY(f8::runtime::Linear::plan(context->context, converted));
    *out = new float8_linear{std::move(linear)};
    return {};
  });
}

void float8_linear_destroy(float8_linear* linear) {
  destroy(linear);
}

float8_status float8_linear_info(const float8_linear* linear, char* text, size_t bytes,
                                 size_t* needed) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(linear, "linear"));
    return copy_text(f8::runtime::describe(*linear->linear), text, bytes, needed);
  });
}

size_t float8_linear_workspace_bytes(const float8_linear* linear) {
  return linear == nullptr ? 0 : linear->linear->workspace_bytes();
}

size_t float8_linear_forward_workspace_bytes(const float8_linear* linear, int32_t x_fp8,
                                             int32_t w_fp8) {
  return linear == nullptr ? 0 : linear->linear->forward_workspace_bytes(x_fp8 != 0, w_fp8 != 0);
}

size_t float8_linear_backward_workspace_bytes(const float8_linear* linear, int32_t x_fp8,
                                              int32_t w_fp8, int32_t dy_fp8) {
  return linear == nullptr
             ? 0
             : linear->linear->backward_workspace_bytes(x_fp8 != 0, w_fp8 != 0, dy_fp8 != 0);
}

size_t float8_linear_saved_bytes(const float8_linear* linear) {
  return linear == nullptr ? 0 : linear->linear->saved_bytes();
}

size_t float8_linear_saved_bytes_with_tensors(const float8_linear* linear, int32_t x_fp8,
                                              int32_t w_fp8) {
  return linear == nullptr ? 0 : linear->linear->saved_bytes(w_fp8 != 0, x_fp8 != 0);
}

float8_status float8_linear_forward(const float8_linear* linear, const float8_forward_args* args,
                                    float8_stream stream) {
  return guarded([&]() -> f8::Status {
    float8_forward_args known;
    Held held;
    F8_TRY(open_call("float8_forward_args", linear, args, known, held));
    const auto reduce = F8_TRY(reducer_of(*linear->linear, held.step, held.step.evaluate != 0));
    return linear->linear->forward(known, stream, reduce);
  });
}

float8_status float8_linear_backward(const float8_linear* linear, const float8_backward_args* args,
                                     float8_stream stream) {
  return guarded([&]() -> f8::Status {
    float8_backward_args known;
    Held held;
    F8_TRY(open_call("float8_backward_args", linear, args, known, held));
    const auto reduce = F8_TRY(reducer_of(*linear->linear, held.step, false));
    return linear->linear->backward(known, stream, reduce);
  });
}

float8_status float8_linear_saved_tensors(const float8_linear* linear, const void* saved, int64_t m,
                                          int32_t w_fp8, float8_tensor* x, float8_tensor* w) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(linear, "linear"));
    F8_TRY(need(saved, "saved"));
    const f8::runtime::Linear& plan = *linear->linear;
    if (plan.saved_bytes() == 0 || plan.desc().recompute) {
      return f8::fail(ErrorCode::kInvalidArgument,
                      "float8_linear_saved_tensors: the linear saves no copies");
    }
    if (m < 0 || m > plan.desc().shape.m) {
      return f8::fail(ErrorCode::kInvalidArgument, "m is {}, the plan was made for 0 to {}", m,
                      plan.desc().shape.m);
    }
    if (x != nullptr) F8_TRY(write_struct("x", plan.saved_x(saved, m), x));
    if (w == nullptr) return {};
    return write_struct("w", plan.saved_w(w_fp8 != 0 ? nullptr : saved), w);
  });
}
