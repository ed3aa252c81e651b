// Interpolation and extrapolation of measured speedups: see surface.hpp.
#include "tuning_db/estimate/surface.hpp"

#include <algorithm>
#include <cmath>

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

// The log speedup of the model; without one nothing is known of it.
double trend(const SpeedModel* model, Shape shape) {
  return model == nullptr ? 0 : std::log(model->bf16_ns(shape) / model->fp8_ns(shape));
}

double size_of(Shape shape) {
  return log2_of(shape.m) + log2_of(shape.n) + log2_of(shape.k);
}

// Printed and compared on many machines, whose last bits of exp and log differ.
double rounded(double v) {
  return std::round(v * 1e4) / 1e4;
}

double rms(const std::vector<double>& errors) {
  double sum = 0;
  for (const double e : errors) sum += e * e;
  return std::sqrt(sum / static_cast<double>(errors.size()));
}

}  // namespace

bool Surface::Column::covers(int64_t m) const {
  return points.front()->shape.m <= m && m <= points.back()->shape.m;
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
                          .points = {}});
    }
    columns_.back().points.push_back(&p);
    m_min_ = m_min_ == 0 ? p.shape.m : std::min(m_min_, p.shape.m);
    m_max_ = std::max(m_max_, p.shape.m);
  }
  model_ = fit_without(nullptr);
  leave_rows_out();
  leave_columns_out();
}

std::optional<Estimate> Surface::estimate(Shape shape) const {
  auto known = from_column(shape);
  return known ? known : from_neighbours(shape, miss(shape).value_or(0));
}

std::optional<Estimate> Surface::from_column(Shape shape) const {
  for (const Column& column : columns_) {
    if (!column.is_of(shape) || !column.covers(shape.m)) continue;
    for (const LinearSpeedup* p : column.points) {
      if (p->shape.m != shape.m) continue;
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
  const LinearSpeedup* below = column.points.front();
  const LinearSpeedup* above = column.points.back();
  m = std::clamp(m, below->shape.m, above->shape.m);
  for (const LinearSpeedup* p : column.points) {
    if (p->shape.m <= m) below = p;
  }
  for (const LinearSpeedup* p : column.points) {
    if (p->shape.m < m) continue;
    above = p;
    break;
  }
  const double span = log2_of(above->shape.m) - log2_of(below->shape.m);
  const double t = span == 0 ? 0 : (log2_of(m) - log2_of(below->shape.m)) / span;
  const auto line = [&](double LinearSpeedup::*field) {
    return (1 - t) * std::log(below->*field) + t * std::log(above->*field);
  };
  const double bend = bulge_ * span * span * t * (1 - t);
  const double off = kSigmas * walk_ * std::sqrt(span * t * (1 - t)) + kBendMargin * std::abs(bend);
  return {.log_speedup = line(&LinearSpeedup::speedup) + bend,
          .log_lo = line(&LinearSpeedup::lo) + bend - off,
          .log_hi = line(&LinearSpeedup::hi) + bend + off,
          .log_bf16 = line(&LinearSpeedup::bf16_ns),
          .off = off,
          .m = m,
          .below = below,
          .above = above};
}

Estimate Surface::along_m(const Column& column, int64_t m) const {
  const Value v = at(column, m);
  return {
      .evidence = Evidence::kInterpolated,
      .speedup = rounded(std::exp(v.log_speedup)),
      .lo = rounded(std::exp(v.log_lo)),
      .hi = rounded(std::exp(v.log_hi)),
      .bf16_ns = std::exp(v.log_bf16),
      .terms = {.rows = (v.log_hi - v.log_lo) / 2 - v.off, .shape = v.off},
      .basis = f8::format("interpolated between M {} ({:.3f}) and {} ({:.3f})", v.below->shape.m,
                          v.below->speedup, v.above->shape.m, v.above->speedup),
      .rows = {v.below, v.above}};
}

std::optional<SpeedModel> Surface::fit_without(const Column* left_out) const {
  std::vector<TimedShape> rows;
  for (const Column& column : columns_) {
    if (&column == left_out) continue;
    for (const LinearSpeedup* p : column.points) {
      rows.push_back({p->shape, p->bf16_ns, p->bf16_ns / p->speedup});
    }
  }
  return SpeedModel::fit(rows);
}

std::optional<Surface::Prediction> Surface::predict(Shape shape, const SpeedModel* model,
                                                    const Column* left_out) const {
  const double x = log2_of(shape.k);
  const double y = log2_of(shape.n);
  const auto trend_bf16 = [model](Shape s) {
    return model == nullptr ? std::log(s.m) + std::log(s.n) + std::log(s.k)
                            : std::log(model->bf16_ns(s));
  };
  std::vector<std::pair<double, const Column*>> by_distance;
  // The prior weighs on the speedup's residual; without a model there is nothing to fall back to.
  const double prior = model == nullptr ? 0 : 1 / (kPriorOctaves * kPriorOctaves);
  double weights = 0;
  Prediction sum;
  for (const Column& column : columns_) {
    if (&column == left_out || (model == nullptr && !column.covers(shape.m))) continue;
    const Value v = at(column, shape.m);
    const double distance = std::hypot(column.x - x, column.y - y, log2_of(shape.m) - log2_of(v.m));
    // A row of the shape itself outweighs everything.
    const double weight = 1 / std::max(distance * distance, 1e-9);
    const Shape taken{v.m, column.n, column.k};
    weights += weight;
    sum.log_speedup += weight * (v.log_speedup - trend(model, taken));
    sum.half_lo += weight * (v.log_speedup - v.log_lo - v.off);
    sum.half_hi += weight * (v.log_hi - v.log_speedup - v.off);
    sum.log_bf16 += weight * (v.log_bf16 - trend_bf16(taken));
    by_distance.emplace_back(distance, &column);
  }
  if (by_distance.empty()) return std::nullopt;
  std::ranges::stable_sort(by_distance, {}, &std::pair<double, const Column*>::first);
  sum.distance = by_distance.front().first;
  by_distance.resize(std::min(by_distance.size(), kNamedNeighbours));
  for (const auto& [distance, column] : by_distance) sum.nearest.push_back(column);
  sum.log_speedup = sum.log_speedup / (weights + prior) + trend(model, shape);
  sum.half_lo /= weights;
  sum.half_hi /= weights;
  sum.log_bf16 = sum.log_bf16 / weights + trend_bf16(shape);
  return sum;
}

std::optional<double> Surface::miss(Shape shape) const {
  if (misses_.size() < kMinErrors) return std::nullopt;
  const double m = log2_of(shape.m);
  const double size = size_of(shape);
  double squares = 0;
  double weights = 0;
  for (const Miss& miss : misses_) {
    const double apart = std::hypot(miss.m - m, miss.size - size);
    const double weight = std::pow(apart * apart + 1, -2);
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

std::optional<Estimate> Surface::from_neighbours(Shape shape, double miss) const {
  const auto prediction = predict(shape, model_ ? &*model_ : nullptr, nullptr);
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
             .rows = {}};
  for (const Column* column : prediction->nearest) {
    const Value v = at(*column, shape.m);
    const auto* nearest = std::abs(log2_of(v.below->shape.m) - log2_of(v.m)) <=
                                  std::abs(log2_of(v.above->shape.m) - log2_of(v.m))
                              ? v.below
                              : v.above;
    e.rows.push_back(nearest);
  }
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
      const LinearSpeedup& a = *column.points[i - 1];
      const LinearSpeedup& b = *column.points[i];
      const LinearSpeedup& c = *column.points[i + 1];
      const double span = log2_of(c.shape.m) - log2_of(a.shape.m);
      const double t = (log2_of(b.shape.m) - log2_of(a.shape.m)) / span;
      const double line = (1 - t) * std::log(a.speedup) + t * std::log(c.speedup);
      middles.push_back({std::log(b.speedup) - line, span, t});
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
  std::vector<double> distances;
  const size_t step = 1 + columns_.size() * points_.size() / kMostWork;
  for (size_t i = 0; i < columns_.size(); i += step) {
    const Column& column = columns_[i];
    const auto model = fit_without(&column);
    if (model_ && !model) continue;
    for (const LinearSpeedup* p : column.points) {
      const auto predicted = predict(p->shape, model ? &*model : nullptr, &column);
      if (!predicted) continue;
      misses_.push_back({.m = log2_of(p->shape.m),
                         .size = size_of(p->shape),
                         .error = predicted->log_speedup - std::log(p->speedup)});
      distances.push_back(predicted->distance);
    }
  }
  if (distances.empty()) return;
  std::ranges::sort(distances);
  reach_ = distances[(distances.size() - 1) * 19 / 20];
}

}  // namespace f8::tuning_db
