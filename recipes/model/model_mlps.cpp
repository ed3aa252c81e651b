#include "recipes/model/model_mlps.hpp"

#include <algorithm>
#include <map>
#include <string_view>

#include "recipes/model/tensor_parallel.hpp"

namespace f8 {
namespace {

// The linears of one module as an MLP, if they are one.
bool is_mlp(std::span<const NamedLinear> layers, ModelMlp& mlp) {
  if (mlp.linears.size() < 2 || mlp.linears.size() > 3) return false;
  const NamedLinear& down = layers[mlp.linears.back()];
  mlp.gate = mlp.linears.size() == 3;
  mlp.features = down.out_features;
  mlp.hidden = down.in_features;
  const bool by_size = std::ranges::all_of(mlp.linears, [&](size_t i) {
    const NamedLinear& one = layers[i];
    const bool fits = i == mlp.linears.back() ||
                      (one.in_features == mlp.features && one.out_features == mlp.hidden);
    return fits && !one.is_experts() && one.count == down.count &&
           one.tokens_share == down.tokens_share;
  });
  if (!by_size || mlp.hidden != mlp.features || !mlp.gate) return by_size;
  return std::ranges::all_of(mlp.linears, [&](size_t i) {
    return tensor_split(layers[i].fqn) ==
           (i == mlp.linears.back() ? TensorSplit::kRow : TensorSplit::kColumn);
  });
}

}  // namespace

std::vector<ModelMlp> mlps_of(std::span<const NamedLinear> layers) {
  std::map<std::string_view, ModelMlp> modules;  // by their names
  for (size_t i = 0; i < layers.size(); ++i) {
    const std::string_view name = layers[i].fqn;
    const size_t dot = name.rfind('.');
    if (dot != std::string_view::npos) modules[name.substr(0, dot)].linears.push_back(i);
  }
  std::vector<ModelMlp> mlps;
  for (auto& [name, mlp] : modules) {
    // Names such as w1, w2, w3 put down second.
    std::ranges::stable_partition(
        mlp.linears, [&](size_t i) { return tensor_split(layers[i].fqn) != TensorSplit::kRow; });
    if (is_mlp(layers, mlp)) mlps.push_back(std::move(mlp));
  }
  return mlps;
}

}  // namespace f8
