// Monotone chain: see hull.hpp.
#include "tuning_db/estimate/hull.hpp"

#include <algorithm>
#include <cmath>
#include <limits>
#include <tuple>

namespace f8::tuning_db {
namespace {

// A measured shape is on its own hull in spite of rounding.
constexpr double kTolerance = 1e-9;

double cross(Point2 o, Point2 a, Point2 b) {
  return (a.x - o.x) * (b.y - o.y) - (a.y - o.y) * (b.x - o.x);
}

double distance_to_segment(Point2 a, Point2 b, Point2 p) {
  const double dx = b.x - a.x;
  const double dy = b.y - a.y;
  const double length2 = dx * dx + dy * dy;
  const double t =
      length2 == 0 ? 0 : std::clamp(((p.x - a.x) * dx + (p.y - a.y) * dy) / length2, 0.0, 1.0);
  return std::hypot(p.x - a.x - t * dx, p.y - a.y - t * dy);
}

// Counterclockwise, without points on edges.
std::vector<Point2> hull_of(std::vector<Point2> points) {
  std::ranges::sort(points, {}, [](Point2 p) { return std::tuple(p.x, p.y); });
  std::vector<Point2> hull;
  const auto chain = [&hull](const auto& range) {
    const size_t start = hull.size();
    for (const Point2 p : range) {
      while (hull.size() >= start + 2 &&
             cross(hull[hull.size() - 2], hull.back(), p) <= kTolerance) {
        hull.pop_back();
      }
      hull.push_back(p);
    }
    hull.pop_back();
  };
  if (points.size() < 3) return points;
  chain(points);
  std::ranges::reverse(points);
  chain(points);
  return hull;
}

}  // namespace

double distance_to_hull(std::vector<Point2> points, Point2 p) {
  const std::vector<Point2> hull = hull_of(std::move(points));
  if (hull.empty()) return std::numeric_limits<double>::infinity();
  double nearest = std::numeric_limits<double>::infinity();
  bool inside = hull.size() >= 3;
  for (size_t i = 0; i < hull.size(); ++i) {
    const Point2 a = hull[i];
    const Point2 b = hull[(i + 1) % hull.size()];
    nearest = std::min(nearest, distance_to_segment(a, b, p));
    inside = inside && cross(a, b, p) >= 0;
  }
  return inside || nearest < kTolerance ? 0 : nearest;
}

}  // namespace f8::tuning_db
