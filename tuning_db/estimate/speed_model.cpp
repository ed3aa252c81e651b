// Fitting the physical model: see speed_model.hpp.
#include "tuning_db/estimate/speed_model.hpp"

namespace f8::tuning_db {
namespace {

constexpr size_t kMinRows = 6;  // two for each coefficient

}  // namespace

// The units (GFLOP, million elements) keep the normal equations well scaled.
Terms SpeedModel::terms_of(Shape s, int64_t weights) {
  const auto m = static_cast<double>(s.m);
  const auto n = static_cast<double>(s.n);
  const auto k = static_cast<double>(s.k);
  const auto e = static_cast<double>(weights);
  return {1e3, 6e-9 * m * n * k, 1e-6 * (m * k + e * n * k + m * n)};
}

void SpeedModel::Sums::add(const TimedShape& row) {
  const Terms terms = terms_of(row.shape);
  ++rows_;
  bf16_.add({terms, row.bf16_ns});
  fp8_.add({terms, row.fp8_ns});
}

void SpeedModel::Sums::add(const Sums& other) {
  rows_ += other.rows_;
  bf16_.add(other.bf16_);
  fp8_.add(other.fp8_);
}

std::optional<SpeedModel> SpeedModel::fit(const Sums& sums) {
  if (sums.rows_ < kMinRows) return std::nullopt;
  const auto bf16 = sums.bf16_.fit_non_negative();
  const auto fp8 = sums.fp8_.fit_non_negative();
  if (!bf16 || !fp8) return std::nullopt;
  SpeedModel model;
  model.bf16_ = *bf16;
  model.fp8_ = *fp8;
  return model;
}

}  // namespace f8::tuning_db
