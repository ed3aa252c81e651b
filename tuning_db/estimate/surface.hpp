// The speedup of float8 over bf16 as a function of (m, n, k), known at the measured shapes of one
// device. It works in logarithms throughout: log speedup over log2 m, log2 n, log2 k.
//
//   measured       the shape is a row
//   along m        its (n, k) has rows on both sides of m: a line in log2 m, which bends as those of
//                  all (n, k) do in the mean. Speedups jump where a wave of tiles begins, so they
//                  leave it as a random walk does: by the root of the distance from the rows. How
//                  far is seen where a row lies between two others of its (n, k)
//   neighbours     a physical model fitted to all rows, plus its residuals at the measured (n, k),
//                  weighted by inverse square distance; the weights include one of residual 0, so
//                  far away the model alone remains
//
// The last one takes its interval from leaving out each (n, k) in turn, fitting again and looking
// how far off the prediction is: small linears and small m are off further, so errors count by how
// alike m and m * n * k are. A shape that is further from the rows than those left out were is
// outside, and the interval grows with the distance beyond that.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "recipes/model/filter_rule.hpp"
#include "tuning_db/estimate/speed_model.hpp"
#include "tuning_db/estimate/tuning_table.hpp"

namespace f8::tuning_db {

// What an interval is made of: how far off the log speedup is in 5 cases of 100, by each cause.
struct IntervalTerms {
  double rows = 0;       // the rows' own intervals
  double shape = 0;      // they are of other shapes
  double device = 0;     // of another device
  double toolchain = 0;  // and by another toolchain
};

struct Estimate {
  Evidence evidence = Evidence::kMeasured;
  double speedup = 1, lo = 1, hi = 1;
  double bf16_ns = 0;
  IntervalTerms terms;
  std::string basis;                       // what it rests on, as a part of a sentence
  std::string device{};                    // whose rows, by an estimator
  std::vector<const LinearSpeedup*> rows;  // the surface's
};

// Rounds to four digits what is printed and compared on many machines, whose last bits of exp and log differ.
[[nodiscard]] double rounded(double v);

class Surface {
 public:
  explicit Surface(std::vector<LinearSpeedup> points);  // shapes are distinct
  Surface(const Surface&) = delete;
  Surface& operator=(const Surface&) = delete;
  // Returns nothing if the rows are too few to say anything of this shape.
  [[nodiscard]] std::optional<Estimate> estimate(Shape shape) const;
  // All (n, k) at one m: most of a prediction's work, and the same for every shape of this m.
  class Slice;
  [[nodiscard]] Slice slice(int64_t m) const;
  // The two parts of an estimate: what the rows of this (n, k) say, and a prediction from all rows,
  // which is off by `miss` where they are near. The slice is one of this surface, at the shape's m.
  [[nodiscard]] std::optional<Estimate> from_column(Shape shape) const;
  [[nodiscard]] std::optional<Estimate> from_neighbours(const Slice& slice, Shape shape,
                                                        double miss) const;
  // How far off predictions from rows of other (n, k) are at shapes like this one, as the standard
  // deviation of the log speedup; nothing where too few were tried.
  [[nodiscard]] std::optional<double> miss(Shape shape) const;
  [[nodiscard]] const std::vector<LinearSpeedup>& points() const { return points_; }
  // The model fitted to all rows; nothing where they are too few.
  [[nodiscard]] const std::optional<SpeedModel>& model() const { return model_; }

 private:
  struct Point {  // a row and its logarithms
    const LinearSpeedup* row = nullptr;
    double log2_m = 0;
    double log_speedup = 0, log_lo = 0, log_hi = 0, log_bf16 = 0;
    [[nodiscard]] int64_t m() const { return row->shape.m; }
  };
  struct Column {  // the rows of one (n, k)
    int64_t n = 0, k = 0;
    double x = 0, y = 0;        // log2 k, log2 n
    SpeedModel::Sums sums;      // of the rows
    std::vector<Point> points;  // by m
    [[nodiscard]] bool covers(int64_t m) const;
    [[nodiscard]] bool is_of(Shape shape) const { return n == shape.n && k == shape.k; }
  };
  struct Value {  // of a column at an m
    double log_speedup = 0, log_lo = 0, log_hi = 0, log_bf16 = 0;
    double off = 0;  // of the interval: how far from the rows' line the speedup may be
    int64_t m = 0;   // where it was taken: m clamped into the column's range
    double log2_m = 0;
    Terms terms{};  // of the model, there
    const Point* below = nullptr;
    const Point* above = nullptr;
    [[nodiscard]] const LinearSpeedup* nearest() const;  // of the two
  };
  struct Prediction {
    double log_speedup = 0, half_lo = 0, half_hi = 0, log_bf16 = 0;
    double distance = 0;  // octaves to the nearest row
    std::vector<const LinearSpeedup*> nearest;
  };
  // A row that was predicted without its column.
  struct Miss {
    double m = 0, size = 0;  // log2 of m and of m * n * k
    double error = 0;        // of the log speedup
  };

  [[nodiscard]] Value at(const Column& column, int64_t m) const;
  [[nodiscard]] std::vector<Value> values(int64_t m) const;  // of each column
  [[nodiscard]] std::optional<SpeedModel> fit_without(const Column* left_out) const;
  // Without a column it is one of the speedup alone.
  [[nodiscard]] Slice slice(const std::vector<Value>& values, int64_t m, const SpeedModel* model,
                            const Column* left_out) const;
  [[nodiscard]] static std::optional<Prediction> predict(const Slice& slice, Shape shape,
                                                         const SpeedModel* model);
  // How much the log speedup of a prediction may be off, beyond the rows' own intervals.
  [[nodiscard]] double error_of(Shape shape, double miss, double distance) const;
  [[nodiscard]] Estimate along_m(const Column& column, int64_t m) const;
  void leave_rows_out();
  void leave_columns_out();

  std::vector<LinearSpeedup> points_;
  std::vector<Column> columns_;
  std::optional<SpeedModel> model_;
  double bulge_ = 0;  // above a line between two rows, over span * span * t * (1 - t), in the mean
  double walk_ = 0;   // how far the log speedup leaves a column's rows within an octave
  std::vector<Miss> misses_;
  double reach_ = 0;  // so far from the nearest row were 19 of 20 of those left out
  int64_t m_min_ = 0, m_max_ = 0;
};

class Surface::Slice {
  friend Surface;
  struct Part {                       // of a column
    double x = 0, y = 0;              // its log2 k, log2 n
    double m_squared = 0;             // the square of the octaves from m to where it was taken
    double speedup = 0, bf16 = 0;     // logs: how far its value is above the trend
    double half_lo = 0, half_hi = 0;  // of the rows' own intervals
    const LinearSpeedup* nearest = nullptr;
  };
  std::vector<Part> parts_;
};

}  // namespace f8::tuning_db
