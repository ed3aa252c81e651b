// Least squares for models of times: a time is a sum of three terms, each with a coefficient that
// is not negative, and of what is known.
#pragma once

#include <array>
#include <optional>
#include <span>
#include <tuple>

namespace f8::tuning_db {

using Terms = std::array<double, 3>;

struct TimedTerms {
  Terms terms{};
  double time = 0;   // positive
  double known = 0;  // what of it has no coefficient
};

[[nodiscard]] inline double dot(const Terms& a, const Terms& b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// All that a fit needs of its rows: those of several sets of rows add up.
class NormalEquations {
 public:
  void add(const TimedTerms& row);
  void add(const NormalEquations& other);
  // The coefficients with the least sum of squared relative errors. Nothing where no set of the terms
  // can be told apart by these rows. The terms should be of one order of magnitude.
  [[nodiscard]] std::optional<Terms> fit_non_negative() const;

 private:
  std::array<Terms, std::tuple_size_v<Terms>> a_{};
  Terms b_{};
};

[[nodiscard]] std::optional<Terms> fit_non_negative(std::span<const TimedTerms> rows);

}  // namespace f8::tuning_db
