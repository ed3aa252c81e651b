// Fitting the physical model: see speed_model.hpp.
#include "tuning_db/estimate/speed_model.hpp"

#include <vector>

namespace f8::tuning_db {
namespace {

constexpr size_t kMinRows = 6;  // two for each coefficient

// The units (GFLOP, million elements) keep the normal equations well scaled.
Terms terms_of(Shape s, int64_t weights = 1) {
  const auto m = static_cast<double>(s.m);
  const auto n = static_cast<double>(s.n);
  const auto k = static_cast<double>(s.k);
  const auto e = static_cast<double>(weights);
  return {1e3, 6e-9 * m * n * k, 1e-6 * (m * k + e * n * k + m * n)};
}

}  // namespace

std::optional<Terms> SpeedModel::fit_one(std::span<const TimedShape> rows,
                                         double TimedShape::*time) {
  std::vector<TimedTerms> timed;
  timed.reserve(rows.size());
  for (const TimedShape& row : rows) timed.push_back({terms_of(row.shape), row.*time});
  return fit_non_negative(timed);
}

std::optional<SpeedModel> SpeedModel::fit(std::span<const TimedShape> rows) {
  if (rows.size() < kMinRows) return std::nullopt;
  const auto bf16 = fit_one(rows, &TimedShape::bf16_ns);
  const auto fp8 = fit_one(rows, &TimedShape::fp8_ns);
  if (!bf16 || !fp8) return std::nullopt;
  SpeedModel model;
  model.bf16_ = *bf16;
  model.fp8_ = *fp8;
  return model;
}

double SpeedModel::bf16_ns(Shape shape, int64_t weights) const {
  return dot(bf16_, terms_of(shape, weights));
}

double SpeedModel::fp8_ns(Shape shape, int64_t weights) const {
  return dot(fp8_, terms_of(shape, weights));
}

}  // namespace f8::tuning_db
