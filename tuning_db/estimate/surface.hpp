// The speedup of float8 over bf16 as a function of (m, n, k), known at the measured shapes of one
// device. It works in logarithms throughout: log speedup over log2 m, log2 n, log2 k.
//
//   measured       the shape is a row
//   along m        its (n, k) has rows on both sides of m: a straight line in log2 m; the interval
//                  is widened by the curvature seen where three rows of one (n, k) are known
//   neighbours     m is inside, and (log2 k, log2 n) in the convex hull of the measured ones: a
//                  physical model fitted to all rows, plus its residuals at the measured (n, k),
//                  weighted by inverse square distance
//   outside        the same, with an interval that grows with the distance; the weights include one
//                  of residual 0, so far away the model alone remains
//
// The last two take their interval from leaving out each (n, k) in turn, fitting again and looking
// how far off the prediction is. Where only m is outside, and rows of this (n, k) are known, it
// comes from leaving out each column's first and last m instead.
#pragma once

#include <map>
#include <optional>
#include <string>
#include <vector>

#include "recipes/filter_rule.hpp"
#include "tuning_db/estimate/speed_model.hpp"
#include "tuning_db/estimate/tuning_table.hpp"

namespace f8::tuning_db {

// What an interval is made of: how far off the log speedup is in 5 cases of 100, by each cause.
struct IntervalTerms {
  double rows = 0;    // the rows' own intervals
  double shape = 0;   // they are of other shapes
  double device = 0;  // and of another device
};

struct Estimate {
  Evidence evidence = Evidence::kMeasured;
  double speedup = 1, lo = 1, hi = 1;
  double bf16_ns = 0;
  IntervalTerms terms;
  std::string basis;                       // what it rests on, as a part of a sentence
  std::vector<const LinearSpeedup*> rows;  // the surface's
};

class Surface {
 public:
  explicit Surface(std::vector<LinearSpeedup> points);  // shapes are distinct
  Surface(const Surface&) = delete;
  Surface& operator=(const Surface&) = delete;
  // Returns nothing if the rows are too few to say anything of this shape.
  [[nodiscard]] std::optional<Estimate> estimate(Shape shape) const;
  [[nodiscard]] const std::vector<LinearSpeedup>& points() const { return points_; }

 private:
  struct Column {  // the rows of one (n, k)
    int64_t n = 0, k = 0;
    double x = 0, y = 0;                       // log2 k, log2 n
    std::vector<const LinearSpeedup*> points;  // by m
    [[nodiscard]] bool covers(int64_t m) const;
  };
  struct Value {  // of a column at an m
    double log_speedup = 0, log_lo = 0, log_hi = 0, log_bf16 = 0;
    double sag = 0;  // of the interval: what a chord may miss
    int64_t m = 0;   // where it was taken: m clamped into the column's range
    const LinearSpeedup* below = nullptr;
    const LinearSpeedup* above = nullptr;
  };
  struct Prediction {
    double log_speedup = 0, half_lo = 0, half_hi = 0, log_bf16 = 0;
    std::vector<const Column*> nearest;
  };

  [[nodiscard]] Value at(const Column& column, int64_t m) const;
  [[nodiscard]] std::optional<SpeedModel> fit_without(const Column* left_out) const;
  [[nodiscard]] std::optional<Prediction> predict(Shape shape, const SpeedModel* model,
                                                  const Column* left_out) const;
  // How much the log speedup of an estimate may be off, beyond the rows' own intervals.
  [[nodiscard]] double error_of(Shape shape, bool inside) const;
  [[nodiscard]] double hull_distance(Shape shape, const Column* left_out) const;
  [[nodiscard]] Estimate along_m(const Column& column, int64_t m) const;
  [[nodiscard]] std::optional<Estimate> from_neighbours(Shape shape) const;
  void measure_curvature();
  void leave_one_out();
  void leave_ends_out();

  std::vector<LinearSpeedup> points_;
  std::vector<Column> columns_;
  std::optional<SpeedModel> model_;
  double curvature_ = 0;  // |d2 log speedup / d (log2 m)^2|, of the rows
  std::optional<double> inside_rms_, everywhere_rms_;  // of leave-one-out, in log speedup
  std::optional<double> per_octave_rms_;  // of predicting a column's end from the row beside it
  int64_t m_min_ = 0, m_max_ = 0;
};

}  // namespace f8::tuning_db
