#include "tools/float8-tune/report/figures/cells.hpp"

#include <algorithm>
#include <iterator>

#include "base/format.hpp"

namespace f8::report {
namespace {

constexpr double kCellWidth = 58;
constexpr double kCellHeight = 34;
constexpr double kTop = 8;

struct Band {
  double from;  // ratios from here to the next band
  const char* style;
  const char* text;
};
constexpr Band kBands[] = {{0, "n4", "<0.7"},    {0.7, "n3", "0.7"},   {0.8, "n2", "0.8"},
                           {0.9, "n1", "0.9"},   {0.995, "even", "1"}, {1.005, "p1", "1.01"},
                           {1.15, "p2", "1.15"}, {1.35, "p3", "1.35"}, {1.6, "p4", "≥1.6"}};

// One step from a cell.
struct Step {
  int row, column;
};

class Outline {
 public:
  Outline(size_t rows, size_t columns, const Inside& inside, double inset_x, double inset_y)
      : rows_(rows), columns_(columns), inside_(inside), inset_x_(inset_x), inset_y_(inset_y) {}

  std::vector<Segment> trace() {
    for (int row = 0; row < static_cast<int>(rows_); ++row) {
      for (int column = 0; column < static_cast<int>(columns_); ++column) {
        if (!is(row, column, true)) continue;
        for (const int sign : {-1, 1}) {
          add_horizontal(row, column, sign);
          add_vertical(row, column, sign);
        }
      }
    }
    return std::move(segments_);
  }

 private:
  [[nodiscard]] bool is(int row, int column, bool wanted) const {
    if (row < 0 || column < 0 || row >= static_cast<int>(rows_) ||
        column >= static_cast<int>(columns_)) {
      return false;
    }
    return inside_(static_cast<size_t>(row), static_cast<size_t>(column)) == wanted;
  }
  [[nodiscard]] bool has_border(int row, int column, Step side) const {
    return is(row, column, true) && is(row + side.row, column + side.column, false);
  }
  // How far a side goes beyond its cell's corner, in insets: 0 where the neighbour's goes on, -1
  // where the cell's own other side meets it, 1 where it turns outwards.
  [[nodiscard]] double overhang(int row, int column, Step side, Step along) const {
    if (inset_x_ == 0 && inset_y_ == 0) return 0;
    if (has_border(row, column, along)) return -1;
    if (!is(row + along.row, column + along.column, true)) return 0;
    return has_border(row + along.row, column + along.column, side) ? 0 : 1;
  }
  void add_horizontal(int row, int column, int sign) {
    const Step side{sign, 0};
    if (!has_border(row, column, side)) return;
    const double y = row + (sign > 0 ? 1 - inset_y_ : inset_y_);
    segments_.push_back({column - inset_x_ * overhang(row, column, side, {0, -1}), y,
                         column + 1 + inset_x_ * overhang(row, column, side, {0, 1}), y});
  }
  void add_vertical(int row, int column, int sign) {
    const Step side{0, sign};
    if (!has_border(row, column, side)) return;
    const double x = column + (sign > 0 ? 1 - inset_x_ : inset_x_);
    segments_.push_back({x, row - inset_y_ * overhang(row, column, side, {-1, 0}), x,
                         row + 1 + inset_y_ * overhang(row, column, side, {1, 0})});
  }

  size_t rows_, columns_;
  const Inside& inside_;
  double inset_x_, inset_y_;
  std::vector<Segment> segments_;
};

double draw_legend(Drawing& drawing, double left, double y, const std::vector<GridLine>& lines) {
  double x = left;
  for (const Band& band : kBands) {
    drawing.bar(x, y + 8, 39, f8::format("key {}", band.style));
    drawing.text(x + 20, y + 12.5, band.text, Drawing::Anchor::kMiddle, "small");
    x += 40;
  }
  y += 26;
  for (const GridLine& line : lines) {
    drawing.line(left, y + 5, left + 34, y + 5, line.style);
    drawing.text(left + 42, y + 9, line.label, Drawing::Anchor::kStart, "small");
    y += 18;
  }
  return y;
}

}  // namespace

std::vector<Segment> border(size_t rows, size_t columns, const Inside& inside, double inset_x,
                            double inset_y) {
  return Outline(rows, columns, inside, inset_x, inset_y).trace();
}

std::string ratio_style(double ratio) {
  const char* style = kBands[0].style;
  for (const Band& band : kBands) {
    if (ratio >= band.from) style = band.style;
  }
  return style;
}

void draw_grid(Figure& figure, const Grid& grid, const std::vector<GridLine>& lines) {
  using enum Drawing::Anchor;
  Drawing drawing;
  const size_t rows = grid.rows.size();
  const size_t columns = grid.columns.size();
  size_t longest = 0;
  for (const std::string& label : grid.rows) longest = std::max(longest, label.size());
  const double left = (grid.row_label.empty() ? 8 : 30) + 8 * static_cast<double>(longest);
  const double right = left + kCellWidth * static_cast<double>(columns);
  const double bottom = kTop + kCellHeight * static_cast<double>(rows);
  for (size_t row = 0; row < rows; ++row) {
    const double y = kTop + kCellHeight * static_cast<double>(row);
    drawing.text(left - 6, y + kCellHeight / 2 + 4.5, grid.rows[row], kEnd);
    for (size_t column = 0; column < columns; ++column) {
      const double x = left + kCellWidth * static_cast<double>(column);
      const Cell& cell = grid.cells[row][column];
      const std::string style = cell.ratio ? ratio_style(*cell.ratio) : "none";
      drawing.bar(x, y + kCellHeight / 2, kCellWidth - 1,
                  "cell " + style);  // a pixel of paper between
      if (cell.text.empty()) continue;
      drawing.text(x + kCellWidth / 2, y + kCellHeight / 2 + 4.5, cell.text, kMiddle);
    }
  }
  for (const GridLine& line : lines) {
    for (const Segment& s : border(rows, columns, line.inside, line.inset_px / kCellWidth,
                                   line.inset_px / kCellHeight)) {
      drawing.line(left + kCellWidth * s.x1, kTop + kCellHeight * s.y1, left + kCellWidth * s.x2,
                   kTop + kCellHeight * s.y2, line.style);
    }
  }
  for (size_t column = 0; column < columns; ++column) {
    drawing.text(left + kCellWidth * (static_cast<double>(column) + 0.5), bottom + 17,
                 grid.columns[column], kMiddle);
  }
  drawing.text((left + right) / 2, bottom + 36, grid.column_label, kMiddle);
  drawing.vertical_text(13, (kTop + bottom) / 2, grid.row_label);
  figure.height = draw_legend(drawing, left, bottom + 48, lines) + 4;
  figure.width = std::max(right, left + 40.0 * std::size(kBands)) + 6;
  figure.body = drawing.body();
}

}  // namespace f8::report
