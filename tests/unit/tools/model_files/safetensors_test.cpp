// Safetensors headers and indexes, whole and broken, and every parser under mutated bytes.
#include "tools/tuner/model_files/safetensors.hpp"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <algorithm>
#include <array>
#include <random>

#include "tests/unit/tools/model_files/model_files.hpp"
#include "tools/tuner/model_files/model.hpp"

namespace f8::tuner {
namespace {

using f8::testing::little_endian;
using f8::testing::safetensors;
using f8::testing::TempFolder;

constexpr std::string_view kHeader = R"({"__metadata__": {"format": "pt"},
 "model.embed_tokens.weight": {"dtype": "BF16", "shape": [32000, 64], "data_offsets": [0, 10]},
 "model.layers.10.mlp.up_proj.weight": {"dtype": "BF16", "shape": [256, 64], "data_offsets": [0, 1]},
 "model.layers.2.mlp.up_proj.weight": {"dtype": "F32", "shape": [256, 64], "data_offsets": [0, 1]},
 "model.layers.2.mlp.up_proj.bias": {"dtype": "F32", "shape": [256], "data_offsets": [0, 1]},
 "model.layers.2.input_layernorm.weight": {"dtype": "F32", "shape": [64], "data_offsets": [0, 1]},
 "model.layers.2.self_attn.rotary.inv_freq": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 1]},
 "lm_head.weight": {"dtype": "BF16", "shape": [32000, 64], "data_offsets": [0, 1]}})";

std::string error_of(const auto& result) {
  EXPECT_FALSE(result.has_value());
  if (result) return "";
  EXPECT_EQ(result.error().message.find('\n'), std::string::npos);
  return result.error().message;
}

bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

TEST(Safetensors, LinearsAreTheTwoDimensionalWeights) {
  const TempFolder folder;
  const Model model = load_model(folder.write("model.safetensors", safetensors(kHeader))).value();
  EXPECT_EQ(model.layers, (std::vector<NamedLinear>{{"lm_head", 64, 32000},
                                                    {"model.layers.2.mlp.up_proj", 64, 256},
                                                    {"model.layers.10.mlp.up_proj", 64, 256}}));
}

// GPT-2 keeps [in_features, out_features]; of a square weight it makes no difference.
TEST(Safetensors, ABiasTellsWhichSizeIsOutFeatures) {
  const auto found = linears({{"h.0.attn.c_attn.weight", {768, 2304}},
                              {"h.0.attn.c_attn.bias", {2304}},
                              {"h.0.attn.c_proj.weight", {768, 768}},
                              {"h.0.attn.c_proj.bias", {768}},
                              {"h.0.attn.bias", {1, 1, 1024, 1024}},
                              {"h.0.mlp.c_fc.weight", {768, 3072}},
                              {"h.0.mlp.c_fc.bias", {3072}},
                              {"other.q.weight", {256, 768}},
                              {"other.q.bias", {256}},
                              {"other.k.weight", {256, 768}}},
                             "f")
                         .value();
  const std::vector<NamedLinear> expected = {{"h.0.attn.c_attn", 768, 2304},
                                             {"h.0.attn.c_proj", 768, 768},
                                             {"h.0.mlp.c_fc", 768, 3072},
                                             {"other.k", 768, 256},
                                             {"other.q", 768, 256}};
  EXPECT_EQ(found, expected);
}

TEST(Safetensors, DataIsNotRead) {
  const TempFolder folder;
  const std::string path = folder.write("big.safetensors", safetensors(kHeader));
  std::filesystem::resize_file(path, uint64_t{1} << 40);  // sparse: 1 TiB that nobody reads
  EXPECT_EQ(load_model(path).value().layers.size(), 3U);
}

TEST(Safetensors, TruncatedAtEveryByteIsAnError) {
  const std::string whole = safetensors(kHeader);
  for (size_t size = 0; size < whole.size(); ++size) {
    const auto parsed = parse_safetensors(whole.substr(0, size), "f");
    ASSERT_FALSE(parsed.has_value()) << size;
    EXPECT_EQ(parsed.error().message.find('\n'), std::string::npos);
  }
  const TempFolder folder;
  const std::string cut = folder.write("cut.safetensors", whole.substr(0, 100));
  EXPECT_TRUE(contains(error_of(load_model(cut)), "truncated"));
  EXPECT_TRUE(contains(error_of(load_model(cut)), cut));
  EXPECT_TRUE(contains(error_of(load_model(folder.write("e.safetensors", ""))), "0 bytes"));
  EXPECT_TRUE(contains(error_of(load_model(folder.write("s.safetensors", "abc"))), "3 bytes"));
}

TEST(Safetensors, ImpossibleLengthsAllocateNothing) {
  const TempFolder folder;
  for (const uint64_t length : {UINT64_MAX, uint64_t{1} << 63, uint64_t{100'000'001}}) {
    const std::string path = folder.write("x.safetensors", little_endian(length) + "{}");
    EXPECT_TRUE(contains(error_of(load_model(path)), "header would be")) << length;
  }
  EXPECT_TRUE(contains(error_of(load_model(folder.write("0.safetensors", little_endian(0)))),
                       "header would be 0"));
}

TEST(Safetensors, MalformedHeadersAreNamed) {
  const auto parse = [](std::string_view header) {
    return error_of(parse_safetensors(safetensors(header), "m.safetensors"));
  };
  EXPECT_TRUE(contains(parse("{,}"), "not valid JSON"));
  EXPECT_TRUE(contains(parse("[]"), "not a JSON object"));
  EXPECT_TRUE(contains(parse(R"({"a": 1})"), "'a' has no dtype"));
  EXPECT_TRUE(contains(parse(R"({"a": {"shape": [1]}})"), "no dtype"));
  EXPECT_TRUE(contains(parse(R"({"a": {"dtype": "F32", "shape": 3}})"), "no dtype and shape"));
  EXPECT_TRUE(contains(parse(R"({"a": {"dtype": "F32", "shape": [-1, 2]}})"), "no list of sizes"));
  EXPECT_TRUE(contains(parse(R"({"a": {"dtype": "F32", "shape": [1.5]}})"), "no list of sizes"));
  EXPECT_TRUE(contains(parse(R"({"a": {"dtype": "F32", "shape": []},
                                "a": {"dtype": "F32", "shape": []}})"),
                       "twice"));
}

TEST(Safetensors, UnusableShapesAreNamed) {
  EXPECT_TRUE(contains(error_of(linears({{"a.weight", {0, 64}}}, "f")), "[0, 64]"));
  EXPECT_TRUE(
      contains(error_of(linears({{"a.weight", {int64_t{1} << 40, 64}}}, "f")), "'a.weight'"));
  EXPECT_TRUE(contains(error_of(linears({{"norm.weight", {64, 64}}}, "f")), "no linear layer"));
  EXPECT_TRUE(contains(error_of(linears({}, "f")), "no linear layer"));
}

class Index : public ::testing::Test {
 protected:
  Index() {
    folder_.write("one.safetensors",
                  safetensors(R"({"a.weight": {"dtype": "F32", "shape": [16, 32]}})"));
    folder_.write("two.safetensors",
                  safetensors(R"({"b.weight": {"dtype": "F32", "shape": [64, 32]}})"));
  }
  [[nodiscard]] Result<Model> load(std::string_view text) const {
    return load_model(folder_.write("model.safetensors.index.json", text));
  }
  TempFolder folder_;
};

TEST_F(Index, JoinsTheShards) {
  const Model model = load(R"({"metadata": {}, "weight_map": {
    "b.weight": "two.safetensors", "a.weight": "one.safetensors"}})")
                          .value();
  EXPECT_EQ(model.layers, (std::vector<NamedLinear>{{"a", 32, 16}, {"b", 32, 64}}));
}

TEST_F(Index, FaultsAreNamed) {
  const auto map = [&](std::string_view entries) {
    return error_of(load(R"({"weight_map": )" + std::string(entries) + "}"));
  };
  EXPECT_TRUE(contains(map(R"({"a.weight": "three.safetensors"})"), "three.safetensors"));
  EXPECT_TRUE(contains(map(R"({"c.weight": "one.safetensors"})"), "'c.weight'"));
  EXPECT_TRUE(contains(map(R"({"a.weight": "../one.safetensors"})"), "beside it"));
  EXPECT_TRUE(contains(map(R"({"a.weight": "/etc/passwd"})"), "beside it"));
  EXPECT_TRUE(contains(map(R"({"a.weight": ".."})"), "beside it"));
  EXPECT_TRUE(contains(map(R"({"a.weight": 3})"), "not a file name"));
  EXPECT_TRUE(contains(map("{}"), "weight_map"));
  EXPECT_TRUE(contains(map("[]"), "weight_map"));
  folder_.write("one.safetensors", "short");
  EXPECT_TRUE(contains(map(R"({"a.weight": "one.safetensors"})"), "one.safetensors"));
}

// The parsers give layers in range or an error of one line, whatever the bytes are. Under the
// sanitizers this also shows that they read nothing that is not there.
TEST(Fuzz, MutatedBytesGiveLayersOrOneLine) {
  constexpr std::string_view kConfig =
      R"({"model_type": "llama", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 2,
          "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 320})";
  constexpr std::string_view kList =
      R"([{"fqn": "layers.0.wk", "in_features": 4096, "out_features": 1024, "count": 1}])";
  struct Seed {
    const char* name;
    std::string bytes;
  };
  const std::array seeds = {Seed{"f.safetensors", safetensors(kHeader)},
                            Seed{"config.json", std::string(kConfig)},
                            Seed{"list.json", std::string(kList)}};
  const TempFolder folder;
  std::mt19937 random(20251121);
  const auto below = [&](size_t n) {
    return std::uniform_int_distribution<size_t>(0, n - 1)(random);
  };
  int accepted = 0;
  int refused = 0;
  for (int i = 0; i < 1500; ++i) {
    const Seed& seed = seeds[below(seeds.size())];
    std::string bytes = seed.bytes;
    for (size_t edits = 1 + below(4); edits > 0 && !bytes.empty(); --edits) {
      const size_t at = below(bytes.size());
      switch (below(5)) {
        case 0:
          bytes[at] = static_cast<char>(below(256));
          break;
        case 1:
          bytes.erase(at, 1 + below(8));
          break;
        case 2:
          bytes.insert(at, bytes.substr(below(bytes.size()), below(16)));
          break;
        case 3:
          bytes.insert(at, 1, "0123456789-{}[]\",:eE.\\"[below(22)]);
          break;
        default:
          bytes.resize(at);
      }
    }
    const Result<Model> model = load_model(folder.write(seed.name, bytes));
    if (!model) {
      ++refused;
      EXPECT_EQ(model.error().message.find('\n'), std::string::npos);
      EXPECT_FALSE(model.error().message.empty());
      continue;
    }
    ++accepted;
    EXPECT_FALSE(model->layers.empty());
    for (const NamedLinear& layer : model->layers) {
      EXPECT_GE(std::min({layer.in_features, layer.out_features, layer.count}), 1);
      EXPECT_LE(std::max({layer.in_features, layer.out_features, layer.count}), kMaxDim);
    }
  }
  EXPECT_GT(accepted, 50);  // the mutations reach past the first check
  EXPECT_GT(refused, 50);
}

}  // namespace
}  // namespace f8::tuner
