// The kernels that a layer of explain's answer takes.
#pragma once

#include <string>
#include <vector>

#include "base/error.hpp"
#include "recipes/problem.hpp"
#include "tuning_db/estimate/tuning_table.hpp"

namespace f8::cli {

struct Kernel {
  std::string op;
  std::string choice;
  std::string by;
};

// Those of a linear's three GEMMs, or of both expert linears of a layer's experts; none where the sizes
// are no multiples of 16.
[[nodiscard]] Result<std::vector<Kernel>> kernels_of(const Recipe& recipe, const NamedLinear& layer,
                                                     int64_t tokens, const TuningTable& table);
// Adds those of an expert linear; `part` precedes their names.
[[nodiscard]] Status add_grouped_kernels(const Recipe& recipe, Shape shape, const Groups& groups,
                                         const TuningTable& table, const std::string& part,
                                         std::vector<Kernel>& kernels);

}  // namespace f8::cli
