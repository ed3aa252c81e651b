// Interpolation and extrapolation of measured speedups: see surface.hpp.
#include "tuning_db/estimate/surface.hpp"

#include <algorithm>
#include <cmath>
#include <set>

#include "tuning_db/estimate/hull.hpp"

namespace f8::tuning_db {
namespace {

// The curvature if no (n, k) has three rows: 5 % of error in the middle of two octaves.
constexpr double kUnknownCurvature = 0.05;
// Three rows give the mean curvature between them; in one gap it may be this much more.
constexpr double kCurvatureMargin = 1.5;
// The weight of "the model is right here" is that of a row this many octaves away.
constexpr double kPriorOctaves = 2;
// Normal errors stay within two standard deviations 95 times in 100.
constexpr double kSigmas = 2;
constexpr size_t kMinErrors = 3;
constexpr size_t kNamedNeighbours = 3;
// Leaving out every column in turn takes columns times rows; of a table beyond this, which is ten
// times what is ever measured, as many columns are left out as fit.
constexpr size_t kMostWork = size_t{1} << 22;

double log2_of(int64_t v) {
  return std::log2(static_cast<double>(v));
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
  measure_curvature();
  leave_one_out();
  leave_ends_out();
}

std::optional<Estimate> Surface::estimate(Shape shape) const {
  for (const Column& column : columns_) {
    if (column.n != shape.n || column.k != shape.k || !column.covers(shape.m)) continue;
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
  return from_neighbours(shape);
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
  // The largest error of a chord of a curve with this second derivative.
  const double sag = curvature_ / 2 * t * (1 - t) * span * span;
  return {.log_speedup = line(&LinearSpeedup::speedup),
          .log_lo = line(&LinearSpeedup::lo) - sag,
          .log_hi = line(&LinearSpeedup::hi) + sag,
          .log_bf16 = line(&LinearSpeedup::bf16_ns),
          .sag = sag,
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
      .terms = {.rows = (v.log_hi - v.log_lo) / 2 - v.sag, .shape = v.sag},
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
  const auto trend = [model](Shape s) {
    return model == nullptr ? 0 : std::log(model->bf16_ns(s) / model->fp8_ns(s));
  };
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
    const double distance = std::hypot(column.x - x, column.y - y);
    // The column itself outweighs everything.
    const double weight = 1 / std::max(distance * distance, 1e-9);
    const Value v = at(column, shape.m);
    const Shape taken{v.m, column.n, column.k};
    weights += weight;
    sum.log_speedup += weight * (v.log_speedup - trend(taken));
    sum.half_lo += weight * (v.log_speedup - v.log_lo);
    sum.half_hi += weight * (v.log_hi - v.log_speedup);
    sum.log_bf16 += weight * (v.log_bf16 - trend_bf16(taken));
    by_distance.emplace_back(distance, &column);
  }
  if (by_distance.empty()) return std::nullopt;
  std::ranges::stable_sort(by_distance, {}, &std::pair<double, const Column*>::first);
  by_distance.resize(std::min(by_distance.size(), kNamedNeighbours));
  for (const auto& [distance, column] : by_distance) sum.nearest.push_back(column);
  sum.log_speedup = sum.log_speedup / (weights + prior) + trend(shape);
  sum.half_lo /= weights;
  sum.half_hi /= weights;
  sum.log_bf16 = sum.log_bf16 / weights + trend_bf16(shape);
  return sum;
}

double Surface::hull_distance(Shape shape, const Column* left_out) const {
  std::vector<Point2> hull;
  for (const Column& column : columns_) {
    if (&column != left_out && column.covers(shape.m)) hull.push_back({column.x, column.y});
  }
  return distance_to_hull(std::move(hull), {log2_of(shape.k), log2_of(shape.n)});
}

double Surface::error_of(Shape shape, bool inside) const {
  if (inside) return kSigmas * inside_rms_.value_or(*everywhere_rms_);
  const int64_t m = std::clamp(shape.m, m_min_, m_max_);
  for (const Column& column : columns_) {
    if (column.n != shape.n || column.k != shape.k || !per_octave_rms_) continue;
    return kSigmas * *per_octave_rms_ * std::abs(log2_of(shape.m) - log2_of(at(column, m).m));
  }
  // Against the hull at the nearest m that was measured.
  const double sideways = hull_distance({m, shape.n, shape.k}, nullptr);
  const double octaves =
      std::hypot(std::isfinite(sideways) ? sideways : 1.0, log2_of(shape.m) - log2_of(m));
  return kSigmas * *everywhere_rms_ * (1 + octaves);
}

std::optional<Estimate> Surface::from_neighbours(Shape shape) const {
  const auto prediction = predict(shape, model_ ? &*model_ : nullptr, nullptr);
  if (!prediction || !everywhere_rms_) return std::nullopt;
  const bool m_inside = m_min_ <= shape.m && shape.m <= m_max_;
  const bool inside = m_inside && hull_distance(shape, nullptr) == 0;
  if (!inside && !model_) return std::nullopt;
  const double error = error_of(shape, inside);
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

void Surface::measure_curvature() {
  std::vector<double> seen;
  for (const Column& column : columns_) {
    for (size_t i = 1; i + 1 < column.points.size(); ++i) {
      const LinearSpeedup& a = *column.points[i - 1];
      const LinearSpeedup& b = *column.points[i];
      const LinearSpeedup& c = *column.points[i + 1];
      const double ab = log2_of(b.shape.m) - log2_of(a.shape.m);
      const double bc = log2_of(c.shape.m) - log2_of(b.shape.m);
      const double slope_ab = std::log(b.speedup / a.speedup) / ab;
      const double slope_bc = std::log(c.speedup / b.speedup) / bc;
      seen.push_back(2 * std::abs(slope_bc - slope_ab) / (ab + bc));
    }
  }
  curvature_ = kUnknownCurvature;
  if (seen.empty()) return;
  // Nine of ten are no more curved.
  std::ranges::sort(seen);
  curvature_ = kCurvatureMargin * seen[(seen.size() - 1) * 9 / 10];
}

void Surface::leave_one_out() {
  std::vector<double> inside, everywhere;
  const size_t step = 1 + columns_.size() * points_.size() / kMostWork;
  for (size_t i = 0; i < columns_.size(); i += step) {
    const Column& column = columns_[i];
    const auto model = fit_without(&column);
    if (model_ && !model) continue;
    for (const LinearSpeedup* p : column.points) {
      const auto predicted = predict(p->shape, model ? &*model : nullptr, &column);
      if (!predicted) continue;
      const double error = predicted->log_speedup - std::log(p->speedup);
      everywhere.push_back(error);
      if (hull_distance(p->shape, &column) == 0) inside.push_back(error);
    }
  }
  if (everywhere.size() >= kMinErrors) everywhere_rms_ = rms(everywhere);
  if (inside.size() >= kMinErrors) inside_rms_ = rms(inside);
}

void Surface::leave_ends_out() {
  if (!model_) return;
  const auto residual = [this](const LinearSpeedup& p) {
    return std::log(p.speedup) - std::log(model_->bf16_ns(p.shape) / model_->fp8_ns(p.shape));
  };
  std::vector<double> errors;
  for (const Column& column : columns_) {
    for (size_t i = 1; i < column.points.size(); ++i) {
      if (i != 1 && i + 1 != column.points.size()) continue;
      const LinearSpeedup& a = *column.points[i - 1];
      const LinearSpeedup& b = *column.points[i];
      errors.push_back((residual(b) - residual(a)) / (log2_of(b.shape.m) - log2_of(a.shape.m)));
    }
  }
  if (errors.size() >= kMinErrors) per_octave_rms_ = rms(errors);
}

}  // namespace f8::tuning_db
