// The routing of a mixture of experts, and the sums over its rows.
#include "runtime/c_abi/common.hpp"

using namespace f8::c_abi;

float8_status float8_moe_route_plan_create(float8_context* context,
                                           const float8_moe_route_desc* desc,
                                           float8_moe_route_plan** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    float8_moe_route_desc known;
    F8_TRY(read_struct(desc, "float8_moe_route_desc", known));
    F8_TRY(need_zero("float8_moe_route_desc.reserved", known.reserved));
    auto plan =
        F8_TRY(f8::runtime::RoutePlan::create(context->context, {.tokens_max = known.tokens_max,
                                                                 .top_k = known.top_k,
                                                                 .experts = known.experts,
                                                                 .long_ids = known.long_ids != 0}));
    *out = new float8_moe_route_plan{std::move(plan)};
    return {};
  });
}

void float8_moe_route_plan_destroy(float8_moe_route_plan* plan) {
  destroy(plan);
}

size_t float8_moe_route_workspace_bytes(const float8_moe_route_plan* plan) {
  return plan == nullptr ? 0 : plan->plan.workspace_bytes();
}

float8_status float8_moe_route(const float8_moe_route_plan* plan, const float8_moe_route_args* args,
                               float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(plan, "plan"));
    float8_moe_route_args known;
    F8_TRY(read_struct(args, "float8_moe_route_args", known));
    F8_TRY(check_bytes("float8_moe_route_args", "workspace", known.workspace,
                       plan->plan.workspace_bytes()));
    return plan->plan.run(known, stream);
  });
}

float8_status float8_moe_combine_plan_create(float8_context* context,
                                             const float8_moe_combine_desc* desc,
                                             float8_moe_combine_plan** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    float8_moe_combine_desc known;
    F8_TRY(read_struct(desc, "float8_moe_combine_desc", known));
    f8::runtime::CombineDesc of{.tokens_max = known.tokens_max,
                                .cols = known.cols,
                                .top_k = known.top_k,
                                .experts = known.experts};
    of.y = F8_TRY(dtype_of("float8_moe_combine_desc.y_dtype", known.y_dtype));
    of.out = F8_TRY(dtype_of("float8_moe_combine_desc.out_dtype", known.out_dtype));
    auto plan = F8_TRY(f8::runtime::CombinePlan::create(context->context, of));
    *out = new float8_moe_combine_plan{std::move(plan)};
    return {};
  });
}

void float8_moe_combine_plan_destroy(float8_moe_combine_plan* plan) {
  destroy(plan);
}

float8_status float8_moe_combine(const float8_moe_combine_plan* plan,
                                 const float8_moe_combine_args* args, float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(plan, "plan"));
    float8_moe_combine_args known;
    F8_TRY(read_struct(args, "float8_moe_combine_args", known));
    return plan->plan.run(known, stream);
  });
}

float8_status float8_moe_score_gradient(const float8_moe_combine_plan* plan,
                                        const float8_moe_score_gradient_args* args,
                                        float8_stream stream) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(plan, "plan"));
    float8_moe_score_gradient_args known;
    F8_TRY(read_struct(args, "float8_moe_score_gradient_args", known));
    return plan->plan.run(known, stream);
  });
}
