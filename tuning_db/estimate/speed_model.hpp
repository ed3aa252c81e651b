// A physical model of a linear's forward + backward, fitted to measured rows:
//
//   time = launches + flops / rate + elements / bandwidth
//
// with flops 6mnk and elements mk + nk + mn, one set of the three coefficients for bf16 and one for
// fp8, none negative. Expert linears share m rows and have nk elements of weights each: they do the
// work of one linear, and read and cast more.
#pragma once

#include <optional>
#include <span>

#include "recipes/problem.hpp"
#include "tuning_db/estimate/least_squares.hpp"

namespace f8::tuning_db {

struct TimedShape {
  Shape shape;
  double bf16_ns = 0;
  double fp8_ns = 0;
};

class SpeedModel {
 public:
  // Least squares of the relative error. Nothing where the rows are too few or too alike.
  [[nodiscard]] static std::optional<SpeedModel> fit(std::span<const TimedShape> rows);
  [[nodiscard]] double bf16_ns(Shape shape, int64_t weights = 1) const;
  [[nodiscard]] double fp8_ns(Shape shape, int64_t weights = 1) const;

 private:
  static std::optional<Terms> fit_one(std::span<const TimedShape> rows, double TimedShape::*time);
  Terms bf16_{}, fp8_{};  // coefficients of 1, flops and elements
};

}  // namespace f8::tuning_db
