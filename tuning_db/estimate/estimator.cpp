// Rows to surfaces: see estimator.hpp.
#include "tuning_db/estimate/estimator.hpp"

#include <algorithm>
#include <cmath>

namespace f8::tuning_db {

namespace {

// The rows come from elsewhere, which adds an error. Errors are independent, so that their squares
// add up.
void widen(Estimate& e, double IntervalTerms::*term, double error, const std::string& where) {
  const double lo = std::hypot(std::log(e.speedup / e.lo), error);
  const double hi = std::hypot(std::log(e.hi / e.speedup), error);
  const auto rounded = [](double v) { return std::round(v * 1e4) / 1e4; };
  e.lo = rounded(e.speedup * std::exp(-lo));
  e.hi = rounded(e.speedup * std::exp(hi));
  e.terms.*term = error;
  e.evidence = Evidence::kModelled;
  e.basis = f8::format("{}, give or take {:.0f} %: {}", where, 100 * std::expm1(error), e.basis);
}

}  // namespace

Estimator::Estimator(const TuningTable& table, const Recipe& recipe, std::string_view device,
                     const Machine* here)
    : table_(table), recipe_(recipe), device_(device) {
  const std::string label = settings_label(recipe);
  // A row that is labelled by the recipe's settings goes before one under the caller's own name.
  const auto is_wanted = [&](const LinearSpeedup& row) {
    if (row.recipe == label) return true;
    return row.recipe == recipe.name && is_label_of(row.recipe, recipe) &&
           std::ranges::none_of(table.speedups(), [&](const LinearSpeedup& other) {
             return other.recipe == label && other.shape == row.shape && other.device == row.device;
           });
  };
  for (size_t i = 0; i < table.devices.size(); ++i) {
    if (!device.empty() && table.devices[i].name != device) continue;
    std::vector<LinearSpeedup> rows;
    for (const LinearSpeedup& row : table.speedups()) {
      if (row.device == i && is_wanted(row)) rows.push_back(row);
    }
    if (rows.empty()) continue;
    if (surfaces_.empty()) {
      device_ = table.devices[i].name;
      here_ = here == nullptr ? Machine{table.devices[i]} : *here;
    }
    surfaces_.push_back(std::make_unique<const Surface>(std::move(rows)));
  }
}

const ToolchainVersions* Estimator::other_toolchain(const Estimate& e,
                                                    const ToolchainVersions& toolchain) const {
  if (!toolchain.is_known()) return nullptr;
  for (const LinearSpeedup* row : e.rows) {
    const ToolchainVersions& measured = table_.sources[row->source].toolchain;
    if (measured.is_known() && measured != toolchain) return &measured;
  }
  return nullptr;
}

Estimator::Slices Estimator::slices(int64_t m) const {
  Slices slices;
  for (const auto& surface : surfaces_) slices.push_back(surface->slice(m));
  return slices;
}

std::optional<Estimate> Estimator::estimate(const Slices& slices, Shape shape,
                                            const ToolchainVersions& toolchain) const {
  std::optional<double> miss;  // of all surfaces
  const auto most_missed = [&] {
    if (!miss) {
      miss = 0;
      for (const auto& surface : surfaces_) {
        miss = std::max(*miss, surface->miss(shape).value_or(0));
      }
    }
    return *miss;
  };
  std::optional<Estimate> narrowest;
  for (size_t i = 0; i < surfaces_.size(); ++i) {
    const Surface* surface = surfaces_[i].get();
    auto e = surface->from_column(shape);
    if (!e) e = surface->from_neighbours(slices[i], shape, most_missed());
    if (!e) continue;
    if (const ToolchainVersions* other = other_toolchain(*e, toolchain)) {
      widen(*e, &IntervalTerms::toolchain, kBetweenToolchains,
            "by another toolchain, " + to_string(*other));
    }
    if (!table_.devices[surface->points().front().device].is_same_class(here_.device)) {
      widen(*e, &IntervalTerms::device, kBetweenDevices, "on another device");
    }
    if (e->evidence == Evidence::kMeasured) return e;
    if (!narrowest || e->hi / e->lo < narrowest->hi / narrowest->lo) narrowest = std::move(e);
  }
  return narrowest;
}

const std::optional<Estimate>& Estimates::operator()(Shape shape) {
  if (shapes_.size() >= kMostShapes) shapes_.clear();
  const auto [at, is_new] = shapes_.try_emplace(shape);
  if (is_new) at->second = estimator_.estimate(slices(shape.m), shape);
  return at->second;
}

const Estimator::Slices& Estimates::slices(int64_t m) {
  if (slices_.size() >= kMostSlices) slices_.clear();
  const auto [at, is_new] = slices_.try_emplace(m);
  if (is_new) {
    at->second = estimator_.slices(m);
    ++slices_made_;
  }
  return at->second;
}

}  // namespace f8::tuning_db
