// The speedup of float8 linears over bf16 on a grid of K and N, one grid for each device, recipe
// and token count: measured where there is a row, else what the estimator says.
#pragma once

#include <vector>

#include "recipes/model/filter_rule.hpp"
#include "tools/float8-tune/report/figures/figure.hpp"
#include "tools/float8-tune/report/figures/measurements.hpp"

namespace f8::report {

inline constexpr size_t kMaxAxis = 24;    // values of K or N in a grid: those with most rows
inline constexpr size_t kMaxTokens = 12;  // grids of one device and recipe, likewise
// An M with fewer built-in linears, and none of the user's, is no grid, unless none has so many.
inline constexpr size_t kMinLinears = 3;

struct SpeedupCell {
  bool is_known = false;
  SpeedupInterval speedup;
  Evidence evidence = Evidence::kRule;
  bool converts = false;       // by the measured policy at its default margin
  bool torchao_keeps = false;  // bf16, by torchao's rule
};
struct SpeedupGrid {
  size_t device = 0;
  std::string recipe;
  int64_t m = 0;
  std::vector<int64_t> ks, ns;                  // ascending
  bool is_cut = false;                          // there are more values than kMaxAxis
  std::vector<std::vector<SpeedupCell>> cells;  // by index of n, then of k
};
[[nodiscard]] std::vector<SpeedupGrid> speedup_grids(const Measurements& measurements);
[[nodiscard]] Figure speedup_map(const Measurements& measurements, const SpeedupGrid& grid);

// The rows of one device, for an estimator that asks nothing else.
[[nodiscard]] TuningTable table_of(const TuningTable& table, size_t device,
                                   std::string_view recipe);

}  // namespace f8::report
