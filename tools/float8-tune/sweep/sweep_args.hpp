// The command line of a sweep, shared by plan, sweep and resume. A run keeps its command line in
// the database in a canonical form, with the shapes written out, and resume reads it back.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "tools/float8-tune/attention_option.hpp"
#include "tools/tuner/search/plan/sweep_plan.hpp"

namespace f8::cli {

struct SweepArgs {
  std::string mnk;
  GroupOptions groups;
  ModelOptions model;
  std::string recipes;  // empty: the usual ones of linears, or all of attention
  std::string max_ci = "0.5%";
  int64_t seed = 1;
  bool no_pruned_rows = false;
  bool exhaustive = false;
  std::string mlp;  // "gated" or "plain"; empty: shapes are those of linears
  // These ask for attention, with the model and the recipes above.
  bool attention = false;
  AttentionOptions attentions;
  std::string sequences;
  int64_t length = tuner::kAccuracyTokens;
  std::optional<Problem> part;  // by its key, instead of shapes
  tuner::SweepOptions options;
};

inline constexpr std::string_view kStrategiesText =
    "auto: the cost model's best, screened together, then the best of those compared; halving: all "
    "screened; topk: the cost model's best, compared; race: few screened, which decides; "
    "exhaustive: all compared";

void declare(CLI::App& command, SweepArgs& args);
// --attention, and the options that are of it alone; declare() has them too.
void declare_attention(CLI::App& command, SweepArgs& args);
// Returns the attention that the options ask for.
[[nodiscard]] Result<tuner::AttentionRequest> attention_request_of(const SweepArgs& args);
// The method's figures: all of them, or those of the search of a GEMM.
void declare_figures(CLI::App& command, tuner::SweepOptions& options, bool gemms_alone);
[[nodiscard]] Result<tuner::SweepRequest> request_of(const SweepArgs& args);
[[nodiscard]] std::vector<std::string> canonical(const SweepArgs& args,
                                                 const tuner::SweepRequest& request);
// `argv` is the text that a run keeps.
[[nodiscard]] Result<SweepArgs> parse_canonical(const std::string& argv);

[[nodiscard]] Result<double> parse_duration_s(std::string_view text);  // "90s", "10m", "1h", "2d"

}  // namespace f8::cli
