// Expert linears, and the layout of a routing.
#include "runtime/c_abi/common.hpp"

using namespace f8::c_abi;

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
    F8_TRY(need(error, "error"));
    return write_struct("float8_group_error", F8_TRY(plan->plan.take_error(layout, stream)), error);
  });
}
