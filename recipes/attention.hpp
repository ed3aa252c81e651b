// Attention as an operation: its sizes in problem keys, its products and its bytes.
//
//   dims   := "s" INT "b" INT "h" INT "g" INT "d" INT "causal" ("0"|"1")
//             tokens of a sequence, sequences, heads of queries, heads of keys and values, elements of a head
//   shapes := shape { ";" shape }
//   shape  := "s" INT "b" INT "h" INT "g" INT "d" INT          a mask stands beside it
//
// attention_forward is the fp8 forward with its casts, attention_backward the backward of recipe fp8 with its own, and
// attention is forward and backward together. The settings are a recipe, and the types e4m3.e4m3.bf16.
#pragma once

#include <array>
#include <string_view>
#include <vector>

#include "recipes/problem.hpp"

namespace f8 {

struct AttentionShape {
  int64_t tokens = 0;
  int64_t batch = 1;
  int64_t heads_q = 1;
  int64_t heads_kv = 1;  // a divisor of heads_q
  int64_t head_dim = 128;
  bool causal = true;
  bool operator==(const AttentionShape&) const = default;
};

enum class AttentionRecipe : uint8_t {
  kFp8Forward,  // its backward is one in bf16, of the values that the forward multiplied
  kFp8,         // forward and backward
  kBf16         // a library's; no problem has it
};
// Those of problems.
inline constexpr std::array kAttentionRecipes = {AttentionRecipe::kFp8Forward,
                                                 AttentionRecipe::kFp8};
inline constexpr std::array<std::string_view, 2> kAttentionRecipeNames = {"fp8_forward", "fp8"};
// "bf16", or the name of a problem's recipe.
[[nodiscard]] std::string_view to_string(AttentionRecipe recipe);
[[nodiscard]] Result<AttentionRecipe> parse_attention_recipe(std::string_view name);

inline constexpr int kAttentionForwardProducts = 2;  // Q K^T and P V
inline constexpr int kAttentionBackwardProducts =
    5;  // Q K^T again, dO V^T, and those of dQ, dK, dV

// Makes a problem of an operation of attention.
[[nodiscard]] Result<Problem> attention_problem(Op op, AttentionRecipe recipe,
                                                const AttentionShape& shape);
[[nodiscard]] AttentionShape attention_shape(const Problem& problem);
[[nodiscard]] AttentionRecipe attention_recipe(const Problem& problem);
[[nodiscard]] Result<std::vector<AttentionShape>> parse_attention_shapes(std::string_view text);
// Parses "causal,full": whether each mask is causal.
[[nodiscard]] Result<std::vector<bool>> parse_attention_masks(std::string_view text);
[[nodiscard]] std::string_view mask_name(bool causal);

// What an OpSpec of attention has.
inline constexpr DimSpec kAttentionDims[] = {
    {.name = "s", .meaning = "tokens"},
    {.name = "b", .meaning = "sequences"},
    {.name = "h", .meaning = "heads of queries"},
    {.name = "g", .meaning = "heads of keys"},
    {.name = "d", .meaning = "elements of a head"},
    {.name = "causal", .meaning = "the mask", .least = 0, .most = 1}};
[[nodiscard]] Status check_attention(const Problem& problem);
[[nodiscard]] double attention_product_flops(const Problem& problem);
[[nodiscard]] double attention_bytes(const Problem& problem);

}  // namespace f8
