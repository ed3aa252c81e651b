#include "recipes/model/tensor_parallel.hpp"

#include <algorithm>
#include <array>
#include <numeric>
#include <utility>

#include "base/text.hpp"
#include "recipes/fp8_layout.hpp"
#include "recipes/model/filter_rule.hpp"

namespace f8 {
namespace {

struct SharedExtent {
  int64_t NamedLinear::*extent = nullptr;  // null: every rank has the whole layer
  const char* what = "";
};

SharedExtent shared_extent(const NamedLinear& layer) {
  if (layer.is_experts()) return {&NamedLinear::out_features, "hidden_dim"};
  switch (tensor_split(layer.fqn)) {
    case TensorSplit::kColumn:
      return {&NamedLinear::out_features, "out_features"};
    case TensorSplit::kRow:
      return {&NamedLinear::in_features, "in_features"};
    case TensorSplit::kWhole:
      break;
  }
  return {};
}

// A tp suits all layers that can be fp8 where it divides this; 0: there is none such.
int64_t suitable_multiple(const std::vector<NamedLinear>& layers) {
  int64_t common = 0;
  for (const NamedLinear& layer : layers) {
    const SharedExtent shared = shared_extent(layer);
    if (shared.extent == nullptr || layer.*shared.extent % kFp8Alignment != 0) continue;
    common = std::gcd(common, layer.*shared.extent / kFp8Alignment);
  }
  return common;
}

// Why a rank of `tp` cannot have its part of so much in fp8; empty: it can.
std::string unfit_part(int64_t tp, int64_t whole, const char* what, std::string_view remedy) {
  if (whole % kFp8Alignment != 0) {
    return f8::format("its {} {} are no multiple of {}", whole, what, kFp8Alignment);
  }
  if (whole % tp != 0)
    return f8::format("tp {} does not divide its {} {}{}", tp, whole, what, remedy);
  if (whole / tp % kFp8Alignment == 0) return {};
  return f8::format("tp {} leaves a rank {} of its {} {}, no multiple of {}{}", tp, whole / tp,
                    whole, what, kFp8Alignment, remedy);
}

}  // namespace

TensorSplit tensor_split(std::string_view fqn) {
  constexpr std::array<std::string_view, 17> kColumn = {
      "wq",      "wk",           "wv",       "wqkv",      "w1",      "w3",
      "q_proj",  "k_proj",       "v_proj",   "gate_proj", "up_proj", "output",
      "lm_head", "gate_up_proj", "q_b_proj", "kv_b_proj", "qkv_proj"};
  constexpr std::array<std::string_view, 4> kRow = {"wo", "w2", "o_proj", "down_proj"};
  const std::string_view last = fqn.substr(fqn.rfind('.') + 1);
  if (std::ranges::find(kColumn, last) != kColumn.end()) return TensorSplit::kColumn;
  if (std::ranges::find(kRow, last) != kRow.end()) return TensorSplit::kRow;
  return TensorSplit::kWhole;
}

Status shard_tensor_parallel(std::vector<NamedLinear>& layers, int64_t tp, std::string_view model) {
  if (tp < 1) return fail(ErrorCode::kInvalidArgument, "tp is {}; it must be 1 or more", tp);
  if (tp == 1) return {};
  const int64_t common = suitable_multiple(layers);
  const std::string remedy =
      common > 1 ? f8::format("; a tp that divides {} suits all layers", common) : "";
  std::vector<NamedLinear> shards = layers;
  size_t shared_layers = 0;
  size_t unfit = 0;
  std::string first_unfit;
  for (NamedLinear& layer : shards) {
    const SharedExtent shared = shared_extent(layer);
    if (shared.extent == nullptr) continue;
    ++shared_layers;
    int64_t& extent = layer.*shared.extent;
    const std::string why = unfit_part(tp, extent, shared.what, remedy);
    if (!why.empty()) {
      if (unfit++ == 0) first_unfit = f8::format("{}: {}", quote(layer.fqn), why);
      layer.kept = f8::format("kept in bf16: {}", why);
    }
    extent = extent / tp + (extent % tp != 0 ? 1 : 0);
  }
  if (shared_layers == 0) {
    return fail(ErrorCode::kInvalidArgument,
                "tp {}: no layer of {} has a name that says how to shard it (wq, q_proj, w1, "
                "down_proj, ...)",
                tp, model);
  }
  if (unfit == shared_layers && common > 0) {
    return fail(ErrorCode::kInvalidArgument, "no layer of {} that ranks share can be fp8: {}{}",
                model, first_unfit, common > 1 ? "" : "; share the model without tp");
  }
  layers = std::move(shards);
  return {};
}

Status shard_expert_parallel(std::vector<NamedLinear>& layers, int64_t ep, std::string_view model) {
  if (ep < 1) return fail(ErrorCode::kInvalidArgument, "ep is {}; it must be 1 or more", ep);
  bool has_experts = false;
  for (const NamedLinear& layer : layers) {
    if (!layer.is_experts()) continue;
    has_experts = true;
    const int64_t experts = layer.groups.experts;
    if (experts % ep != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "ep {} does not divide the {} experts of {}; choose a divisor", ep, experts,
                  quote(layer.fqn));
    }
    if (experts / ep > kMaxExperts) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} has {} experts for each rank, and a call has at most {}; choose an ep of at "
                  "least {}",
                  quote(layer.fqn), experts / ep, kMaxExperts, ceil_div(experts, kMaxExperts));
    }
  }
  if (ep > 1 && !has_experts) {
    return fail(ErrorCode::kInvalidArgument, "ep {}: {} has no layer of experts to share", ep,
                model);
  }
  for (NamedLinear& layer : layers) layer.groups.experts /= ep;
  return {};
}

}  // namespace f8
