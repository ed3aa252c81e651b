#include "tools/tuner/model_files/model.hpp"

#include <algorithm>
#include <array>
#include <set>

#include "base/file.hpp"
#include "base/text.hpp"
#include "tools/tuner/model_files/architecture.hpp"
#include "tools/tuner/model_files/safetensors.hpp"
#include "tools/tuner/model_files/strict_json.hpp"
#include "tuning_db/json/json_text.hpp"

namespace f8::tuner {
namespace {

using nlohmann::json;
using tuning_db::parse_json;

Result<std::vector<NamedLinear>> parse_list(const json& list, std::string_view where) {
  if (list.empty()) {
    return fail(ErrorCode::kInvalidArgument, "{} lists no layers; add at least one", where);
  }
  std::vector<NamedLinear> layers;
  std::set<std::string> names;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string entry = f8::format("{}, entry {}", where, i);
    if (!list[i].is_object()) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} is not an object with fqn, in_features and out_features", entry);
    }
    const auto fqn = list[i].find("fqn");
    if (fqn == list[i].end() || !fqn->is_string() || fqn->get_ref<const std::string&>().empty()) {
      return fail(ErrorCode::kInvalidArgument, "{} has no \"fqn\", the layer's name", entry);
    }
    NamedLinear layer;
    layer.fqn = fqn->get<std::string>();
    if (has_control(layer.fqn)) {
      return fail(ErrorCode::kInvalidArgument, "{}: \"fqn\" has control characters", entry);
    }
    layer.in_features = F8_TRY(integer_field(list[i], "in_features", entry, 1, kMaxDim));
    layer.out_features = F8_TRY(integer_field(list[i], "out_features", entry, 1, kMaxDim));
    layer.count = F8_TRY(integer_field_or(list[i], "count", entry, 1, kMaxDim, 1));
    if (!names.insert(layer.fqn).second) {
      return fail(ErrorCode::kInvalidArgument, "{}: the layer {} is listed twice; use count", entry,
                  quote(layer.fqn));
    }
    layers.push_back(std::move(layer));
  }
  return layers;
}

Result<std::vector<NamedLinear>> parse_file(const fs::path& path) {
  if (path.extension() == ".safetensors") {
    return linears(F8_TRY(read_safetensors(path)), path.string());
  }
  const std::string text = F8_TRY(read_input(path));
  const std::string name = input_name(path);
  // A pipe has no ending. The highest byte of a header's length is 0, and no JSON has one there.
  if (text.size() > 8 && text[7] == '\0')
    return linears(F8_TRY(parse_safetensors(text, name)), name);
  return parse_model_json(text, name);
}

enum class Split { kColumn, kRow, kNone };

Split split_of(std::string_view fqn) {
  constexpr std::array<std::string_view, 14> kColumn = {
      "wq",     "wk",     "wv",        "wqkv",    "w1",     "w3",      "q_proj",
      "k_proj", "v_proj", "gate_proj", "up_proj", "output", "lm_head", "gate_up_proj"};
  constexpr std::array<std::string_view, 4> kRow = {"wo", "w2", "o_proj", "down_proj"};
  const std::string_view last = fqn.substr(fqn.rfind('.') + 1);
  if (std::ranges::find(kColumn, last) != kColumn.end()) return Split::kColumn;
  if (std::ranges::find(kRow, last) != kRow.end()) return Split::kRow;
  return Split::kNone;
}

}  // namespace

Result<std::vector<NamedLinear>> parse_model_json(std::string_view text, const fs::path& path) {
  const std::string where = path.string();
  const json parsed = F8_TRY(parse_json(text, where));
  if (parsed.is_array()) return parse_list(parsed, where);
  if (parsed.is_object() && parsed.contains("weight_map")) {
    return linears(F8_TRY(read_index(path, parsed)), where);
  }
  if (parsed.is_object() && (parsed.contains("hidden_size") || parsed.contains("model_type"))) {
    return linears(F8_TRY(parse_config(parsed, where)));
  }
  return fail(ErrorCode::kInvalidArgument,
              "{} is no model file: expected a list of layers, a Hugging Face config.json or a "
              "*.index.json",
              where);
}

std::vector<std::string_view> builtin_models() {
  return builtin_architectures();
}

Result<Model> load_model(std::string_view name_or_path) {
  if (const auto architecture = find_architecture(name_or_path)) {
    return Model{std::string(name_or_path), linears(*architecture)};
  }
  const fs::path path(name_or_path);
  std::error_code error;
  if (!is_standard_stream(path) && !fs::exists(path, error)) {
    return fail(ErrorCode::kNotFound, "{} is no file and no built-in model; built in are {}",
                quote(name_or_path), fmt::join(builtin_models(), ", "));
  }
  std::vector<NamedLinear> layers = F8_TRY(parse_file(path));
  return Model{input_name(path), std::move(layers)};
}

Status shard(Model& model, int64_t tp) {
  if (tp < 1) return fail(ErrorCode::kInvalidArgument, "tp is {}; it must be 1 or more", tp);
  if (tp == 1) return {};
  std::vector<NamedLinear> layers = model.layers;
  bool any = false;
  for (NamedLinear& layer : layers) {
    const Split split = split_of(layer.fqn);
    if (split == Split::kNone) continue;
    any = true;
    const bool column = split == Split::kColumn;
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
                tp, model.name);
  }
  model.layers = std::move(layers);
  return {};
}

}  // namespace f8::tuner
