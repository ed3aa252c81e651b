// Linears.
#include "runtime/c_abi/linear.hpp"

#include "runtime/c_abi/common.hpp"
#include "runtime/c_abi/ranks.hpp"
#include "runtime/c_abi/recipe.hpp"
#include "runtime/model/first_use.hpp"
#include "runtime/model/info.hpp"

using namespace f8::c_abi;
using f8::ErrorCode;

namespace {

// The caller's tensors in fp8 as this version knows them.
struct HeldTensors {
  float8_tensor x, w, dy;
};

// The reduction of a call: a first step takes the scales of delayed operands from all ranks.
template <class Args>
f8::Result<f8::runtime::AmaxReducer> reducer_of(const char* field, const f8::runtime::Linear& plan,
                                                const Args& known) {
  bool reduces = known.first_step != 0 && !plan.scale_slots().empty();
  if constexpr (requires { known.evaluate; }) reduces = reduces && known.evaluate == 0;
  return amax_reducer(*plan.context(), field, known.ranks, reduces);
}

// Begins a forward or a backward.
template <class Args>
f8::Status open_call(const char* type, const float8_linear* linear, const Args* args, Args& known,
                     HeldTensors& held) {
  F8_TRY(need(linear, "linear"));
  F8_TRY(read_struct(args, type, known));
  F8_TRY(read_tensor("x_tensor", known.x_tensor, held.x));
  F8_TRY(read_tensor("w_tensor", known.w_tensor, held.w));
  if constexpr (requires { known.dy_tensor; }) {
    F8_TRY(read_tensor("dy_tensor", known.dy_tensor, held.dy));
  }
  if (known.reserved != 0) [[unlikely]] {
    return f8::fail(ErrorCode::kInvalidArgument, "{}.reserved is {}; it must be 0", type,
                    known.reserved);
  }
  const f8::runtime::Linear& plan = *linear->linear;
  F8_TRY(check_bytes(type, "workspace_bytes", known.workspace_bytes, plan.workspace_bytes()));
  if (known.reserved_2 != 0) [[unlikely]] {
    return f8::fail(ErrorCode::kInvalidArgument, "{}.reserved_2 is {}; it must be 0", type,
                    known.reserved_2);
  }
  if (known.saved != nullptr) {
    F8_TRY(check_bytes(type, "saved_bytes", known.saved_bytes,
                       plan.saved_bytes(known.w_tensor != nullptr, known.x_tensor != nullptr)));
  }
  return {};
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
  F8_TRY(need_zero("float8_linear_desc.reserved", known.reserved));
  converted.sm_limit = F8_TRY(sm_limit_of("float8_linear_desc.sm_limit", known.sm_limit));
  return converted;
}

}  // namespace f8::c_abi

float8_status float8_linear_plan(float8_context* context, const float8_linear_desc* desc,
                                 float8_linear** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    float8_linear_desc known;
    F8_TRY(read_struct(desc, "float8_linear_desc", known));
    f8::runtime::LinearDesc converted = F8_TRY(linear_options(known));
    converted.shape = {known.m_max, known.n, known.k};
    converted.recipe = F8_TRY(one_recipe("float8_linear_desc", known.recipe, known.custom_recipe));
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

size_t float8_linear_saved_bytes(const float8_linear* linear) {
  return linear == nullptr ? 0 : linear->linear->saved_bytes();
}

size_t float8_linear_saved_bytes_with_tensors(const float8_linear* linear, int32_t x_tensor,
                                              int32_t w_tensor) {
  return linear == nullptr ? 0 : linear->linear->saved_bytes(w_tensor != 0, x_tensor != 0);
}

float8_status float8_linear_forward(const float8_linear* linear, const float8_forward_args* args,
                                    void* workspace, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    float8_forward_args known;
    HeldTensors held;
    F8_TRY(open_call("float8_forward_args", linear, args, known, held));
    const auto reduce = F8_TRY(reducer_of("float8_forward_args.ranks", *linear->linear, known));
    return linear->linear->forward(known, workspace, stream, reduce);
  });
}

float8_status float8_linear_backward(const float8_linear* linear, const float8_backward_args* args,
                                     void* workspace, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    float8_backward_args known;
    HeldTensors held;
    F8_TRY(open_call("float8_backward_args", linear, args, known, held));
    const auto reduce = F8_TRY(reducer_of("float8_backward_args.ranks", *linear->linear, known));
    return linear->linear->backward(known, workspace, stream, reduce);
  });
}

float8_status float8_linear_saved_tensors(const float8_linear* linear, const void* saved, int64_t m,
                                          int32_t w_tensor, float8_tensor* x, float8_tensor* w) {
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
    return write_struct("w", plan.saved_w(w_tensor != 0 ? nullptr : saved), w);
  });
}
