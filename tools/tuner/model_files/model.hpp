// The linear layers of a model, from a built-in name or from a file:
//
//   built-in name     llama2-7b|13b|70b  llama3-8b|70b|405b  mistral-7b  qwen2.5-7b|72b
//                     mixtral-8x7b
//   config.json       Hugging Face: one of the families that config.hpp lists
//   *.safetensors     the header alone; 2-D weights, without embeddings and norms; a bias tells
//                     which size is out_features
//   *.index.json      Hugging Face's index of shards, which are in the same folder
//   list              [{"fqn": TEXT, "in_features": INT, "out_features": INT, "count": INT = 1,
//                       "tokens_share": NUMBER = 1},
//                      {"fqn": TEXT, "num_experts": INT, "top_k": INT, "dim": INT, "hidden_dim": INT,
//                       "count": INT = 1}, ...]
//
// Every layer is one entry under its full name, because filters speak of names. The SwiGLU experts of a
// layer are one entry with groups, or as ExpertsAs says each expert's linear is an entry of its own; but
// in a model of many experts those of a layer, which are alike,
// are one entry with a count (architecture.hpp). A list and weights have what they name. The M that a
// command is given is the number of
// tokens of a step. A router sends experts tokens * top_k rows in all, and a balanced one sends each
// the same part of them, which is its linears' M (tokens_of in recipes/problem.hpp); shared experts and
// the rest see all.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "recipes/problem.hpp"
#include "tools/tuner/model_files/architecture.hpp"

namespace f8::tuner {

struct Model {
  std::string name;  // the built-in name or the file's path
  std::vector<NamedLinear> layers;
};

[[nodiscard]] std::vector<std::string_view> builtin_models();
[[nodiscard]] Result<Model> load_model(std::string_view name_or_path,
                                       ExpertsAs experts = ExpertsAs::kLinears);
// The layers of a list, a config.json or an index of shards; `path` names it, and the shards are
// next to it.
[[nodiscard]] Result<std::vector<NamedLinear>> parse_model_json(
    std::string_view text, const std::filesystem::path& path,
    ExpertsAs experts = ExpertsAs::kLinears);

// The attention of the model's blocks, of one of `tp` ranks that share its heads; a built-in name or a
// config.json tells it, and of other files, which do not say heads, it is an error.
[[nodiscard]] Result<std::vector<AttentionLayer>> load_attention(std::string_view name_or_path,
                                                                 int64_t tp);

// Makes the shapes those of one of `tp` tensor-parallel ranks, and leaves it the experts of one of `ep`
// expert-parallel ranks (recipes/model/tensor_parallel.hpp).
[[nodiscard]] Status shard(Model& model, int64_t tp);
[[nodiscard]] Status shard_experts(Model& model, int64_t ep);

}  // namespace f8::tuner
