#include "tools/float8-tune/report/figures/speedups.hpp"

#include <algorithm>
#include <functional>
#include <map>
#include <utility>

#include "tools/float8-tune/report/figures/cells.hpp"
#include "tuning_db/estimate/estimator.hpp"

namespace f8::report {
namespace {

using tuning_db::Estimator;

// The values that most rows have, ascending.
std::vector<int64_t> most_frequent(const std::map<int64_t, size_t>& counts, size_t most) {
  std::vector<std::pair<size_t, int64_t>> order;
  for (const auto& [value, count] : counts) order.emplace_back(count, value);
  std::ranges::stable_sort(order, std::greater{}, &std::pair<size_t, int64_t>::first);
  order.resize(std::min(order.size(), most));
  std::vector<int64_t> values;
  for (const auto& [count, value] : order) values.push_back(value);
  std::ranges::sort(values);
  return values;
}

SpeedupCell cell_of(const Estimator& estimator, Shape shape) {
  SpeedupCell cell;
  cell.torchao_keeps = !torchao_boxes(estimator.recipe()).empty() &&
                       !torchao_verdict(estimator.recipe(), {"", shape.k, shape.n}).convert;
  if (const auto estimate = estimator.estimate(shape)) {
    cell.is_known = true;
    cell.speedup = {estimate->speedup, estimate->lo, estimate->hi};
    cell.evidence = estimate->evidence;
    cell.converts = speedup_verdict(cell.speedup, kFilterMargin, "").convert;
  }
  return cell;
}

void add_grids(size_t device, const TuningTable& table, const Estimator& estimator,
               std::vector<SpeedupGrid>& grids) {
  std::map<int64_t, size_t> ms;
  for (const LinearSpeedup& row : table.speedups()) {
    ms[row.shape.m] += table.sources[row.source].name == "built-in" ? 1 : kMinLinears;
  }
  const auto is_grid = [](const auto& one) { return one.second >= kMinLinears; };
  if (std::ranges::any_of(ms, is_grid)) std::erase_if(ms, std::not_fn(is_grid));
  for (const int64_t m : most_frequent(ms, kMaxTokens)) {
    std::map<int64_t, size_t> ks, ns;
    for (const LinearSpeedup& row : table.speedups()) {
      if (row.shape.m != m) continue;
      ++ks[row.shape.k];
      ++ns[row.shape.n];
    }
    SpeedupGrid grid{.device = device,
                     .recipe = estimator.recipe().name,
                     .m = m,
                     .ks = most_frequent(ks, kMaxAxis),
                     .ns = most_frequent(ns, kMaxAxis),
                     .is_cut = ks.size() > kMaxAxis || ns.size() > kMaxAxis,
                     .cells = {}};
    for (const int64_t n : grid.ns) {
      std::vector<SpeedupCell>& row = grid.cells.emplace_back();
      for (const int64_t k : grid.ks) row.push_back(cell_of(estimator, {m, n, k}));
    }
    grids.push_back(std::move(grid));
  }
}

DataTable numbers_of(const SpeedupGrid& grid) {
  const bool has_rule = has_torchao_rule(grid.recipe);
  DataTable table{.caption = f8::format("Speedups at M {}, recipe {}", grid.m, grid.recipe),
                  .columns = {"K", "N", "speedup", "95 % interval", "evidence", "filter"},
                  .rows = {},
                  .heads = 2};
  if (has_rule) table.columns.emplace_back("torchao's rule");
  for (size_t n = 0; n < grid.ns.size(); ++n) {
    for (size_t k = 0; k < grid.ks.size(); ++k) {
      const SpeedupCell& cell = grid.cells[n][k];
      if (!cell.is_known) continue;
      std::vector<std::string> row = {
          f8::format("{}", grid.ks[k]),
          f8::format("{}", grid.ns[n]),
          f8::format("{:.3f}", cell.speedup.speedup),
          f8::format("[{:.3f}, {:.3f}]", cell.speedup.lo, cell.speedup.hi),
          std::string(to_string(cell.evidence)),
          cell.converts ? "float8" : "bf16"};
      if (has_rule) row.emplace_back(cell.torchao_keeps ? "bf16" : "float8");
      table.rows.push_back(std::move(row));
    }
  }
  return table;
}

}  // namespace

TuningTable table_of(const TuningTable& table, size_t device, std::string_view recipe) {
  TuningTable one;
  one.devices = {table.devices.at(device)};
  one.sources = table.sources;
  for (LinearSpeedup row : table.speedups()) {
    if (row.device != device || row.recipe != recipe) continue;
    row.device = 0;
    one.add(std::move(row));
  }
  return one;
}

std::vector<SpeedupGrid> speedup_grids(const Measurements& measurements) {
  std::vector<SpeedupGrid> grids;
  for (size_t device = 0; device < measurements.table.devices.size(); ++device) {
    for (const std::string& recipe : measurements.recipes()) {
      const TuningTable table = table_of(measurements.table, device, recipe);
      if (table.speedups().empty()) continue;
      add_grids(device, table, Estimator(table, recipe), grids);
    }
  }
  return grids;
}

Figure speedup_map(const Measurements& measurements, const SpeedupGrid& grid) {
  const std::string device = measurements.device_label(grid.device);
  Figure figure{.kind = "speedup",
                .device = device,
                .recipe = grid.recipe,
                .m = grid.m,
                .title = f8::format("Speedup at M {}: {}", grid.m, grid.recipe),
                .description = {},
                .table = numbers_of(grid)};
  // The largest N is the uppermost row.
  Grid drawn{.rows = {},
             .columns = {},
             .cells = {},
             .row_label = "N (out_features)",
             .column_label = "K (in_features)"};
  for (const int64_t k : grid.ks) drawn.columns.push_back(f8::format("{}", k));
  size_t faster = 0;
  size_t measured = 0;
  for (size_t n = grid.ns.size(); n-- > 0;) {
    drawn.rows.push_back(f8::format("{}", grid.ns[n]));
    std::vector<Cell>& row = drawn.cells.emplace_back();
    for (const SpeedupCell& cell : grid.cells[n]) {
      if (!cell.is_known) {
        row.emplace_back();
        continue;
      }
      const bool is_row = cell.evidence == Evidence::kMeasured;
      measured += is_row ? 1 : 0;
      faster += is_row && cell.speedup.speedup >= 1 ? 1 : 0;
      row.push_back(
          {cell.speedup.speedup, f8::format("{}{:.2f}", is_row ? "" : "~", cell.speedup.speedup)});
    }
  }
  const auto at = [&grid](size_t row, size_t column) -> const SpeedupCell& {
    return grid.cells[grid.ns.size() - 1 - row][column];
  };
  std::vector<GridLine> lines = {{"line-one", "speedup 1.0: float8 is slower on the orange side",
                                  [&](size_t row, size_t column) -> std::optional<bool> {
                                    if (!at(row, column).is_known) return std::nullopt;
                                    return at(row, column).speedup.speedup < 1;
                                  },
                                  0}};
  if (has_torchao_rule(grid.recipe)) {
    lines.push_back({"line-rule", "torchao's rule keeps bf16 inside (low K, N)",
                     [&](size_t row, size_t column) -> std::optional<bool> {
                       return at(row, column).torchao_keeps;
                     },
                     5});
  }
  figure.description = f8::format(
      "{} of {} measured shapes are at least as fast in float8, on {}. Numbers with ~ are "
      "estimates "
      "for shapes that were not measured.{}{}",
      faster, measured, device,
      has_torchao_rule(grid.recipe) ? "" : " torchao has no rule for this recipe.",
      grid.is_cut ? " Only the K and N with most measurements are shown." : "");
  draw_grid(figure, drawn, lines);
  return figure;
}

}  // namespace f8::report
