// A grid of cells with numbers in them: a ratio's colour diverges at 1, from orange (slower) to
// blue (faster), and the digits say the same. Lines run between cells.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "tools/float8-tune/report/figures/figure.hpp"

namespace f8::report {

struct Cell {
  std::optional<double> ratio{};  // nothing: an empty cell
  std::string text{};
};
struct Grid {
  std::vector<std::string> rows, columns;  // the first row is the uppermost
  std::vector<std::vector<Cell>> cells;    // by row
  std::string row_label, column_label;
};

// A line in units of cells, from the upper left corner.
struct Segment {
  double x1 = 0, y1 = 0, x2 = 0, y2 = 0;
  bool operator==(const Segment&) const = default;
};
// Says of a cell (row, column) whether it is inside; nothing where that is not known.
using Inside = std::function<std::optional<bool>(size_t row, size_t column)>;
// The border of the inside against cells that are known to be outside, drawn on the inside's cells
// at these distances from their edges.
[[nodiscard]] std::vector<Segment> border(size_t rows, size_t columns, const Inside& inside,
                                          double inset_x = 0, double inset_y = 0);

// The class of figure.css for a ratio: "n4" to "n1" below 1, "even" where two
// digits say 1.00, "p1" to "p4" above.
[[nodiscard]] std::string ratio_style(double ratio);

struct GridLine {
  std::string style, label;
  Inside inside;
  double inset_px = 0;
};
// Draws the grid with its lines and the legends of both; sets body, width and height.
void draw_grid(Figure& figure, const Grid& grid, const std::vector<GridLine>& lines);

}  // namespace f8::report
