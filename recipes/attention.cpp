// Sizes of attention: their checks, products and bytes, and the grammar of their lists.
#include "recipes/attention.hpp"

#include <algorithm>

#include "base/text.hpp"

namespace f8 {
namespace {

constexpr int64_t kHeadDims[] = {64, 128, 256};
constexpr std::string_view kMasks[] = {"full", "causal"};  // by whether they are causal

}  // namespace

std::string_view to_string(AttentionRecipe recipe) {
  if (recipe == AttentionRecipe::kBf16) return "bf16";
  return kAttentionRecipeNames[static_cast<size_t>(recipe)];
}

Result<AttentionRecipe> parse_attention_recipe(std::string_view name) {
  for (const AttentionRecipe recipe : kAttentionRecipes) {
    if (to_string(recipe) == name) return recipe;
  }
  return fail(ErrorCode::kInvalidArgument,
              "attention in fp8 has the recipes {}, and not {}; a newer float8 may have others",
              fmt::join(kAttentionRecipeNames, " and "), quote(name));
}

Result<Problem> attention_problem(Op op, AttentionRecipe recipe, const AttentionShape& s) {
  Problem problem;
  problem.op = op;
  problem.recipe = to_string(recipe);
  problem.dims = {s.tokens, s.batch, s.heads_q, s.heads_kv, s.head_dim, s.causal ? 1 : 0};
  // The text has the checks of each size by itself.
  F8_TRY(parse_dims(to_string(problem.dims, kAttentionDims), kAttentionDims));
  F8_TRY(check_attention(problem));
  return problem;
}

AttentionShape attention_shape(const Problem& problem) {
  const auto [s, b, h, g, d, causal] = problem.dims.sizes;
  return {s, b, h, g, d, causal == 1};
}

AttentionRecipe attention_recipe(const Problem& problem) {
  return problem.recipe == to_string(AttentionRecipe::kFp8) ? AttentionRecipe::kFp8
                                                            : AttentionRecipe::kFp8Forward;
}

Status check_attention(const Problem& problem) {
  const AttentionRecipe recipe = F8_TRY(parse_attention_recipe(problem.recipe));
  if (problem.op == Op::kAttentionBackward && recipe != AttentionRecipe::kFp8) {
    return fail(ErrorCode::kInvalidArgument,
                "{} of recipe {} is in bf16, and not float8's; that of {} is in fp8",
                to_string(problem.op), to_string(recipe), to_string(AttentionRecipe::kFp8));
  }
  const AttentionShape s = attention_shape(problem);
  if (std::ranges::find(kHeadDims, s.head_dim) == std::end(kHeadDims)) {
    return fail(ErrorCode::kInvalidArgument,
                "d (elements of a head) is {}; attention in fp8 has heads of 64, 128 and 256",
                s.head_dim);
  }
  if (s.heads_q % s.heads_kv != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "h (heads of queries) is {} and g (heads of keys) {}; the first is a multiple of "
                "the second",
                s.heads_q, s.heads_kv);
  }
  Problem own;
  own.op = problem.op;
  own.recipe = problem.recipe;
  own.dims = problem.dims;
  if (own == problem) return {};
  return fail(ErrorCode::kInvalidArgument,
              "this float8 knows {} as {} alone; use the newer float8 that wrote it",
              to_string(problem.op), own.key());
}

double attention_product_flops(const Problem& problem) {
  const AttentionShape s = attention_shape(problem);
  const auto tokens = static_cast<double>(s.tokens);
  return 2.0 * static_cast<double>(s.batch * s.heads_q) * tokens * tokens *
         static_cast<double>(s.head_dim) / (s.causal ? 2 : 1);
}

double attention_bytes(const Problem& problem) {
  const AttentionShape s = attention_shape(problem);
  // Gradients are as large, and a backward reads what a forward does.
  const double both = problem.op == Op::kAttentionForward ? 1 : 2;
  return both * 2 * static_cast<double>(s.batch * (s.heads_q + s.heads_kv)) *
         static_cast<double>(s.tokens) * static_cast<double>(s.head_dim) *
         static_cast<double>(size_bytes(problem.d));
}

Result<std::vector<AttentionShape>> parse_attention_shapes(std::string_view text) {
  constexpr std::span kSizes = std::span(kAttentionDims).first<5>();
  std::vector<AttentionShape> shapes;
  for (const std::string& item : split(text, ';')) {
    Problem problem;
    problem.dims = F8_TRY(parse_dims(item, kSizes));
    AttentionShape shape = attention_shape(problem);
    shape.causal = true;
    F8_TRY(attention_problem(Op::kAttention, AttentionRecipe::kFp8Forward, shape));
    if (std::ranges::find(shapes, shape) == shapes.end()) shapes.push_back(shape);
  }
  return shapes;
}

Result<std::vector<bool>> parse_attention_masks(std::string_view text) {
  std::vector<bool> masks;
  for (const std::string& name : split(text, ',')) {
    const auto* found = std::ranges::find(kMasks, name);
    if (found == std::end(kMasks)) {
      return fail(ErrorCode::kInvalidArgument, "mask {} is not known; there are causal and full",
                  quote(name));
    }
    const bool causal = found != kMasks;
    if (std::ranges::find(masks, causal) == masks.end()) masks.push_back(causal);
  }
  return masks;
}

std::string_view mask_name(bool causal) {
  return kMasks[causal ? 1 : 0];
}

}  // namespace f8
