// Least squares for models of times: a time is a sum of three terms, each with a coefficient that
// is not negative, and of what is known. And the solver of linear equations behind it.
#pragma once

#include <array>
#include <cmath>
#include <optional>
#include <span>
#include <utility>

namespace f8::tuning_db {

using Terms = std::array<double, 3>;

struct TimedTerms {
  Terms terms{};
  double time = 0;   // positive
  double known = 0;  // what of it has no coefficient
};

[[nodiscard]] double dot(const Terms& a, const Terms& b);

// The coefficients with the least sum of squared relative errors. Nothing where no set of the terms
// can be told apart by these rows. The terms should be of one order of magnitude.
[[nodiscard]] std::optional<Terms> fit_non_negative(std::span<const TimedTerms> rows);

// Solves a x = b by elimination with pivots; nothing if the matrix is singular.
template <size_t N>
[[nodiscard]] std::optional<std::array<double, N>> solve(std::array<std::array<double, N>, N> a,
                                                         std::array<double, N> b) {
  for (size_t i = 0; i < N; ++i) {
    size_t pivot = i;
    for (size_t r = i + 1; r < N; ++r) {
      if (std::abs(a[r][i]) > std::abs(a[pivot][i])) pivot = r;
    }
    if (std::abs(a[pivot][i]) < 1e-12) return std::nullopt;
    std::swap(a[i], a[pivot]);
    std::swap(b[i], b[pivot]);
    for (size_t r = i + 1; r < N; ++r) {
      const double factor = a[r][i] / a[i][i];
      for (size_t c = i; c < N; ++c) a[r][c] -= factor * a[i][c];
      b[r] -= factor * b[i];
    }
  }
  std::array<double, N> x{};
  for (size_t i = N; i-- > 0;) {
    double sum = b[i];
    for (size_t c = i + 1; c < N; ++c) sum -= a[i][c] * x[c];
    x[i] = sum / a[i][i];
  }
  return x;
}

// The normal equations of a regression whose rows come one by one.
template <size_t N>
class NormalEquations {
 public:
  void add(const std::array<double, N>& terms, double value) {
    for (size_t i = 0; i < N; ++i) {
      for (size_t j = 0; j < N; ++j) a_[i][j] += terms[i] * terms[j];
      b_[i] += terms[i] * value;
    }
    ++rows_;
  }
  [[nodiscard]] size_t rows() const { return rows_; }
  // Ridge regression: coefficients are drawn towards 0 by `ridge`, those before `first` are not.
  [[nodiscard]] std::optional<std::array<double, N>> solved(double ridge, size_t first = 0) const {
    auto a = a_;
    for (size_t i = first; i < N; ++i) a[i][i] += ridge;
    return solve(a, b_);
  }

 private:
  std::array<std::array<double, N>, N> a_{};
  std::array<double, N> b_{};
  size_t rows_ = 0;
};

}  // namespace f8::tuning_db
