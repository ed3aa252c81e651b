// Expert linears, and the layout of a routing.
#include "runtime/c_abi/common.hpp"
#include "runtime/c_abi/recipe.hpp"

using namespace f8::c_abi;

namespace {

f8::Result<f8::runtime::ExpertsDesc> experts_desc(const float8_experts_desc* desc) {
  float8_experts_desc known;
  F8_TRY(read_struct(desc, "float8_experts_desc", known));
  F8_TRY(check_enum("float8_experts_desc.non_finite", known.non_finite, FLOAT8_SATURATE));
  f8::runtime::ExpertsDesc out;
  out.shape = {known.m_max, known.n, known.k};
  out.experts = known.experts;
  out.recipe =
      F8_TRY(f8::c_abi::one_recipe("float8_experts_desc", known.recipe, known.custom_recipe));
  out.tensor_dtype = F8_TRY(dtype_of("float8_experts_desc.tensor_dtype", known.tensor_dtype));
  out.grad_weight_dtype =
      F8_TRY(dtype_of("float8_experts_desc.grad_weight_dtype", known.grad_weight_dtype));
  out.accumulate_grad_weight = known.accumulate_grad_weight != 0;
  out.needs_grad_input = known.no_grad_input == 0;
  out.non_finite = non_finite_of(known.non_finite);
  out.recompute_weight = known.recompute_weight != 0;
  out.input_over_ranks = known.x_over_ranks != 0;
  out.grad_output_over_ranks = known.dy_over_ranks != 0;
  out.needs_grad_weight = known.no_grad_weight == 0;
  F8_TRY(need_zero("float8_experts_desc.reserved", known.reserved));
  out.sm_limit = F8_TRY(sm_limit_of("float8_experts_desc.sm_limit", known.sm_limit));
  return out;
}

f8::Result<f8::runtime::ExpertQuantizerDesc> quantizer_desc(
    const float8_expert_quantizer_desc* desc) {
  constexpr const char* kType = "float8_expert_quantizer_desc";
  float8_expert_quantizer_desc known;
  F8_TRY(read_struct(desc, kType, known));
  F8_TRY(check_enum("float8_expert_quantizer_desc.non_finite", known.non_finite, FLOAT8_SATURATE));
  f8::runtime::ExpertQuantizerDesc out;
  out.experts = known.experts;
  out.rows = known.n;
  out.cols = known.k;
  out.recipe = F8_TRY(f8::c_abi::one_recipe(kType, known.recipe, known.custom_recipe));
  out.dtype = F8_TRY(dtype_of("float8_expert_quantizer_desc.dtype", known.dtype));
  out.f32_source = known.f32_source != 0;
  out.non_finite = non_finite_of(known.non_finite);
  out.over_ranks = known.over_ranks != 0;
  out.noop_flag = known.noop_flag != 0;
  out.two_tensors = known.two_tensors != 0;
  F8_TRY(need_zero("float8_expert_quantizer_desc.reserved", known.reserved));
  return out;
}

f8::Status read_call(const float8_expert_quantizer* quantizer,
                     const float8_expert_quantize_args* args, float8_expert_quantize_args& known,
                     float8_step& step) {
  constexpr const char* kType = "float8_expert_quantize_args";
  F8_TRY(need(quantizer, "quantizer"));
  F8_TRY(read_struct(args, kType, known));
  F8_TRY(read_step(known.step, step));
  F8_TRY(need_plain(kType, "w", known.w));
  F8_TRY(need_plain(kType, "second_w", known.second_w));
  const f8::runtime::ExpertQuantizer& plan = *quantizer->quantizer;
  const size_t transposed = plan.layout().transposed_bytes;
  F8_TRY(check_bytes(kType, "tensor", known.tensor, plan.layout().tensor_bytes - transposed));
  F8_TRY(check_bytes(kType, "transposed", known.transposed, transposed));
  return check_bytes(kType, "workspace", known.workspace, plan.workspace_bytes());
}

// Begins a forward or a backward.
template <class Args>
f8::Status open_call(const char* type, const float8_experts* experts, const Args* args, Args& known,
                     float8_step& step, float8_tensor& weight) {
  F8_TRY(need(experts, "experts"));
  F8_TRY(read_struct(args, type, known));
  F8_TRY(read_step(known.step, step));
  F8_TRY(read_tensor("w.fp8", known.w.fp8, weight));
  if (known.reserved != 0) {
    return f8::fail(f8::ErrorCode::kInvalidArgument, "{}.reserved is {}; it must be 0", type,
                    known.reserved);
  }
  const f8::runtime::Experts& plan = *experts->experts;
  F8_TRY(check_bytes(type, "layout", known.layout, plan.layout_bytes()));
  F8_TRY(check_bytes(type, "saved", known.saved, plan.saved_bytes()));
  return check_bytes(type, "workspace", known.workspace, plan.workspace_bytes());
}

}  // namespace

float8_status float8_group_layout_plan_create(float8_context* context,
                                              const float8_group_layout_desc* desc,
                                              float8_group_layout_plan** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    float8_group_layout_desc known;
    F8_TRY(read_struct(desc, "float8_group_layout_desc", known));
    F8_TRY(need_zero("float8_group_layout_desc.reserved", known.reserved));
    auto plan =
        F8_TRY(f8::runtime::GroupLayoutPlan::create(context->context, known.m_max, known.experts));
    *out = new float8_group_layout_plan{std::move(plan)};
    return {};
  });
}

void float8_group_layout_plan_destroy(float8_group_layout_plan* plan) {
  destroy(plan);
}

size_t float8_group_layout_bytes(const float8_group_layout_plan* plan) {
  return plan == nullptr ? 0 : plan->plan.bytes();
}

float8_status float8_group_layout(const float8_group_layout_plan* plan,
                                  const float8_group_layout_args* args, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(plan, "plan"));
    float8_group_layout_args known;
    F8_TRY(read_struct(args, "float8_group_layout_args", known));
    F8_TRY(check_bytes("float8_group_layout_args", "layout", known.layout, plan->plan.bytes()));
    return plan->plan.run(known, stream);
  });
}

float8_status float8_group_layout_error(const float8_group_layout_plan* plan, void* layout,
                                        float8_stream stream, float8_group_error* error) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(plan, "plan"));
    float8_group_error known;
    F8_TRY(read_struct(error, "float8_group_error", known));  // before the error is taken
    return write_struct("float8_group_error", F8_TRY(plan->plan.take_error(layout, stream)), error);
  });
}

float8_status float8_experts_plan(float8_context* context, const float8_experts_desc* desc,
                                  float8_experts** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    const f8::runtime::ExpertsDesc known = F8_TRY(experts_desc(desc));
    auto plan = F8_TRY(f8::runtime::Experts::plan(context->context, known));
    *out = new float8_experts{std::move(plan)};
    return {};
  });
}

void float8_experts_destroy(float8_experts* experts) {
  destroy(experts);
}

size_t float8_experts_workspace_bytes(const float8_experts* experts) {
  return experts == nullptr ? 0 : experts->experts->workspace_bytes();
}

size_t float8_experts_saved_bytes(const float8_experts* experts) {
  return experts == nullptr ? 0 : experts->experts->saved_bytes();
}

float8_status float8_experts_forward(const float8_experts* experts,
                                     const float8_experts_forward_args* args,
                                     float8_stream stream) {
  return guarded([&]() -> f8::Status {
    constexpr const char* kType = "float8_experts_forward_args";
    float8_experts_forward_args known;
    float8_step step;
    float8_tensor weight;
    F8_TRY(open_call(kType, experts, args, known, step, weight));
    F8_TRY(need_plain(kType, "x", known.x));
    F8_TRY(check_result(kType, "y", known.y, false));
    return experts->experts->forward(known, stream);
  });
}

float8_status float8_experts_backward(const float8_experts* experts,
                                      const float8_experts_backward_args* args,
                                      float8_stream stream) {
  return guarded([&]() -> f8::Status {
    constexpr const char* kType = "float8_experts_backward_args";
    float8_experts_backward_args known;
    float8_step step;
    float8_tensor weight;
    F8_TRY(open_call(kType, experts, args, known, step, weight));
    F8_TRY(need_plain(kType, "dy", known.dy));
    F8_TRY(need_plain(kType, "x", known.x));
    F8_TRY(check_result(kType, "dx", known.dx, false));
    F8_TRY(check_result(kType, "dw", known.dw, true));
    return experts->experts->backward(known, stream);
  });
}

float8_status float8_expert_quantizer_plan(float8_context* context,
                                           const float8_expert_quantizer_desc* desc,
                                           float8_expert_quantizer** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    const f8::runtime::ExpertQuantizerDesc known = F8_TRY(quantizer_desc(desc));
    auto plan = F8_TRY(f8::runtime::ExpertQuantizer::plan(context->context, known));
    *out = new float8_expert_quantizer{std::move(plan)};
    return {};
  });
}

void float8_expert_quantizer_destroy(float8_expert_quantizer* quantizer) {
  destroy(quantizer);
}

size_t float8_expert_quantizer_workspace_bytes(const float8_expert_quantizer* quantizer) {
  return quantizer == nullptr ? 0 : quantizer->quantizer->workspace_bytes();
}

float8_status float8_expert_quantizer_layout(const float8_expert_quantizer_desc* desc,
                                             float8_layout* layout) {
  return guarded([&]() -> f8::Status {
    const f8::runtime::ExpertQuantizerDesc known = F8_TRY(quantizer_desc(desc));
    return write_struct("float8_layout", F8_TRY(f8::runtime::ExpertQuantizer::layout_of(known)),
                        layout);
  });
}

float8_status float8_expert_quantize(const float8_expert_quantizer* quantizer,
                                     const float8_expert_quantize_args* args,
                                     float8_stream stream) {
  return guarded([&]() -> f8::Status {
    float8_expert_quantize_args known;
    float8_step step;
    F8_TRY(read_call(quantizer, args, known, step));
    return quantizer->quantizer->run(known, stream);
  });
}

float8_status float8_expert_quantize_amax(const float8_expert_quantizer* quantizer,
                                          const float8_expert_quantize_args* args,
                                          float8_stream stream) {
  return guarded([&]() -> f8::Status {
    float8_expert_quantize_args known;
    float8_step step;
    F8_TRY(read_call(quantizer, args, known, step));
    return quantizer->quantizer->find_amax(known, stream);
  });
}
