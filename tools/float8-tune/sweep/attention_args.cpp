// The part of a sweep's command line that asks for attention.
#include <algorithm>

#include "base/number.hpp"
#include "base/text.hpp"
#include "tools/float8-tune/sweep/sweep_args.hpp"

namespace f8::cli {
namespace {

Result<std::vector<int64_t>> sequences_of(const std::string& list) {
  std::vector<int64_t> sequences;
  for (const std::string& item : split(list, ',')) {
    const auto tokens = number_of<int64_t>(item);
    if (!tokens || *tokens < 1 || *tokens > kMaxDim) {
      return fail(ErrorCode::kInvalidArgument,
                  "--sequence: {} is no number of tokens from 1 to {}; write 8192, or 8192,32768",
                  quote(item), kMaxDim);
    }
    sequences.push_back(*tokens);
  }
  return sequences;
}

// The shapes of the model's layers, under each mask.
Result<std::vector<AttentionShape>> shapes_of_model(const SweepArgs& args) {
  const std::vector<bool> masks =
      F8_TRY(of_option("--masks", parse_attention_masks(args.attentions.masks)));
  std::vector<AttentionShape> shapes;
  std::string kept;
  for (const int64_t sequence : F8_TRY(sequences_of(args.sequences))) {
    for (auto& [layer, shape] :
         F8_TRY(attention_of(args.model.model, args.model.tp,
                             {.tokens = args.model.tokens, .sequence = sequence}))) {
      if (!layer.kept.empty()) {
        if (kept.empty()) kept = layer.fqn + ": " + layer.kept;
        continue;
      }
      for (const bool causal : masks) {
        shape.causal = causal;
        shapes.push_back(shape);
      }
    }
  }
  if (shapes.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "--model {}: it has no attention that can be float8, so there is nothing to "
                "measure ({}); name another model, --tp or --sequence",
                args.model.model, kept.empty() ? "it has none at all" : kept);
  }
  return shapes;
}

}  // namespace

void declare_attention(CLI::App& command, SweepArgs& args) {
  CLI::Option* attention =
      command.add_flag("--attention", args.attention,
                       "measure the forward and the backward of attention in fp8, and both "
                       "together beside cuDNN's in bf16, instead of linears: of --shape, or of the "
                       "layers of --model at --sequence");
  for (const char* of_linears : {"--mnk", "--mlp", "--experts", "--skew", "--strategy",
                                 "--exhaustive", "--no-pruned-rows", "--problem"}) {
    if (CLI::Option* option = command.get_option_no_throw(of_linears)) attention->excludes(option);
  }
  const AttentionFlags flags = add_attention(command, args.attentions);
  CLI::Option* sequence =
      command
          .add_option("--sequence", args.sequences,
                      "tokens of a sequence, separated by commas; a step is --tokens in sequences "
                      "of so many, or without it one sequence")
          ->type_name("LIST")
          ->needs(attention);
  CLI::Option* length =
      add_integer(command, "--length", args.length,
                  f8::format("tokens of the data that is compared with fp64, in 4 heads; 0: none "
                             "is (default: {})",
                             args.length),
                  0, 1 << 14)
          ->needs(attention);
  for (CLI::Option* flag : flags.all()) flag->needs(attention);
  for (CLI::Option* own : {sequence, length}) own->group("Attention");
  for (CLI::Option* own : flags.all()) own->group("Attention");
  attention->group("Attention");
}

Result<tuner::AttentionRequest> attention_request_of(const SweepArgs& args) {
  tuner::AttentionRequest request;
  request.accuracy_tokens = args.length;
  if (args.part) {
    request.shapes = {attention_shape(*args.part)};
    request.recipes = {attention_recipe(*args.part)};
    return request;
  }
  const bool of_model = !args.model.model.empty();
  if (of_model != !args.sequences.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "--model and --sequence stand together with --attention: give {} too",
                of_model ? "--sequence, the tokens of a sequence," : "--model");
  }
  if (!of_model && args.attentions.shapes.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "no shapes: give --shape s8192b1h32g8d128[;...], or --model with --sequence");
  }
  request.recipes =
      F8_TRY(attention_recipes_of(args.recipes.empty() ? attention_recipes_text() : args.recipes));
  std::vector<AttentionShape> all = F8_TRY(shapes_of(args.attentions));
  if (of_model) std::ranges::move(F8_TRY(shapes_of_model(args)), std::back_inserter(all));
  for (const AttentionShape& shape : all) {
    if (std::ranges::find(request.shapes, shape) == request.shapes.end()) {
      request.shapes.push_back(shape);
    }
  }
  return request;
}

}  // namespace f8::cli
