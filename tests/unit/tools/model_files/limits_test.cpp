// Large and hostile model files: bounded growth, files that are none.
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "base/text.hpp"
#include "tests/unit/tools/model_files/model_files.hpp"
#include "tools/tuner/model_files/architecture.hpp"
#include "tools/tuner/model_files/model.hpp"

namespace f8::tuner {
namespace {

using f8::testing::safetensors;
using f8::testing::TempFolder;

TEST(ModelLimits, AMillionLayersAreRead) {
  std::string text = "[";
  for (int i = 0; i < 1'000'000; ++i) {
    text += f8::format(R"({}{{"fqn":"layers.{}.wq","in_features":4096,"out_features":1024}})",
                       i == 0 ? "" : ",", i);
  }
  const TempFolder folder;
  const std::string file = folder.write("list.json", text + "]");
  const Model model = load_model(file).value();
  EXPECT_EQ(model.layers.size(), 1'000'000U);
  EXPECT_EQ(model.layers.back().fqn, "layers.999999.wq");
}

TEST(ModelLimits, AMillionTensorsAreRead) {
  std::string header = "{";
  for (int i = 0; i < 1'000'000; ++i) {
    header += f8::format(
        R"({}"layers.{}.wq.weight":{{"dtype":"F8","shape":[64,16],"data_offsets":[0,1]}})",
        i == 0 ? "" : ",", i);
  }
  const TempFolder folder;
  const std::string file = folder.write("m.safetensors", safetensors(header + "}"));
  const Model model = load_model(file).value();
  EXPECT_EQ(model.layers.size(), 1'000'000U);
  EXPECT_EQ(model.layers.back().fqn, "layers.999999.wq");
}

std::string config(int64_t layers, int64_t experts) {
  return f8::format(R"({{"model_type": "mixtral", "hidden_size": 4096, "intermediate_size": 14336,
    "num_hidden_layers": {}, "num_attention_heads": 32, "num_key_value_heads": 8,
    "vocab_size": 32000, "num_local_experts": {}}})",
                    layers, experts);
}

TEST(ModelLimits, ManyExpertsAreOneEntryWithACount) {
  const TempFolder folder;
  const Model many = load_model(folder.write("many.json", config(4096, 512))).value();
  EXPECT_EQ(many.layers.size(), 4096U * (4 + 1 + 3) + 1);
  int64_t linears = 0;
  for (const NamedLinear& layer : many.layers) linears += layer.count;
  EXPECT_EQ(linears, 4096 * (4 + 1 + 512 * 3) + 1);
  EXPECT_EQ(many.layers[5], (NamedLinear{"model.layers.0.block_sparse_moe.experts.*.w1", 4096,
                                         14336, 512, 2.0 / 512}));  // Mixtral's own top-k
  const auto size_of = [&](int64_t layers, int64_t experts) {
    return load_model(folder.write("c.json", config(layers, experts))).value().layers.size();
  };
  EXPECT_EQ(size_of(512, 8), 512U * (4 + 1 + 24) + 1);  // kMostNamedExperts, each under its name
  EXPECT_EQ(size_of(513, 8), 513U * (4 + 1 + 3) + 1);
}

TEST(ModelLimits, FilesThatNeverEndAreRefused) {
  const TempFolder folder;
  ASSERT_EQ(::mkfifo((folder.path() / "fifo").c_str(), 0600), 0);
  ASSERT_EQ(::mkfifo((folder.path() / "a.safetensors").c_str(), 0600), 0);
  std::filesystem::create_symlink("/dev/zero", folder.path() / "zero.json");
  std::filesystem::create_symlink("/dev/zero", folder.path() / "zero.safetensors");
  for (const char* name : {"fifo", "a.safetensors", "zero.json", "zero.safetensors"}) {
    const auto model = load_model((folder.path() / name).string());
    ASSERT_FALSE(model) << name;
    EXPECT_NE(model.error().message.find(name), std::string::npos) << model.error().message;
  }
  std::filesystem::resize_file(folder.write("sparse.json", "["), uint64_t{60} << 30);
  const auto sparse = load_model((folder.path() / "sparse.json").string());
  ASSERT_FALSE(sparse);
  EXPECT_NE(sparse.error().message.find("larger than"), std::string::npos);
}

TEST(ModelLimits, NamesHaveABound) {
  const TempFolder folder;
  for (const size_t bytes : {kLongestName, kLongestName + 1}) {
    const std::string name(bytes, 'n');
    const std::string header =
        R"({")" + name +
        R"(.weight": {"dtype": "BF16", "shape": [16, 16], "data_offsets": [0, 512]}})";
    const std::string list =
        R"([{"fqn": ")" + name + R"(", "in_features": 16, "out_features": 16}])";
    const auto listed = load_model(folder.write("l.json", list));
    EXPECT_EQ(listed.has_value(), bytes == kLongestName);
    if (!listed) {
      EXPECT_NE(listed.error().message.find("at most 4096"), std::string::npos);
    }
    const auto tensors = load_model(folder.write("m.safetensors", safetensors(header)));
    ASSERT_FALSE(tensors);  // ".weight" is part of it
    EXPECT_NE(tensors.error().message.find("has at most 4096"), std::string::npos);
  }
}

TEST(ModelLimits, NoControlByteOfANameIsKept) {
  const TempFolder folder;
  const std::string header =
      R"({"a\u001b[31m.weight": {"dtype": "F8", "shape": [16, 16], "data_offsets": [0, 1]}})";
  for (const std::string& file :
       {folder.write("m.safetensors", safetensors(header)),
        folder.write("l.json", R"([{"fqn": "a\u009b", "in_features": 16, "out_features": 16}])")}) {
    const auto model = load_model(file);
    ASSERT_FALSE(model) << file;
    EXPECT_NE(model.error().message.find("control characters"), std::string::npos);
    EXPECT_FALSE(has_control(model.error().message));
  }
}

}  // namespace
}  // namespace f8::tuner
