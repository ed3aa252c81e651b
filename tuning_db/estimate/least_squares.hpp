// Least squares for models of times: a time is a sum of three terms, each with a coefficient that
// is not negative, and of what is known.
#pragma once

#include <array>
#include <optional>
#include <span>

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

}  // namespace f8::tuning_db
