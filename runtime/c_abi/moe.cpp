// The MLP of experts.
#include "runtime/c_abi/common.hpp"
#include "runtime/c_abi/recipe.hpp"

using namespace f8::c_abi;

namespace {

f8::Result<f8::runtime::MoeDesc> moe_desc(const float8_moe_desc* desc) {
  float8_moe_desc known;
  F8_TRY(read_struct(desc, "float8_moe_desc", known));
  F8_TRY(need_zero("float8_moe_desc.reserved", known.reserved));
  F8_TRY(check_enum("float8_moe_desc.non_finite", known.non_finite, FLOAT8_SATURATE));
  f8::runtime::MoeDesc out;
  out.m_max = known.m_max;
  out.dim = known.dim;
  out.hidden = known.hidden;
  out.experts = known.experts;
  out.recipe = F8_TRY(one_recipe("float8_moe_desc", known.recipe, known.custom_recipe));
  out.tensor_dtype = F8_TRY(dtype_of("float8_moe_desc.tensor_dtype", known.tensor_dtype));
  out.grad_weight_dtype =
      F8_TRY(dtype_of("float8_moe_desc.grad_weight_dtype", known.grad_weight_dtype));
  out.accumulate_grad_weight = known.accumulate_grad_weight != 0;
  out.recompute_weight = known.recompute_weight != 0;
  out.rows_in_place = known.rows_in_place != 0;
  out.w3_apart = known.w3_apart != 0;
  out.needs_grad_w13 = known.no_grad_w13 == 0;
  out.needs_grad_w2 = known.no_grad_w2 == 0;
  out.non_finite = non_finite_of(known.non_finite);
  out.sm_limit = F8_TRY(sm_limit_of("float8_moe_desc.sm_limit", known.sm_limit));
  return out;
}

// Begins a forward or a backward.
template <class Args>
f8::Status open_call(const char* type, const float8_moe* moe, const Args* args, Args& known,
                     std::array<float8_tensor, 2>& weights, float8_step& step) {
  F8_TRY(need(moe, "moe"));
  F8_TRY(read_struct(args, type, known));
  if constexpr (requires { known.part; }) {
    F8_TRY(check_enum("float8_moe_backward_args.part", known.part, FLOAT8_MOE_GRAD_WEIGHT));
    F8_TRY(need_zero("float8_moe_backward_args.reserved_2", known.reserved_2));
  }
  F8_TRY(read_step(known.step, step));
  if (known.reserved != 0) {
    return f8::fail(f8::ErrorCode::kInvalidArgument, "{}.reserved is {}; it must be 0", type,
                    known.reserved);
  }
  const f8::runtime::Moe& plan = *moe->moe;
  F8_TRY(check_bytes(type, "layout", known.layout, plan.layout_bytes()));
  F8_TRY(check_bytes(type, "saved", known.saved, plan.saved_bytes()));
  const int64_t m = std::clamp<int64_t>(known.m, 0, plan.m_max());  // which is checked later
  for (int32_t i = 0; const auto& [name, at] : f8::runtime::kMoeBuffers) {
    F8_TRY(check_bytes(type, name, known.buffers.*at, plan.buffer_bytes(i++, m)));
  }
  F8_TRY(check_bytes(type, "workspace", known.workspace, plan.bytes_of(known)));
  F8_TRY(read_tensor("w13.fp8", known.w13.fp8, weights[0]));
  F8_TRY(read_tensor("w2.fp8", known.w2.fp8, weights[1]));
  F8_TRY(need_plain(type, "w3", known.w3));
  return need_plain(type, "x", known.x);
}

}  // namespace

float8_status float8_moe_plan(float8_context* context, const float8_moe_desc* desc,
                              float8_moe** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    const f8::runtime::MoeDesc known = F8_TRY(moe_desc(desc));
    auto plan = F8_TRY(f8::runtime::Moe::plan(context->context, known));
    *out = new float8_moe{plan, {float8_experts{plan->w13()}, float8_experts{plan->w2()}}};
    return {};
  });
}

void float8_moe_destroy(float8_moe* moe) {
  destroy(moe);
}

size_t float8_moe_workspace_bytes(const float8_moe* moe) {
  return moe == nullptr ? 0 : moe->moe->workspace_bytes();
}

size_t float8_moe_saved_bytes(const float8_moe* moe) {
  return moe == nullptr ? 0 : moe->moe->saved_bytes();
}

size_t float8_moe_call_bytes(const float8_moe* moe, int32_t call) {
  return moe == nullptr ? 0 : moe->moe->call_bytes(call);
}

size_t float8_moe_buffer_bytes(const float8_moe* moe, int32_t buffer) {
  return moe == nullptr ? 0 : moe->moe->buffer_bytes(buffer);
}

const float8_experts* float8_moe_linear(const float8_moe* moe, int32_t index) {
  return moe == nullptr || index < 0 || index > 1 ? nullptr : &moe->linears[index];
}

float8_status float8_moe_forward(const float8_moe* moe, const float8_moe_forward_args* args,
                                 float8_stream stream) {
  return guarded([&]() -> f8::Status {
    constexpr const char* kType = "float8_moe_forward_args";
    float8_moe_forward_args known;
    std::array<float8_tensor, 2> weights;
    float8_step step;
    F8_TRY(open_call(kType, moe, args, known, weights, step));
    F8_TRY(check_result(kType, "y", known.y, false));
    return moe->moe->forward(known, stream);
  });
}

float8_status float8_moe_backward(const float8_moe* moe, const float8_moe_backward_args* args,
                                  float8_stream stream) {
  return guarded([&]() -> f8::Status {
    constexpr const char* kType = "float8_moe_backward_args";
    float8_moe_backward_args known;
    std::array<float8_tensor, 2> weights;
    float8_step step;
    F8_TRY(open_call(kType, moe, args, known, weights, step));
    F8_TRY(need_plain(kType, "dy", known.dy));
    F8_TRY(check_result(kType, "dx", known.dx, false));
    F8_TRY(check_result(kType, "dw13", known.dw13, true));
    F8_TRY(check_result(kType, "dw3", known.dw3, true));
    F8_TRY(check_result(kType, "dw2", known.dw2, true));
    return moe->moe->backward(known, stream);
  });
}
