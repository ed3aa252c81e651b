#include "tools/tuner/model_files/config.hpp"

#include <algorithm>
#include <array>
#include <cctype>
#include <string>

#include "base/text.hpp"
#include "tools/tuner/model_files/strict_json.hpp"

namespace f8::tuner {
namespace {

using Json = nlohmann::json;

constexpr int64_t kMostLayers = 4096;
constexpr int64_t kMostHeads = 1 << 16;
constexpr int64_t kMostExperts = 512;

enum class Experts { kNone, kMixtral, kQwen, kDeepseek, kGptOss, kLlama4 };
enum class Attention { kGrouped, kFused, kLatent, kIndexed, kMostlyLinear };

// The defaults of a model type's fields, which its published files may leave out.
struct Family {
  std::string_view type;
  Experts experts = Experts::kNone;
  bool tied_head = false;
  int64_t head_dim = 0;  // 0: hidden_size / num_attention_heads
  int64_t vocab = 0;     // 0: the file must have it
  Attention attention = Attention::kGrouped;
  std::string_view scores = {};  // as Architecture's
  // The family of the language model, which "text_config" describes; empty: the file itself does.
  std::string_view text = {};
};

constexpr std::array kFamilies = {
    Family{"llama"},
    Family{"mistral"},
    Family{.type = "mistral3", .text = "mistral"},
    Family{"qwen2"},
    Family{"qwen3", Experts::kNone, false, 128},
    Family{"gemma", Experts::kNone, true, 256},
    Family{.type = "gemma2", .tied_head = true, .head_dim = 256, .scores = "capped scores"},
    Family{.type = "gemma3", .text = "gemma3_text"},
    Family{"gemma3_text", Experts::kNone, true, 256, 262208},
    Family{"smollm3", Experts::kNone, true},
    Family{"olmo2"},
    Family{"granite"},
    Family{.type = "phi3", .attention = Attention::kFused},
    Family{"mixtral", Experts::kMixtral},
    Family{"minimax_m2", Experts::kMixtral},
    Family{.type = "gpt_oss",
           .experts = Experts::kGptOss,
           .head_dim = 64,
           .scores = "attention sinks"},
    Family{.type = "llama4", .text = "llama4_text"},
    Family{"llama4_text", Experts::kLlama4, false, 128},
    Family{"qwen3_moe", Experts::kQwen},
    Family{.type = "qwen3_next",
           .experts = Experts::kQwen,
           .head_dim = 256,
           .attention = Attention::kMostlyLinear},
    Family{.type = "deepseek_v2", .experts = Experts::kDeepseek, .attention = Attention::kLatent},
    Family{.type = "deepseek_v3", .experts = Experts::kDeepseek, .attention = Attention::kLatent},
    Family{.type = "deepseek_v32", .experts = Experts::kDeepseek, .attention = Attention::kIndexed},
    Family{.type = "kimi_k2", .experts = Experts::kDeepseek, .attention = Attention::kLatent},
    Family{"glm4_moe", Experts::kDeepseek, false, 128},
    Family{"gpt2", Experts::kNone, true},
};

const Family* find_family(std::string_view type) {
  const auto* found = std::ranges::find(kFamilies, type, &Family::type);
  return found == kFamilies.end() ? nullptr : found;
}

// The family that a class is of, such as qwen3_moe for Qwen3MoeForCausalLM; null for none.
const Family* family_of_class(std::string name) {
  for (const char* end : {"For", "LMHead"}) name = name.substr(0, name.find(end));
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
  const auto* found = std::ranges::find_if(kFamilies, [&](const Family& family) {
    std::string type(family.type);
    std::erase(type, '_');
    return type == name;
  });
  return found == kFamilies.end() ? nullptr : found;
}

std::unexpected<Error> unknown_family(const Json& named, std::string_view field,
                                      std::string_view where) {
  std::string known;
  for (const Family& family : kFamilies) {
    known += f8::format("{}{}", known.empty() ? "" : ", ", family.type);
  }
  return fail(ErrorCode::kUnsupported,
              "{}: {} {} is not one whose layers are known ({}); give the model's "
              ".safetensors file, its *.index.json, or a list of layers",
              where, field,
              quote(named.is_string() ? named.get<std::string>()
                                      : named.dump(-1, ' ', true, Json::error_handler_t::replace)),
              known);
}

Result<Family> family_of(const Json& config, std::string_view where) {
  if (const auto type = config.find("model_type"); type != config.end()) {
    const Family* found =
        type->is_string() ? find_family(type->get_ref<const std::string&>()) : nullptr;
    if (found == nullptr) return unknown_family(*type, "model_type", where);
    return *found;
  }
  if (const auto classes = config.find("architectures");
      classes != config.end() && !classes->is_null()) {
    const bool is_named = classes->is_array() && !classes->empty() && classes->front().is_string();
    const Family* found = is_named ? family_of_class(classes->front().get<std::string>()) : nullptr;
    if (found == nullptr) return unknown_family(*classes, "architectures", where);
    return *found;
  }
  for (const char* field : {"num_experts", "n_routed_experts"}) {
    if (!config.contains(field)) continue;
    return fail(ErrorCode::kInvalidArgument,
                "{} has \"{}\" and no \"model_type\", which says what its experts are; add it",
                where, field);
  }
  const bool experts = config.contains("num_local_experts");
  return Family{"llama", experts ? Experts::kMixtral : Experts::kNone};
}

Result<bool> bool_field_or(const Json& config, std::string_view field, std::string_view where,
                           bool missing) {
  const auto found = config.find(field);
  if (found == config.end() || found->is_null()) return missing;
  if (!found->is_boolean()) {
    return fail(ErrorCode::kInvalidArgument, "{}: \"{}\" must be true or false", where, field);
  }
  return found->get<bool>();
}

// A list that may be absent, and else says of each layer what other fields say too.
Status expect_list(const Json& config, std::string_view field, const Json& expected,
                   std::string_view where) {
  const auto list = config.find(field);
  if (list == config.end() || list->is_null() || list->empty() || *list == expected) return {};
  return fail(ErrorCode::kUnsupported,
              "{}: {} differs from the pattern of such models, and others are not known; give the "
              "model's *.index.json or a list of layers",
              where, field);
}

// A weight has `widths` such extents.
Status check_extent(std::string_view counts, int64_t count, std::string_view dims, int64_t dim,
                    std::string_view where, int64_t widths = 1) {
  if (count * dim <= kMaxDim / widths) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}: {} {} times {} {} is more than {}; correct one of them", where, counts, count,
              dims, dim, kMaxDim / widths);
}

Status check_heads(const Architecture& a, int64_t dim, std::string_view dims,
                   std::string_view where, int64_t widths = 1) {
  return check_extent("num_attention_heads", a.heads, dims, dim, where, widths);
}

Status read_attention(Architecture& a, const Json& config, std::string_view where,
                      const Family& family) {
  a.kv_heads =
      F8_TRY(integer_field_or(config, "num_key_value_heads", where, 1, kMostHeads, a.heads));
  if (a.heads % a.kv_heads != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: num_attention_heads {} is no multiple of num_key_value_heads {}; correct one "
                "of them",
                where, a.heads, a.kv_heads);
  }
  a.head_dim = F8_TRY(integer_field_or(config, "head_dim", where, 1, kMostHeads, family.head_dim));
  if (a.head_dim == 0) {
    if (a.hidden % a.heads != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: hidden_size {} is no multiple of num_attention_heads {}; correct one of "
                  "them or add head_dim",
                  where, a.hidden, a.heads);
    }
    a.head_dim = a.hidden / a.heads;
  }
  a.fused = family.attention == Attention::kFused;
  // One weight has q, k and v, or each query with its gate.
  const int64_t widths = a.fused ? 3 : family.attention == Attention::kMostlyLinear ? 2 : 1;
  return check_heads(a, a.head_dim, "head_dim", where, widths);
}

Status read_latent_attention(Architecture& a, const Json& config, std::string_view where,
                             bool indexed) {
  LatentAttention& l = a.latent;
  if (indexed) {
    l.q_rank = F8_TRY(integer_field(config, "q_lora_rank", where, 1, kMaxDim));
    l.index_heads = F8_TRY(integer_field(config, "index_n_heads", where, 1, kMostHeads));
    l.index_dim = F8_TRY(integer_field(config, "index_head_dim", where, 1, kMostHeads));
    F8_TRY(check_extent("index_n_heads", l.index_heads, "index_head_dim", l.index_dim, where));
  } else {
    l.q_rank = F8_TRY(integer_field_or(config, "q_lora_rank", where, 1, kMaxDim, 0));
  }
  l.kv_rank = F8_TRY(integer_field(config, "kv_lora_rank", where, 1, kMaxDim / 2));
  l.nope_dim = F8_TRY(integer_field(config, "qk_nope_head_dim", where, 1, kMostHeads));
  l.rope_dim = F8_TRY(integer_field(config, "qk_rope_head_dim", where, 1, kMostHeads));
  l.value_dim = F8_TRY(integer_field(config, "v_head_dim", where, 1, kMostHeads));
  F8_TRY(check_heads(a, l.nope_dim + l.rope_dim, "qk_nope_head_dim + qk_rope_head_dim", where));
  return check_heads(a, l.nope_dim + l.value_dim, "qk_nope_head_dim + v_head_dim", where);
}

// "layer_types" says the same as the interval, or it is not known.
Status read_linear_attention(Architecture& a, const Json& config, std::string_view where) {
  LinearAttention& l = a.linear;
  a.gated_queries = true;
  l.key_heads = F8_TRY(integer_field(config, "linear_num_key_heads", where, 1, kMostHeads));
  l.key_dim = F8_TRY(integer_field(config, "linear_key_head_dim", where, 1, kMostHeads));
  l.value_heads = F8_TRY(integer_field(config, "linear_num_value_heads", where, 1, kMostHeads));
  l.value_dim = F8_TRY(integer_field(config, "linear_value_head_dim", where, 1, kMostHeads));
  F8_TRY(check_extent("linear_num_key_heads", l.key_heads, "linear_key_head_dim", l.key_dim, where,
                      4));
  F8_TRY(check_extent("linear_num_value_heads", l.value_heads, "linear_value_head_dim", l.value_dim,
                      where, 4));
  l.full_step =
      F8_TRY(integer_field_or(config, "full_attention_interval", where, 1, kMostLayers, 4));
  Json types = Json::array();
  for (int64_t i = 1; i <= a.layers; ++i) {
    types.push_back(i % l.full_step == 0 ? "full_attention" : "linear_attention");
  }
  return expect_list(config, "layer_types", types, where);
}

Status read_qwen_experts(Architecture& a, const Json& config, std::string_view where) {
  a.experts = F8_TRY(integer_field(config, "num_experts", where, 1, kMostExperts));
  a.moe_layer_step =
      F8_TRY(integer_field_or(config, "decoder_sparse_step", where, 1, kMostLayers, 1));
  a.moe_layer_shift = 1;
  a.moe_names = kQwenNames;
  a.shared_intermediate =
      F8_TRY(integer_field_or(config, "shared_expert_intermediate_size", where, 1, kMaxDim, 0));
  a.shared_gate = a.shared_intermediate > 0;
  return expect_list(config, "mlp_only_layers", Json::array(), where);
}

// Layers without experts have intermediate_size_mlp, the others intermediate_size.
Status read_llama4_experts(Architecture& a, const Json& config, std::string_view where) {
  a.moe_names = kLlama4Names;
  a.expert_intermediate = a.shared_intermediate = a.intermediate;
  a.intermediate = F8_TRY(integer_field(config, "intermediate_size_mlp", where, 1, kMaxDim));
  a.moe_layer_step =
      F8_TRY(integer_field_or(config, "interleave_moe_layer_step", where, 1, kMostLayers, 1));
  a.moe_layer_shift = 1;
  Json layers = Json::array();
  for (int64_t i = a.moe_layer_step - 1; i < a.layers; i += a.moe_layer_step) layers.push_back(i);
  return expect_list(config, "moe_layers", layers, where);
}

Status read_deepseek_experts(Architecture& a, const Json& config, std::string_view where) {
  a.experts = F8_TRY(integer_field(config, "n_routed_experts", where, 1, kMostExperts));
  a.first_moe_layer = F8_TRY(integer_field(config, "first_k_dense_replace", where, 0, kMostLayers));
  a.moe_layer_step = F8_TRY(integer_field_or(config, "moe_layer_freq", where, 1, kMostLayers, 1));
  if (a.first_moe_layer > a.layers) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: first_k_dense_replace {} is more than num_hidden_layers {}; correct one of "
                "them",
                where, a.first_moe_layer, a.layers);
  }
  return {};
}

Status read_shared_experts(Architecture& a, const Json& config, std::string_view where) {
  const int64_t shared =
      F8_TRY(integer_field_or(config, "n_shared_experts", where, 0, kMostExperts, 0));
  a.shared_intermediate = shared * a.expert_intermediate;
  return check_extent("n_shared_experts", shared, "moe_intermediate_size", a.expert_intermediate,
                      where);
}

Status read_experts(Architecture& a, const Json& config, std::string_view where, Experts experts) {
  if (experts == Experts::kNone) return {};
  if (experts == Experts::kQwen || experts == Experts::kDeepseek) {
    a.expert_intermediate =
        F8_TRY(integer_field(config, "moe_intermediate_size", where, 1, kMaxDim));
  } else {
    a.experts = F8_TRY(integer_field(config, "num_local_experts", where, 1, kMostExperts));
  }
  if (experts == Experts::kGptOss) a.moe_names = kGptOssNames;
  if (experts == Experts::kLlama4) F8_TRY(read_llama4_experts(a, config, where));
  if (experts == Experts::kQwen) F8_TRY(read_qwen_experts(a, config, where));
  if (experts == Experts::kDeepseek) {
    a.moe_names = kDeepseekNames;
    F8_TRY(read_deepseek_experts(a, config, where));
    F8_TRY(read_shared_experts(a, config, where));
  }
  a.top_k =
      F8_TRY(integer_field_or(config, "num_experts_per_tok", where, 1, kMaxDim,
                              experts == Experts::kMixtral ? std::min<int64_t>(2, a.experts) : 1));
  if (a.top_k > a.experts) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: num_experts_per_tok {} is more than the {} experts; correct one of them",
                where, a.top_k, a.experts);
  }
  return {};
}

Result<Architecture> parse_gpt2(const Json& config, std::string_view where) {
  Architecture a;
  a.naming = Naming::kGpt2;
  a.hidden = F8_TRY(integer_field(config, "n_embd", where, 1, kMaxDim / 4));
  a.intermediate = F8_TRY(integer_field_or(config, "n_inner", where, 1, kMaxDim, 4 * a.hidden));
  a.heads = F8_TRY(integer_field(config, "n_head", where, 1, kMostHeads));
  a.layers = F8_TRY(integer_field(config, "n_layer", where, 1, kMostLayers));
  a.vocab = F8_TRY(integer_field(config, "vocab_size", where, 1, kMaxDim));
  if (a.hidden % a.heads != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: n_embd {} is no multiple of n_head {}; correct one of them", where, a.hidden,
                a.heads);
  }
  a.tied_head = F8_TRY(bool_field_or(config, "tie_word_embeddings", where, true));
  return a;
}

Result<Architecture> parse_decoder(const Json& config, std::string_view where,
                                   const Family& family) {
  Architecture a;
  a.hidden = F8_TRY(integer_field(config, "hidden_size", where, 1, kMaxDim));
  const bool gate_up = family.attention == Attention::kFused ||
                       family.experts == Experts::kGptOss || family.experts == Experts::kLlama4;
  a.intermediate =
      F8_TRY(integer_field(config, "intermediate_size", where, 1, gate_up ? kMaxDim / 2 : kMaxDim));
  a.heads = F8_TRY(integer_field(config, "num_attention_heads", where, 1, kMostHeads));
  a.layers = F8_TRY(integer_field(config, "num_hidden_layers", where, 1, kMostLayers));
  a.vocab = family.vocab == 0
                ? F8_TRY(integer_field(config, "vocab_size", where, 1, kMaxDim))
                : F8_TRY(integer_field_or(config, "vocab_size", where, 1, kMaxDim, family.vocab));
  if (family.attention == Attention::kLatent || family.attention == Attention::kIndexed) {
    F8_TRY(read_latent_attention(a, config, where, family.attention == Attention::kIndexed));
  } else {
    F8_TRY(read_attention(a, config, where, family));
  }
  if (family.attention == Attention::kMostlyLinear) F8_TRY(read_linear_attention(a, config, where));
  F8_TRY(read_experts(a, config, where, family.experts));
  a.tied_head = F8_TRY(bool_field_or(config, "tie_word_embeddings", where, family.tied_head));
  a.scores = family.scores;
  if (F8_TRY(bool_field_or(config, "use_sliding_window", where, true))) {
    a.window = F8_TRY(integer_field_or(config, "sliding_window", where, 1, kMaxDim, 0));
  }
  return a;
}

}  // namespace

Result<Architecture> parse_config(const Json& config, std::string_view where) {
  const Family family = F8_TRY(family_of(config, where));
  if (family.type == "gpt2") return parse_gpt2(config, where);
  if (family.text.empty()) return parse_decoder(config, where, family);
  const auto text = config.find("text_config");
  if (text == config.end() || !text->is_object()) {
    return fail(ErrorCode::kInvalidArgument,
                "{} has no object \"text_config\"; add it, or set model_type to {} if the file "
                "describes the language model alone",
                where, family.text);
  }
  Family language = *find_family(family.text);
  language.tied_head =
      F8_TRY(bool_field_or(config, "tie_word_embeddings", where, language.tied_head));
  Architecture a = F8_TRY(parse_decoder(*text, f8::format("{}, text_config", where), language));
  a.prefix = "language_model.";
  return a;
}

}  // namespace f8::tuner
