// The plans of expert linears, of the MLP of experts, and of their routing.
#include <algorithm>
#include <memory>
#include <string>

#include "python/shim/base/errors.hpp"
#include "python/shim/plans/registry.hpp"

namespace float8_torch {
namespace {

// Returns what the descs of a linear and of an MLP of experts have in common; they point to `custom`.
template <class Desc>
Desc experts_desc(const ExpertsKey& key, float8_recipe& custom) {
  const Config config(key.config);
  Desc desc = {};
  desc.struct_size = sizeof desc;
  desc.m_max = key.m_max;
  desc.experts = key.experts;
  desc.tensor_dtype = key.tensor_dtype;
  config.set_recipe(desc, custom);
  desc.grad_weight_dtype = key.grad_dtype;
  desc.non_finite = config.saturate() ? FLOAT8_SATURATE : FLOAT8_PROPAGATE;
  desc.recompute_weight = config.recompute() ? 1 : 0;
  return desc;
}

std::unique_ptr<ExpertsPlan> make_experts(const ExpertsKey& key) {
  float8_recipe custom;
  auto desc = experts_desc<float8_experts_desc>(key, custom);
  desc.n = key.n;
  desc.k = key.k;
  desc.no_grad_weight = Config(key.config).frozen() ? 1 : 0;
  desc.x_over_ranks = key.x_over_ranks ? 1 : 0;
  desc.dy_over_ranks = key.dy_over_ranks ? 1 : 0;
  auto made = std::make_unique<ExpertsPlan>();
  check(float8_experts_plan(context_of(key.device), &desc, &made->experts));
  made->workspace_bytes = float8_experts_workspace_bytes(made->experts);
  made->saved_bytes = float8_experts_saved_bytes(made->experts);
  keep_any(key.config, key.device, {.experts = made->experts});
  return made;
}

// Calls `work` with the description of a quantizer, which does not outlive the call.
template <class Work>
void with_expert_desc(const ExpertQuantizerKey& key, const Work& work) {
  const Config config(key.config);
  float8_recipe custom;
  float8_expert_quantizer_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.n = key.n;
  desc.k = key.k;
  desc.experts = key.experts;
  desc.dtype = key.dtype;
  config.set_recipe(desc, custom);
  desc.non_finite = config.saturate() ? FLOAT8_SATURATE : FLOAT8_PROPAGATE;
  desc.f32_source = key.f32_source ? 1 : 0;
  desc.over_ranks = key.over_ranks ? 1 : 0;
  desc.noop_flag = key.noop_flag ? 1 : 0;
  desc.two_tensors = key.two_tensors ? 1 : 0;
  work(desc);
}

std::unique_ptr<ExpertQuantizer> make_expert_quantizer(const ExpertQuantizerKey& key) {
  auto made = std::make_unique<ExpertQuantizer>();
  with_expert_desc(key, [&](const float8_expert_quantizer_desc& desc) {
    check(float8_expert_quantizer_plan(context_of(key.device), &desc, &made->quantizer));
  });
  made->context = context_of(key.device);
  made->workspace_bytes = float8_expert_quantizer_workspace_bytes(made->quantizer);
  made->layout = expert_layout(key);
  return made;
}

std::unique_ptr<MoePlan> make_moe(const MoeKey& key) {
  float8_recipe custom;
  auto desc = experts_desc<float8_moe_desc>(key.linear, custom);
  desc.dim = key.linear.k;
  desc.hidden = key.linear.n;
  desc.rows_in_place = key.rows_in_place ? 1 : 0;
  desc.w3_apart = key.w3_apart ? 1 : 0;
  desc.no_grad_w13 = Config(key.linear.config).frozen() ? 1 : 0;
  desc.no_grad_w2 = Config(key.linear.config).frozen_w2() ? 1 : 0;
  auto made = std::make_unique<MoePlan>();
  check(float8_moe_plan(context_of(key.linear.device), &desc, &made->moe));
  keep_any(key.linear.config, key.linear.device, {.experts = float8_moe_linear(made->moe, 0)});
  return made;
}

std::unique_ptr<GroupLayoutPlan> make_group_layout(const GroupLayoutKey& key) {
  float8_group_layout_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.m_max = key.m_max;
  desc.experts = key.experts;
  auto made = std::make_unique<GroupLayoutPlan>();
  check(float8_group_layout_plan_create(context_of(key.device), &desc, &made->plan));
  made->bytes = float8_group_layout_bytes(made->plan);
  return made;
}

constexpr int64_t kMostPairs = int64_t{1} << 30;  // of a routing

std::unique_ptr<RoutePlan> make_route(const RouteKey& key) {
  float8_moe_route_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.tokens_max = kMostPairs / std::max(key.top_k, 1);
  desc.top_k = key.top_k;
  desc.experts = key.experts;
  desc.long_ids = key.long_ids ? 1 : 0;
  auto made = std::make_unique<RoutePlan>();
  check(float8_moe_route_plan_create(context_of(key.device), &desc, &made->plan));
  made->workspace_bytes = float8_moe_route_workspace_bytes(made->plan);
  return made;
}

std::unique_ptr<CombinePlan> make_combine(const CombineKey& key) {
  float8_moe_combine_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.tokens_max = kMostPairs / std::max(key.top_k, 1);
  desc.cols = key.cols;
  desc.top_k = key.top_k;
  desc.experts = key.experts;
  desc.y_dtype = key.dtype;
  desc.out_dtype = key.dtype;
  auto made = std::make_unique<CombinePlan>();
  check(float8_moe_combine_plan_create(context_of(key.device), &desc, &made->plan));
  return made;
}

}  // namespace

const ExpertsPlan& experts_for(const ExpertsKey& key, const Place& place) {
  static auto* const plans = new Registry<ExpertsKey, ExpertsPlan>;
  return plans->get(
      key, place, [&] { return make_experts(key); },
      [&] {
        return "the linear of " + std::to_string(key.experts) + " experts of M up to " +
               std::to_string(key.m_max) + ", N " + std::to_string(key.n) + ", K " +
               std::to_string(key.k);
      });
}

const ExpertQuantizer& expert_quantizer_for(const ExpertQuantizerKey& key, const Place& place) {
  static auto* const plans = new Registry<ExpertQuantizerKey, ExpertQuantizer>;
  return plans->get(
      key, place, [&] { return make_expert_quantizer(key); },
      [&] {
        return "the casts of the weights of " + std::to_string(key.experts) + " experts, N " +
               std::to_string(key.n) + ", K " + std::to_string(key.k);
      });
}

float8_layout expert_layout(const ExpertQuantizerKey& key) {
  float8_layout layout = {};
  layout.struct_size = sizeof layout;
  with_expert_desc(key, [&](const float8_expert_quantizer_desc& desc) {
    check(float8_expert_quantizer_layout(&desc, &layout));
  });
  return layout;
}

const MoePlan& moe_for(const MoeKey& key, const Place& place) {
  static auto* const plans = new Registry<MoeKey, MoePlan>;
  return plans->get(
      key, place, [&] { return make_moe(key); },
      [&] {
        return "the MLP of " + std::to_string(key.linear.experts) + " experts of M up to " +
               std::to_string(key.linear.m_max) + ", D " + std::to_string(key.linear.k) + ", F " +
               std::to_string(key.linear.n);
      });
}

const GroupLayoutPlan& group_layout_for(const GroupLayoutKey& key, const Place& place) {
  static auto* const plans = new Registry<GroupLayoutKey, GroupLayoutPlan>;
  return plans->get(
      key, place, [&] { return make_group_layout(key); },
      [&] {
        return "the layout of " + std::to_string(key.experts) + " experts of M up to " +
               std::to_string(key.m_max);
      });
}

const RoutePlan& route_plan_for(const RouteKey& key, const Place& place) {
  static auto* const plans = new Registry<RouteKey, RoutePlan>;
  return plans->get(
      key, place, [&] { return make_route(key); },
      [&] {
        return "the routing of " + std::to_string(key.experts) + " experts, " +
               std::to_string(key.top_k) + " of a token";
      });
}

const CombinePlan& combine_plan_for(const CombineKey& key, const Place& place) {
  static auto* const plans = new Registry<CombineKey, CombinePlan>;
  return plans->get(
      key, place, [&] { return make_combine(key); },
      [&] {
        return "the sums of rows of " + std::to_string(key.cols) + " of " +
               std::to_string(key.experts) + " experts, " + std::to_string(key.top_k) +
               " of a token";
      });
}

}  // namespace float8_torch
