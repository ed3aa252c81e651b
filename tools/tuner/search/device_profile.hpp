// The rates that a class of devices sustains in linears, fitted to measured ones: what the times of
// sweeps and of kernels are predicted by. They order nothing and decide nothing: kernels are chosen
// by the cost model and the tables, verdicts by the estimator.
//
//   fp8 linear  = flops / fp8 rate + bytes of casts / cast rate + 9 launches
//   bf16 linear = flops / bf16 rate + bytes of GEMMs / memory rate + 3 launches
#pragma once

#include <span>
#include <string>
#include <vector>

#include "tuning_db/database.hpp"

namespace f8::tuner {

// Stands for a rate that no linear shows, since its term is less than a hundredth of every time.
inline constexpr double kNotSeen = 1e9;

struct DeviceProfile {
  std::string name;       // of the device class
  double settled = 0;     // the SM clock under long fp8 linears, as a share of the maximum
  double fp8_tflops = 0;  // of the GEMMs of a linear
  double bf16_tflops = 0;
  double cast_gb_per_s = 0;    // of a linear's casts, whose bytes are counted at 6 an element
  double memory_gb_per_s = 0;  // of a bf16 linear's GEMMs, at 6 an element
  double launch_us = 0;        // of an fp8 linear's
  double bf16_launch_us = 0;
  double error_median = 0, error_p95 = 0;  // of the predicted times of the linears, relative
  int64_t rows = 0;                        // linears that it is fitted to
  std::string measured = {};               // the date of the last of them

  [[nodiscard]] double linear_ns(Shape shape, bool fp8) const;
  [[nodiscard]] double gemm_ns(double flops, bool fp8) const;
};

// The built-in profiles; `float8-tune profile fit -o` writes their source, device_profiles.cpp.
[[nodiscard]] std::span<const DeviceProfile> device_profiles();
// The profile of the class of this name, else the first.
[[nodiscard]] const DeviceProfile& profile_of(const DeviceClass& device);

// A profile is fitted to linears of so many shapes at least, in fp8 and in bf16.
inline constexpr size_t kFewestShapes = 12;
// A profile for each device of the database, in order of their names. kInvalidArgument: a device has
// linears of too few shapes.
[[nodiscard]] Result<std::vector<DeviceProfile>> fit_profiles(const tuning_db::Database& database);

// The text of device_profiles.cpp.
[[nodiscard]] std::string profiles_source(std::span<const DeviceProfile> profiles);

}  // namespace f8::tuner
