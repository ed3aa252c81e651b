#include "recipes/model/model_mlps.hpp"

#include <algorithm>
#include <array>
#include <map>
#include <string_view>

#include "recipes/model/tensor_parallel.hpp"

namespace f8 {
namespace {

constexpr std::array<std::string_view, 17> kNames = {
    "gate_proj", "up_proj", "down_proj", "w1",      "w2",   "w3",   "fc1",  "fc2", "gate",
    "up",        "down",    "linear1",   "linear2", "lin1", "lin2", "c_fc", "wi"};

// Of linears that make gate and up. An attention's query, key and value are made by one of such sizes too.
constexpr std::array<std::string_view, 9> kNamesOfBoth = {
    "gate_up_proj", "gate_up", "w12", "w13", "fc1", "Wi", "wi", "dense_h_to_4h", "input_linear"};

template <size_t kCount>
bool is_among(const std::array<std::string_view, kCount>& names, std::string_view fqn) {
  return std::ranges::find(names, fqn.substr(fqn.rfind('.') + 1)) != names.end();
}

// Tells whether the first of two linears makes gate and up of an MLP, which fuse takes in whole 128s.
bool makes_both(const NamedLinear& first, const NamedLinear& down) {
  return first.out_features == 2 * down.in_features && down.in_features % 128 == 0 &&
         is_among(kNamesOfBoth, first.fqn);
}

// The linears of one module as an MLP, if they are one.
bool is_mlp(std::span<const NamedLinear> layers, ModelMlp& mlp) {
  if (mlp.linears.size() < 2 || mlp.linears.size() > 3) return false;
  const NamedLinear& down = layers[mlp.linears.back()];
  const bool merged = mlp.linears.size() == 2 && makes_both(layers[mlp.linears.front()], down);
  mlp.gate = merged || mlp.linears.size() == 3;
  mlp.features = down.out_features;
  mlp.hidden = down.in_features;
  const int64_t made = merged ? 2 * mlp.hidden : mlp.hidden;
  const bool by_size = std::ranges::all_of(mlp.linears, [&](size_t i) {
    const NamedLinear& one = layers[i];
    const bool fits =
        i == mlp.linears.back() || (one.in_features == mlp.features && one.out_features == made);
    return fits && !one.is_experts() && one.count == down.count &&
           one.tokens_share == down.tokens_share;
  });
  if (!by_size || merged || mlp.hidden != mlp.features) return by_size;
  return std::ranges::all_of(mlp.linears,
                             [&](size_t i) { return is_among(kNames, layers[i].fqn); });
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
