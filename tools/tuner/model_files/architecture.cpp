#include "tools/tuner/model_files/architecture.hpp"

#include <algorithm>
#include <array>
#include <string>

#include "base/text.hpp"
#include "tools/tuner/model_files/strict_json.hpp"

namespace f8::tuner {
namespace {

struct Builtin {
  std::string_view name;
  Architecture architecture;
};

constexpr Naming kTitan = Naming::kTorchtitan;
constexpr Naming kHf = Naming::kHuggingFace;
// hidden, intermediate, heads, kv_heads, head_dim, layers, vocab, experts, naming
constexpr std::array kBuiltins = {
    Builtin{"llama2-7b", {4096, 11008, 32, 32, 128, 32, 32000, 0, kTitan}},
    Builtin{"llama2-13b", {5120, 13824, 40, 40, 128, 40, 32000, 0, kTitan}},
    Builtin{"llama2-70b", {8192, 28672, 64, 8, 128, 80, 32000, 0, kTitan}},
    Builtin{"llama3-8b", {4096, 14336, 32, 8, 128, 32, 128256, 0, kTitan}},
    Builtin{"llama3-70b", {8192, 28672, 64, 8, 128, 80, 128256, 0, kTitan}},
    Builtin{"llama3-405b", {16384, 53248, 128, 8, 128, 126, 128256, 0, kTitan}},
    Builtin{"mistral-7b", {4096, 14336, 32, 8, 128, 32, 32000, 0, kHf}},
    Builtin{"qwen2.5-7b", {3584, 18944, 28, 4, 128, 28, 152064, 0, kHf}},
    Builtin{"qwen2.5-72b", {8192, 29568, 64, 8, 128, 80, 152064, 0, kHf}},
    Builtin{"mixtral-8x7b", {4096, 14336, 32, 8, 128, 32, 32000, 8, kHf}},
};

// Model types whose layers are those that linears() lists.
constexpr std::array<std::string_view, 8> kModelTypes = {
    "llama", "mistral", "qwen2", "qwen3", "gemma", "gemma2", "gemma3_text", "mixtral"};

void add_dense(std::vector<NamedLinear>& out, const std::string& prefix, const Architecture& a) {
  const bool titan = a.naming == kTitan;
  const std::string ffn = prefix + (titan ? "feed_forward." : "mlp.");
  out.push_back({ffn + (titan ? "w1" : "gate_proj"), a.hidden, a.intermediate});
  out.push_back({ffn + (titan ? "w3" : "up_proj"), a.hidden, a.intermediate});
  out.push_back({ffn + (titan ? "w2" : "down_proj"), a.intermediate, a.hidden});
}

void add_experts(std::vector<NamedLinear>& out, const std::string& prefix, const Architecture& a) {
  const std::string moe = prefix + "block_sparse_moe.";
  out.push_back({moe + "gate", a.hidden, a.experts});
  const auto add = [&](const std::string& expert, int64_t count) {
    out.push_back({expert + "w1", a.hidden, a.intermediate, count});
    out.push_back({expert + "w3", a.hidden, a.intermediate, count});
    out.push_back({expert + "w2", a.intermediate, a.hidden, count});
  };
  if (a.layers * a.experts > kMostNamedExperts) {
    add(moe + "experts.*.", a.experts);
    return;
  }
  for (int64_t e = 0; e < a.experts; ++e) add(f8::format("{}experts.{}.", moe, e), 1);
}

}  // namespace

std::vector<std::string_view> builtin_architectures() {
  std::vector<std::string_view> names;
  for (const Builtin& builtin : kBuiltins) names.push_back(builtin.name);
  return names;
}

std::optional<Architecture> find_architecture(std::string_view name) {
  const auto* found = std::ranges::find(kBuiltins, name, &Builtin::name);
  if (found == kBuiltins.end()) return std::nullopt;
  return found->architecture;
}

Result<Architecture> parse_config(const nlohmann::json& config, std::string_view where) {
  if (const auto type = config.find("model_type"); type != config.end()) {
    if (!type->is_string() ||
        std::ranges::find(kModelTypes, type->get<std::string_view>()) == kModelTypes.end()) {
      return fail(ErrorCode::kUnsupported,
                  "{}: model_type {} is not one whose layers are known ({}); give the model's "
                  ".safetensors file, its *.index.json, or a list of layers",
                  where, quote(type->dump(-1, ' ', true, nlohmann::json::error_handler_t::replace)),
                  fmt::join(kModelTypes, ", "));
    }
  }
  constexpr int64_t kMostLayers = 4096;
  constexpr int64_t kMostHeads = 1 << 16;
  Architecture a;
  a.hidden = F8_TRY(integer_field(config, "hidden_size", where, 1, kMaxDim));
  a.intermediate = F8_TRY(integer_field(config, "intermediate_size", where, 1, kMaxDim));
  a.heads = F8_TRY(integer_field(config, "num_attention_heads", where, 1, kMostHeads));
  a.kv_heads =
      F8_TRY(integer_field_or(config, "num_key_value_heads", where, 1, kMostHeads, a.heads));
  a.layers = F8_TRY(integer_field(config, "num_hidden_layers", where, 1, kMostLayers));
  a.vocab = F8_TRY(integer_field(config, "vocab_size", where, 1, kMaxDim));
  a.experts = F8_TRY(integer_field_or(config, "num_local_experts", where, 1, 512, 0));
  a.head_dim = F8_TRY(integer_field_or(config, "head_dim", where, 1, kMostHeads, 0));
  if (a.head_dim == 0) {
    if (a.hidden % a.heads != 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}: hidden_size {} is no multiple of num_attention_heads {}; correct one of "
                  "them or add head_dim",
                  where, a.hidden, a.heads);
    }
    a.head_dim = a.hidden / a.heads;
  }
  if (a.heads % a.kv_heads != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: num_attention_heads {} is no multiple of num_key_value_heads {}", where,
                a.heads, a.kv_heads);
  }
  if (a.heads * a.head_dim > kMaxDim) {
    return fail(ErrorCode::kInvalidArgument,
                "{}: num_attention_heads {} times head_dim {} is more than {}", where, a.heads,
                a.head_dim, kMaxDim);
  }
  return a;
}

std::vector<NamedLinear> linears(const Architecture& a) {
  const bool titan = a.naming == kTitan;
  std::vector<NamedLinear> out;
  for (int64_t i = 0; i < a.layers; ++i) {
    const std::string prefix = f8::format("{}layers.{}.", titan ? "" : "model.", i);
    const std::string attention = prefix + (titan ? "attention." : "self_attn.");
    const int64_t q = a.heads * a.head_dim;
    const int64_t kv = a.kv_heads * a.head_dim;
    out.push_back({attention + (titan ? "wq" : "q_proj"), a.hidden, q});
    out.push_back({attention + (titan ? "wk" : "k_proj"), a.hidden, kv});
    out.push_back({attention + (titan ? "wv" : "v_proj"), a.hidden, kv});
    out.push_back({attention + (titan ? "wo" : "o_proj"), q, a.hidden});
    if (a.experts > 0) {
      add_experts(out, prefix, a);
    } else {
      add_dense(out, prefix, a);
    }
  }
  out.push_back({titan ? "output" : "lm_head", a.hidden, a.vocab});
  return out;
}

}  // namespace f8::tuner
