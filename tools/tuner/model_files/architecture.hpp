// Decoder architectures: a few numbers that give the linear layers of a whole model.
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>
#include <vector>

#include "recipes/problem.hpp"

namespace f8::tuner {

enum class Naming { kTorchtitan, kHuggingFace, kGpt2 };
enum class MoeNames {
  kMixtral,  // block_sparse_moe.experts.0.w1
  kMlp,      // mlp.experts.0.gate_proj
};

// Multi-head latent attention: keys and values come from one vector of kv_rank numbers per token.
struct LatentAttention {
  int64_t q_rank = 0;   // 0: one q_proj
  int64_t kv_rank = 0;  // 0: the model has no latent attention
  int64_t nope_dim = 0;
  int64_t rope_dim = 0;
  int64_t value_dim = 0;
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

  MoeNames moe_names = MoeNames::kMixtral;
  int64_t expert_intermediate = 0;  // 0: intermediate
  int64_t shared_intermediate = 0;  // all shared experts together; 0: none
  // Layer i has experts if i >= first_moe_layer and moe_layer_step divides i + moe_layer_shift.
  int64_t first_moe_layer = 0;
  int64_t moe_layer_step = 1;
  int64_t moe_layer_shift = 0;
  LatentAttention latent = {};
  bool tied_head = false;        // The head is the embedding, so it is no layer of its own.
  std::string_view prefix = {};  // what precedes "model." and "lm_head" in the names
};

[[nodiscard]] std::vector<std::string_view> builtin_architectures();
[[nodiscard]] std::optional<Architecture> find_architecture(std::string_view name);
// Every linear in the order of the forward pass, the output head last unless it is tied. The experts of a layer are
// alike: in a model with more than kMostNamedExperts of them, all layers together, those of a layer
// are one entry "experts.*" with their count.
inline constexpr int64_t kMostNamedExperts = 4096;
[[nodiscard]] std::vector<NamedLinear> linears(const Architecture& architecture);

}  // namespace f8::tuner
