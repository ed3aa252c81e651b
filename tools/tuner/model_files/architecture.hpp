// Decoder architectures: a few numbers that give the linear layers of a whole model.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "recipes/problem.hpp"

namespace f8::tuner {

enum class Naming { kTorchtitan, kHuggingFace, kGpt2 };
// What the parts of a layer with experts are called. The parts of its shared experts and of a dense
// layer are gate_proj, up_proj and down_proj.
struct MoeNames {
  std::string_view block, router;
  std::string_view gate, up, down;  // of an expert; up is empty where one weight has gate and up
  std::string_view shared = {};
  // The block in programs whose experts are one module, where it has another name there.
  std::string_view module_block = {};
};
inline constexpr MoeNames kMixtralNames = {
    "block_sparse_moe.", "gate", "w1", "w3", "w2", {}, "mlp."};
inline constexpr MoeNames kDeepseekNames = {"mlp.",    "gate",      "gate_proj",
                                            "up_proj", "down_proj", "shared_experts."};
inline constexpr MoeNames kQwenNames = {"mlp.",    "gate",      "gate_proj",
                                        "up_proj", "down_proj", "shared_expert."};
inline constexpr MoeNames kGptOssNames = {"mlp.", "router", "gate_up_proj", "", "down_proj"};
inline constexpr MoeNames kLlama4Names = {"feed_forward.", "router",        "gate_up_proj", "",
                                          "down_proj",     "shared_expert."};

// Multi-head latent attention: keys and values come from one vector of kv_rank numbers per token.
struct LatentAttention {
  int64_t q_rank = 0;   // 0: one q_proj
  int64_t kv_rank = 0;  // 0: the model has no latent attention
  int64_t nope_dim = 0;
  int64_t rope_dim = 0;
  int64_t value_dim = 0;
  // The indexer chooses the tokens that a query sees. With 0 heads there is none, and it sees all.
  int64_t index_heads = 0;
  int64_t index_dim = 0;
};

// Gated delta rule: layers without a softmax, between those of full attention.
struct LinearAttention {
  int64_t key_heads = 0;  // 0: the model has no linear attention
  int64_t key_dim = 0;
  int64_t value_heads = 0;
  int64_t value_dim = 0;
  int64_t full_step = 1;  // layer i has full attention where this divides i + 1
};

struct Architecture {
  int64_t hidden = 0;
  int64_t intermediate = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;
  int64_t head_dim = 0;
  int64_t layers = 0;
  int64_t vocab = 0;
  int64_t experts = 0;  // 0: one dense feed-forward
  Naming naming = Naming::kHuggingFace;
  int64_t top_k = 1;  // experts that a token is sent to

  MoeNames moe_names = kMixtralNames;
  int64_t expert_intermediate = 0;  // 0: intermediate
  int64_t shared_intermediate = 0;  // all shared experts together; 0: none
  bool shared_gate = false;         // a linear of one output scales the shared expert's
  // Layer i has experts if i >= first_moe_layer and moe_layer_step divides i + moe_layer_shift.
  int64_t first_moe_layer = 0;
  int64_t moe_layer_step = 1;
  int64_t moe_layer_shift = 0;
  LatentAttention latent = {};
  LinearAttention linear = {};
  bool gated_queries = false;    // q_proj has a gate for each query
  bool fused = false;            // one qkv_proj, and one gate_up_proj in dense layers
  bool tied_head = false;        // The head is the embedding, so it is no layer of its own.
  std::string_view prefix = {};  // what precedes "model." and "lm_head" in the names
  int64_t window = 0;            // keys that a query of some layers has at most; 0: all of them
  std::string_view scores = {};  // what scores have besides a softmax: "capped scores"
};

// The attention of a block: its module, and the heads of one rank.
struct AttentionLayer {
  std::string fqn;  // "model.layers.0.self_attn"
  int64_t heads_q = 0;
  int64_t heads_kv = 0;
  int64_t head_dim = 0;
  int64_t window = 0;
  std::string kept = {};  // why there is no attention in fp8 of it; empty: there may be
};

[[nodiscard]] std::vector<std::string_view> builtin_architectures();
[[nodiscard]] std::optional<Architecture> find_architecture(std::string_view name);
// What the experts of a layer are: one module, which is one entry "experts" with groups, or a linear of
// each, as programs have them that call experts in turn. These are alike: in a model with more than
// kMostNamedExperts of them, all layers together, those of a layer are one entry "experts.*" with their
// count.
enum class ExpertsAs { kModule, kLinears };
inline constexpr int64_t kMostNamedExperts = 4096;
// Every attention with a softmax, in the order of the forward pass.
[[nodiscard]] std::vector<AttentionLayer> attention_layers(const Architecture& architecture);
// Every linear in the order of the forward pass, the output head last unless it is tied.
[[nodiscard]] std::vector<NamedLinear> linears(const Architecture& architecture,
                                               ExpertsAs experts = ExpertsAs::kLinears);

}  // namespace f8::tuner
