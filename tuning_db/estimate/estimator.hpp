// An estimator answers for a recipe's linears from a tuning table: it asks the speed surfaces of
// the table's devices.
//
// A row of the device asked about answers; else the surface with the narrowest interval does, the
// first of equals. What was measured on another device than the one asked about, or by another
// toolchain, is `modelled`, and its interval is widened by what two devices or two toolchains
// differed by. A device with few rows has seen few predictions go wrong, so those of all devices
// count.
//
// Expert linears have surfaces of their own rows, those of as many experts and the same skew. Where
// these say nothing, the model of linears does, with the weights of all experts in its bytes. MLPs have surfaces
// of their own rows, those with or without a gate of as many experts and the same skew, and nothing else.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "tuning_db/estimate/surface.hpp"

namespace f8::tuning_db {

// 95 % of the log speedups of linears that an H100 and an H200 have differ by no more, interval
// widened: `float8-tune estimate score --elsewhere`, see docs/database.md.
inline constexpr double kBetweenDevices = 0.085;

// The same for linears of one device by toolchains that differ in NVRTC, cuBLASLt or both:
// `float8-tune estimate score --truth`, see docs/database.md.
inline constexpr double kBetweenToolchains = 0.03;

// How far off the log speedup of expert linears is where the model of linears tells it: the 24 layers of
// experts of docs/lab/experts.md, under three recipes, even and Zipf routing, are off by at most 0.15.
inline constexpr double kOfLinearsModel = 0.2;

// A machine is where a linear is going to run.
struct Machine {
  DeviceClass device;
  ToolchainVersions toolchain = {};  // not known: taken for that of the rows
};

class Estimator {
 public:
  // The table must outlive the estimator. device: only rows of devices of this name; empty: all.
  // here: the machine that is asked about; null: the first device with its rows' toolchains.
  // Rows of linears are found by the recipe's settings.
  Estimator(const TuningTable& table, const Recipe& recipe, std::string_view device = {},
            const Machine* here = nullptr);
  // The same for the recipe of a row's label.
  Estimator(const TuningTable& table, std::string_view label, std::string_view device = {},
            const Machine* here = nullptr)
      : Estimator(table, recipe_of_label(label), device, here) {}
  // The estimator of expert linears of these groups, for the same recipe, device and machine. The table
  // must outlive it.
  [[nodiscard]] Estimator of_experts(const Groups& groups) const { return {*this, groups}; }
  // Likewise the estimator of MLPs, which has nothing to say without rows of them.
  [[nodiscard]] Estimator of_mlps(bool gate, const Groups& groups) const {
    return {*this, groups, gate};
  }
  [[nodiscard]] bool empty() const { return surfaces_.empty() && !linears_; }
  [[nodiscard]] const Recipe& recipe() const { return recipe_; }
  // The name of the table's first device with rows of the recipe; without rows the one that was asked for.
  [[nodiscard]] const std::string& device() const { return device_; }
  // The first surface of an estimator of linears that is not empty().
  [[nodiscard]] const Surface& first() const { return *surfaces_.front(); }
  // Returns nothing if the rows are too few to say anything of this shape.
  [[nodiscard]] std::optional<Estimate> estimate(Shape shape) const {
    return estimate(shape, here_.toolchain);
  }
  // The same for another toolchain than this machine's.
  [[nodiscard]] std::optional<Estimate> estimate(Shape shape,
                                                 const ToolchainVersions& toolchain) const {
    return estimate(slices(shape.m), shape, toolchain);
  }
  // The surfaces at one m, for those who ask for many shapes of it.
  using Slices = std::vector<Surface::Slice>;
  [[nodiscard]] Slices slices(int64_t m) const;
  [[nodiscard]] std::optional<Estimate> estimate(const Slices& slices, Shape shape) const {
    return estimate(slices, shape, here_.toolchain);
  }

 private:
  Estimator(const Estimator& linears, const Groups& groups, std::optional<bool> gate = {});
  void add_surfaces(const std::vector<LinearSpeedup>& rows);
  // Adds the error of rows of another device than the one that is asked about.
  void widen_elsewhere(Estimate& e, const DeviceClass& device) const;
  [[nodiscard]] std::optional<Estimate> estimate(const Slices& slices, Shape shape,
                                                 const ToolchainVersions& toolchain) const;
  // What the model of linears says of expert linears.
  [[nodiscard]] std::optional<Estimate> by_linears(Shape shape) const;
  // The first toolchain of the estimate's rows that is another one than this; null: there is none.
  [[nodiscard]] const ToolchainVersions* other_toolchain(const Estimate& e,
                                                         const ToolchainVersions& toolchain) const;

  const TuningTable& table_;
  Recipe recipe_;
  std::string wanted_;  // the device that is asked about; empty: any
  std::string device_;
  std::vector<std::unique_ptr<const Surface>> surfaces_;
  Machine here_;
  Groups groups_;                      // of expert linears and of MLPs
  std::optional<bool> gate_;           // of MLPs
  std::optional<SpeedModel> linears_;  // beside them: fitted to the recipe's linears,
  DeviceClass linears_device_;         // which were measured on this one
};

// The estimates of a model's layers: many of them have one shape, whose estimate is made once, and
// most have one m. Of a list with more unlike ones than a model has it forgets now and then what it
// knows, so that it stays small.
class Estimates {
 public:
  static constexpr size_t kMostShapes = 4096;
  static constexpr size_t kMostSlices = 16;

  explicit Estimates(const Estimator& estimator) : estimator_(estimator) {}
  // The estimator's own estimate; valid until the next call.
  [[nodiscard]] const std::optional<Estimate>& operator()(Shape shape);
  // What it has made and what it keeps.
  [[nodiscard]] size_t slices_made() const { return slices_made_; }
  [[nodiscard]] size_t shapes_kept() const { return shapes_.size(); }
  [[nodiscard]] size_t slices_kept() const { return slices_.size(); }

 private:
  [[nodiscard]] const Estimator::Slices& slices(int64_t m);

  const Estimator& estimator_;
  std::map<Shape, std::optional<Estimate>> shapes_;
  std::map<int64_t, Estimator::Slices> slices_;  // by m
  size_t slices_made_ = 0;
};

}  // namespace f8::tuning_db
