// What the report's figures are drawn from: text, scales, cells and the lines between them.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "tests/unit/report/occurrences.hpp"
#include "tools/float8-tune/report/figures/cells.hpp"
#include "tools/float8-tune/report/figures/figure.hpp"
#include "tools/float8-tune/report/figures/text.hpp"

namespace f8::report {
namespace {

TEST(Markup, EscapesWhatXmlDoesNotAllow) {
  EXPECT_EQ(escape("<a href=\"x\">&'b'</a>"),
            "&lt;a href=&quot;x&quot;&gt;&amp;&#39;b&#39;&lt;/a&gt;");
  EXPECT_EQ(escape(std::string_view("a\0\x1b\n\xff", 5)), "a\\x00\\x1b\\x0a\\xff");
  EXPECT_EQ(escape("\xef\xbf\xbe|\xef\xbf\xbf|\xef\xbf\xbd|é"),
            "\\xef\\xbf\\xbe|\\xef\\xbf\\xbf|\xef\xbf\xbd|é");
}

TEST(Markup, ATableHasHeadsForRowsAndColumns) {
  const std::string text = html({.caption = "c<", .columns = {"a", "b"}, .rows = {{"1", "<2>"}}});
  EXPECT_EQ(occurrences(text, "<th scope=\"col\">"), 2u);
  EXPECT_EQ(occurrences(text, "<th scope=\"row\">1</th>"), 1u);
  EXPECT_EQ(occurrences(text, "<td>&lt;2&gt;</td>"), 1u);
  EXPECT_EQ(occurrences(text, "<caption>c&lt;</caption>"), 1u);
}

TEST(Markup, LinesLeaveOutWhatTheRowAboveHas) {
  const DataTable table{.caption = "c<",
                        .columns = {"N", "K", "us"},
                        .rows = {{"1", "2", "9"}, {"1", "3", "9"}, {"4", "3", "<5>"}},
                        .heads = 2};
  EXPECT_EQ(lines(table),
            "<pre data-caption=\"c&lt;\" data-heads=\"2\">N\tK\tus\n"
            "1\t2\t9\n\t3\t\n4\t\t&lt;5&gt;</pre>\n");
}

TEST(Drawings, ShapesOfAStyleAreOnePathBelowTheTexts) {
  Drawing drawing;
  drawing.text(1, 2, "<", Drawing::Anchor::kEnd, "small");
  drawing.line(0, 0, 0, 5, "grid");
  drawing.marker(Drawing::Marker::kCircle, 3.2, 4, "series0");
  drawing.line(0, 0, 7.25, 0, "grid");
  drawing.marker(Drawing::Marker::kCircle, 3.4, 4, "series0");  // nobody would see it
  EXPECT_EQ(drawing.body(),
            "<path d=\"M0 0V5M0 0H7\" class=\"grid\"/>\n"
            "<path d=\"M3 4h1\" class=\"dot series0\"/>\n"
            "<g class=\"end small\"><text x=\"1\" y=\"2\">&lt;</text></g>\n");
}

TEST(Figures, HaveNamesThatNoOtherOneHas) {
  std::vector<Figure> figures(3);
  for (Figure& figure : figures) figure.kind = "speedup";
  figures[0].device = "GPU (a)";
  figures[1].device = "GPU /a/";  // the same slug
  figures[2].recipe = "../../etc";
  figures[2].m = 8;
  name_figures(figures);
  EXPECT_EQ(figures[0].name, "speedup-gpu-a");
  EXPECT_EQ(figures[1].name, "speedup-gpu-a-2");
  EXPECT_EQ(figures[2].name, "speedup-etc-m8");
}

TEST(Figures, AFileHasTheBodyOfThePageAndItsStyle) {
  Figure figure{.kind = "k",
                .title = "T<",
                .description = "D&",
                .width = 10,
                .height = 20,
                .body = "<path/>",
                .table = {}};
  figure.name = "k";
  const std::string page = inline_svg(figure);
  const std::string file = svg_file(figure);
  for (const std::string& text : {page, file}) {
    EXPECT_EQ(occurrences(text, "<title id=\"k-t\">T&lt;</title><desc id=\"k-d\">D&amp;</desc>"),
              1u);
    EXPECT_EQ(occurrences(text, "role=\"img\""), 1u);
    EXPECT_EQ(occurrences(text, "aria-labelledby=\"k-t k-d\""), 1u);
    EXPECT_EQ(occurrences(text, "<path/>"), 1u);
  }
  EXPECT_EQ(occurrences(page, "http"), 0u);
  EXPECT_EQ(occurrences(file, "<style>"), 1u);
  EXPECT_EQ(occurrences(file, "var("), 0u);
}

TEST(Axes, EndAtRoundNumbersAroundTheValues) {
  const Axis linear(0, 118, false, 0, 100);
  EXPECT_EQ(linear.ticks(), (std::vector<double>{0, 25, 50, 75, 100, 125}));
  EXPECT_DOUBLE_EQ(linear.at(62.5), 50);
  EXPECT_DOUBLE_EQ(linear.at(1000), 100) << "clamped";
  const Axis log(30, 900, true, 0, 100);
  EXPECT_DOUBLE_EQ(log.lo(), 20);
  EXPECT_DOUBLE_EQ(log.hi(), 1000);
  EXPECT_NEAR(log.at(std::sqrt(20 * 1000.0)), 50, 1e-9);
  const Axis exact(0.8, 1.8, false, 0, 100);
  EXPECT_NEAR(exact.lo(), 0.8, 1e-9);
  EXPECT_NEAR(exact.hi(), 1.8, 1e-9);
}

TEST(Cells, DivergeAtOne) {
  EXPECT_EQ(ratio_style(0.1), "n4");
  EXPECT_EQ(ratio_style(0.99), "n1");
  EXPECT_EQ(ratio_style(0.996), "even");
  EXPECT_EQ(ratio_style(1.004), "even");
  EXPECT_EQ(ratio_style(1.006), "p1");
  EXPECT_EQ(ratio_style(9), "p4");
}

// The inside is an L: the left column and the lowest row of 2 x 2.
std::optional<bool> is_l(size_t row, size_t column) {
  return column == 0 || row == 1;
}

TEST(Cells, ABorderRunsBetweenInsideAndOutside) {
  const std::vector<Segment> segments = border(2, 2, is_l);
  EXPECT_EQ(segments, (std::vector<Segment>{{1, 0, 1, 1}, {1, 1, 2, 1}}));
}

TEST(Cells, AnInsetBorderStaysOnTheInsideAndTurnsWithIt) {
  // The upper left cell's right side moves left and goes on to the corner; the lower right cell's
  // upper side moves down and begins there.
  const std::vector<Segment> segments = border(2, 2, is_l, 0.25, 0.125);
  EXPECT_EQ(segments, (std::vector<Segment>{{0.75, 0, 0.75, 1.125}, {0.75, 1.125, 2, 1.125}}));
  // A cell by itself has an outline whose corners meet.
  const auto is_centre = [](size_t row, size_t column) -> std::optional<bool> {
    return row == 1 && column == 1;
  };
  for (const Segment& s : border(3, 3, is_centre, 0.25, 0.125)) {
    EXPECT_GE(std::min(s.x1, s.x2), 1.25);
    EXPECT_LE(std::max(s.x1, s.x2), 1.75);
    EXPECT_GE(std::min(s.y1, s.y2), 1.125);
    EXPECT_LE(std::max(s.y1, s.y2), 1.875);
  }
}

TEST(Cells, WhatIsNotKnownHasNoBorder) {
  const auto inside = [](size_t, size_t column) -> std::optional<bool> {
    if (column == 1) return std::nullopt;
    return column == 0;
  };
  EXPECT_TRUE(border(1, 3, inside).empty());
}

}  // namespace
}  // namespace f8::report
