// The architecture that a Hugging Face config.json describes. The model types are:
//
//   llama mistral qwen2 qwen3 smollm3 olmo2 granite
//                               dense; head_dim may differ from hidden_size / num_attention_heads
//   phi3                        dense; one qkv_proj and one gate_up_proj
//   gemma gemma2 gemma3_text    dense; the head is the embedding, so it is no layer
//   gemma3 mistral3 llama4      the language model, which "text_config" describes; its names begin
//                               with "language_model."; the vision tower is left out
//   mixtral minimax_m2          num_local_experts experts of intermediate_size in every layer
//   gpt_oss                     the same; an expert has one gate_up_proj
//   llama4_text                 the same and a shared expert, in every interleave_moe_layer_step-th
//                               layer; the others have intermediate_size_mlp
//   qwen3_moe                   num_experts experts of moe_intermediate_size in every
//                               decoder_sparse_step-th layer
//   qwen3_next                  the same and a shared expert with a gate; linear attention but in
//                               every full_attention_interval-th layer
//   deepseek_v2 deepseek_v3 kimi_k2
//                               latent attention; after first_k_dense_replace dense layers come
//                               n_routed_experts and n_shared_experts of moe_intermediate_size
//   deepseek_v32                the same, and an indexer
//   glm4_moe                    the experts of deepseek_v3, without its attention
//   gpt2                        n_embd, n_inner, n_head, n_layer; transformer.h.0.attn.c_attn
//
// Layers that only predict further tokens (num_nextn_predict_layers) are left out.
// Without model_type "architectures" says the family; a class that is of none is refused. Without
// both a file is read as llama, or as mixtral if it has num_local_experts.
// tie_word_embeddings says whether the head is the embedding; a family's default stands for it
// where the file has none.
#pragma once

#include <nlohmann/json.hpp>
#include <string_view>

#include "base/error.hpp"
#include "tools/tuner/model_files/architecture.hpp"

namespace f8::tuner {

// `where` is the file's path. An error names the field and says what to do.
[[nodiscard]] Result<Architecture> parse_config(const nlohmann::json& config,
                                                std::string_view where);

}  // namespace f8::tuner
