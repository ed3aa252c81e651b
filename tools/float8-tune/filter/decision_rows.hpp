// A model's decisions as rows for people: layers that differ in their number alone share a row.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "tuning_db/estimate/filter.hpp"

namespace f8::cli {

struct DecisionRow {
  std::string name;  // "layers.*.attention.wk"
  const tuning_db::FilterDecision* decision;
  int64_t count;
};
// "layers.12.attention.wk" as "layers.*.attention.wk".
[[nodiscard]] std::string pattern_of(std::string_view fqn);
// The rows point into the result.
[[nodiscard]] std::vector<DecisionRow> decision_rows(const tuning_db::FilterResult& result);
// "200 of 225 linears", and where there are some "8 of 32 layers of experts".
[[nodiscard]] std::string count_text(const tuning_db::FilterResult& result);
// "1.234" and "[1.200, 1.270]"; "-" where nothing is known.
struct SpeedupCells {
  std::string speedup, interval;
};
[[nodiscard]] SpeedupCells speedup_cells(const tuning_db::FilterDecision& decision);

}  // namespace f8::cli
