#include "tools/tuner/model_files/model.hpp"

#include <optional>
#include <set>

#include "base/file.hpp"
#include "base/text.hpp"
#include "recipes/model/tensor_parallel.hpp"
#include "tools/tuner/model_files/architecture.hpp"
#include "tools/tuner/model_files/config.hpp"
#include "tools/tuner/model_files/safetensors.hpp"
#include "tools/tuner/model_files/strict_json.hpp"
#include "tuning_db/json/json_text.hpp"

namespace f8::tuner {
namespace {

using Json = nlohmann::json;
using tuning_db::parse_json;

// The fields of a linear.
Status parse_linear(const Json& entry, const std::string& where, NamedLinear& layer) {
  layer.in_features = F8_TRY(integer_field(entry, "in_features", where, 1, kMaxDim));
  layer.out_features = F8_TRY(integer_field(entry, "out_features", where, 1, kMaxDim));
  if (const auto share = entry.find("tokens_share"); share != entry.end()) {
    if (!share->is_number() || !(share->get<double>() > 0 && share->get<double>() <= 1)) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: \"tokens_share\" is {}; it is the share of the tokens that the layer sees, "
                  "more than 0 and at most 1",
                  where, share->dump());
    }
    layer.tokens_share = share->get<double>();
  }
  return {};
}

// Those of a layer's experts.
Status parse_experts(const Json& entry, const std::string& where, NamedLinear& layer) {
  constexpr int64_t kMostOfAllRanks = 1 << 20;
  layer.groups.experts = F8_TRY(integer_field(entry, "num_experts", where, 1, kMostOfAllRanks));
  layer.in_features = F8_TRY(integer_field(entry, "dim", where, 1, kMaxDim));
  layer.out_features = F8_TRY(integer_field(entry, "hidden_dim", where, 1, kMaxDim / 2));
  const int64_t top_k = F8_TRY(integer_field(entry, "top_k", where, 1, layer.groups.experts));
  layer.tokens_share = static_cast<double>(top_k);
  for (const char* of_linear : {"in_features", "out_features", "tokens_share"}) {
    if (!entry.contains(of_linear)) continue;
    return fail(ErrorCode::kInvalidArgument,
                "{} has num_experts, and \"{}\", which a linear has; leave one of them out", where,
                of_linear);
  }
  return {};
}

Result<std::vector<NamedLinear>> parse_list(const Json& list, std::string_view where) {
  if (list.empty()) {
    return fail(ErrorCode::kInvalidArgument, "{} lists no layers; add at least one", where);
  }
  std::vector<NamedLinear> layers;
  std::set<std::string> names;
  for (size_t i = 0; i < list.size(); ++i) {
    const std::string entry = f8::format("{}, entry {}", where, i);
    if (!list[i].is_object()) {
      return fail(ErrorCode::kInvalidArgument,
                  "{} is not an object with fqn, in_features and out_features, or of experts with "
                  "fqn, num_experts, top_k, dim and hidden_dim",
                  entry);
    }
    const auto fqn = list[i].find("fqn");
    if (fqn == list[i].end() || !fqn->is_string() || fqn->get_ref<const std::string&>().empty()) {
      return fail(ErrorCode::kInvalidArgument, "{} has no \"fqn\", the layer's name; add it",
                  entry);
    }
    NamedLinear layer;
    layer.fqn = fqn->get<std::string>();
    if (layer.fqn.size() > kLongestName) {
      return fail(ErrorCode::kInvalidArgument, "{}: \"fqn\" has {} bytes; a name has at most {}",
                  entry, layer.fqn.size(), kLongestName);
    }
    if (has_control(layer.fqn)) {
      return fail(ErrorCode::kInvalidArgument, "{}: \"fqn\" has control characters; leave them out",
                  entry);
    }
    const auto parse = list[i].contains("num_experts") ? parse_experts : parse_linear;
    F8_TRY(parse(list[i], entry, layer));
    layer.count = F8_TRY(integer_field_or(list[i], "count", entry, 1, kMaxDim, 1));
    if (!names.insert(layer.fqn).second) {
      return fail(ErrorCode::kInvalidArgument, "{}: the layer {} is listed twice; use count", entry,
                  quote(layer.fqn));
    }
    layers.push_back(std::move(layer));
  }
  return layers;
}

Result<std::vector<NamedLinear>> parse_file(const fs::path& path, ExpertsAs experts) {
  if (path.extension() == ".safetensors") {
    return linears(F8_TRY(read_safetensors(path)), path.string());
  }
  const std::string text = F8_TRY(read_input(path));
  const std::string name = input_name(path);
  // A pipe has no ending. The highest byte of a header's length is 0, and no JSON has one there.
  if (text.size() > 8 && text[7] == '\0')
    return linears(F8_TRY(parse_safetensors(text, name)), name);
  return parse_model_json(text, name, experts);
}

bool is_config(const Json& parsed) {
  return parsed.is_object() && (parsed.contains("hidden_size") || parsed.contains("model_type") ||
                                parsed.contains("architectures"));
}

}  // namespace

Result<std::vector<NamedLinear>> parse_model_json(std::string_view text, const fs::path& path,
                                                  ExpertsAs experts) {
  const std::string where = path.string();
  const Json parsed = F8_TRY(parse_json(text, where));
  if (parsed.is_array()) return parse_list(parsed, where);
  if (parsed.is_object() && parsed.contains("weight_map")) {
    return linears(F8_TRY(read_index(path, parsed)), where);
  }
  if (is_config(parsed)) {
    return linears(F8_TRY(parse_config(parsed, where)), experts);
  }
  return fail(ErrorCode::kInvalidArgument,
              "{} is no model file: expected a list of layers, a Hugging Face config.json or a "
              "*.index.json",
              where);
}

std::vector<std::string_view> builtin_models() {
  return builtin_architectures();
}

Result<Model> load_model(std::string_view name_or_path, ExpertsAs experts) {
  if (const auto architecture = find_architecture(name_or_path)) {
    return Model{std::string(name_or_path), linears(*architecture, experts)};
  }
  const fs::path path(name_or_path);
  std::error_code error;
  if (!is_standard_stream(path) && !fs::exists(path, error)) {
    return fail(ErrorCode::kNotFound, "{} is no file and no built-in model; built in are {}",
                quote(name_or_path), fmt::join(builtin_models(), ", "));
  }
  std::vector<NamedLinear> layers = F8_TRY(parse_file(path, experts));
  return Model{input_name(path), std::move(layers)};
}

Result<std::vector<AttentionLayer>> load_attention(std::string_view name_or_path, int64_t tp) {
  std::optional<Architecture> architecture = find_architecture(name_or_path);
  const fs::path path(name_or_path);
  if (!architecture && path.extension() == ".json") {
    const std::string text = F8_TRY(read_input(path));
    const Json parsed = F8_TRY(parse_json(text, path.string()));
    if (is_config(parsed)) architecture = F8_TRY(parse_config(parsed, path.string()));
  }
  if (!architecture) {
    return fail(
        ErrorCode::kInvalidArgument,
        "{} does not say the heads of its attention; give a built-in model or the file of a "
        "Hugging Face config.json",
        quote(name_or_path));
  }
  std::vector<AttentionLayer> layers = attention_layers(*architecture);
  for (AttentionLayer& layer : layers) {
    if (layer.heads_q % tp != 0 || layer.heads_kv % tp != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: {} heads of queries and {} of keys are not divided by {} ranks", layer.fqn,
                  layer.heads_q, layer.heads_kv, tp);
    }
    layer.heads_q /= tp;
    layer.heads_kv /= tp;
  }
  return layers;
}

Status shard(Model& model, int64_t tp) {
  return shard_tensor_parallel(model.layers, tp, model.name);
}

Status shard_experts(Model& model, int64_t ep) {
  return shard_expert_parallel(model.layers, ep, model.name);
}

}  // namespace f8::tuner
