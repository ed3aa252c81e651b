// Options of the commands that take attention: its shapes and masks, or those of a model's layers.
#pragma once

#include <array>
#include <string>
#include <vector>

#include "recipes/attention.hpp"
#include "tools/float8-tune/options.hpp"

namespace f8::cli {

struct AttentionOptions {
  std::string shapes;  // empty: none is given
  std::string masks = "causal";
};
struct AttentionFlags {
  CLI::Option *shape, *masks, *causal, *full;
  [[nodiscard]] std::array<CLI::Option*, 4> all() const { return {shape, masks, causal, full}; }
};
AttentionFlags add_attention(CLI::App& command, AttentionOptions& options);
// Each shape under each mask. None where no shape is given.
[[nodiscard]] Result<std::vector<AttentionShape>> shapes_of(const AttentionOptions& options);
// Names of recipes, separated by commas, each once.
[[nodiscard]] Result<std::vector<AttentionRecipe>> attention_recipes_of(const std::string& list);
[[nodiscard]] std::string attention_recipes_text();  // "fp8_forward,fp8"

// A shape without its mask, as options have it: "s8192b1h32g8d128".
[[nodiscard]] std::string shape_text(const AttentionShape& shape);
// "s8192b1h32g8d128;s32768b1h32g8d128", each once, and "causal,full".
[[nodiscard]] AttentionOptions options_of(const std::vector<AttentionShape>& shapes);

// A step of so many tokens, in sequences of so many.
struct Sequences {
  int64_t tokens = 0;  // 0: one sequence
  int64_t sequence = 0;
};
// A layer of a model, and its attention under a causal mask; `layer.kept` says why there is none in fp8.
struct LayerAttention {
  tuner::AttentionLayer layer;
  AttentionShape shape;
};
[[nodiscard]] Result<std::vector<LayerAttention>> attention_of(const std::string& model, int64_t tp,
                                                               const Sequences& step);

// The command that measures attention beside bf16, whose rows decide.
[[nodiscard]] std::string how_to_measure(const std::vector<AttentionShape>& shapes,
                                         const std::string& database = "FILE");
// The same beside PyTorch's attention in bf16, where there is no cuDNN for float8.
[[nodiscard]] std::string how_to_measure_in_pytorch(const std::vector<AttentionShape>& shapes,
                                                    const std::string& database);

}  // namespace f8::cli
