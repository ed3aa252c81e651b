// Loss curves become an SVG document: the smoothed losses with a legend, and below them how far
// each is from the first curve, which the losses themselves hardly show.
#include <algorithm>
#include <array>
#include <cmath>
#include <string_view>

#include "error.hpp"
#include "report/curve.hpp"

namespace train {
namespace {

constexpr double kWidth = 860;
constexpr double kHeight = 640;
constexpr double kLeft = 70;
constexpr double kRight = 20;
constexpr double kTop = 30;        // top of the losses
constexpr double kMiddle = 380;    // bottom of the losses
constexpr double kLowerTop = 420;  // top of the differences
constexpr double kLowerBottom = 580;
constexpr size_t kMostPoints = 800;  // a polyline has no more, for no screen would show them
constexpr std::array kColours = {"#222222", "#d1495b", "#2e86ab", "#3a7d44", "#e08e1b", "#7b4fa3"};

std::string escaped(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      default:
        out += static_cast<unsigned char>(c) < 0x20 ? ' ' : c;
    }
  }
  return out;
}

// Gives the distance of about `count` ticks: 1, 2 or 5 times a power of ten.
double tick_distance(double range, int count) {
  const double rough = range / count;
  const double power = std::pow(10.0, std::floor(std::log10(rough)));
  for (const double step : {1.0, 2.0, 5.0}) {
    if (step * power >= rough) return step * power;
  }
  return 10 * power;
}

struct Axis {
  double low, high;    // values
  double start, stop;  // pixels

  [[nodiscard]] double at(double value) const {
    return start + (value - low) / (high - low) * (stop - start);
  }
};

class Picture {
 public:
  Picture() {
    add(
        format("<?xml version=\"1.0\" encoding=\"UTF-8\"?>\n"
               "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 %g %g\" width=\"%g\" "
               "height=\"%g\" font-family=\"sans-serif\" font-size=\"13\">\n"
               "<rect width=\"%g\" height=\"%g\" fill=\"white\"/>\n",
               kWidth, kHeight, kWidth, kHeight, kWidth, kHeight));
  }
  void add(std::string_view svg) { text_ += svg; }
  void line(double x1, double y1, double x2, double y2, const char* colour) {
    add(format("<line x1=\"%.1f\" y1=\"%.1f\" x2=\"%.1f\" y2=\"%.1f\" stroke=\"%s\"/>\n", x1, y1,
               x2, y2, colour));
  }
  void label(double x, double y, const char* anchor, std::string_view words) {
    add(format("<text x=\"%.1f\" y=\"%.1f\" text-anchor=\"%s\">%s</text>\n", x, y, anchor,
               escaped(words).c_str()));
  }
  std::string finish() {
    text_ += "</svg>\n";
    return std::move(text_);
  }

 private:
  std::string text_;
};

using Line = std::vector<double>;

void draw_axes(Picture& picture, const Axis& x, const Axis& y, int ticks,
               const std::string& title) {
  const double x_step = tick_distance(x.high - x.low, 8);
  for (double value = x.low; value <= x.high * (1 + 1e-9); value += x_step) {
    picture.line(x.at(value), y.start, x.at(value), y.stop, "#e4e4e4");
    picture.label(x.at(value), y.start + 18, "middle", format("%.6g", value));
  }
  const double y_step = tick_distance(y.high - y.low, ticks);
  for (double tick = std::ceil(y.low / y_step); tick * y_step <= y.high; ++tick) {
    const double value = tick * y_step;
    picture.line(x.start, y.at(value), x.stop, y.at(value), "#e4e4e4");
    picture.label(x.start - 8, y.at(value) + 4, "end", format("%.4g", value));
  }
  picture.line(x.start, y.start, x.stop, y.start, "#222222");
  picture.line(x.start, y.start, x.start, y.stop, "#222222");
  picture.add(format(
      "<text transform=\"translate(18 %.1f) rotate(-90)\" text-anchor=\"middle\">%s</text>\n",
      (y.start + y.stop) / 2, title.c_str()));
}

// Sets the axis to what the lines' finite values span, and a little more.
void fit(Axis& y, const std::vector<Line>& lines, double least_margin) {
  double least = HUGE_VAL;
  double most = -HUGE_VAL;
  for (const Line& line : lines) {
    for (const double value : line) {
      if (!std::isfinite(value)) continue;
      least = std::min(least, value);
      most = std::max(most, value);
    }
  }
  if (least > most) return;  // no value is finite
  const double margin = std::max(0.05 * (most - least), least_margin);
  y.low = least - margin;
  y.high = most + margin;
}

void draw_lines(Picture& picture, const Axis& x, const Axis& y, const std::vector<Line>& lines) {
  for (size_t c = 0; c < lines.size(); ++c) {
    const Line& line = lines[c];
    picture.add(format("<polyline fill=\"none\" stroke=\"%s\" stroke-width=\"1.5\" points=\"",
                       kColours[c % kColours.size()]));
    const size_t stride = line.size() / kMostPoints + 1;
    for (size_t i = 0; i < line.size(); ++i) {
      if ((i % stride != 0 && i + 1 != line.size()) || !std::isfinite(line[i])) continue;
      picture.add(format("%.1f,%.2f ", x.at(static_cast<double>(i + 1)), y.at(line[i])));
    }
    picture.add("\"/>\n");
  }
}

// Gives each line's difference from the first in percent, as far as both go.
std::vector<Line> differences(const std::vector<Line>& lines) {
  std::vector<Line> out;
  for (const Line& line : lines) {
    const size_t length = std::min(line.size(), lines[0].size());
    Line& difference = out.emplace_back();
    for (size_t i = 0; i < length; ++i) difference.push_back(100 * (line[i] / lines[0][i] - 1));
  }
  return out;
}

}  // namespace

std::string to_svg(const std::vector<Curve>& curves) {
  std::vector<Line> lines;
  Axis x{0, 1, kLeft, kWidth - kRight};
  for (const Curve& curve : curves) {
    lines.push_back(smoothed(curve.loss));
    x.high = std::max(x.high, static_cast<double>(curve.loss.size()));
  }
  Axis y{0, 1, kMiddle, kTop};
  fit(y, lines, 0.01);

  Picture picture;
  draw_axes(picture, x, y, 8, format("loss (nats per byte), mean of %zu steps", kSmoothingSteps));
  draw_lines(picture, x, y, lines);
  for (size_t c = 0; c < curves.size(); ++c) {
    const double row = kTop + 14 + 18 * static_cast<double>(c);
    picture.line(x.stop - 200, row - 4, x.stop - 175, row - 4, kColours[c % kColours.size()]);
    picture.label(x.stop - 168, row, "start", curves[c].name);
  }
  const std::vector<Line> lower = differences(lines);
  Axis percent{-1, 1, kLowerBottom, kLowerTop};
  fit(percent, lower, 0.1);
  draw_axes(picture, x, percent, 4, "from the first (%)");
  draw_lines(picture, x, percent, lower);
  picture.label((x.start + x.stop) / 2, kHeight - 15, "middle", "step");
  return picture.finish();
}

}  // namespace train
