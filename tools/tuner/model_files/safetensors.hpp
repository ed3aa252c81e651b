// The header of a safetensors file, which says all that the shapes of a model need:
//
//   file    := LENGTH header data      LENGTH: 8 bytes, little-endian
//   header  := JSON object of LENGTH bytes:
//              name -> {"dtype", "shape", "data_offsets"}, and "__metadata__"
//
// The data is never read.
#pragma once

#include <cstdint>
#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "recipes/problem.hpp"

namespace f8::tuner {

struct TensorShape {
  std::string name;
  std::vector<int64_t> shape;
};

// `bytes` is the file or its beginning.
[[nodiscard]] Result<std::vector<TensorShape>> parse_safetensors(std::string_view bytes,
                                                                 std::string_view where);
[[nodiscard]] Result<std::vector<TensorShape>> read_safetensors(const std::filesystem::path& path);

// The linears among the tensors: their names end in ".weight", they have two dimensions
// [out_features, in_features], and they are neither embeddings nor norms. They come in natural
// order of the names (layers.2 before layers.10).
[[nodiscard]] Result<std::vector<NamedLinear>> linears(std::vector<TensorShape> tensors,
                                                       std::string_view where);

// The tensors of all shards of a Hugging Face index, which are in its folder.
[[nodiscard]] Result<std::vector<TensorShape>> read_index(const std::filesystem::path& path,
                                                          const nlohmann::json& index);

}  // namespace f8::tuner
