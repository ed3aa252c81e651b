// The configurations of published models, each with the number of its parameters and of its linears.
#pragma once

#include <cstdint>

namespace f8::tuner {

struct Published {
  const char* name;
  const char* config;
  int64_t parameters;  // of the state dict
  int64_t others;      // those that are no linear's weight
  int64_t linears;
};

constexpr int64_t norms(int64_t layers, int64_t hidden, int64_t per_layer = 2) {
  return (per_layer * layers + 1) * hidden;
}

// SigLIP of 27 layers at 896 pixels, and the projector to the language model.
constexpr int64_t vision(int64_t hidden) {
  return 416'866'032 + 1152 * hidden + 1152;
}

// Pixtral of 24 layers of width 1024, and the projector, which merges four patches into one.
constexpr int64_t pixtral(int64_t hidden) {
  constexpr int64_t kLayer = 3 * 4096 * 1024 + 4 * 1024 * 1024 + 2 * 1024;
  constexpr int64_t kTower = 3 * 14 * 14 * 1024 + 1024 + 24 * kLayer;
  return kTower + 1024 + 4096 * 1024 + 1024 * hidden + hidden * hidden;
}

// The vision tower of 34 layers of width 1408, and the projector.
constexpr int64_t llama4_vision(int64_t hidden) {
  constexpr int64_t kLayer = 4 * (1408 * 1408 + 1408) + 2 * 1408 * 5632 + 5632 + 1408 + 4 * 1408;
  constexpr int64_t kEnds = 1408 * 588 + 1408 + 577 * 1408 + 4 * 1408;
  return kEnds + 34 * kLayer + 4096 * 5632 + 4096 * 4096 + 4096 * hidden;
}

constexpr int64_t gpt2_others(int64_t layers, int64_t hidden) {
  return (50257 + 1024) * hidden + layers * 13 * hidden + 2 * hidden;
}

inline const Published kPublished[] = {
    {"Llama-3 8B", R"({"architectures": ["LlamaForCausalLM"], "model_type": "llama",
      "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
      "num_key_value_heads": 8, "num_hidden_layers": 32, "vocab_size": 128256,
      "rope_theta": 500000.0, "tie_word_embeddings": false})",
     8'030'261'248, 128256 * 4096 + norms(32, 4096), 32 * 7 + 1},
    {"Llama-3 70B", R"({"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672,
      "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80,
      "vocab_size": 128256, "tie_word_embeddings": false})",
     70'553'706'496, 128256LL * 8192 + norms(80, 8192), 80 * 7 + 1},
    {"Llama-3.1 405B", R"({"model_type": "llama", "hidden_size": 16384, "mlp_bias": false,
      "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8,
      "num_hidden_layers": 126, "vocab_size": 128256, "tie_word_embeddings": false})",
     405'853'388'800, 128256LL * 16384 + norms(126, 16384), 126 * 7 + 1},
    {"Llama-3.2 1B", R"({"model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192,
      "head_dim": 64, "num_attention_heads": 32, "num_key_value_heads": 8,
      "num_hidden_layers": 16, "vocab_size": 128256, "tie_word_embeddings": true})",
     1'235'814'400, 128256 * 2048 + norms(16, 2048), 16 * 7},
    {"Llama-3.2 3B", R"({"model_type": "llama", "hidden_size": 3072, "intermediate_size": 8192,
      "head_dim": 128, "num_attention_heads": 24, "num_key_value_heads": 8,
      "num_hidden_layers": 28, "vocab_size": 128256, "tie_word_embeddings": true})",
     3'212'749'824, 128256 * 3072 + norms(28, 3072), 28 * 7},
    {"Mistral 7B", R"({"model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
      "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
      "sliding_window": 4096, "vocab_size": 32000, "tie_word_embeddings": false})",
     7'241'732'096, 32000 * 4096 + norms(32, 4096), 32 * 7 + 1},
    {"Mistral Nemo 12B", R"({"model_type": "mistral", "hidden_size": 5120, "head_dim": 128,
      "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8,
      "num_hidden_layers": 40, "sliding_window": null, "vocab_size": 131072,
      "tie_word_embeddings": false})",
     12'247'782'400, 131072 * 5120 + norms(40, 5120), 40 * 7 + 1},
    {"Qwen2.5 7B", R"({"model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
      "num_attention_heads": 28, "num_key_value_heads": 4, "num_hidden_layers": 28,
      "max_window_layers": 28, "vocab_size": 152064, "tie_word_embeddings": false})",
     7'615'616'512, 152064 * 3584 + norms(28, 3584) + 28 * (3584 + 2 * 512), 28 * 7 + 1},
    {"Qwen2.5 72B", R"({"model_type": "qwen2", "hidden_size": 8192, "intermediate_size": 29568,
      "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 80,
      "vocab_size": 152064, "tie_word_embeddings": false})",
     72'706'203'648, 152064LL * 8192 + norms(80, 8192) + 80 * (8192 + 2 * 1024), 80 * 7 + 1},
    {"Qwen3 8B", R"({"model_type": "qwen3", "hidden_size": 4096, "intermediate_size": 12288,
      "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 8,
      "num_hidden_layers": 36, "vocab_size": 151936, "tie_word_embeddings": false})",
     8'190'735'360, 151936 * 4096 + norms(36, 4096) + 36 * 2 * 128, 36 * 7 + 1},
    {"Qwen3 32B", R"({"model_type": "qwen3", "hidden_size": 5120, "intermediate_size": 25600,
      "head_dim": 128, "num_attention_heads": 64, "num_key_value_heads": 8,
      "num_hidden_layers": 64, "vocab_size": 151936, "tie_word_embeddings": false})",
     32'762'123'264, 151936 * 5120 + norms(64, 5120) + 64 * 2 * 128, 64 * 7 + 1},
    {"Qwen3 30B-A3B", R"({"model_type": "qwen3_moe", "hidden_size": 2048,
      "intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128,
      "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 128,
      "num_attention_heads": 32, "num_key_value_heads": 4, "num_hidden_layers": 48,
      "vocab_size": 151936, "tie_word_embeddings": false})",
     30'532'122'624, 151936 * 2048 + norms(48, 2048) + 48 * 2 * 128, 48 * (4 + 1 + 128 * 3) + 1},
    {"Qwen3 235B-A22B", R"({"model_type": "qwen3_moe", "hidden_size": 4096,
      "intermediate_size": 12288, "moe_intermediate_size": 1536, "num_experts": 128,
      "num_experts_per_tok": 8, "decoder_sparse_step": 1, "mlp_only_layers": [], "head_dim": 128,
      "num_attention_heads": 64, "num_key_value_heads": 4, "num_hidden_layers": 94,
      "vocab_size": 151936, "tie_word_embeddings": false})",
     235'093'634'560, 151936 * 4096 + norms(94, 4096) + 94 * 2 * 128, 94 * (4 + 1 + 128 * 3) + 1},
    {"Mixtral 8x7B", R"({"model_type": "mixtral", "hidden_size": 4096,
      "intermediate_size": 14336, "num_local_experts": 8, "num_experts_per_tok": 2,
      "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
      "vocab_size": 32000, "tie_word_embeddings": false})",
     46'702'792'704, 32000 * 4096 + norms(32, 4096), 32 * (4 + 1 + 8 * 3) + 1},
    {"Mixtral 8x22B", R"({"model_type": "mixtral", "hidden_size": 6144,
      "intermediate_size": 16384, "num_local_experts": 8, "num_experts_per_tok": 2,
      "num_attention_heads": 48, "num_key_value_heads": 8, "num_hidden_layers": 56,
      "vocab_size": 32768, "tie_word_embeddings": false})",
     140'630'071'296, 32768 * 6144 + norms(56, 6144), 56 * (4 + 1 + 8 * 3) + 1},
    {"Gemma 2 9B", R"({"model_type": "gemma2", "hidden_size": 3584, "intermediate_size": 14336,
      "head_dim": 256, "num_attention_heads": 16, "num_key_value_heads": 8,
      "num_hidden_layers": 42, "query_pre_attn_scalar": 256, "vocab_size": 256000})",
     9'241'705'984, 256000 * 3584 + norms(42, 3584, 4), 42 * 7},
    {"Gemma 2 27B", R"({"model_type": "gemma2", "hidden_size": 4608, "intermediate_size": 36864,
      "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 16,
      "num_hidden_layers": 46, "query_pre_attn_scalar": 144, "vocab_size": 256000})",
     27'227'128'320, 256000 * 4608 + norms(46, 4608, 4), 46 * 7},
    {"Gemma 3 12B", R"({"model_type": "gemma3", "mm_tokens_per_image": 256, "text_config": {
      "model_type": "gemma3_text", "hidden_size": 3840, "intermediate_size": 15360,
      "num_attention_heads": 16, "num_key_value_heads": 8, "num_hidden_layers": 48},
      "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152,
      "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27}})",
     12'187'325'040, 262208 * 3840 + norms(48, 3840, 4) + 48 * 2 * 256 + vision(3840), 48 * 7},
    {"Gemma 3 27B", R"({"model_type": "gemma3", "mm_tokens_per_image": 256, "text_config": {
      "model_type": "gemma3_text", "hidden_size": 5376, "intermediate_size": 21504,
      "head_dim": 128, "num_attention_heads": 32, "num_key_value_heads": 16,
      "num_hidden_layers": 62, "query_pre_attn_scalar": 168},
      "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 1152,
      "intermediate_size": 4304, "num_attention_heads": 16, "num_hidden_layers": 27}})",
     27'432'406'640, 262208 * 5376 + norms(62, 5376, 4) + 62 * 2 * 128 + vision(5376), 62 * 7},
    {"DeepSeek-V3", R"({"model_type": "deepseek_v3", "hidden_size": 7168,
      "intermediate_size": 18432, "moe_intermediate_size": 2048, "n_routed_experts": 256,
      "n_shared_experts": 1, "num_experts_per_tok": 8, "first_k_dense_replace": 3,
      "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128,
      "qk_rope_head_dim": 64, "v_head_dim": 128, "num_attention_heads": 128,
      "num_key_value_heads": 128, "num_hidden_layers": 61, "num_nextn_predict_layers": 1,
      "vocab_size": 129280, "tie_word_embeddings": false})",
     671'026'419'200, 129280 * 7168 + norms(61, 7168) + 61 * (1536 + 512) + 58 * 256,
     61 * 5 + 3 * 3 + 58 * (1 + 256 * 3 + 3) + 1},
    {"SmolLM3 3B", R"({"architectures": ["SmolLM3ForCausalLM"], "model_type": "smollm3",
      "hidden_size": 2048, "intermediate_size": 11008, "num_attention_heads": 16,
      "num_key_value_heads": 4, "num_hidden_layers": 36, "vocab_size": 128256})",
     3'075'098'624, 128256 * 2048 + norms(36, 2048), 36 * 7},
    {"OLMo 2 7B", R"({"architectures": ["Olmo2ForCausalLM"], "model_type": "olmo2",
      "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32,
      "num_key_value_heads": 32, "num_hidden_layers": 32, "vocab_size": 100352,
      "tie_word_embeddings": false})",
     7'298'617'344, 100352 * 4096 + norms(32, 4096, 4), 32 * 7 + 1},
    {"Granite 3.3 8B", R"({"architectures": ["GraniteForCausalLM"], "model_type": "granite",
      "hidden_size": 4096, "intermediate_size": 12800, "num_attention_heads": 32,
      "num_key_value_heads": 8, "num_hidden_layers": 40, "vocab_size": 49159,
      "residual_multiplier": 0.22, "tie_word_embeddings": true})",
     8'170'864'640, 49159 * 4096 + norms(40, 4096), 40 * 7},
    {"Phi-3 mini", R"({"architectures": ["Phi3ForCausalLM"], "model_type": "phi3",
      "hidden_size": 3072, "intermediate_size": 8192, "num_attention_heads": 32,
      "num_key_value_heads": 32, "num_hidden_layers": 32, "vocab_size": 32064,
      "tie_word_embeddings": false})",
     3'821'079'552, 32064 * 3072 + norms(32, 3072), 32 * 4 + 1},
    {"Mistral Small 3.1 24B", R"({"architectures": ["Mistral3ForConditionalGeneration"],
      "model_type": "mistral3", "spatial_merge_size": 2, "text_config": {"model_type": "mistral",
      "hidden_size": 5120, "intermediate_size": 32768, "head_dim": 128, "num_attention_heads": 32,
      "num_key_value_heads": 8, "num_hidden_layers": 40, "vocab_size": 131072},
      "vision_config": {"model_type": "pixtral", "hidden_size": 1024, "num_hidden_layers": 24}})",
     24'011'361'280, 131072 * 5120 + norms(40, 5120) + pixtral(5120), 40 * 7 + 1},
    {"Kimi K2", R"({"architectures": ["DeepseekV3ForCausalLM"], "model_type": "kimi_k2",
      "hidden_size": 7168, "intermediate_size": 18432, "moe_intermediate_size": 2048,
      "n_routed_experts": 384, "n_shared_experts": 1, "num_experts_per_tok": 8,
      "first_k_dense_replace": 1, "moe_layer_freq": 1, "q_lora_rank": 1536, "kv_lora_rank": 512,
      "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
      "num_attention_heads": 64, "num_key_value_heads": 64, "num_hidden_layers": 61,
      "num_nextn_predict_layers": 0, "vocab_size": 163840, "tie_word_embeddings": false})",
     1'026'408'232'448, 163840LL * 7168 + norms(61, 7168) + 61 * (1536 + 512) + 60 * 384,
     61 * 5 + 3 + 60 * (1 + 384 * 3 + 3) + 1},
    {"DeepSeek-V3.2", R"({"architectures": ["DeepseekV32ForCausalLM"],
      "model_type": "deepseek_v32", "hidden_size": 7168, "intermediate_size": 18432,
      "moe_intermediate_size": 2048, "n_routed_experts": 256, "n_shared_experts": 1,
      "num_experts_per_tok": 8, "first_k_dense_replace": 3, "moe_layer_freq": 1,
      "q_lora_rank": 1536, "kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64,
      "v_head_dim": 128, "index_head_dim": 128, "index_n_heads": 64, "index_topk": 2048,
      "num_attention_heads": 128, "num_key_value_heads": 128, "num_hidden_layers": 61,
      "num_nextn_predict_layers": 1, "vocab_size": 129280, "tie_word_embeddings": false})",
     671'877'944'064, 129280 * 7168 + norms(61, 7168) + 61 * (1536 + 512 + 2 * 128) + 58 * 256,
     61 * 8 + 3 * 3 + 58 * (1 + 256 * 3 + 3) + 1},
    {"GLM-4.5 Air", R"({"architectures": ["Glm4MoeForCausalLM"], "model_type": "glm4_moe",
      "hidden_size": 4096, "intermediate_size": 10944, "moe_intermediate_size": 1408,
      "n_routed_experts": 128, "n_shared_experts": 1, "num_experts_per_tok": 8,
      "first_k_dense_replace": 1, "head_dim": 128, "num_attention_heads": 96,
      "num_key_value_heads": 8, "num_hidden_layers": 46, "num_nextn_predict_layers": 1,
      "vocab_size": 151552, "attention_bias": true, "tie_word_embeddings": false})",
     106'852'251'264, 151552 * 4096 + norms(46, 4096) + 46 * (12288 + 2 * 1024) + 45 * 128,
     46 * 4 + 3 + 45 * (1 + 128 * 3 + 3) + 1},
    {"MiniMax-M2", R"({"architectures": ["MiniMaxM2ForCausalLM"], "model_type": "minimax_m2",
      "hidden_size": 3072, "intermediate_size": 1536, "num_local_experts": 256,
      "num_experts_per_tok": 8, "head_dim": 128, "num_attention_heads": 48,
      "num_key_value_heads": 8, "num_hidden_layers": 62, "vocab_size": 200064,
      "use_qk_norm": true, "tie_word_embeddings": false})",
     228'689'764'864, 200064 * 3072 + norms(62, 3072) + 62 * (48 * 128 + 8 * 128 + 256),
     62 * (4 + 1 + 256 * 3) + 1},
    {"gpt-oss 20B", R"({"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss",
      "hidden_size": 2880, "intermediate_size": 2880, "num_local_experts": 32,
      "num_experts_per_tok": 4, "experts_per_token": 4, "head_dim": 64, "attention_bias": true,
      "num_attention_heads": 64, "num_key_value_heads": 8, "num_hidden_layers": 24,
      "vocab_size": 201088, "tie_word_embeddings": false})",
     20'914'757'184,
     201088 * 2880 + norms(24, 2880) +
         24 * (64 + 4096 + 2 * 512 + 2880 + 32 + 32 * (2 * 2880 + 2880)),
     24 * (4 + 1 + 32 * 2) + 1},
    {"Qwen3-Next 80B-A3B", R"({"architectures": ["Qwen3NextForCausalLM"],
      "model_type": "qwen3_next", "hidden_size": 2048, "intermediate_size": 5120,
      "moe_intermediate_size": 512, "shared_expert_intermediate_size": 512, "num_experts": 512,
      "num_experts_per_tok": 10, "decoder_sparse_step": 1, "mlp_only_layers": [],
      "full_attention_interval": 4, "head_dim": 256, "num_attention_heads": 16,
      "num_key_value_heads": 2, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
      "linear_key_head_dim": 128, "linear_value_head_dim": 128, "linear_conv_kernel_dim": 4,
      "num_hidden_layers": 48, "vocab_size": 151936, "tie_word_embeddings": false})",
     79'674'391'296,
     151936 * 2048 + norms(48, 2048) + 36 * (32 + 32 + 8192 * 4 + 128) + 12 * 2 * 256,
     36 * 3 + 12 * 4 + 48 * (1 + 512 * 3 + 3 + 1) + 1},
    {"Llama 4 Scout", R"({"architectures": ["Llama4ForConditionalGeneration"],
      "model_type": "llama4", "text_config": {"model_type": "llama4_text", "hidden_size": 5120,
      "intermediate_size": 8192, "intermediate_size_mlp": 16384, "interleave_moe_layer_step": 1,
      "num_local_experts": 16, "num_experts_per_tok": 1, "head_dim": 128,
      "num_attention_heads": 40, "num_key_value_heads": 8, "num_hidden_layers": 48,
      "vocab_size": 202048}, "vision_config": {"model_type": "llama4_vision_model"}})",
     108'641'793'536, 202048 * 5120 + norms(48, 5120) + llama4_vision(5120),
     48 * (4 + 1 + 16 * 2 + 3) + 1},
    {"GPT-2", R"({"model_type": "gpt2", "n_embd": 768, "n_head": 12, "n_layer": 12,
      "n_ctx": 1024, "n_positions": 1024, "vocab_size": 50257})",
     124'439'808, gpt2_others(12, 768), 12 * 4},
    {"GPT-2 XL", R"({"model_type": "gpt2", "n_embd": 1600, "n_head": 25, "n_layer": 48,
      "n_inner": null, "n_ctx": 1024, "n_positions": 1024, "vocab_size": 50257})",
     1'557'611'200, gpt2_others(48, 1600), 48 * 4},
};

}  // namespace f8::tuner
