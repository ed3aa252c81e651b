// Built-in models, configurations, lists, sharding.
#include "tools/tuner/model_files/model.hpp"

#include <gtest/gtest.h>

#include <algorithm>

#include "tests/unit/tools/model_files/model_files.hpp"

namespace f8::tuner {
namespace {

using f8::testing::TempFolder;

const NamedLinear* find(const Model& model, std::string_view fqn) {
  const auto found = std::ranges::find(model.layers, fqn, &NamedLinear::fqn);
  return found == model.layers.end() ? nullptr : &*found;
}

void expect_layer(const Model& model, std::string_view fqn, int64_t in, int64_t out) {
  const NamedLinear* layer = find(model, fqn);
  ASSERT_NE(layer, nullptr) << fqn;
  EXPECT_EQ(layer->in_features, in) << fqn;
  EXPECT_EQ(layer->out_features, out) << fqn;
}

double parameters(const Model& model) {
  double sum = 0;
  for (const NamedLinear& l : model.layers) {
    sum += static_cast<double>(l.in_features) * static_cast<double>(l.out_features * l.count);
  }
  return sum;
}

std::string error_of(const Result<Model>& result) {
  EXPECT_FALSE(result.has_value());
  if (result) return "";
  EXPECT_EQ(result.error().message.find('\n'), std::string::npos);
  return result.error().message;
}

#define EXPECT_ERROR(result, ...)                                  \
  do {                                                             \
    const std::string message = error_of(result);                  \
    for (const char* part : {__VA_ARGS__}) {                       \
      EXPECT_NE(message.find(part), std::string::npos) << message; \
    }                                                              \
  } while (false)

TEST(BuiltinModels, Llama3Has8BLinears) {
  const Model model = load_model("llama3-8b").value();
  EXPECT_EQ(model.layers.size(), 32U * 7 + 1);
  expect_layer(model, "layers.0.attention.wq", 4096, 4096);
  expect_layer(model, "layers.0.attention.wk", 4096, 1024);
  expect_layer(model, "layers.31.attention.wv", 4096, 1024);
  expect_layer(model, "layers.31.attention.wo", 4096, 4096);
  expect_layer(model, "layers.7.feed_forward.w1", 4096, 14336);
  expect_layer(model, "layers.7.feed_forward.w3", 4096, 14336);
  expect_layer(model, "layers.7.feed_forward.w2", 14336, 4096);
  expect_layer(model, "output", 4096, 128256);
  EXPECT_EQ(find(model, "layers.32.attention.wq"), nullptr);
}

// The linears hold the published parameter counts without the input embedding, but for norms and
// biases.
TEST(BuiltinModels, HaveTheParametersOfTheirNames) {
  const std::pair<const char*, double> kCounts[] = {
      {"llama2-7b", 6.738e9 - 32000 * 4096.0},     {"llama2-13b", 13.016e9 - 32000 * 5120.0},
      {"llama2-70b", 68.977e9 - 32000 * 8192.0},   {"llama3-8b", 8.030e9 - 128256 * 4096.0},
      {"llama3-70b", 70.554e9 - 128256 * 8192.0},  {"llama3-405b", 405.853e9 - 128256 * 16384.0},
      {"mistral-7b", 7.242e9 - 32000 * 4096.0},    {"qwen2.5-7b", 7.616e9 - 152064 * 3584.0},
      {"qwen2.5-72b", 72.706e9 - 152064 * 8192.0}, {"mixtral-8x7b", 46.703e9 - 32000 * 4096.0}};
  for (const auto& [name, count] : kCounts) {
    const Model model = load_model(name).value();
    EXPECT_NEAR(parameters(model) / count, 1, 1e-3) << name;
  }
  EXPECT_EQ(builtin_models().size(), std::size(kCounts));
}

TEST(BuiltinModels, MixtralListsEveryExpert) {
  const Model model = load_model("mixtral-8x7b").value();
  EXPECT_EQ(model.layers.size(), 32U * (4 + 1 + 8 * 3) + 1);
  expect_layer(model, "model.layers.3.block_sparse_moe.gate", 4096, 8);
  expect_layer(model, "model.layers.3.block_sparse_moe.experts.7.w2", 14336, 4096);
  const NamedLinear& expert = *find(model, "model.layers.3.block_sparse_moe.experts.7.w2");
  EXPECT_EQ(tokens_of(expert, 8192), 2048);  // 2 of 8
  EXPECT_EQ(tokens_of(expert, 1), 1);
  EXPECT_EQ(tokens_of(expert, 1001), 250);
  EXPECT_EQ(tokens_of(*find(model, "model.layers.3.block_sparse_moe.gate"), 8192), 8192);
}

TEST(BuiltinModels, NamesAreUnique) {
  for (const std::string_view name : builtin_models()) {
    Model model = load_model(name).value();
    std::ranges::sort(model.layers, {}, &NamedLinear::fqn);
    EXPECT_EQ(std::ranges::adjacent_find(model.layers, {}, &NamedLinear::fqn), model.layers.end())
        << name;
  }
}

TEST(BuiltinModels, UnknownNameListsTheKnownOnes) {
  EXPECT_ERROR(load_model("llama9-1b"), "'llama9-1b'", "llama3-8b", "mixtral-8x7b");
  EXPECT_ERROR(load_model(""), "built in are");
}

constexpr std::string_view kMistral = R"({
  "model_type": "mistral", "hidden_size": 4096, "intermediate_size": 14336,
  "num_attention_heads": 32, "num_key_value_heads": 8, "num_hidden_layers": 32,
  "vocab_size": 32000, "rope_theta": 10000.0, "sliding_window": null})";

TEST(Config, EqualsTheBuiltinModel) {
  const TempFolder folder;
  const Model model = load_model(folder.write("config.json", kMistral)).value();
  EXPECT_EQ(model.layers, load_model("mistral-7b").value().layers);
}

TEST(Config, HeadDimensionNeedNotFollowFromHidden) {
  const TempFolder folder;
  const Model model = load_model(folder.write("config.json", R"({
    "model_type": "qwen3", "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 1,
    "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936})"))
                          .value();
  expect_layer(model, "model.layers.0.self_attn.q_proj", 1024, 2048);
  expect_layer(model, "model.layers.0.self_attn.k_proj", 1024, 1024);
  expect_layer(model, "model.layers.0.self_attn.o_proj", 2048, 1024);
  expect_layer(model, "lm_head", 1024, 151936);
}

TEST(Config, WithoutKeyValueHeadsAllHeadsHaveThem) {
  const TempFolder folder;
  const Model model = load_model(folder.write("config.json", R"({"model_type": "llama",
    "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 2,
    "num_attention_heads": 32, "vocab_size": 32000})"))
                          .value();
  expect_layer(model, "model.layers.1.self_attn.v_proj", 4096, 4096);
}

TEST(Config, LocalExpertsAreMixtral) {
  const TempFolder folder;
  const Model model = load_model(folder.write("config.json", R"({"model_type": "mixtral",
    "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
    "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": 32000,
    "num_local_experts": 8})"))
                          .value();
  EXPECT_EQ(model.layers, load_model("mixtral-8x7b").value().layers);
}

TEST(Config, ArchitecturesSayTheFamilyWithoutAModelType) {
  const TempFolder folder;
  const auto with = [&](const std::string& first) {
    return load_model(folder.write("config.json", "{" + first + R"("hidden_size": 2048,
      "intermediate_size": 6144, "moe_intermediate_size": 768, "num_hidden_layers": 2,
      "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 16,
      "num_experts_per_tok": 8, "vocab_size": 151936})"));
  };
  const Model typed = with(R"("model_type": "qwen3_moe",)").value();
  EXPECT_EQ(with(R"("architectures": ["Qwen3MoeForCausalLM"],)").value().layers, typed.layers);
  EXPECT_ERROR(with(""), "num_experts", "model_type", "add it");
  EXPECT_ERROR(with(R"("architectures": ["NewForCausalLM"],)"), "NewForCausalLM", "qwen3_moe");
}

TEST(Config, BadFieldsAreNamed) {
  const TempFolder folder;
  const auto with = [&](std::string_view from, std::string_view to) {
    std::string text(kMistral);
    text.replace(text.find(from), from.size(), to);
    return load_model(folder.write("config.json", text));
  };
  EXPECT_ERROR(with(R"("hidden_size": 4096,)", ""), "hidden_size", "config.json");
  EXPECT_ERROR(with("4096", "0"), "hidden_size", "is 0;", "from 1");
  EXPECT_ERROR(with("4096", "-4096"), "hidden_size", "is -4096;");
  EXPECT_ERROR(with("4096", "4096.5"), "hidden_size", "integer");
  EXPECT_ERROR(with("4096", "\"4096\""), "hidden_size", "integer");
  EXPECT_ERROR(with("4096", "99999999999999999999"), "hidden_size");
  EXPECT_ERROR(with("4096", "4294967296"), "hidden_size");
  EXPECT_ERROR(with("4096", "4095"), "hidden_size 4095", "num_attention_heads 32");
  EXPECT_ERROR(with(R"(heads": 8)", R"(heads": 5)"), "num_key_value_heads 5");
  EXPECT_ERROR(with("\"num_hidden_layers\": 32", "\"num_hidden_layers\": 1000000"),
               "num_hidden_layers", "4096");
  EXPECT_ERROR(with("\"mistral\"", "\"bert\""), "bert", "safetensors");
  EXPECT_ERROR(with("\"mistral\"", "7"), "model_type", "7");
}

TEST(List, IsTakenAsItStands) {
  const TempFolder folder;
  const Model model = load_model(folder.write("layers.json", R"([
    {"fqn": "a", "in_features": 4096, "out_features": 1024, "count": 3, "note": "extra"},
    {"fqn": "b", "in_features": 1, "out_features": 1073741824}])"))
                          .value();
  EXPECT_EQ(model.layers,
            (std::vector<NamedLinear>{{"a", 4096, 1024, 3}, {"b", 1, int64_t{1} << 30, 1}}));
}

TEST(List, HasSharesOfTheTokens) {
  const TempFolder folder;
  const auto load = [&](std::string_view share) {
    return load_model(folder.write(
        "layers.json",
        f8::format(R"([{{"fqn": "a", "in_features": 16, "out_features": 16, "tokens_share": {}}}])",
                   share)));
  };
  EXPECT_EQ(load("0.25").value().layers[0].tokens_share, 0.25);
  EXPECT_EQ(load("1").value().layers[0].tokens_share, 1);
  for (const char* share : {"0", "-0.5", "1.5", "\"half\"", "null", "true", "[1]"}) {
    EXPECT_ERROR(load(share), "layers.json", "entry 0", "tokens_share",
                 "more than 0 and at most 1");
  }
}

TEST(List, BadEntriesAreNamed) {
  const TempFolder folder;
  const auto load = [&](std::string_view text) {
    return load_model(folder.write("layers.json", text));
  };
  EXPECT_ERROR(load("[]"), "layers.json", "no layers");
  EXPECT_ERROR(load("[1]"), "entry 0", "fqn");
  EXPECT_ERROR(load(R"([{"in_features": 16, "out_features": 16}])"), "entry 0", "fqn");
  EXPECT_ERROR(load(R"([{"fqn": "", "in_features": 16, "out_features": 16}])"), "fqn");
  EXPECT_ERROR(load(R"([{"fqn": "a\nb", "in_features": 16, "out_features": 16}])"), "control");
  EXPECT_ERROR(load(R"([{"fqn": "a", "in_features": 0, "out_features": 16}])"), "in_features",
               "is 0;");
  EXPECT_ERROR(load(R"([{"fqn": "a", "in_features": 16}])"), "out_features");
  EXPECT_ERROR(load(R"([{"fqn": "a", "in_features": 16, "out_features": 16, "count": 0}])"),
               "count", "is 0;");
  EXPECT_ERROR(load(R"([{"fqn": "a", "in_features": 16, "out_features": 16, "count": -1}])"),
               "count");
  EXPECT_ERROR(load(R"([{"fqn": "a", "in_features": 16, "out_features": 1e300}])"), "out_features");
  EXPECT_ERROR(load(R"([{"fqn": "a", "in_features": 16, "in_features": 32, "out_features": 16}])"),
               "'in_features' twice");
  EXPECT_ERROR(load(R"([{"fqn": "a", "in_features": 16, "out_features": 16},
                        {"fqn": "a", "in_features": 16, "out_features": 16}])"),
               "entry 1", "'a' is listed twice");
}

TEST(File, WhatIsNoModelIsRefused) {
  const TempFolder folder;
  EXPECT_ERROR(load_model(folder.path().string()), "directory");
  EXPECT_ERROR(load_model(folder.write("empty.json", "")), "empty.json", "not valid JSON");
  EXPECT_ERROR(load_model(folder.write("half.json", R"([{"fqn": "a",)")), "half.json",
               "not valid JSON");
  EXPECT_ERROR(load_model(folder.write("bytes.json", "\xff\xfe\x01\n\x02")), "not valid JSON");
  EXPECT_ERROR(load_model(folder.write("other.json", R"({"a": 1})")), "other.json",
               "no model file");
  EXPECT_ERROR(load_model(folder.write("number.json", "7")), "no model file");
  EXPECT_ERROR(load_model(folder.write("deep.json", std::string(100000, '['))), "deep.json");
  EXPECT_ERROR(load_model("/dev/zero"), "regular file");
}

TEST(Shard, ColumnsLoseOutputsAndRowsInputs) {
  Model model = load_model("llama3-8b").value();
  ASSERT_TRUE(shard(model, 8));
  expect_layer(model, "layers.0.attention.wq", 4096, 512);
  expect_layer(model, "layers.0.attention.wk", 4096, 128);
  expect_layer(model, "layers.0.attention.wo", 512, 4096);
  expect_layer(model, "layers.0.feed_forward.w1", 4096, 1792);
  expect_layer(model, "layers.0.feed_forward.w2", 1792, 4096);
  expect_layer(model, "output", 4096, 16032);
  Model hf = load_model("mixtral-8x7b").value();
  ASSERT_TRUE(shard(hf, 2));
  expect_layer(hf, "model.layers.0.self_attn.k_proj", 4096, 512);
  expect_layer(hf, "model.layers.0.self_attn.o_proj", 2048, 4096);
  expect_layer(hf, "model.layers.0.block_sparse_moe.gate", 4096, 8);
  expect_layer(hf, "model.layers.0.block_sparse_moe.experts.0.w2", 7168, 4096);
  expect_layer(hf, "lm_head", 4096, 16000);
}

TEST(Shard, KeepsTheLayersThatRanksCannotShare) {
  Model model{
      "list.json",
      {{"a.wq", 4096, 4096}, {"a.wk", 4096, 64}, {"a.dense", 64, 24}, {"lm_head", 64, 50257}}};
  ASSERT_TRUE(shard(model, 8));
  const std::vector<NamedLinear>& layers = model.layers;
  EXPECT_EQ(layers[0], (NamedLinear{"a.wq", 4096, 512}));
  EXPECT_EQ(
      layers[1].kept,
      "kept in bf16: tp 8 leaves a rank 8 of its 64 out_features, no multiple of 16; a tp that "
      "divides 4 suits all layers");
  EXPECT_EQ(layers[2], (NamedLinear{"a.dense", 64, 24})) << "every rank has all of it";
  EXPECT_EQ(layers[3].kept, "kept in bf16: its 50257 out_features are no multiple of 16");
  EXPECT_EQ(layers[3].out_features, 6283) << "the largest part";
}

TEST(Shard, RefusesWhatDoesNotDivideAndChangesNothing) {
  Model model = load_model("llama3-8b").value();
  const std::vector<NamedLinear> before = model.layers;
  for (const int64_t tp : {5, 0, -1}) {
    const Status status = shard(model, tp);
    ASSERT_FALSE(status) << tp;
    EXPECT_NE(status.error().message.find(f8::format("{}", tp)), std::string::npos);
    EXPECT_EQ(model.layers, before);
  }
  Model unknown{"list.json", {{"encoder.dense", 1024, 1024, 1}}};
  const Status status = shard(unknown, 2);
  ASSERT_FALSE(status);
  EXPECT_NE(status.error().message.find("list.json"), std::string::npos);
}

}  // namespace
}  // namespace f8::tuner
