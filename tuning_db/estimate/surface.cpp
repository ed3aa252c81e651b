// Interpolation and extrapolation of measured speedups: see surface.hpp.
#include "tuning_db/estimate/surface.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <map>
#include <utility>

namespace f8::tuning_db {
namespace {

// All columns bend alike in the mean; this one may by so much more or less.
constexpr double kBendMargin = 0.5;
// How far a walk leaves its rows if no (n, k) has three: what the built-in tables have.
constexpr double kUnknownWalk = 0.03;
// The weight of "the model is right here" is that of a row this many octaves away.
constexpr double kPriorOctaves = 2;
// 95 of 100 errors are within so many standard deviations where some ten errors tell the deviation.
constexpr double kSigmas = 2.2;
// An error of a log speedup that says nothing is known: a factor of more than two.
constexpr double kUnknown = 1;
constexpr size_t kMinErrors = 3;
constexpr size_t kNamedNeighbours = 3;
// Leaving out every column in turn takes columns times rows; of a table beyond this, which is ten
// times what is ever measured, as many columns are left out as fit.
constexpr size_t kMostWork = size_t{1} << 22;

double log2_of(int64_t v) {
  return std::log2(static_cast<double>(v));
}

// The logs of a model's speedup and of its time in bf16. Without one nothing is known of the speedup, and
// the time grows as the work does.
double log_speedup(const SpeedModel* model, const Terms& terms) {
  return model == nullptr ? 0 : std::log(model->bf16_ns(terms) / model->fp8_ns(terms));
}
double log_bf16(const SpeedModel* model, const Terms& terms, Shape s) {
  return model == nullptr ? std::log(s.m) + std::log(s.n) + std::log(s.k)
                          : std::log(model->bf16_ns(terms));
}

double size_of(Shape shape) {
  return log2_of(shape.m) + log2_of(shape.n) + log2_of(shape.k);
}

double squared(double v) {
  return v * v;
}

double rms(const std::vector<double>& errors) {
  double sum = 0;
  for (const double e : errors) sum += e * e;
  return std::sqrt(sum / static_cast<double>(errors.size()));
}

}  // namespace

double rounded(double v) {
  return std::round(v * 1e4) / 1e4;
}

bool Surface::Column::covers(int64_t m) const {
  return points.front().m() <= m && m <= points.back().m();
}

Surface::Surface(std::vector<LinearSpeedup> points) : points_(std::move(points)) {
  std::ranges::sort(points_, {}, [](const LinearSpeedup& p) {
    return std::tuple(p.shape.n, p.shape.k, p.shape.m);
  });
  for (const LinearSpeedup& p : points_) {
    if (columns_.empty() || columns_.back().n != p.shape.n || columns_.back().k != p.shape.k) {
      columns_.push_back({.n = p.shape.n,
                          .k = p.shape.k,
                          .x = log2_of(p.shape.k),
                          .y = log2_of(p.shape.n),
                          .sums = {},
                          .points = {}});
    }
    columns_.back().sums.add({p.shape, p.bf16_ns, p.bf16_ns / p.speedup});
    columns_.back().points.push_back({.row = &p,
                                      .log2_m = log2_of(p.shape.m),
                                      .log_speedup = std::log(p.speedup),
                                      .log_lo = std::log(p.lo),
                                      .log_hi = std::log(p.hi),
                                      .log_bf16 = std::log(p.bf16_ns)});
    m_min_ = m_min_ == 0 ? p.shape.m : std::min(m_min_, p.shape.m);
    m_max_ = std::max(m_max_, p.shape.m);
  }
  model_ = fit_without(nullptr);
  leave_rows_out();
  leave_columns_out();
}

std::optional<Estimate> Surface::estimate(Shape shape) const {
  auto known = from_column(shape);
  return known ? known : from_neighbours(slice(shape.m), shape, miss(shape).value_or(0));
}

std::optional<Estimate> Surface::from_column(Shape shape) const {
  for (const Column& column : columns_) {
    if (!column.is_of(shape) || !column.covers(shape.m)) continue;
    for (const Point& point : column.points) {
      if (point.m() != shape.m) continue;
      const LinearSpeedup* p = point.row;
      return Estimate{.evidence = Evidence::kMeasured,
                      .speedup = p->speedup,
                      .lo = p->lo,
                      .hi = p->hi,
                      .bf16_ns = p->bf16_ns,
                      .terms = {.rows = std::log(p->hi / p->lo) / 2},
                      .basis = f8::format("measured, bf16 {:.1f} us, float8 {:.1f} us",
                                          p->bf16_ns / 1e3, p->bf16_ns / p->speedup / 1e3),
                      .rows = {p}};
    }
    return along_m(column, shape.m);
  }
  return std::nullopt;
}

Surface::Value Surface::at(const Column& column, int64_t m) const {
  const Point* below = &column.points.front();
  const Point* above = &column.points.back();
  m = std::clamp(m, below->m(), above->m());
  for (const Point& p : column.points) {
    if (p.m() <= m) below = &p;
  }
  for (const Point& p : column.points) {
    if (p.m() < m) continue;
    above = &p;
    break;
  }
  const double log2_m = log2_of(m);
  const double span = above->log2_m - below->log2_m;
  const double t = span == 0 ? 0 : (log2_m - below->log2_m) / span;
  const auto line = [&](double Point::*field) {
    return (1 - t) * below->*field + t * above->*field;
  };
  const double bend = bulge_ * span * span * t * (1 - t);
  const double off = kSigmas * walk_ * std::sqrt(span * t * (1 - t)) + kBendMargin * std::abs(bend);
  return {.log_speedup = line(&Point::log_speedup) + bend,
          .log_lo = line(&Point::log_lo) + bend - off,
          .log_hi = line(&Point::log_hi) + bend + off,
          .log_bf16 = line(&Point::log_bf16),
          .off = off,
          .m = m,
          .log2_m = log2_m,
          .terms = SpeedModel::terms_of({m, column.n, column.k}),
          .below = below,
          .above = above};
}

const LinearSpeedup* Surface::Value::nearest() const {
  const bool is_below = std::abs(below->log2_m - log2_m) <= std::abs(above->log2_m - log2_m);
  return (is_below ? below : above)->row;
}

Estimate Surface::along_m(const Column& column, int64_t m) const {
  const Value v = at(column, m);
  return {.evidence = Evidence::kInterpolated,
          .speedup = rounded(std::exp(v.log_speedup)),
          .lo = rounded(std::exp(v.log_lo)),
          .hi = rounded(std::exp(v.log_hi)),
          .bf16_ns = std::exp(v.log_bf16),
          .terms = {.rows = (v.log_hi - v.log_lo) / 2 - v.off, .shape = v.off},
          .basis = f8::format("interpolated between M {} ({:.3f}) and {} ({:.3f})", v.below->m(),
                              v.below->row->speedup, v.above->m(), v.above->row->speedup),
          .rows = {v.below->row, v.above->row}};
}

std::optional<SpeedModel> Surface::fit_without(const Column* left_out) const {
  SpeedModel::Sums sums;
  for (const Column& column : columns_) {
    if (&column != left_out) sums.add(column.sums);
  }
  return SpeedModel::fit(sums);
}

std::vector<Surface::Value> Surface::values(int64_t m) const {
  std::vector<Value> values;
  values.reserve(columns_.size());
  for (const Column& column : columns_) values.push_back(at(column, m));
  return values;
}

Surface::Slice Surface::slice(int64_t m) const {
  return slice(values(m), m, model_ ? &*model_ : nullptr, nullptr);
}

Surface::Slice Surface::slice(const std::vector<Value>& values, int64_t m, const SpeedModel* model,
                              const Column* left_out) const {
  Slice slice;
  slice.parts_.reserve(columns_.size());
  const double log2_m = log2_of(m);
  for (size_t i = 0; i < columns_.size(); ++i) {
    const Column& column = columns_[i];
    if (&column == left_out || (model == nullptr && !column.covers(m))) continue;
    const Value& v = values[i];
    const Shape shape = {v.m, column.n, column.k};
    slice.parts_.push_back(
        {.x = column.x,
         .y = column.y,
         .m_squared = squared(log2_m - v.log2_m),
         .speedup = v.log_speedup - log_speedup(model, v.terms),
         .bf16 = left_out == nullptr ? v.log_bf16 - log_bf16(model, v.terms, shape) : 0,
         .half_lo = v.log_speedup - v.log_lo - v.off,
         .half_hi = v.log_hi - v.log_speedup - v.off,
         .nearest = v.nearest()});
  }
  return slice;
}

std::optional<Surface::Prediction> Surface::predict(const Slice& slice, Shape shape,
                                                    const SpeedModel* model) {
  if (slice.parts_.empty()) return std::nullopt;
  const double x = log2_of(shape.k);
  const double y = log2_of(shape.n);
  struct Near {
    double distance_squared = std::numeric_limits<double>::infinity();
    const LinearSpeedup* row = nullptr;
  };
  std::array<Near, kNamedNeighbours> nearest;  // the first of equals is nearer
  // The prior weighs on the speedup's residual; without a model there is nothing to fall back to.
  const double prior = model == nullptr ? 0 : 1 / (kPriorOctaves * kPriorOctaves);
  double weights = 0;
  Prediction sum;
  for (const Slice::Part& part : slice.parts_) {
    const double distance_squared = squared(part.x - x) + squared(part.y - y) + part.m_squared;
    // A row of the shape itself outweighs everything.
    const double weight = 1 / std::max(distance_squared, 1e-9);
    weights += weight;
    sum.log_speedup += weight * part.speedup;
    sum.half_lo += weight * part.half_lo;
    sum.half_hi += weight * part.half_hi;
    sum.log_bf16 += weight * part.bf16;
    if (distance_squared >= nearest.back().distance_squared) continue;
    nearest.back() = {distance_squared, part.nearest};
    for (size_t i = nearest.size() - 1; i > 0; --i) {
      if (nearest[i].distance_squared >= nearest[i - 1].distance_squared) break;
      std::swap(nearest[i], nearest[i - 1]);
    }
  }
  sum.distance = std::sqrt(nearest.front().distance_squared);
  for (const Near& near : nearest) {
    if (near.row != nullptr) sum.nearest.push_back(near.row);
  }
  const Terms terms = SpeedModel::terms_of(shape);
  sum.log_speedup = sum.log_speedup / (weights + prior) + log_speedup(model, terms);
  sum.half_lo /= weights;
  sum.half_hi /= weights;
  sum.log_bf16 = sum.log_bf16 / weights + log_bf16(model, terms, shape);
  return sum;
}

std::optional<double> Surface::miss(Shape shape) const {
  if (misses_.size() < kMinErrors) return std::nullopt;
  const double m = log2_of(shape.m);
  const double size = size_of(shape);
  double squares = 0;
  double weights = 0;
  for (const Miss& miss : misses_) {
    const double weight = 1 / squared(squared(miss.m - m) + squared(miss.size - size) + 1);
    squares += weight * miss.error * miss.error;
    weights += weight;
  }
  return std::sqrt(squares / weights);
}

double Surface::error_of(Shape shape, double miss, double distance) const {
  const double beyond = std::max(0.0, distance - reach_);
  const double error = std::min(kUnknown, miss * (1 + beyond * beyond));
  for (const Column& column : columns_) {
    if (!column.is_of(shape)) continue;
    return kSigmas * std::min(error, walk_ * std::sqrt(distance));
  }
  return kSigmas * error;
}

std::optional<Estimate> Surface::from_neighbours(const Slice& slice, Shape shape,
                                                 double miss) const {
  const auto prediction = predict(slice, shape, model_ ? &*model_ : nullptr);
  if (!prediction || misses_.size() < kMinErrors) return std::nullopt;
  const bool inside = m_min_ <= shape.m && shape.m <= m_max_ && prediction->distance <= reach_;
  if (!inside && !model_) return std::nullopt;
  const double error = error_of(shape, miss, prediction->distance);
  Estimate e{.evidence = inside ? Evidence::kInterpolated : Evidence::kModelled,
             .speedup = rounded(std::exp(prediction->log_speedup)),
             .lo = rounded(std::exp(prediction->log_speedup - prediction->half_lo - error)),
             .hi = rounded(std::exp(prediction->log_speedup + prediction->half_hi + error)),
             .bf16_ns = std::exp(prediction->log_bf16),
             .terms = {.rows = (prediction->half_lo + prediction->half_hi) / 2, .shape = error},
             .basis = {},
             .rows = prediction->nearest};
  const double off = 100 * (std::exp(error) - 1);
  e.basis = inside ? f8::format("interpolated between {} measured (n, k), give or take {:.0f} %",
                                columns_.size(), off)
                   : f8::format("outside the {} measured shapes, give or take {:.0f} %",
                                points_.size(), off);
  return e;
}

// Each row between two others of its column, against the line through these: how much columns bend
// in the mean, and how far rows are from that.
void Surface::leave_rows_out() {
  struct Middle {
    double above_line, span, t;
    [[nodiscard]] double bend() const { return span * span * t * (1 - t); }
  };
  std::vector<Middle> middles;
  double product = 0;
  double squares = 0;
  for (const Column& column : columns_) {
    for (size_t i = 1; i + 1 < column.points.size(); ++i) {
      const Point& a = column.points[i - 1];
      const Point& b = column.points[i];
      const Point& c = column.points[i + 1];
      const double span = c.log2_m - a.log2_m;
      const double t = (b.log2_m - a.log2_m) / span;
      const double line = (1 - t) * a.log_speedup + t * c.log_speedup;
      middles.push_back({b.log_speedup - line, span, t});
      product += middles.back().above_line * middles.back().bend();
      squares += middles.back().bend() * middles.back().bend();
    }
  }
  walk_ = kUnknownWalk;
  if (middles.size() < kMinErrors) return;
  bulge_ = product / squares;
  std::vector<double> walks;
  for (const Middle& middle : middles) {
    walks.push_back((middle.above_line - bulge_ * middle.bend()) /
                    std::sqrt(middle.span * middle.t * (1 - middle.t)));
  }
  walk_ = rms(walks);
}

void Surface::leave_columns_out() {
  struct LeftOut {
    const Column* column;
    std::optional<SpeedModel> model;
    const Point* point;
  };
  std::map<int64_t, std::vector<LeftOut>> by_m;  // the columns' values at an m are found once
  const size_t step = 1 + columns_.size() * points_.size() / kMostWork;
  for (size_t i = 0; i < columns_.size(); i += step) {
    const auto model = fit_without(&columns_[i]);
    if (model_ && !model) continue;
    for (const Point& p : columns_[i].points) by_m[p.m()].push_back({&columns_[i], model, &p});
  }
  std::vector<double> distances;
  for (const auto& [m, all] : by_m) {
    const std::vector<Value> known = values(m);
    for (const auto& [column, model, p] : all) {
      const SpeedModel* without = model ? &*model : nullptr;
      const auto predicted = predict(slice(known, m, without, column), p->row->shape, without);
      if (!predicted) continue;
      misses_.push_back({.m = p->log2_m,
                         .size = size_of(p->row->shape),
                         .error = predicted->log_speedup - p->log_speedup});
      distances.push_back(predicted->distance);
    }
  }
  if (distances.empty()) return;
  std::ranges::sort(distances);
  reach_ = distances[(distances.size() - 1) * 19 / 20];
}

}  // namespace f8::tuning_db
