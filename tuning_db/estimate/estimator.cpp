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
  e.lo = rounded(e.speedup * std::exp(-lo));
  e.hi = rounded(e.speedup * std::exp(hi));
  e.terms.*term = error;
  e.evidence = Evidence::kModelled;
  e.basis = f8::format("{}, give or take {:.0f} %: {}", where, 100 * std::expm1(error), e.basis);
}

}  // namespace

Estimator::Estimator(const TuningTable& table, const Recipe& recipe, std::string_view device,
                     const Machine* here)
    : table_(table), recipe_(recipe), wanted_(device), device_(device) {
  if (here != nullptr) here_ = *here;
  add_surfaces(table.speedups());
}

void Estimator::add_surfaces(const std::vector<LinearSpeedup>& all) {
  const std::string label = settings_label(recipe_);
  // A row that is labelled by the recipe's settings goes before one under the caller's own name.
  const auto is_wanted = [&](const LinearSpeedup& row) {
    if (row.groups != groups_ || row.gate != gate_) return false;
    if (row.recipe == label) return true;
    return row.recipe == recipe_.name && is_label_of(row.recipe, recipe_) &&
           std::ranges::none_of(all, [&](const LinearSpeedup& other) {
             return other.recipe == label && other.shape == row.shape &&
                    other.groups == row.groups && other.gate == row.gate &&
                    other.device == row.device;
           });
  };
  for (size_t i = 0; i < table_.devices.size(); ++i) {
    if (!wanted_.empty() && table_.devices[i].name != wanted_) continue;
    std::vector<LinearSpeedup> rows;
    for (const LinearSpeedup& row : all) {
      if (row.device == i && is_wanted(row)) rows.push_back(row);
    }
    if (rows.empty()) continue;
    if (surfaces_.empty()) {
      if (here_.device == DeviceClass{}) here_.device = table_.devices[i];
      device_ = table_.devices[i].name;
    }
    surfaces_.push_back(std::make_unique<const Surface>(std::move(rows)));
  }
}

Estimator::Estimator(const Estimator& linears, const Groups& groups, std::optional<bool> gate)
    : table_(linears.table_),
      recipe_(linears.recipe_),
      wanted_(linears.wanted_),
      device_(linears.device_),
      here_(linears.here_),
      groups_(groups),
      gate_(gate) {
  if (gate) {
    add_surfaces(table_.mlps());
    return;
  }
  if (!linears.surfaces_.empty()) {
    linears_ = linears.first().model();
    linears_device_ = table_.devices[linears.first().points().front().device];
  }
  add_surfaces(table_.experts());
}

void Estimator::widen_elsewhere(Estimate& e, const DeviceClass& device) const {
  if (device.is_same_class(here_.device)) return;
  // Two classes may differ in power alone.
  widen(
      e, &IntervalTerms::device, kBetweenDevices,
      device.name == here_.device.name ? "on another device" : "on another device, " + device.name);
}

std::optional<Estimate> Estimator::by_linears(Shape shape) const {
  if (!linears_) return std::nullopt;
  const Terms terms = SpeedModel::terms_of(shape, groups_.experts);
  Estimate e{.evidence = Evidence::kModelled,
             .bf16_ns = linears_->bf16_ns(terms),
             .terms = {.shape = kOfLinearsModel},
             .basis = {},
             .rows = {}};
  const double speedup = e.bf16_ns / linears_->fp8_ns(terms);
  e.speedup = rounded(speedup);
  e.lo = rounded(speedup * std::exp(-kOfLinearsModel));
  e.hi = rounded(speedup * std::exp(kOfLinearsModel));
  e.basis = f8::format(
      "an estimate by the model of linears with {} weight{}{}, give or take {:.0f} %",
      groups_.experts, groups_.experts == 1 ? "" : "s",
      groups_.skew == 0 ? "" : " and even shares of the rows", 100 * std::expm1(kOfLinearsModel));
  e.device = linears_device_.name;
  widen_elsewhere(e, linears_device_);
  return e;
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
    const DeviceClass& measured = table_.devices[surface->points().front().device];
    e->device = measured.name;
    widen_elsewhere(*e, measured);
    if (e->evidence == Evidence::kMeasured) return e;
    if (!narrowest || e->hi / e->lo < narrowest->hi / narrowest->lo) narrowest = std::move(e);
  }
  if (!narrowest) return by_linears(shape);
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
