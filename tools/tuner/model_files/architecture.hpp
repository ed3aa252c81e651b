// Decoder architectures: a few numbers that give the linear layers of a whole model.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "recipes/problem.hpp"

namespace f8::tuner {

enum class Naming { kTorchtitan, kHuggingFace };

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
};

[[nodiscard]] std::vector<std::string_view> builtin_architectures();
[[nodiscard]] std::optional<Architecture> find_architecture(std::string_view name);
// Reads a Hugging Face config.json; `where` is its path.
[[nodiscard]] Result<Architecture> parse_config(const nlohmann::json& config,
                                                std::string_view where);
// Every linear in the order of the forward pass, the output head last. The experts of a layer are
// alike: in a model with more than kMostNamedExperts of them, all layers together, those of a layer
// are one entry "experts.*" with their count.
inline constexpr int64_t kMostNamedExperts = 4096;
[[nodiscard]] std::vector<NamedLinear> linears(const Architecture& architecture);

}  // namespace f8::tuner
