#include "recipes/tensor_parallel.hpp"

#include <algorithm>
#include <array>
#include <utility>

#include "base/text.hpp"

namespace f8 {

TensorSplit tensor_split(std::string_view fqn) {
  constexpr std::array<std::string_view, 16> kColumn = {
      "wq",      "wk",           "wv",       "wqkv",      "w1",      "w3",
      "q_proj",  "k_proj",       "v_proj",   "gate_proj", "up_proj", "output",
      "lm_head", "gate_up_proj", "q_b_proj", "kv_b_proj"};
  constexpr std::array<std::string_view, 4> kRow = {"wo", "w2", "o_proj", "down_proj"};
  const std::string_view last = fqn.substr(fqn.rfind('.') + 1);
  if (std::ranges::find(kColumn, last) != kColumn.end()) return TensorSplit::kColumn;
  if (std::ranges::find(kRow, last) != kRow.end()) return TensorSplit::kRow;
  return TensorSplit::kWhole;
}

Status shard_tensor_parallel(std::vector<NamedLinear>& layers, int64_t tp, std::string_view model) {
  if (tp < 1) return fail(ErrorCode::kInvalidArgument, "tp is {}; it must be 1 or more", tp);
  if (tp == 1) return {};
  std::vector<NamedLinear> shards = layers;
  bool any = false;
  for (NamedLinear& layer : shards) {
    const TensorSplit split = tensor_split(layer.fqn);
    if (split == TensorSplit::kWhole) continue;
    any = true;
    const bool column = split == TensorSplit::kColumn;
    int64_t& extent = column ? layer.out_features : layer.in_features;
    if (extent % tp != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "tp {} does not divide the {} {} of {}; choose a divisor of it", tp,
                  column ? "out_features" : "in_features", extent, quote(layer.fqn));
    }
    extent /= tp;
  }
  if (!any) {
    return fail(ErrorCode::kInvalidArgument,
                "tp {}: no layer of {} has a name that says how to shard it (wq, q_proj, w1, "
                "down_proj, ...)",
                tp, model);
  }
  layers = std::move(shards);
  return {};
}

}  // namespace f8
