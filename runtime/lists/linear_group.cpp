// Planning a group chooses no kernels of GEMMs: those are its linears'. It lays out buffers that the
// linears share, lists their casts together, and plans their GEMMs for these buffers.
#include "runtime/lists/linear_group.hpp"

#include <algorithm>
#include <functional>
#include <tuple>

#include "runtime/lists/group_state.hpp"

namespace f8::runtime {

LinearGroup::LinearGroup(std::unique_ptr<State> state) : state_(std::move(state)) {}
LinearGroup::~LinearGroup() = default;

Result<std::shared_ptr<const LinearGroup>> LinearGroup::plan(
    const std::shared_ptr<Context>& context,
    std::span<const std::shared_ptr<const Linear>> linears) {
  auto state = std::make_unique<State>();
  state->context = context;
  state->linears.assign(linears.begin(), linears.end());
  F8_TRY(state->check_linears());
  // The lists of casts begin the workspace, and what follows depends on their size.
  state->plan_layout(0);
  F8_TRY(state->plan_casts());
  state->plan_layout(state->casts_bytes());
  F8_TRY(state->plan_casts());
  F8_TRY(state->plan_members());
  return std::shared_ptr<const LinearGroup>(new LinearGroup(std::move(state)));
}

Status LinearGroup::State::check_linears() const {
  constexpr const char* kCall = "float8_linear_group_plan";
  if (linears.empty() || linears.size() > FLOAT8_GROUP_LINEARS) {
    return fail(ErrorCode::kInvalidArgument, "{}: count is {}; 1 to {}", kCall, linears.size(),
                FLOAT8_GROUP_LINEARS);
  }
  for (size_t i = 0; i < linears.size(); ++i) {
    if (linears[i] == nullptr || linears[i]->context() != context) {
      return fail(ErrorCode::kInvalidArgument, "{}: linears[{}] is {}", kCall, i,
                  linears[i] == nullptr ? "NULL" : "another context's");
    }
    const LinearDesc& of = linears[i]->desc();
    if (of.recompute) {
      return fail(ErrorCode::kUnsupported,
                  "{}: linears[{}] has recompute, whose backward casts x again; a group keeps x",
                  kCall, i);
    }
    const std::tuple<const char*, bool> same[] = {
        {"m_max", of.shape.m == desc().shape.m},
        {"k", of.shape.k == desc().shape.k},
        {"tensor_dtype", of.tensor_dtype == desc().tensor_dtype},
        {"non_finite", of.non_finite == desc().non_finite},
        {"count", of.count == desc().count},
        {"no_grad_input", of.needs_grad_input == desc().needs_grad_input}};
    for (const auto& [field, is_same] : same) {
      if (is_same) continue;
      return fail(ErrorCode::kInvalidArgument,
                  "{}: linears[{}] and linears[0] differ in {}; linears of one x have one", kCall,
                  i, field);
    }
    const Copies& x = linear(i).kernels.of(Tensor::kInput);
    const Copies& first = linear(0).kernels.of(Tensor::kInput);
    if (x.q != first.q || x.qt != first.qt) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: recipes {} of linears[0] and {} of linears[{}] cast x differently", kCall,
                  desc().recipe.name, of.recipe.name, i);
    }
    if (i > 0 && of.needs_grad_input && !of.accumulate_grad_input) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: linears[{}] adds to the dx of those before it; set "
                  "float8_linear_desc.accumulate_grad_input",
                  kCall, i);
    }
  }
  return {};
}

void LinearGroup::State::plan_layout(size_t casts) {
  std::vector<GroupedLinear> shapes;
  std::array<size_t, 3> gemm_bytes = {};
  for (size_t i = 0; i < linears.size(); ++i) {
    shapes.push_back({linear(i).kernels, linear(i).desc.shape});
    for (const auto* plans : {&linear(i).gemms.all, &linear(i).gemms.adding}) {
      for (size_t gemm = 0; gemm < plans->size(); ++gemm) {
        if (const GemmPlanPtr& plan = (*plans)[gemm]) {
          gemm_bytes[gemm] = std::max(gemm_bytes[gemm], plan->workspace_bytes());
        }
      }
    }
  }
  layout = group_layout(desc().shape.m, shapes, context->device().sm_count, casts, gemm_bytes[0],
                        std::max(gemm_bytes[1], gemm_bytes[2]));
}

Status LinearGroup::State::plan_casts() {
  for (const bool saved : {false, true}) {
    std::vector<ListedTensor> tensors;
    tensors.push_back({.kernels = linear(0).kernels,
                       .tensor = Tensor::kInput,
                       .copies = kXq | (saved ? kXqt : 0),
                       .at = layout.members[0].forward.x,
                       .rows_max = desc().shape.m});
    for (size_t i = 0; i < linears.size(); ++i) {
      tensors.push_back({.kernels = linear(i).kernels,
                         .tensor = Tensor::kWeight,
                         .copies = kWq | (saved ? kWqt : 0),
                         .at = layout.members[i].forward.w,
                         .rows_max = linear(i).desc.shape.n});
    }
    forward_casts[saved ? 1 : 0] = F8_TRY(CastList::plan(context, tensors));
  }
  for (unsigned copies = 1; copies < dy_casts.size(); ++copies) {
    std::vector<ListedTensor> tensors;
    for (size_t i = 0; i < linears.size(); ++i) {
      tensors.push_back(
          {.kernels = linear(i).kernels,
           .tensor = Tensor::kGradOutput,
           .copies = ((copies & kReadsQ) != 0 ? kDyq : 0) | ((copies & kReadsQt) != 0 ? kDyqt : 0),
           .at = layout.members[i].backward.dy,
           .rows_max = desc().shape.m});
    }
    dy_casts[copies] = F8_TRY(CastList::plan(context, tensors));
  }
  return {};
}

size_t LinearGroup::State::casts_bytes() const {
  size_t most = 0;
  for (const auto& casts : forward_casts) most = std::max(most, casts->workspace_bytes());
  for (const auto& casts : dy_casts) most = std::max(most, casts ? casts->workspace_bytes() : 0);
  return most;
}

Status LinearGroup::State::plan_members() {
  for (size_t i = 0; i < linears.size(); ++i) {
    const Linear::State& of = linear(i);
    const LinearLayout& buffers = layout.members[i];
    const auto forward = [&](CallKind kind) {
      return plan_forward(context, of.desc, of.kernels, of.gemms, buffers, kind);
    };
    Member& member = members.emplace_back();
    member.output = F8_TRY(forward(kGivenX | kGivenW));
    for (CallKind kind = 0; kind < kGradientKinds; ++kind) {
      member.gradients[kind] = F8_TRY(
          plan_gradients(context, of.desc, of.kernels, of.gemms, buffers, kind << kGradientShift));
    }
    if (i > 0) continue;
    for (const CallKind saved : {CallKind{0}, kForwardSaved}) {
      for (const CallKind step : {CallKind{0}, kFirstStep, kFirstStep | kOverRanks}) {
        if (step != 0 && of.kernels.slots.empty()) continue;
        cast_x[kGivenW | saved | step] = F8_TRY(forward(kGivenW | saved | step));
      }
    }
  }
  return {};
}

size_t LinearGroup::workspace_bytes() const {
  return state_->layout.workspace_bytes;
}
size_t LinearGroup::saved_bytes(bool weights) const {
  return weights ? state_->layout.saved_input_bytes : state_->layout.saved_bytes;
}
const std::vector<std::shared_ptr<const Linear>>& LinearGroup::linears() const {
  return state_->linears;
}

Status LinearGroup::forward(const LinearGroupCall& call, Stream stream, AmaxReducer reduce) const {
  const State& state = *state_;
  F8_TRY(state.check_forward(call, stream));
  if (call.m == 0) return {};
  const Context::State& context = state.context->state();
  const ScopedContext current(context.driver, context.primary);
  F8_TRY(current.status());
  const bool saved = call.saved.data != nullptr;
  const float8_step& step = step_of(call);
  const bool over_ranks = step.ranks != nullptr && step.evaluate == 0;
  bool casts_weights = false;
  for (size_t i = 0; i < call.count; ++i) {
    casts_weights =
        casts_weights || (call.linears[i].w.fp8 == nullptr && state.casts_weights(saved, i));
  }
  if (casts_weights) {
    const auto bind = [&](size_t tensor, CallArguments& to) {
      const size_t i = tensor == 0 ? 0 : tensor - 1;
      if (tensor > 0 && call.linears[i].w.fp8 != nullptr) return false;
      state.bind(call, i, saved, to);
      return true;
    };
    F8_TRY(state.forward_casts[saved ? 1 : 0]->run(
        std::cref(bind), {.first_step = step_of(call).first_step != 0,
                          .ranks = over_ranks ? step_of(call).ranks : nullptr,
                          .reduce = reduce,
                          .workspace = call.workspace.data,
                          .launch_counts = launch_counts(call),
                          .stream = stream}));
  }
  for (size_t i = 0; i < call.count; ++i) {
    CallArguments arguments;
    arguments.reduce = reduce;
    state.bind(call, i, saved, arguments);
    const LaunchList* list = &state.members[i].output;
    if (i == 0 && !casts_weights) {
      CallKind kind = kGivenW | (saved ? kForwardSaved : 0);
      if (step_of(call).first_step != 0 && !state.linear(0).kernels.slots.empty()) {
        kind |= over_ranks ? kFirstStep | kOverRanks : kFirstStep;
      }
      list = &state.cast_x[kind];
    }
    F8_TRY(runtime::run(*list, context, arguments, stream));
  }
  return {};
}

Status LinearGroup::backward(const LinearGroupCall& call, Stream stream, AmaxReducer reduce) const {
  const State& state = *state_;
  F8_TRY(state.check_backward(call, stream));
  const Context::State& context = state.context->state();
  const ScopedContext current(context.driver, context.primary);
  F8_TRY(current.status());
  // Each list casts the dy of the linears that read its copies.
  for (unsigned copies = 1; copies < state.dy_casts.size() && call.m > 0; ++copies) {
    bool any = false;
    for (size_t i = 0; i < call.count; ++i) any = any || state.reads(call, i) == copies;
    if (!any) continue;
    const auto bind = [&](size_t i, CallArguments& to) {
      if (state.reads(call, i) != copies) return false;
      state.bind(call, i, true, to);
      return true;
    };
    F8_TRY(
        state.dy_casts[copies]->run(std::cref(bind), {.first_step = step_of(call).first_step != 0,
                                                      .ranks = step_of(call).ranks,
                                                      .reduce = reduce,
                                                      .workspace = call.workspace.data,
                                                      .launch_counts = launch_counts(call),
                                                      .stream = stream}));
  }
  for (size_t i = 0; i < call.count; ++i) {
    const GroupedLinearCall& of = call.linears[i];
    CallKind kind = 0;
    if (call.dx.data != nullptr) {
      kind |= kBackwardDx | (i > 0 || call.dx.accumulate != 0 ? kBackwardAddDx : 0);
    }
    if (of.dw.data != nullptr) kind |= kBackwardDw | (of.dw.accumulate != 0 ? kBackwardAddDw : 0);
    if (of.db.data != nullptr) kind |= kBackwardDb;
    if (kind == 0) continue;
    CallArguments arguments;
    state.bind(call, i, true, arguments);
    F8_TRY(runtime::run(state.members[i].gradients[kind >> kGradientShift], context, arguments,
                        stream));
  }
  return {};
}

}  // namespace f8::runtime
