// Groups of linears of one x.
#include <array>

#include "runtime/c_abi/common.hpp"
#include "runtime/c_abi/ranks.hpp"

using namespace f8::c_abi;
using f8::ErrorCode;

namespace {

// A call's structs as this version knows them.
struct GroupArgs {
  float8_linear_group_args known;
  float8_step step;
  std::array<float8_grouped_linear_args, FLOAT8_GROUP_LINEARS> linears;
  std::array<float8_tensor, FLOAT8_GROUP_LINEARS> w;
};

f8::Status read_linear(const f8::runtime::CallArray<float8_grouped_linear_args>& array, size_t i,
                       GroupArgs& args) {
  constexpr const char* kArgs = "float8_grouped_linear_args";
  F8_TRY(need(array.first, "linears"));
  float8_grouped_linear_args& linear = args.linears[i];
  F8_TRY(read_element(array.given(i), array.first, kArgs, linear));
  F8_TRY(need_plain(kArgs, "dy", linear.dy));
  F8_TRY(check_result(kArgs, "y", linear.y, false));
  F8_TRY(check_result(kArgs, "dw", linear.dw, true));
  F8_TRY(check_result(kArgs, "db", linear.db, true, true));
  return read_tensor("w.fp8", linear.w.fp8, args.w[i]);
}

// Begins a call, and finds its reduction over ranks.
f8::Result<f8::runtime::AmaxReducer> open_call(const float8_linear_group* group,
                                               const float8_linear_group_args* args, bool forward,
                                               GroupArgs& to) {
  constexpr const char* kArgs = "float8_linear_group_args";
  F8_TRY(need(group, "group"));
  F8_TRY(read_struct(args, kArgs, to.known));
  F8_TRY(read_step(to.known.step, to.step));
  if (!forward) to.step.evaluate = 0;
  F8_TRY(need_plain(kArgs, "x", to.known.x));
  F8_TRY(check_result(kArgs, "dx", to.known.dx, true));
  const f8::runtime::LinearGroup& plan = *group->group;
  const f8::runtime::Context& context = *plan.linears().front()->context();
  if (to.known.count != plan.linears().size()) {
    return f8::fail(ErrorCode::kInvalidArgument, "{}.count is {}, the group has {} linears", kArgs,
                    to.known.count, plan.linears().size());
  }
  bool weights = true;
  bool has_slots = false;
  for (size_t i = 0; i < to.known.count; ++i) {
    if (f8::Status good = read_linear({to.known.count, to.known.linears}, i, to); !good) {
      good.error().message = f8::format("{}.linears[{}]: {}", kArgs, i, good.error().message);
      return std::unexpected(std::move(good).error());
    }
    weights = weights && to.linears[i].w.fp8 != nullptr;
    has_slots = has_slots || !plan.linears()[i]->scale_slots().empty();
  }
  to.known.linears = to.linears.data();
  F8_TRY(check_launch_counts(to.step, context));
  F8_TRY(check_bytes(kArgs, "workspace", to.known.workspace, plan.workspace_bytes()));
  F8_TRY(check_bytes(kArgs, "saved", to.known.saved, plan.saved_bytes(weights)));
  const bool reduces = to.step.first_step != 0 && to.step.evaluate == 0 && has_slots;
  return amax_reducer(context, "float8_step.ranks", to.step.ranks, reduces);
}

}  // namespace

float8_status float8_linear_group_plan(float8_context* context, const float8_linear* const* linears,
                                       size_t count, float8_linear_group** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    if (count > 0) F8_TRY(need(linears, "linears"));
    std::vector<std::shared_ptr<const f8::runtime::Linear>> list;
    for (size_t i = 0; i < count; ++i) {
      list.push_back(linears[i] == nullptr ? nullptr : linears[i]->linear);
    }
    auto group = F8_TRY(f8::runtime::LinearGroup::plan(context->context, list));
    *out = new float8_linear_group{std::move(group)};
    return {};
  });
}

void float8_linear_group_destroy(float8_linear_group* group) {
  destroy(group);
}

size_t float8_linear_group_workspace_bytes(const float8_linear_group* group) {
  return group == nullptr ? 0 : group->group->workspace_bytes();
}

size_t float8_linear_group_saved_bytes(const float8_linear_group* group, int32_t weights) {
  return group == nullptr ? 0 : group->group->saved_bytes(weights != 0);
}

float8_status float8_linear_group_info(const float8_linear_group* group, char* text, size_t bytes,
                                       size_t* needed) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(group, "group"));
    return copy_text(f8::runtime::describe(*group->group), text, bytes, needed);
  });
}

float8_status float8_linear_group_forward(const float8_linear_group* group,
                                          const float8_linear_group_args* args,
                                          float8_stream stream) {
  return guarded([&]() -> f8::Status {
    GroupArgs known;
    const auto reduce = F8_TRY(open_call(group, args, true, known));
    return group->group->forward(known.known, stream, reduce);
  });
}

float8_status float8_linear_group_backward(const float8_linear_group* group,
                                           const float8_linear_group_args* args,
                                           float8_stream stream) {
  return guarded([&]() -> f8::Status {
    GroupArgs known;
    const auto reduce = F8_TRY(open_call(group, args, false, known));
    return group->group->backward(known.known, stream, reduce);
  });
}
