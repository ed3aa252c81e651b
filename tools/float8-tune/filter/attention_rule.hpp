// Which attentions of a model to convert, and to which recipe: where forward and backward together, casts included, are
// faster than the fastest in bf16 of the same run, and the results are near enough to fp64 on data of every kind. Of the
// recipes that are both, the one whose speedup is at least the largest. Nothing is estimated: a shape without a row stays
// in bf16.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "recipes/model/filter_file.hpp"
#include "tools/float8-tune/attention_option.hpp"
#include "tools/float8-tune/options.hpp"
#include "tools/float8-tune/output.hpp"

namespace f8::cli {

// A verdict says whether to convert to one recipe, and why.
struct AttentionVerdict {
  Problem problem;
  Verdict verdict;
  std::optional<tuning_db::TrialRow> row;  // that it rests on
};
// The verdicts are of all recipes, best first: those to convert to, then those that have a row, each by the lower end of
// its speedup.
using AttentionVerdicts = std::vector<AttentionVerdict>;

// The rows that decide are float8's on this device.
[[nodiscard]] Result<AttentionVerdicts> attention_verdicts(const AttentionShape& shape,
                                                           const Databases& databases,
                                                           const std::string& device,
                                                           double margin);

// The answer to `explain` with the key of an attention: the speedup and the accuracy of each recipe, which both must do.
[[nodiscard]] Result<int> explain_attention(const Problem& problem, const std::string& device,
                                            double margin, const Global& global);

// The answer to `filter --attention` for a model whose step has so many tokens, in sequences of so many.
struct AttentionQuestion {
  std::string model;
  int64_t tp = 1;
  Sequences step;
  std::string device;
  double margin = kFilterMargin;
};
struct AttentionDecision {
  tuner::AttentionLayer layer;
  AttentionVerdicts recipes;  // empty: there is no attention in fp8 of it
  Verdict verdict;            // of the best, or why there is none
};
[[nodiscard]] Result<std::vector<AttentionDecision>> decide_attention(
    const AttentionQuestion& asked, const Databases& databases);
[[nodiscard]] Json to_json(const AttentionDecision& decision);
[[nodiscard]] FilterFile::Attention filed(const AttentionDecision& decision);
[[nodiscard]] std::string text_of(const std::vector<AttentionDecision>& decisions, bool color);

}  // namespace f8::cli
