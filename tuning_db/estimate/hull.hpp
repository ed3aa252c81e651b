// The convex hull of points of the plane.
#pragma once

#include <vector>

namespace f8::tuning_db {

struct Point2 {
  double x = 0, y = 0;
};

// How far p is outside the hull of the points; 0 inside and on it. A hull of one point or of points
// on one line has no inside, only that point or segment. Infinite without points.
[[nodiscard]] double distance_to_hull(std::vector<Point2> points, Point2 p);

}  // namespace f8::tuning_db
