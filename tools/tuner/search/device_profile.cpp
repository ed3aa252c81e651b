#include "tools/tuner/search/device_profile.hpp"

#include <algorithm>
#include <cmath>
#include <map>
#include <optional>
#include <set>

#include "tools/tuner/statistics.hpp"
#include "tuning_db/estimate/least_squares.hpp"

namespace f8::tuner {
namespace {

using tuning_db::TimedTerms;
using tuning_db::TrialRow;

constexpr double kBytesOfElement = 6;  // casts read bf16 twice and write two fp8 copies
constexpr double kFp8Launches = 9;
constexpr double kBf16Launches = 3;
constexpr double kLongNs = 1e6;  // a linear that lasts so long has settled the clock

double elements_of(Shape shape) {
  const auto m = static_cast<double>(shape.m);
  const auto n = static_cast<double>(shape.n);
  const auto k = static_cast<double>(shape.k);
  return m * k + n * k + m * n;
}

double flops_of(Shape shape) {
  return 6.0 * static_cast<double>(shape.m) * static_cast<double>(shape.n) *
         static_cast<double>(shape.k);
}

// The time's parts in ns at 1000 TFLOP/s, 1000 GB/s and 1 us a launch.
tuning_db::Terms terms_of(Shape shape, bool fp8) {
  return {flops_of(shape) / 1e6, kBytesOfElement * elements_of(shape) / 1e3,
          1e3 * (fp8 ? kFp8Launches : kBf16Launches)};
}

// The rate of a term, which is seen where the term is a part of the time of some row.
double rate(const tuning_db::Terms& fitted, size_t term,
            std::span<const std::pair<Shape, double>> rows, bool fp8) {
  constexpr double kLeastShare = 0.01;
  const bool seen = std::ranges::any_of(rows, [&](const auto& row) {
    return fitted[term] * terms_of(row.first, fp8)[term] >= kLeastShare * row.second;
  });
  return seen ? 1e3 / fitted[term] : kNotSeen;
}

// The relative errors of the predicted times.
void add_errors(const DeviceProfile& profile, std::span<const std::pair<Shape, double>> rows,
                bool fp8, std::vector<double>& errors) {
  for (const auto& [shape, ns] : rows) {
    errors.push_back(std::abs(profile.linear_ns(shape, fp8) / ns - 1));
  }
}

struct DeviceRows {
  int sm_clock_max_mhz = 0;
  std::vector<std::pair<Shape, double>> fp8, bf16;
  std::vector<double> settled_mhz;
  std::string measured;

  void add(const TrialRow& row) {
    const bool is_fp8 = row.candidate.impl == tuning_db::Impl::kFloat8;
    const double ns = row.result.timing->median_ns;
    (is_fp8 ? fp8 : bf16).emplace_back(row.problem.shape(), ns);
    sm_clock_max_mhz = row.device.sm_clock_max_mhz;
    measured = std::max(measured, row.at.substr(0, 10));
    if (is_fp8 && ns >= kLongNs && row.result.sm_mhz_mean) {
      settled_mhz.push_back(*row.result.sm_mhz_mean);
    }
  }
};

Result<tuning_db::Terms> fit_terms(const std::string& device,
                                   std::span<const std::pair<Shape, double>> rows, bool fp8) {
  std::vector<TimedTerms> timed;
  std::set<Shape> shapes;
  for (const auto& [shape, ns] : rows) {
    timed.push_back({terms_of(shape, fp8), ns, 0});
    shapes.insert(shape);
  }
  const auto found =
      shapes.size() < kFewestShapes ? std::nullopt : tuning_db::fit_non_negative(timed);
  if (found) return *found;
  return fail(ErrorCode::kInvalidArgument,
              "{}: {} linears of {} shapes are too few for a profile, which needs {} of unlike "
              "sizes; measure more with `float8-tune sweep --mnk 1024:16384:x4,1024:8192:x2,4096`",
              device, fp8 ? "fp8" : "bf16", shapes.size(), kFewestShapes);
}

Result<DeviceProfile> fit(const std::string& name, const DeviceRows& rows) {
  const tuning_db::Terms fp8 = F8_TRY(fit_terms(name, rows.fp8, true));
  const tuning_db::Terms bf16 = F8_TRY(fit_terms(name, rows.bf16, false));
  DeviceProfile profile{.name = name,
                        .settled = 1,
                        .fp8_tflops = rate(fp8, 0, rows.fp8, true),
                        .bf16_tflops = rate(bf16, 0, rows.bf16, false),
                        .cast_gb_per_s = rate(fp8, 1, rows.fp8, true),
                        .memory_gb_per_s = rate(bf16, 1, rows.bf16, false),
                        .launch_us = fp8[2],
                        .bf16_launch_us = bf16[2],
                        .rows = static_cast<int64_t>(rows.fp8.size() + rows.bf16.size()),
                        .measured = rows.measured};
  if (!rows.settled_mhz.empty() && rows.sm_clock_max_mhz > 0) {
    profile.settled = median(rows.settled_mhz) / rows.sm_clock_max_mhz;
  }
  std::vector<double> errors;
  add_errors(profile, rows.fp8, true, errors);
  add_errors(profile, rows.bf16, false, errors);
  profile.error_median = median(errors);
  profile.error_p95 = percentile(errors, 0.95);
  return profile;
}

}  // namespace

double DeviceProfile::linear_ns(Shape shape, bool fp8) const {
  const double flops = flops_of(shape);
  const double bytes = kBytesOfElement * elements_of(shape);
  return fp8 ? flops / fp8_tflops / 1e3 + bytes / cast_gb_per_s + kFp8Launches * launch_us * 1e3
             : flops / bf16_tflops / 1e3 + bytes / memory_gb_per_s +
                   kBf16Launches * bf16_launch_us * 1e3;
}

double DeviceProfile::gemm_ns(double flops, bool fp8) const {
  return flops / (fp8 ? fp8_tflops : bf16_tflops) / 1e3 + (fp8 ? launch_us : bf16_launch_us) * 1e3;
}

const DeviceProfile& profile_of(const DeviceClass& device) {
  const std::span<const DeviceProfile> all = device_profiles();
  const auto found = std::ranges::find(all, device.name, &DeviceProfile::name);
  return found != all.end() ? *found : all.front();
}

Result<std::vector<DeviceProfile>> fit_profiles(const tuning_db::Database& database) {
  std::map<std::string, DeviceRows> devices;
  for (const TrialRow& row : F8_TRY(database.timed())) {
    const bool linear = row.candidate.impl == tuning_db::Impl::kFloat8 ||
                        row.candidate.impl == tuning_db::Impl::kBf16;
    if (linear && row.problem.op == Op::kLinear && row.result.state == tuning_db::TrialState::kOk) {
      devices[row.device.name].add(row);
    }
  }
  if (devices.empty()) {
    return fail(ErrorCode::kInvalidArgument,
                "no measured linears to fit a profile to, which needs {} shapes; measure some with "
                "`float8-tune sweep`",
                kFewestShapes);
  }
  std::vector<DeviceProfile> profiles;
  for (const auto& [name, rows] : devices) profiles.push_back(F8_TRY(fit(name, rows)));
  return profiles;
}

std::string profiles_source(std::span<const DeviceProfile> profiles) {
  std::string text = R"(// Written by `float8-tune profile fit`; see docs/method.md.
#include "tools/tuner/search/device_profile.hpp"

namespace f8::tuner {

std::span<const DeviceProfile> device_profiles() {
  static const std::vector<DeviceProfile> kProfiles = {
)";
  for (const DeviceProfile& p : profiles) {
    text += f8::format(R"(      {{.name = "{}",
       .settled = {:.3f},
       .fp8_tflops = {:.0f},
       .bf16_tflops = {:.0f},
       .cast_gb_per_s = {:.0f},
       .memory_gb_per_s = {:.0f},
       .launch_us = {:.2f},
       .bf16_launch_us = {:.2f},
       .error_median = {:.3f},
       .error_p95 = {:.3f},
       .rows = {},
       .measured = "{}"}},
)",
                       p.name, p.settled, p.fp8_tflops, p.bf16_tflops, p.cast_gb_per_s,
                       p.memory_gb_per_s, p.launch_us, p.bf16_launch_us, p.error_median,
                       p.error_p95, p.rows, p.measured);
  }
  return text + R"(  };
  return kProfiles;
}

}  // namespace f8::tuner
)";
}

}  // namespace f8::tuner
