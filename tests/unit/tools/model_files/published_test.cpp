// The configurations of published models give the linears of their state dicts. The linears and
// what is none of them (embeddings, norms, biases, a vision tower) are all of a model's parameters.
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <string>

#include "tests/unit/tools/model_files/published_models.hpp"
#include "tools/tuner/model_files/model.hpp"

namespace f8::tuner {
namespace {

const Published& published(std::string_view name) {
  return *std::ranges::find(kPublished, name, &Published::name);
}

Result<std::vector<NamedLinear>> parse(std::string_view config) {
  return parse_model_json(config, "config.json");
}

// The layers whose names begin with `prefix`, without it: name -> {N, K}, as a weight's shape.
using Shapes = std::map<std::string, std::pair<int64_t, int64_t>>;
Shapes shapes(std::string_view name, std::string_view prefix) {
  Shapes found;
  const std::vector<NamedLinear> layers = parse(published(name).config).value();
  for (const NamedLinear& layer : layers) {
    if (!layer.fqn.starts_with(prefix)) continue;
    found[layer.fqn.substr(prefix.size())] = {layer.out_features, layer.in_features};
  }
  return found;
}

TEST(PublishedConfig, LinearsAndTheRestAreAllParameters) {
  for (const Published& model : kPublished) {
    int64_t parameters = model.others;
    int64_t linears = 0;
    const std::vector<NamedLinear> layers = parse(model.config).value();
    for (const NamedLinear& layer : layers) {
      parameters += layer.in_features * layer.out_features * layer.count;
      linears += layer.count;
    }
    EXPECT_EQ(parameters, model.parameters) << model.name;
    EXPECT_EQ(linears, model.linears) << model.name;
  }
}

TEST(PublishedConfig, TheHeadIsAbsentWhereItIsTheEmbedding) {
  EXPECT_EQ(shapes("Llama-3 8B", "lm_head"), (Shapes{{"", {128256, 4096}}}));
  EXPECT_EQ(shapes("Qwen3 8B", "lm_head"), (Shapes{{"", {151936, 4096}}}));
  for (const char* name : {"Llama-3.2 1B", "Gemma 2 9B", "GPT-2"}) {
    EXPECT_EQ(shapes(name, "lm_head"), Shapes{}) << name;
  }
  EXPECT_EQ(shapes("Gemma 3 12B", "language_model.lm_head"), Shapes{});
}

TEST(PublishedConfig, HeadDimensionsAreTheFamilys) {
  EXPECT_EQ(shapes("Mistral Nemo 12B", "model.layers.39.self_attn."),
            (Shapes{{"q_proj", {4096, 5120}},
                    {"k_proj", {1024, 5120}},
                    {"v_proj", {1024, 5120}},
                    {"o_proj", {5120, 4096}}}));
  EXPECT_EQ(shapes("Gemma 3 12B", "language_model.model.layers.47."),
            (Shapes{{"self_attn.q_proj", {4096, 3840}},
                    {"self_attn.k_proj", {2048, 3840}},
                    {"self_attn.v_proj", {2048, 3840}},
                    {"self_attn.o_proj", {3840, 4096}},
                    {"mlp.gate_proj", {15360, 3840}},
                    {"mlp.up_proj", {15360, 3840}},
                    {"mlp.down_proj", {3840, 15360}}}));
}

TEST(PublishedConfig, ExpertsOfQwenHaveTheirOwnWidth) {
  EXPECT_EQ(shapes("Qwen3 30B-A3B", "model.layers.47."),
            (Shapes{{"self_attn.q_proj", {4096, 2048}},
                    {"self_attn.k_proj", {512, 2048}},
                    {"self_attn.v_proj", {512, 2048}},
                    {"self_attn.o_proj", {2048, 4096}},
                    {"mlp.gate", {128, 2048}},
                    {"mlp.experts.*.gate_proj", {768, 2048}},
                    {"mlp.experts.*.up_proj", {768, 2048}},
                    {"mlp.experts.*.down_proj", {2048, 768}}}));
  const std::vector<NamedLinear> layers = parse(published("Qwen3 30B-A3B").config).value();
  for (const NamedLinear& layer : layers) {  // 8 of 128
    const bool routed = layer.fqn.find(".experts.") != std::string::npos;
    EXPECT_EQ(tokens_of(layer, 8192), routed ? 512 : 8192) << layer.fqn;
  }
}

// The experts of a layer as the module that they are in the state dicts of today.
TEST(PublishedConfig, ExpertsAreOneEntryOfALayer) {
  struct Experts {
    const char *model, *name;
    int64_t layers, experts, top_k, width, own_width;
  };
  for (const Experts& e : {
           Experts{"Qwen3 30B-A3B", "mlp.experts", 48, 128, 8, 2048, 768},
           Experts{"Mixtral 8x7B", "mlp.experts", 32, 8, 2, 4096, 14336},
           Experts{"DeepSeek-V3", "mlp.experts", 58, 256, 8, 7168, 2048},
           Experts{"gpt-oss 20B", "mlp.experts", 24, 32, 4, 2880, 2880},
           Experts{"Llama 4 Scout", "feed_forward.experts", 48, 16, 1, 5120, 8192},
       }) {
    int64_t layers = 0;
    const auto all = parse_model_json(published(e.model).config, "c.json", ExpertsAs::kModule);
    for (const NamedLinear& layer : all.value()) {
      EXPECT_EQ(layer.fqn.find(".experts."), std::string::npos) << layer.fqn;
      if (!layer.is_experts()) continue;
      ++layers;
      EXPECT_TRUE(layer.fqn.ends_with(e.name)) << layer.fqn;
      EXPECT_EQ(layer.groups, (Groups{.experts = e.experts})) << layer.fqn;
      EXPECT_EQ(tokens_of(layer, 1000), 1000 * e.top_k) << layer.fqn;
      EXPECT_EQ(layer.in_features, e.width) << layer.fqn;
      EXPECT_EQ(layer.out_features, e.own_width) << layer.fqn;
    }
    EXPECT_EQ(layers, e.layers) << e.model;
  }
}

TEST(PublishedConfig, DeepSeekHasLatentAttentionAndSharedExperts) {
  const Shapes attention = {{"q_a_proj", {1536, 7168}},
                            {"q_b_proj", {24576, 1536}},
                            {"kv_a_proj_with_mqa", {576, 7168}},
                            {"kv_b_proj", {32768, 512}},
                            {"o_proj", {7168, 16384}}};
  EXPECT_EQ(shapes("DeepSeek-V3", "model.layers.0.self_attn."), attention);
  EXPECT_EQ(shapes("DeepSeek-V3", "model.layers.60.self_attn."), attention);
  EXPECT_EQ(shapes("DeepSeek-V3", "model.layers.2.mlp."), (Shapes{{"gate_proj", {18432, 7168}},
                                                                  {"up_proj", {18432, 7168}},
                                                                  {"down_proj", {7168, 18432}}}));
  EXPECT_EQ(shapes("DeepSeek-V3", "model.layers.3.mlp."),
            (Shapes{{"gate", {256, 7168}},
                    {"experts.*.gate_proj", {2048, 7168}},
                    {"experts.*.up_proj", {2048, 7168}},
                    {"experts.*.down_proj", {7168, 2048}},
                    {"shared_experts.gate_proj", {2048, 7168}},
                    {"shared_experts.up_proj", {2048, 7168}},
                    {"shared_experts.down_proj", {7168, 2048}}}));
  Model model{"DeepSeek-V3", parse(published("DeepSeek-V3").config).value()};
  for (const NamedLinear& layer : model.layers) {  // 8 of 256, and the shared expert sees all
    const bool routed = layer.fqn.find(".experts.") != std::string::npos;
    EXPECT_EQ(tokens_of(layer, 32768), routed ? 1024 : 32768) << layer.fqn;
  }
  ASSERT_TRUE(shard(model, 8));
  EXPECT_EQ(model.layers[1], (NamedLinear{"model.layers.0.self_attn.q_b_proj", 1536, 3072}));
  EXPECT_EQ(model.layers[3], (NamedLinear{"model.layers.0.self_attn.kv_b_proj", 512, 4096}));
  EXPECT_EQ(model.layers[4], (NamedLinear{"model.layers.0.self_attn.o_proj", 2048, 7168}));
}

TEST(PublishedConfig, FusedWeightsAreOneLinear) {
  EXPECT_EQ(shapes("Phi-3 mini", "model.layers.31."), (Shapes{{"self_attn.qkv_proj", {9216, 3072}},
                                                              {"self_attn.o_proj", {3072, 3072}},
                                                              {"mlp.gate_up_proj", {16384, 3072}},
                                                              {"mlp.down_proj", {3072, 8192}}}));
  EXPECT_EQ(shapes("gpt-oss 20B", "model.layers.23.mlp.experts.31."),
            (Shapes{{"gate_up_proj", {5760, 2880}}, {"down_proj", {2880, 2880}}}));
  EXPECT_EQ(shapes("gpt-oss 20B", "model.layers.0.mlp.router"), (Shapes{{"", {32, 2880}}}));
}

TEST(PublishedConfig, AnIndexerIsBesideLatentAttention) {
  EXPECT_EQ(shapes("DeepSeek-V3.2", "model.layers.60.self_attn.indexer."),
            (Shapes{{"wq_b", {8192, 1536}}, {"wk", {128, 7168}}, {"weights_proj", {64, 7168}}}));
  EXPECT_EQ(shapes("Kimi K2", "model.layers.60.self_attn.indexer."), Shapes{});
}

TEST(PublishedConfig, Qwen3NextHasLinearAttentionInThreeOfFourLayers) {
  EXPECT_EQ(shapes("Qwen3-Next 80B-A3B", "model.layers.46.linear_attn."),
            (Shapes{{"in_proj_qkvz", {12288, 2048}},
                    {"in_proj_ba", {64, 2048}},
                    {"out_proj", {2048, 4096}}}));
  EXPECT_EQ(shapes("Qwen3-Next 80B-A3B", "model.layers.47.self_attn."),
            (Shapes{{"q_proj", {8192, 2048}},
                    {"k_proj", {512, 2048}},
                    {"v_proj", {512, 2048}},
                    {"o_proj", {2048, 4096}}}));
  EXPECT_EQ(shapes("Qwen3-Next 80B-A3B", "model.layers.0.mlp.shared_expert"),
            (Shapes{{".gate_proj", {512, 2048}},
                    {".up_proj", {512, 2048}},
                    {".down_proj", {2048, 512}},
                    {"_gate", {1, 2048}}}));
}

// Maverick has experts in every second layer, and wider dense layers between.
TEST(PublishedConfig, Llama4HasDenseLayersBetween) {
  EXPECT_EQ(
      shapes("Llama 4 Scout",
             "language_model.model.layers.0.feed_forward."
             "shared_expert."),
      (Shapes{
          {"gate_proj", {8192, 5120}}, {"up_proj", {8192, 5120}}, {"down_proj", {5120, 8192}}}));
  std::string text = published("Llama 4 Scout").config;
  text.replace(text.find("step\": 1"), 8, "step\": 2");
  const std::vector<NamedLinear> layers = parse(text).value();
  std::map<std::string, int64_t> outputs;
  for (const NamedLinear& layer : layers) outputs[layer.fqn] = layer.out_features;
  EXPECT_EQ(outputs.at("language_model.model.layers.0.feed_forward.up_proj"), 16384);
  EXPECT_EQ(outputs.at("language_model.model.layers.1.feed_forward.experts.15.gate_up_proj"),
            16384);
  EXPECT_EQ(outputs.count("language_model.model.layers.1.feed_forward.up_proj"), 0U);
}

// The class alone names the family; one that is of none is not guessed at.
TEST(PublishedConfig, TheClassAloneNamesTheFamily) {
  for (const Published& model : kPublished) {
    std::string text = model.config;
    const size_t type = text.find("\"model_type\"");
    if (text.find("\"architectures\"") > type) continue;
    text.replace(type, 12, "\"other\"");
    const auto layers = parse(text);
    ASSERT_TRUE(layers) << model.name << ": " << layers.error().message;
    EXPECT_EQ(*layers, parse(model.config).value()) << model.name;
  }
  for (const char* named : {"[\"NewForCausalLM\"]", "[]", "7"}) {
    const auto layers = parse(f8::format(R"({{"architectures": {}, "hidden_size": 64,
        "intermediate_size": 64, "num_attention_heads": 4, "num_hidden_layers": 1,
        "vocab_size": 64}})",
                                         named));
    ASSERT_FALSE(layers) << named;
    EXPECT_EQ(layers.error().code, ErrorCode::kUnsupported) << named;
    EXPECT_NE(layers.error().message.find("architectures"), std::string::npos);
  }
}

// Conv1D holds its weight as [in_features, out_features].
TEST(PublishedConfig, Gpt2HasFourLinearsPerBlock) {
  EXPECT_EQ(shapes("GPT-2", "transformer.h.11."), (Shapes{{"attn.c_attn", {2304, 768}},
                                                          {"attn.c_proj", {768, 768}},
                                                          {"mlp.c_fc", {3072, 768}},
                                                          {"mlp.c_proj", {768, 3072}}}));
}

// What reading the configuration of `name` says once `from` is `to`.
std::string error_with(std::string_view name, std::string_view from, std::string_view to) {
  std::string text = published(name).config;
  const size_t at = text.find(from);
  EXPECT_NE(at, std::string::npos) << from;
  const auto layers = parse(text.replace(at, from.size(), to));
  EXPECT_FALSE(layers.has_value()) << name << ": " << to;
  return layers ? "" : layers.error().message;
}

TEST(PublishedConfig, AMissingFieldIsNamed) {
  const std::pair<const char*, const char*> kNeeded[] = {
      {"Mixtral 8x7B", "num_local_experts"},
      {"Qwen3 30B-A3B", "num_experts"},
      {"Qwen3 30B-A3B", "moe_intermediate_size"},
      {"DeepSeek-V3", "kv_lora_rank"},
      {"DeepSeek-V3", "qk_rope_head_dim"},
      {"DeepSeek-V3", "v_head_dim"},
      {"DeepSeek-V3", "n_routed_experts"},
      {"DeepSeek-V3", "first_k_dense_replace"},
      {"DeepSeek-V3.2", "index_n_heads"},
      {"DeepSeek-V3.2", "q_lora_rank"},
      {"Qwen3-Next 80B-A3B", "linear_value_head_dim"},
      {"Llama 4 Scout", "intermediate_size_mlp"},
      {"Mistral Small 3.1 24B", "text_config"},
      {"GPT-2", "n_embd"},
      {"GPT-2", "n_head"},
      {"Gemma 3 12B", "text_config"},
      {"Gemma 2 9B", "vocab_size"}};
  for (const auto& [model, field] : kNeeded) {
    const std::string quoted = "\"" + std::string(field) + "\"";
    const std::string message = error_with(model, quoted, "\"other\"");
    EXPECT_NE(message.find(quoted), std::string::npos) << message;
    EXPECT_NE(message.find("add it"), std::string::npos) << message;
  }
  EXPECT_NE(error_with("Gemma 3 12B", "\"hidden_size\"", "\"other\"").find("text_config"),
            std::string::npos);
}

TEST(PublishedConfig, AContradictionNamesItsFields) {
  const auto expect = [](const std::string& message, std::initializer_list<const char*> parts) {
    for (const char* part : parts) EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect(error_with("Mixtral 8x7B", "per_tok\": 2", "per_tok\": 9"),
         {"num_experts_per_tok 9", "8 experts"});
  expect(error_with("DeepSeek-V3", "replace\": 3", "replace\": 62"),
         {"first_k_dense_replace 62", "num_hidden_layers 61"});
  expect(error_with("GPT-2", "n_head\": 12", "n_head\": 11"), {"n_embd 768", "n_head 11"});
  expect(error_with("Qwen3 30B-A3B", "[]", "[0]"), {"mlp_only_layers", "index.json"});
  expect(error_with("Llama 4 Scout", "step\": 1", "step\": 1, \"moe_layers\": [1]"),
         {"moe_layers", "index.json"});
  expect(error_with("Qwen3-Next 80B-A3B", "interval\": 4",
                    "interval\": 4, \"layer_types\": [\"full_attention\"]"),
         {"layer_types", "index.json"});
  expect(error_with("Phi-3 mini", "size\": 8192", "size\": 1000000000"),
         {"intermediate_size", "1000000000"});
  expect(error_with("Llama-3 8B", "embeddings\": false", "embeddings\": 1"),
         {"tie_word_embeddings", "true or false"});
  expect(error_with("DeepSeek-V3", "shared_experts\": 1", "shared_experts\": -1"),
         {"n_shared_experts", "-1"});
}

TEST(Config, SparseStepsLeaveDenseLayersBetween) {
  std::string text = published("Qwen3 30B-A3B").config;
  text.replace(text.find("step\": 1"), 8, "step\": 2");
  const std::vector<NamedLinear> layers = parse(text).value();
  const auto has = [&](std::string_view fqn) {
    return std::ranges::find(layers, fqn, &NamedLinear::fqn) != layers.end();
  };
  EXPECT_TRUE(has("model.layers.0.mlp.gate_proj"));
  EXPECT_FALSE(has("model.layers.0.mlp.gate"));
  EXPECT_TRUE(has("model.layers.1.mlp.gate"));
  EXPECT_FALSE(has("model.layers.1.mlp.gate_proj"));
  EXPECT_TRUE(has("model.layers.1.mlp.experts.127.down_proj"));  // 24 * 128 have names
}

}  // namespace
}  // namespace f8::tuner
