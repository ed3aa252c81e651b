#include "tools/tuner/model_files/architecture.hpp"

#include <algorithm>
#include <array>
#include <string>

#include "base/text.hpp"

namespace f8::tuner {
namespace {

struct Builtin {
  std::string_view name;
  Architecture architecture;
};

constexpr Naming kTitan = Naming::kTorchtitan;
constexpr Naming kHf = Naming::kHuggingFace;
// hidden, intermediate, heads, kv_heads, head_dim, layers, vocab, experts, naming, top_k
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
    Builtin{"mixtral-8x7b", {4096, 14336, 32, 8, 128, 32, 32000, 8, kHf, 2}},
};

using Layers = std::vector<NamedLinear>;

struct Ffn {
  std::string_view gate = "gate_proj", up = "up_proj", down = "down_proj";
  int64_t extent = 0;
  int64_t count = 1;
  double share = 1;  // of the tokens
};

void add_ffn(Layers& out, const std::string& prefix, int64_t hidden, const Ffn& f) {
  const auto add = [&](std::string_view name, int64_t in, int64_t outputs) {
    out.push_back({f8::format("{}{}", prefix, name), in, outputs, f.count, f.share});
  };
  add(f.gate, hidden, f.up.empty() ? 2 * f.extent : f.extent);
  if (!f.up.empty()) add(f.up, hidden, f.extent);
  add(f.down, f.extent, hidden);
}

void add_dense(Layers& out, const std::string& prefix, const Architecture& a) {
  if (a.naming == kTitan) {
    return add_ffn(out, prefix + "feed_forward.", a.hidden,
                   {.gate = "w1", .up = "w3", .down = "w2", .extent = a.intermediate});
  }
  const bool feed_forward = a.moe_names.block == kLlama4Names.block;
  Ffn dense{.extent = a.intermediate};
  if (a.fused) dense = {.gate = "gate_up_proj", .up = "", .extent = a.intermediate};
  add_ffn(out, prefix + (feed_forward ? "feed_forward." : "mlp."), a.hidden, dense);
}

// How the experts of all layers are listed.
enum class Listed { kModule, kMerged, kEach };

void add_experts(Layers& out, const std::string& prefix, const Architecture& a, Listed listed) {
  const MoeNames& names = a.moe_names;
  const bool renamed = listed == Listed::kModule && !names.module_block.empty();
  const std::string moe = f8::format("{}{}", prefix, renamed ? names.module_block : names.block);
  out.push_back({f8::format("{}{}", moe, names.router), a.hidden, a.experts});
  const bool merge = listed == Listed::kMerged;
  Ffn expert{.gate = names.gate,
             .up = names.up,
             .down = names.down,
             .extent = a.expert_intermediate > 0 ? a.expert_intermediate : a.intermediate,
             .count = merge ? a.experts : 1,
             .share = static_cast<double>(a.top_k) / static_cast<double>(a.experts)};
  if (listed == Listed::kModule) {
    out.push_back({.fqn = moe + "experts",
                   .in_features = a.hidden,
                   .out_features = expert.extent,
                   .tokens_share = static_cast<double>(a.top_k),
                   .groups = {.experts = a.experts}});
  } else if (merge) {
    add_ffn(out, moe + "experts.*.", a.hidden, expert);
  } else {
    for (int64_t e = 0; e < a.experts; ++e)
      add_ffn(out, f8::format("{}experts.{}.", moe, e), a.hidden, expert);
  }
  if (a.shared_intermediate == 0) return;
  add_ffn(out, f8::format("{}{}", moe, names.shared), a.hidden, {.extent = a.shared_intermediate});
  if (a.shared_gate) out.push_back({moe + "shared_expert_gate", a.hidden, 1});
}

void add_attention(Layers& out, const std::string& prefix, const Architecture& a) {
  const bool titan = a.naming == kTitan;
  const std::string attention = prefix + (titan ? "attention." : "self_attn.");
  const int64_t q = a.heads * a.head_dim;
  const int64_t kv = a.kv_heads * a.head_dim;
  if (a.fused) {
    out.push_back({attention + "qkv_proj", a.hidden, q + 2 * kv});
  } else {
    out.push_back({attention + (titan ? "wq" : "q_proj"), a.hidden, a.gated_queries ? 2 * q : q});
    out.push_back({attention + (titan ? "wk" : "k_proj"), a.hidden, kv});
    out.push_back({attention + (titan ? "wv" : "v_proj"), a.hidden, kv});
  }
  out.push_back({attention + (titan ? "wo" : "o_proj"), q, a.hidden});
}

void add_latent_attention(Layers& out, const std::string& prefix, const Architecture& a) {
  const std::string attention = prefix + "self_attn.";
  const LatentAttention& l = a.latent;
  const int64_t q = a.heads * (l.nope_dim + l.rope_dim);
  if (l.q_rank > 0) {
    out.push_back({attention + "q_a_proj", a.hidden, l.q_rank});
    out.push_back({attention + "q_b_proj", l.q_rank, q});
  } else {
    out.push_back({attention + "q_proj", a.hidden, q});
  }
  out.push_back({attention + "kv_a_proj_with_mqa", a.hidden, l.kv_rank + l.rope_dim});
  out.push_back({attention + "kv_b_proj", l.kv_rank, a.heads * (l.nope_dim + l.value_dim)});
  if (l.index_heads > 0) {
    out.push_back({attention + "indexer.wq_b", l.q_rank, l.index_heads * l.index_dim});
    out.push_back({attention + "indexer.wk", a.hidden, l.index_dim});
    out.push_back({attention + "indexer.weights_proj", a.hidden, l.index_heads});
  }
  out.push_back({attention + "o_proj", a.heads * l.value_dim, a.hidden});
}

void add_linear_attention(Layers& out, const std::string& prefix, const Architecture& a) {
  const std::string attention = prefix + "linear_attn.";
  const LinearAttention& l = a.linear;
  const int64_t values = l.value_heads * l.value_dim;
  out.push_back({attention + "in_proj_qkvz", a.hidden, 2 * l.key_heads * l.key_dim + 2 * values});
  out.push_back({attention + "in_proj_ba", a.hidden, 2 * l.value_heads});
  out.push_back({attention + "out_proj", values, a.hidden});
}

void add_gpt2_block(Layers& out, const std::string& prefix, const Architecture& a) {
  out.push_back({prefix + "attn.c_attn", a.hidden, 3 * a.hidden});
  out.push_back({prefix + "attn.c_proj", a.hidden, a.hidden});
  out.push_back({prefix + "mlp.c_fc", a.hidden, a.intermediate});
  out.push_back({prefix + "mlp.c_proj", a.intermediate, a.hidden});
}

bool has_experts(const Architecture& a, int64_t layer) {
  return a.experts > 0 && layer >= a.first_moe_layer &&
         (layer + a.moe_layer_shift) % a.moe_layer_step == 0;
}

std::string block_prefix(const Architecture& a, int64_t layer) {
  switch (a.naming) {
    case Naming::kTorchtitan:
      return f8::format("layers.{}.", layer);
    case Naming::kGpt2:
      return f8::format("transformer.h.{}.", layer);
    case Naming::kHuggingFace:
      break;
  }
  return f8::format("{}model.layers.{}.", a.prefix, layer);
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

std::vector<AttentionLayer> attention_layers(const Architecture& a) {
  std::vector<AttentionLayer> layers;
  for (int64_t i = 0; i < a.layers; ++i) {
    if (a.linear.key_heads > 0 && (i + 1) % a.linear.full_step != 0) continue;
    const char* module = a.naming == Naming::kHuggingFace  ? "self_attn"
                         : a.naming == Naming::kTorchtitan ? "attention"
                                                           : "attn";
    AttentionLayer layer{.fqn = block_prefix(a, i) + module,
                         .heads_q = a.heads,
                         .heads_kv = a.kv_heads > 0 ? a.kv_heads : a.heads,
                         .head_dim = a.head_dim > 0 ? a.head_dim : a.hidden / a.heads,
                         .window = a.window};
    if (a.latent.kv_rank > 0)
      layer.kept = "latent attention has other heads of keys than of values";
    if (!a.scores.empty()) layer.kept = f8::format("attention in fp8 has no {}", a.scores);
    layers.push_back(std::move(layer));
  }
  return layers;
}

std::vector<NamedLinear> linears(const Architecture& a, ExpertsAs as) {
  int64_t experts = 0;
  for (int64_t i = 0; i < a.layers; ++i) experts += has_experts(a, i) ? a.experts : 0;
  const Listed listed = as == ExpertsAs::kModule      ? Listed::kModule
                        : experts > kMostNamedExperts ? Listed::kMerged
                                                      : Listed::kEach;
  Layers out;
  for (int64_t i = 0; i < a.layers; ++i) {
    const std::string prefix = block_prefix(a, i);
    if (a.naming == Naming::kGpt2) {
      add_gpt2_block(out, prefix, a);
      continue;
    }
    if (a.latent.kv_rank > 0) {
      add_latent_attention(out, prefix, a);
    } else if (a.linear.key_heads > 0 && (i + 1) % a.linear.full_step != 0) {
      add_linear_attention(out, prefix, a);
    } else {
      add_attention(out, prefix, a);
    }
    if (has_experts(a, i)) {
      add_experts(out, prefix, a, listed);
    } else {
      add_dense(out, prefix, a);
    }
  }
  if (!a.tied_head) {
    const bool titan = a.naming == kTitan;
    out.push_back({titan ? "output" : f8::format("{}lm_head", a.prefix), a.hidden, a.vocab});
  }
  return out;
}

}  // namespace f8::tuner
