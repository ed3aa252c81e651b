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

enum class Experts { kNone, kMixtral, kQwen, kDeepseek };

// The defaults of a model type's fields, which its published files may leave out.
struct Family {
  std::string_view type;
  Experts experts = Experts::kNone;
  bool tied_head = false;
  int64_t head_dim = 0;  // 0: hidden_size / num_attention_heads
  int64_t vocab = 0;     // 0: the file must have it
};

constexpr std::array kFamilies = {
    Family{"llama"},
    Family{"mistral"},
    Family{"qwen2"},
    Family{"qwen3", Experts::kNone, false, 128},
    Family{"gemma", Experts::kNone, true, 256},
    Family{"gemma2", Experts::kNone, true, 256},
    Family{"gemma3", Experts::kNone, true, 256, 262208},
    Family{"gemma3_text", Experts::kNone, true, 256, 262208},
    Family{"mixtral", Experts::kMixtral},
    Family{"qwen3_moe", Experts::kQwen},
    Family{"deepseek_v2", Experts::kDeepseek},
    Family{"deepseek_v3", Experts::kDeepseek},
    Family{"gpt2", Experts::kNone, true},
};

// The family that "architectures" names, such as qwen3_moe by Qwen3MoeForCausalLM; null for none.
const Family* family_of_class(const Json& config) {
  const auto classes = config.find("architectures");
  if (classes == config.end() || !classes->is_array() || classes->empty() ||
      !classes->front().is_string()) {
    return nullptr;
  }
  std::string name = classes->front().get<std::string>();
  for (const char* end : {"For", "LMHead"}) name = name.substr(0, name.find(end));
  std::ranges::transform(name, name.begin(), [](unsigned char c) { return std::tolower(c); });
  const auto* found = std::ranges::find_if(kFamilies, [&](const Family& family) {
    std::string type(family.type);
    std::erase(type, '_');
    return type == name;
  });
  return found == kFamilies.end() ? nullptr : found;
}

Result<Family> family_of(const Json& config, std::string_view where) {
  const auto type = config.find("model_type");
  if (type == config.end()) {
    if (const Family* named = family_of_class(config)) return *named;
    for (const char* field : {"num_experts", "n_routed_experts"}) {
      if (!config.contains(field)) continue;
      return fail(ErrorCode::kInvalidArgument,
                  "{} has \"{}\" and no \"model_type\", which says what its experts are; add it",
                  where, field);
    }
    const bool experts = config.contains("num_local_experts");
    return Family{"llama", experts ? Experts::kMixtral : Experts::kNone};
  }
  if (type->is_string()) {
    const auto* found =
        std::ranges::find(kFamilies, type->get_ref<const std::string&>(), &Family::type);
    if (found != kFamilies.end()) return *found;
  }
  std::string known;
  for (const Family& family : kFamilies) {
    known += f8::format("{}{}", known.empty() ? "" : ", ", family.type);
  }
  return fail(ErrorCode::kUnsupported,
              "{}: model_type {} is not one whose layers are known ({}); give the model's "
              ".safetensors file, its *.index.json, or a list of layers",
              where, quote(type->dump(-1, ' ', true, Json::error_handler_t::replace)), known);
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

Status check_extent(int64_t heads, int64_t dim, std::string_view dims, std::string_view where) {
  if (heads * dim <= kMaxDim) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}: num_attention_heads {} times {} {} is more than {}; correct one of them", where,
              heads, dims, dim, kMaxDim);
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
  return check_extent(a.heads, a.head_dim, "head_dim", where);
}

Status read_latent_attention(Architecture& a, const Json& config, std::string_view where) {
  LatentAttention& l = a.latent;
  l.q_rank = F8_TRY(integer_field_or(config, "q_lora_rank", where, 1, kMaxDim, 0));
  l.kv_rank = F8_TRY(integer_field(config, "kv_lora_rank", where, 1, kMaxDim / 2));
  l.nope_dim = F8_TRY(integer_field(config, "qk_nope_head_dim", where, 1, kMostHeads));
  l.rope_dim = F8_TRY(integer_field(config, "qk_rope_head_dim", where, 1, kMostHeads));
  l.value_dim = F8_TRY(integer_field(config, "v_head_dim", where, 1, kMostHeads));
  F8_TRY(
      check_extent(a.heads, l.nope_dim + l.rope_dim, "qk_nope_head_dim + qk_rope_head_dim", where));
  return check_extent(a.heads, l.nope_dim + l.value_dim, "qk_nope_head_dim + v_head_dim", where);
}

Status read_qwen_experts(Architecture& a, const Json& config, std::string_view where) {
  a.experts = F8_TRY(integer_field(config, "num_experts", where, 1, kMostExperts));
  a.moe_layer_step =
      F8_TRY(integer_field_or(config, "decoder_sparse_step", where, 1, kMostLayers, 1));
  a.moe_layer_shift = 1;
  const auto dense = config.find("mlp_only_layers");
  if (dense != config.end() && !dense->empty()) {
    return fail(ErrorCode::kUnsupported,
                "{}: mlp_only_layers is not empty, and such models are not known; give the "
                "model's *.index.json or a list of layers",
                where);
  }
  return {};
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

Status read_experts(Architecture& a, const Json& config, std::string_view where, Experts experts) {
  if (experts == Experts::kNone) return {};
  if (experts == Experts::kMixtral) {
    a.experts = F8_TRY(integer_field(config, "num_local_experts", where, 1, kMostExperts));
  } else {
    a.moe_names = MoeNames::kMlp;
    a.expert_intermediate =
        F8_TRY(integer_field(config, "moe_intermediate_size", where, 1, kMaxDim));
  }
  if (experts == Experts::kQwen) F8_TRY(read_qwen_experts(a, config, where));
  if (experts == Experts::kDeepseek) {
    F8_TRY(read_deepseek_experts(a, config, where));
    const int64_t shared =
        F8_TRY(integer_field_or(config, "n_shared_experts", where, 0, kMostExperts, 0));
    a.shared_intermediate = shared * a.expert_intermediate;
    if (a.shared_intermediate > kMaxDim) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: n_shared_experts {} times moe_intermediate_size {} is more than {}; correct "
                  "one of them",
                  where, shared, a.expert_intermediate, kMaxDim);
    }
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
  a.intermediate = F8_TRY(integer_field(config, "intermediate_size", where, 1, kMaxDim));
  a.heads = F8_TRY(integer_field(config, "num_attention_heads", where, 1, kMostHeads));
  a.layers = F8_TRY(integer_field(config, "num_hidden_layers", where, 1, kMostLayers));
  a.vocab = family.vocab == 0
                ? F8_TRY(integer_field(config, "vocab_size", where, 1, kMaxDim))
                : F8_TRY(integer_field_or(config, "vocab_size", where, 1, kMaxDim, family.vocab));
  if (family.experts == Experts::kDeepseek) {
    F8_TRY(read_latent_attention(a, config, where));
  } else {
    F8_TRY(read_attention(a, config, where, family));
  }
  F8_TRY(read_experts(a, config, where, family.experts));
  a.tied_head = F8_TRY(bool_field_or(config, "tie_word_embeddings", where, family.tied_head));
  return a;
}

}  // namespace

Result<Architecture> parse_config(const Json& config, std::string_view where) {
  Family family = F8_TRY(family_of(config, where));
  if (family.type == "gpt2") return parse_gpt2(config, where);
  if (family.type != "gemma3") return parse_decoder(config, where, family);
  const auto text = config.find("text_config");
  if (text == config.end() || !text->is_object()) {
    return fail(ErrorCode::kInvalidArgument,
                "{} has no object \"text_config\"; add it, or set model_type to gemma3_text if the "
                "file describes the language model alone",
                where);
  }
  family.tied_head = F8_TRY(bool_field_or(config, "tie_word_embeddings", where, family.tied_head));
  Architecture a = F8_TRY(parse_decoder(*text, f8::format("{}, text_config", where), family));
  a.prefix = "language_model.";
  return a;
}

}  // namespace f8::tuner
