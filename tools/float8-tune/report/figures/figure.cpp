#include "tools/float8-tune/report/figures/figure.hpp"

#include <algorithm>
#include <cmath>
#include <set>

#include "base/format.hpp"
#include "tools/float8-tune/report/figures/text.hpp"

namespace f8::report {
namespace {

// Tenths of a pixel, without zeros that say nothing.
std::string px(double value) {
  std::string text = f8::format("{:.1f}", value);
  if (text.ends_with(".0")) text.resize(text.size() - 2);
  return text;
}

std::string number(double value) {
  if (std::abs(value) >= 10'000) return f8::format("{:g}k", value / 1000);
  return f8::format("{:.6g}", value);
}

std::string svg(const Figure& figure, std::string_view attributes, std::string_view style) {
  return f8::format(
      "<svg {}viewBox=\"0 0 {} {}\" role=\"img\" class=\"figure\" aria-labelledby=\"{}-t {}-d\">"
      "<title id=\"{}-t\">{}</title><desc id=\"{}-d\">{}</desc>{}\n{}</svg>",
      attributes, px(figure.width), px(figure.height), figure.name, figure.name, figure.name,
      escape(figure.title), figure.name, escape(figure.description), style, figure.body);
}

bool is_decade(double tick) {
  const double exponent = std::log10(tick);
  return std::abs(exponent - std::round(exponent)) < 1e-6;
}

// True if the numbers of a logarithmic axis would touch, so that only its decades have one.
bool has_sparse_labels(const Axis& axis, double room_px) {
  if (!axis.is_log()) return false;
  for (size_t i = 1; i < axis.ticks().size(); ++i) {
    if (std::abs(axis.at(axis.ticks()[i]) - axis.at(axis.ticks()[i - 1])) < room_px) return true;
  }
  return false;
}

// The rules with the colours that a block of variables gives.
std::string with_colours(std::string_view rules, std::string_view variables) {
  constexpr std::string_view kUse = "var(";
  std::string text;
  for (size_t at = rules.find(kUse); at != rules.npos; at = rules.find(kUse)) {
    text += rules.substr(0, at);
    const size_t name = at + kUse.size();
    const size_t end = rules.find(')', name);
    const std::string declared = f8::format("{}: ", rules.substr(name, end - name));
    const size_t value = variables.find(declared) + declared.size();
    text += variables.substr(value, variables.find(';', value) - value);
    rules.remove_prefix(end + 1);
  }
  return text.append(rules);
}

// The style of a figure by itself: colours in place of variables, which few programs but browsers
// know.
std::string style_of_file() {
  const std::string_view css = text::figure_css;
  const std::string_view rules = css.substr(css.find("svg.figure"));
  std::string text = with_colours(rules, css);
  for (const std::string_view media : {"@media (prefers-color-scheme: dark)", "@media print"}) {
    text += f8::format("{} {{\n{}}}\n", media, with_colours(rules, css.substr(css.find(media))));
  }
  return text;
}

}  // namespace

void name_figures(std::vector<Figure>& figures) {
  std::set<std::string> taken;
  for (Figure& figure : figures) {
    std::string name = figure.kind;
    for (const std::string& part : {figure.device, figure.recipe}) {
      if (!part.empty()) name += f8::format("-{}", slug(part));
    }
    if (figure.m > 0) name += f8::format("-m{}", figure.m);
    figure.name = name;
    for (int i = 2; !taken.insert(figure.name).second; ++i) {
      figure.name = f8::format("{}-{}", name, i);
    }
  }
}

bool is_wide(const Figure& figure) {
  return figure.width > 1.25 * kPlotWidth;
}

std::string inline_svg(const Figure& figure) {
  const std::string least =
      is_wide(figure) ? f8::format("; min-width: {}px", px(0.85 * figure.width)) : std::string();
  return svg(figure, f8::format("style=\"max-width: {}px{}\" ", px(1.3 * figure.width), least), "");
}

std::string svg_file(const Figure& figure) {
  static const std::string kStyle = f8::format("<style>\n{}</style>", style_of_file());
  const std::string attributes =
      f8::format("xmlns=\"http://www.w3.org/2000/svg\" width=\"{}\" height=\"{}\" ",
                 px(figure.width), px(figure.height));
  return svg(figure, attributes, kStyle) + "\n";
}

void Drawing::bar(double x, double y, double width, std::string_view style) {
  path(f8::format("M{} {}h{}", px(x), px(y), px(width)), style);
}

void Drawing::line(double x1, double y1, double x2, double y2, std::string_view style) {
  const std::string from = f8::format("M{:.0f} {:.0f}", x1, y1);
  if (x1 == x2) return path(f8::format("{}V{:.0f}", from, y2), style);
  if (y1 == y2) return path(f8::format("{}H{:.0f}", from, x2), style);
  path(f8::format("{}L{:.0f} {:.0f}", from, x2, y2), style);
}

void Drawing::text(double x, double y, std::string_view text, Anchor anchor,
                   std::string_view style) {
  constexpr std::string_view kAnchors[] = {"", "mid", "end"};
  const std::string_view align = kAnchors[static_cast<size_t>(anchor)];
  const char* space = align.empty() || style.empty() ? "" : " ";
  part(texts_, f8::format("{}{}{}", align, space, style)) +=
      f8::format("<text x=\"{:.0f}\" y=\"{:.0f}\">{}</text>", x, y, escape(text));
}

void Drawing::vertical_text(double x, double y, std::string_view text) {
  part(texts_, "mid") += f8::format(
      "<text transform=\"translate({:.0f} {:.0f}) rotate(-90)\">{}</text>", x, y, escape(text));
}

void Drawing::path(std::string_view d, std::string_view style) {
  if (drawn_.insert(f8::format("{} {}", style, d)).second) part(shapes_, style) += d;
}

// A short line with round ends is a dot.
void Drawing::marker(Marker marker, double x, double y, std::string_view style) {
  switch (marker) {
    case Marker::kCircle:
      return path(f8::format("M{:.0f} {:.0f}h1", x, y), f8::format("dot {}", style));
    case Marker::kSquare:
      return path(f8::format("M{:.0f} {:.0f}h5", x - 2.5, y), f8::format("square {}", style));
    case Marker::kTriangle:
      return path(f8::format("M{:.0f} {:.0f}l3.5 6h-7z", x, y - 3.5), style);
    case Marker::kCross:
      return path(f8::format("M{:.0f} {:.0f}l7 7m0-7l-7 7", x - 3.5, y - 3.5), style);
  }
}

std::string& Drawing::part(Parts& parts, std::string_view style) {
  const auto known = std::ranges::find(parts, style, &Parts::value_type::first);
  return known != parts.end() ? known->second : parts.emplace_back(style, "").second;
}

std::string Drawing::body() const {
  std::string body;
  for (const auto& [style, d] : shapes_) {
    body += f8::format("<path d=\"{}\" class=\"{}\"/>\n", d, style);
  }
  for (const auto& [style, texts] : texts_) {
    body +=
        f8::format("<g{}>{}</g>\n", style.empty() ? "" : f8::format(" class=\"{}\"", style), texts);
  }
  return body;
}

Axis::Axis(double lo, double hi, bool is_log, double from_px, double to_px)
    : lo_(lo), hi_(hi), from_px_(from_px), to_px_(to_px), is_log_(is_log) {
  if (is_log) {
    lo_ = std::max(lo_, 1e-9);
    hi_ = std::max(hi_, lo_ * 2);
    for (double decade = std::pow(10, std::floor(std::log10(lo_))); decade < hi_ * 10;
         decade *= 10) {
      for (const double step : {1.0, 2.0, 5.0}) ticks_.push_back(decade * step);
    }
  } else {
    if (hi_ <= lo_) hi_ = lo_ + 1;
    const double rough = (hi_ - lo_) / 5;
    const double decade = std::pow(10, std::floor(std::log10(rough)));
    double step = decade * 10;
    for (const double factor : {5.0, 2.5, 2.0, 1.0}) {
      if (decade * factor >= rough) step = decade * factor;
    }
    for (double tick = std::floor(lo_ / step); tick <= std::ceil(hi_ / step) + 0.5; ++tick) {
      ticks_.push_back(tick * step);
    }
  }
  // The last tick at or below the values, and the first one at or above them, are the ends.
  const auto above = std::ranges::find_if(ticks_, [&](double t) { return t > lo_ * (1 + 1e-9); });
  if (above != ticks_.begin()) ticks_.erase(ticks_.begin(), above - 1);
  const auto end = std::ranges::find_if(ticks_, [&](double t) { return t >= hi_ * (1 - 1e-9); });
  if (end != ticks_.end()) ticks_.erase(end + 1, ticks_.end());
  lo_ = ticks_.front();
  hi_ = ticks_.back();
}

double Axis::at(double value) const {
  const double v = std::clamp(value, lo_, hi_);
  const double share = is_log_ ? std::log(v / lo_) / std::log(hi_ / lo_) : (v - lo_) / (hi_ - lo_);
  return from_px_ + share * (to_px_ - from_px_);
}

void draw_frame(Drawing& drawing, const Axis& x, const Axis& y, const Labels& labels) {
  using enum Drawing::Anchor;
  const double left = x.from_px();
  const double right = x.to_px();
  const double bottom = y.from_px();
  const double top = y.to_px();
  const bool x_sparse = has_sparse_labels(x, 34);
  for (const double tick : x.ticks()) {
    drawing.line(x.at(tick), top, x.at(tick), bottom, "grid");
    if (x_sparse && !is_decade(tick)) continue;
    drawing.text(x.at(tick), bottom + 17, number(tick) + labels.x_suffix, kMiddle);
  }
  const bool y_sparse = has_sparse_labels(y, 15);
  for (const double tick : y.ticks()) {
    drawing.line(left, y.at(tick), right, y.at(tick), "grid");
    if (y_sparse && !is_decade(tick)) continue;
    drawing.text(left - 6, y.at(tick) + 4, number(tick) + labels.y_suffix, kEnd);
  }
  drawing.text((left + right) / 2, bottom + 36, labels.x, kMiddle);
  drawing.vertical_text(13, (top + bottom) / 2, labels.y);
}

}  // namespace f8::report
