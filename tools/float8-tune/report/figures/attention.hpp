// Attention in fp8: how fast it is, and how near to fp64.
#pragma once

#include <optional>

#include "tools/float8-tune/report/figures/figure.hpp"
#include "tools/float8-tune/report/figures/measurements.hpp"

namespace f8::report {

// Each is a table, and nothing where there are no rows for it.
[[nodiscard]] std::optional<Figure> attention_speeds(const Measurements& measurements);
[[nodiscard]] std::optional<Figure> attention_accuracy(const Measurements& measurements);

}  // namespace f8::report
