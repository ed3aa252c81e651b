#include "tuning_db/estimate/least_squares.hpp"

#include <algorithm>
#include <cmath>
#include <utility>

namespace f8::tuning_db {
namespace {

constexpr size_t kTerms = std::tuple_size_v<Terms>;
using Matrix = std::array<Terms, kTerms>;

// Solves a x = b by elimination with pivots; nothing if the matrix is singular.
std::optional<Terms> solve(Matrix a, Terms b) {
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
  Terms x{};
  for (size_t i = kTerms; i-- > 0;) {
    double sum = b[i];
    for (size_t c = i + 1; c < kTerms; ++c) sum -= a[i][c] * x[c];
    x[i] = sum / a[i][i];
  }
  return x;
}

// Solves a x = b for the chosen terms, the others 0; nothing if the matrix is singular.
std::optional<Terms> solve_chosen(Matrix a, Terms b, unsigned chosen) {
  for (size_t i = 0; i < kTerms; ++i) {
    if ((chosen >> i & 1U) != 0) continue;
    for (size_t j = 0; j < kTerms; ++j) a[i][j] = a[j][i] = i == j ? 1 : 0;
    b[i] = 0;
  }
  return solve(a, b);
}

}  // namespace

void NormalEquations::add(const TimedTerms& row) {
  Terms terms = row.terms;
  for (double& t : terms) t /= row.time;
  for (size_t i = 0; i < kTerms; ++i) {
    for (size_t j = 0; j < kTerms; ++j) a_[i][j] += terms[i] * terms[j];
    b_[i] += terms[i] * (1 - row.known / row.time);
  }
}

void NormalEquations::add(const NormalEquations& other) {
  for (size_t i = 0; i < kTerms; ++i) {
    for (size_t j = 0; j < kTerms; ++j) a_[i][j] += other.a_[i][j];
    b_[i] += other.b_[i];
  }
}

std::optional<Terms> NormalEquations::fit_non_negative() const {
  // With three terms there are seven sets of them to try. A set whose solution has a negative
  // coefficient is out; the optimum is the best of the others.
  std::optional<Terms> best;
  double best_error = 0;
  for (unsigned chosen = 1; chosen < 1U << kTerms; ++chosen) {
    const auto x = solve_chosen(a_, b_, chosen);
    if (!x || std::ranges::any_of(*x, [](double c) { return !(c >= 0); })) continue;
    // The sum of squared errors, x a x - 2 b x + c, without the c that all have.
    double error = -2 * dot(b_, *x);
    for (size_t i = 0; i < kTerms; ++i) error += (*x)[i] * dot(a_[i], *x);
    if (!best || error < best_error) {
      best = x;
      best_error = error;
    }
  }
  return best;
}

std::optional<Terms> fit_non_negative(std::span<const TimedTerms> rows) {
  NormalEquations equations;
  for (const TimedTerms& row : rows) equations.add(row);
  return equations.fit_non_negative();
}

}  // namespace f8::tuning_db
