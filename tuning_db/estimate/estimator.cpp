// Rows to surfaces: see estimator.hpp.
#include "tuning_db/estimate/estimator.hpp"

namespace f8::tuning_db {

Estimator::Estimator(const TuningTable& table, std::string_view recipe, std::string_view device)
    : table_(table), recipe_(recipe), device_(device) {
  for (size_t i = 0; i < table.devices.size(); ++i) {
    if (!device.empty() && table.devices[i].name != device) continue;
    std::vector<LinearSpeedup> rows;
    for (const LinearSpeedup& row : table.speedups()) {
      if (row.device == i && row.recipe == recipe) rows.push_back(row);
    }
    if (rows.empty()) continue;
    if (surfaces_.empty()) device_ = table.devices[i].name;
    surfaces_.push_back(std::make_unique<const Surface>(std::move(rows)));
  }
}

std::optional<Estimate> Estimator::estimate(Shape shape) const {
  for (const auto& surface : surfaces_) {
    auto e = surface->estimate(shape);
    if (!e) continue;
    if (surface != surfaces_.front()) {
      e->evidence = Evidence::kModelled;
      e->basis = "on another device than the first: " + e->basis;
    }
    return e;
  }
  return std::nullopt;
}

std::string Estimator::describe_source(const Estimate& estimate) const {
  const LinearSpeedup& row = *estimate.rows.front();
  const DeviceClass& device = table_.devices[row.device];
  return f8::format("({}, {} W; {}; {})", device.name, device.power_limit_w, row.date,
                    table_.sources[row.source]);
}

}  // namespace f8::tuning_db
