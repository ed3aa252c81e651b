// Several commands show these alike: a problem, a measured row, with times in microseconds and its
// provenance, and the filter's verdict.
#pragma once

#include <string>

#include "tools/float8-tune/output.hpp"
#include "tuning_db/database.hpp"
#include "tuning_db/estimate/filter.hpp"

namespace f8::cli {

// A problem's dims as --mnk takes them: "8192,4096,4096", or those of expert linears and MLPs as their keys have them.
[[nodiscard]] std::string mnk_of(const Problem& problem);

// "problem", "op", "recipe", and its dims by their names.
[[nodiscard]] Json problem_json(const Problem& problem);
// "experts" and "skew", where it is grouped.
void add_groups(Json& row, const Problem& problem);
// The same of a layer's experts, and the expert linears that their verdict adds up, as "parts".
void add_experts(Json& json, const tuning_db::FilterDecision& decision);
[[nodiscard]] Json accuracy_json(const std::vector<tuning_db::Accuracy>& accuracy);
// The same as a table: a row for each kind of data, a column for each tensor.
[[nodiscard]] std::string accuracy_text(const std::vector<tuning_db::Accuracy>& accuracy,
                                        bool color);
// A result's median and interval, where it was timed.
void add_us(Json& json, const tuning_db::TrialResult& result);
[[nodiscard]] Json trial_json(const tuning_db::TrialRow& row);
// "convert", "reason", "evidence" and the speedup with its interval, after what `json` holds. Where
// nothing is known, "speedup_known" is false and the numbers, which scripts expect, are 1.
void add_verdict(Json& json, const tuning_db::FilterDecision& decision);
// What a layer sends in a step, and its speedup without that.
[[nodiscard]] Json wire_json(const tuning_db::WireShare& share);
// The ranks that share a model, and what of the answer rests on the wire's model.
[[nodiscard]] Json ranks_json(const tuning_db::WireCost& wire);
// "generated 128x256s4c2x1w2g8", "cublaslt h3", "float8".
[[nodiscard]] std::string candidate_text(const tuning_db::Candidate& candidate);

}  // namespace f8::cli
