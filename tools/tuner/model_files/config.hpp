// The architecture that a Hugging Face config.json describes. The model types are:
//
//   llama mistral qwen2 qwen3   dense; head_dim may differ from hidden_size / num_attention_heads
//   gemma gemma2 gemma3_text    dense; the head is the embedding, so it is no layer
//   gemma3                      the language model, which "text_config" describes; its names begin
//                               with "language_model."; the vision tower is left out
//   mixtral                     num_local_experts experts of intermediate_size in every layer
//   qwen3_moe                   num_experts experts of moe_intermediate_size in every
//                               decoder_sparse_step-th layer
//   deepseek_v2 deepseek_v3     latent attention; after first_k_dense_replace dense layers come
//                               n_routed_experts and n_shared_experts of moe_intermediate_size
//   gpt2                        n_embd, n_inner, n_head, n_layer; transformer.h.0.attn.c_attn
//
// Without model_type "architectures" says the family; without both a file is read as llama, or as
// mixtral if it has num_local_experts.
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
