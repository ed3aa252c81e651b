// A physical model of a linear's forward + backward, fitted to measured rows:
//
//   time = launches + flops / rate + elements / bandwidth
//
// with flops 6mnk and elements mk + nk + mn, one set of the three coefficients for bf16 and one for
// fp8, none negative. Expert linears share m rows and have nk elements of weights each: they do the
// work of one linear, and read and cast more.
#pragma once

#include <optional>

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
  // All that a fit needs of its rows.
  class Sums {
   public:
    void add(const TimedShape& row);
    void add(const Sums& other);

   private:
    friend SpeedModel;
    size_t rows_ = 0;
    NormalEquations bf16_, fp8_;
  };
  // Least squares of the relative error. Nothing where the rows are too few or too alike.
  [[nodiscard]] static std::optional<SpeedModel> fit(const Sums& sums);
  // Returns what the coefficients multiply.
  [[nodiscard]] static Terms terms_of(Shape shape, int64_t weights = 1);
  [[nodiscard]] double bf16_ns(const Terms& terms) const { return dot(bf16_, terms); }
  [[nodiscard]] double fp8_ns(const Terms& terms) const { return dot(fp8_, terms); }

 private:
  Terms bf16_{}, fp8_{};  // coefficients of 1, flops and elements
};

}  // namespace f8::tuning_db
