// A group in words, and its launches beside those of its linears.
#include <algorithm>

#include "runtime/lists/group_state.hpp"

namespace f8::runtime {
namespace {

size_t kernels_of(const LaunchList& list, int64_t m) {
  const auto is_kernel = [](const LaunchLabel& label) { return !label.name.starts_with("clear"); };
  return static_cast<size_t>(std::ranges::count_if(range_at(list, m).labels, is_kernel));
}

}  // namespace

LinearGroup::Launches LinearGroup::launches(int64_t m) const {
  Launches count;
  const bool dx = state_->desc().needs_grad_input;
  count.forward = state_->forward_casts[1]->launches(m);
  count.forward_with_weights = kernels_of(state_->cast_x[kGivenW | kForwardSaved], m);
  count.backward = state_->dy_casts[dx ? kReadsQ | kReadsQt : kReadsQt]->launches(m);
  for (size_t i = 0; i < state_->members.size(); ++i) {
    const State::Member& member = state_->members[i];
    count.forward += kernels_of(member.output, m);
    if (i > 0) count.forward_with_weights += kernels_of(member.output, m);
    CallKind kind = kBackwardDw | (dx ? kBackwardDx : 0) | (dx && i > 0 ? kBackwardAddDx : 0);
    if (state_->linear(i).desc.bias_grad) kind |= kBackwardDb;
    count.backward += kernels_of(member.gradients[kind >> kGradientShift], m);
  }
  return count;
}

LinearGroup::Launches LinearGroup::launches_one_by_one(int64_t m) const {
  Launches count;
  for (size_t i = 0; i < state_->linears.size(); ++i) {
    const Linear::State& linear = state_->linear(i);
    const bool dx = linear.desc.needs_grad_input;
    CallKind kind = kBackwardDw | (dx ? kBackwardDx : 0) | (dx && i > 0 ? kBackwardAddDx : 0);
    if (linear.desc.bias_grad) kind |= kBackwardDb;
    count.forward += kernels_of(linear.launches.forward[kForwardSaved], m);
    count.forward_with_weights += kernels_of(linear.launches.forward[kForwardSaved | kGivenW], m);
    count.backward += kernels_of(linear.launches.backward[kind], m);
  }
  return count;
}

std::string describe(const LinearGroup& group) {
  const auto& linears = group.linears();
  const LinearDesc& desc = linears.front()->desc();
  size_t saved = 0;
  std::string text = f8::format("group of {} linears, m up to {}, k {}, recipe {}: n ",
                                linears.size(), desc.shape.m, desc.shape.k, desc.recipe.name);
  for (const auto& linear : linears) {
    text += f8::format("{}{}", linear == linears.front() ? "" : ", ", linear->desc().shape.n);
    saved += linear->saved_bytes();
  }
  const LinearGroup::Launches of_group = group.launches(desc.shape.m);
  const LinearGroup::Launches alone = group.launches_one_by_one(desc.shape.m);
  text += f8::format("\n  {:<42} {:>5}  one by one", "kernels at the largest m", "group");
  const auto add = [&](const char* name, size_t LinearGroup::Launches::*count) {
    text += f8::format("\n  {:<42} {:>5}  {:>10}", name, of_group.*count, alone.*count);
  };
  add("forward", &LinearGroup::Launches::forward);
  add("forward with weights in fp8", &LinearGroup::Launches::forward_with_weights);
  add("backward", &LinearGroup::Launches::backward);
  return text + f8::format(
                    "\n  bytes: workspace {}, saved {} ({} with weights in fp8); one by one, "
                    "saved {}",
                    group.workspace_bytes(), group.saved_bytes(), group.saved_bytes(true), saved);
}

}  // namespace f8::runtime
