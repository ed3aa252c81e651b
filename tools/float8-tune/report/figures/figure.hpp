// A figure: an SVG drawing with its title, description and numbers. The page holds it inline and
// `--svg` writes it as a file; both come from the same body. Colours and line styles are classes
// of figure.css.
#pragma once

#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tools/float8-tune/report/figures/markup.hpp"

namespace f8::report {

struct Figure {
  std::string kind;         // the section that it belongs to, and the begin of its name
  std::string device = {};  // what the page's controls choose by; empty and 0: it is always shown
  std::string recipe = {};
  int64_t m = 0;
  std::string title;
  std::string description;
  double width = 0, height = 0;
  std::string body = {};  // SVG elements; empty: there is only the table
  DataTable table;
  std::string name = {};  // of its file and id; name_figures() gives it
};
// Gives each figure a name of its kind, device, recipe and m that no other one has.
void name_figures(std::vector<Figure>& figures);
// A figure that would be illegible if it were as narrow as others; the page lets it scroll.
[[nodiscard]] bool is_wide(const Figure& figure);
[[nodiscard]] std::string inline_svg(const Figure& figure);
[[nodiscard]] std::string svg_file(const Figure& figure);  // with its style, for use by itself

// Collects SVG elements. `style` names classes of figure.css. Shapes of one style are one path, and
// equal ones are drawn once: a page has tens of thousands, nearly all at whole pixels. The first style
// lies lowest, and text on top.
class Drawing {
 public:
  enum class Anchor { kStart, kMiddle, kEnd };
  // A horizontal bar, whose height is the style's stroke-width; `y` is its middle.
  void bar(double x, double y, double width, std::string_view style);
  void line(double x1, double y1, double x2, double y2, std::string_view style);
  void text(double x, double y, std::string_view text, Anchor anchor = Anchor::kStart,
            std::string_view style = {});
  void vertical_text(double x, double y, std::string_view text);  // centred, read upwards
  void path(std::string_view d, std::string_view style);
  enum class Marker { kCircle, kSquare, kTriangle, kCross };
  void marker(Marker marker, double x, double y, std::string_view style);
  [[nodiscard]] std::string body() const;

 private:
  using Parts = std::vector<std::pair<std::string, std::string>>;  // by style
  static std::string& part(Parts& parts, std::string_view style);
  Parts shapes_, texts_;
  std::set<std::string> drawn_;
};

// A scale from values to pixels, linear or logarithmic, whose ends are round numbers. A logarithmic
// one has positive values.
class Axis {
 public:
  Axis(double lo, double hi, bool is_log, double from_px, double to_px);
  [[nodiscard]] double at(double value) const;  // clamped into the axis
  [[nodiscard]] const std::vector<double>& ticks() const { return ticks_; }
  [[nodiscard]] bool is_log() const { return is_log_; }
  [[nodiscard]] double lo() const { return lo_; }
  [[nodiscard]] double hi() const { return hi_; }
  [[nodiscard]] double from_px() const { return from_px_; }
  [[nodiscard]] double to_px() const { return to_px_; }

 private:
  double lo_, hi_, from_px_, to_px_;
  bool is_log_;
  std::vector<double> ticks_;
};
// The plots share a width, so that a phone shows their text at nearly its size.
inline constexpr double kPlotWidth = 420;
inline constexpr double kRight = 394;  // where their horizontal axes end

// The frame of a plot with grid lines, ticks and labels. `suffix` follows the numbers of an axis.
struct Labels {
  std::string x, y;
  std::string x_suffix = {}, y_suffix = {};
};
void draw_frame(Drawing& drawing, const Axis& x, const Axis& y, const Labels& labels);

}  // namespace f8::report
