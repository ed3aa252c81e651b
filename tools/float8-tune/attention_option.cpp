#include "tools/float8-tune/attention_option.hpp"

#include <algorithm>

#include "base/text.hpp"

namespace f8::cli {

AttentionFlags add_attention(CLI::App& command, AttentionOptions& options) {
  AttentionFlags flags{};
  flags.shape =
      command
          .add_option("--shape", options.shapes,
                      "tokens, sequences, heads of queries, heads of keys, elements of a head; "
                      "several with ';'")
          ->type_name("s8192b1h32g8d128");
  flags.masks =
      command.add_option("--masks", options.masks, "causal, full or both")->type_name("LIST");
  const auto mask = [&](bool causal) {
    const std::string name(mask_name(causal));
    return command
        .add_flag_function(
            "--" + name, [&options, name](int64_t) { options.masks = name; }, "--masks " + name)
        ->excludes(flags.masks);
  };
  flags.causal = mask(true);
  flags.full = mask(false)->excludes(flags.causal);
  return flags;
}

Result<std::vector<AttentionShape>> shapes_of(const AttentionOptions& options) {
  const std::vector<bool> masks =
      F8_TRY(of_option("--masks", parse_attention_masks(options.masks)));
  std::vector<AttentionShape> shapes;
  if (options.shapes.empty()) return shapes;
  for (AttentionShape shape :
       F8_TRY(of_option("--shape", parse_attention_shapes(options.shapes)))) {
    for (const bool causal : masks) {
      shape.causal = causal;
      shapes.push_back(shape);
    }
  }
  return shapes;
}

Result<std::vector<AttentionRecipe>> attention_recipes_of(const std::string& list) {
  std::vector<AttentionRecipe> recipes;
  for (const std::string& name : split(list, ',')) {
    const AttentionRecipe recipe = F8_TRY(of_option("--recipe", parse_attention_recipe(name)));
    if (std::ranges::find(recipes, recipe) == recipes.end()) recipes.push_back(recipe);
  }
  return recipes;
}

std::string attention_recipes_text() {
  return f8::format("{}", fmt::join(kAttentionRecipeNames, ","));
}

std::string shape_text(const AttentionShape& s) {
  return to_string(Dims{s.tokens, s.batch, s.heads_q, s.heads_kv, s.head_dim},
                   std::span(kAttentionDims).first<5>());
}

AttentionOptions options_of(const std::vector<AttentionShape>& shapes) {
  std::vector<std::string> texts, masks;
  const auto keep = [](std::vector<std::string>& all, std::string one) {
    if (std::ranges::find(all, one) == all.end()) all.push_back(std::move(one));
  };
  for (const AttentionShape& shape : shapes) {
    keep(texts, shape_text(shape));
    keep(masks, std::string(mask_name(shape.causal)));
  }
  return {.shapes = f8::format("{}", fmt::join(texts, ";")),
          .masks = f8::format("{}", fmt::join(masks, ","))};
}

Result<std::vector<LayerAttention>> attention_of(const std::string& model, int64_t tp,
                                                 const Sequences& step) {
  const auto [tokens, sequence] = step;
  if (tokens % sequence != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "--tokens {} are no whole sequences of --sequence {}; correct one of them", tokens,
                sequence);
  }
  std::vector<LayerAttention> all;
  for (tuner::AttentionLayer& layer :
       F8_TRY(of_option("--attention", tuner::load_attention(model, tp)))) {
    const AttentionShape shape{.tokens = sequence,
                               .batch = std::max<int64_t>(tokens / sequence, 1),
                               .heads_q = layer.heads_q,
                               .heads_kv = layer.heads_kv,
                               .head_dim = layer.head_dim};
    const auto problem = attention_problem(Op::kAttention, kAttentionRecipes.front(), shape);
    if (layer.kept.empty() && !problem) layer.kept = problem.error().message;
    if (layer.kept.empty() && layer.window > 0 && layer.window < sequence) {
      layer.kept = f8::format("windows of {} keys are not measured", layer.window);
    }
    all.push_back({std::move(layer), shape});
  }
  return all;
}

std::string how_to_measure(const std::vector<AttentionShape>& shapes, const std::string& database) {
  const auto [texts, masks] = options_of(shapes);
  return f8::format("on a GPU: float8-tune sweep --attention --shape \"{}\" --masks {} --db {}",
                    texts, masks, database);
}

std::string how_to_measure_in_pytorch(const std::vector<AttentionShape>& shapes,
                                      const std::string& database) {
  const auto [texts, masks] = options_of(shapes);
  return f8::format(
      "on a GPU: benchmarks/pytorch/attention.py --shapes {} --masks {} --jsonl rows.jsonl, then "
      "float8-tune db import rows.jsonl --db {}",
      shapes.size() > 1 ? "'" + texts + "'" : texts, masks, database);
}

}  // namespace f8::cli
