// Fitting the physical model: see speed_model.hpp.
#include "tuning_db/estimate/speed_model.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace f8::tuning_db {
namespace {

constexpr size_t kTerms = 3;
constexpr size_t kMinRows = 6;  // two for each coefficient
using Vector = std::array<double, kTerms>;
using Matrix = std::array<Vector, kTerms>;

// The units (GFLOP, million elements) keep the normal equations well scaled.
Vector terms_of(Shape s) {
  const auto m = static_cast<double>(s.m);
  const auto n = static_cast<double>(s.n);
  const auto k = static_cast<double>(s.k);
  return {1e3, 6e-9 * m * n * k, 1e-6 * (m * k + n * k + m * n)};
}

// Solves a x = b for the chosen terms, the others 0; nothing if the matrix is singular.
std::optional<Vector> solve(Matrix a, Vector b, unsigned chosen) {
  for (size_t i = 0; i < kTerms; ++i) {
    if ((chosen >> i & 1U) != 0) continue;
    for (size_t j = 0; j < kTerms; ++j) a[i][j] = a[j][i] = i == j ? 1 : 0;
    b[i] = 0;
  }
  for (size_t i = 0; i < kTerms; ++i) {
    size_t pivot = i;
    for (size_t r = i + 1; r < kTerms; ++r) {
      if (std::abs(a[r][i]) > std::abs(a[pivot][i])) pivot = r;
    }
    if (std::abs(a[pivot][i]) < 1e-12) return std::nullopt;
    std::swap(a[i], a[pivot]);
    std::swap(b[i], b[pivot]);
    for (size_t r = i + 1; r < kTerms; ++r) {
      const double factor = a[r][i] / a[i][i];
      for (size_t c = i; c < kTerms; ++c) a[r][c] -= factor * a[i][c];
      b[r] -= factor * b[i];
    }
  }
  Vector x{};
  for (size_t i = kTerms; i-- > 0;) {
    double sum = b[i];
    for (size_t c = i + 1; c < kTerms; ++c) sum -= a[i][c] * x[c];
    x[i] = sum / a[i][i];
  }
  return x;
}

double evaluate(const Vector& coefficients, Shape shape) {
  const Vector terms = terms_of(shape);
  double sum = 0;
  for (size_t i = 0; i < kTerms; ++i) sum += coefficients[i] * terms[i];
  return sum;
}

}  // namespace

std::optional<SpeedModel::Coefficients> SpeedModel::fit_one(std::span<const TimedShape> rows,
                                                            double TimedShape::*time) {
  Matrix a{};
  Vector b{};
  for (const TimedShape& row : rows) {
    Vector terms = terms_of(row.shape);
    for (double& t : terms) t /= row.*time;
    for (size_t i = 0; i < kTerms; ++i) {
      for (size_t j = 0; j < kTerms; ++j) a[i][j] += terms[i] * terms[j];
      b[i] += terms[i];
    }
  }
  // Non-negative least squares by trying every set of terms: with three there are seven. A set
  // whose solution has a negative coefficient is out; the optimum is the best of the others.
  std::optional<Vector> best;
  double best_error = 0;
  for (unsigned chosen = 1; chosen < 1U << kTerms; ++chosen) {
    const auto x = solve(a, b, chosen);
    if (!x || std::ranges::any_of(*x, [](double c) { return !(c >= 0); })) continue;
    double error = 0;
    for (const TimedShape& row : rows) {
      const double relative = evaluate(*x, row.shape) / (row.*time) - 1;
      error += relative * relative;
    }
    if (!best || error < best_error) {
      best = x;
      best_error = error;
    }
  }
  return best;
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

double SpeedModel::bf16_ns(Shape shape) const {
  return evaluate(bf16_, shape);
}

double SpeedModel::fp8_ns(Shape shape) const {
  return evaluate(fp8_, shape);
}

}  // namespace f8::tuning_db
