// A sweep over shapes: many benchmarks as one, with the shapes that a file names, a summary of the
// ratios and a table for other programs.
//
// The file of shapes is CSV. Its first line names the columns, of which m, n and k are read
// wherever they stand; a shape counts once. Fields hold no commas or line ends.
#pragma once

#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/error.hpp"
#include "base/file.hpp"
#include "recipes/problem.hpp"

namespace f8::tuner {

// The fields of a line, without blanks and quotes around them.
[[nodiscard]] std::vector<std::string_view> csv_fields(std::string_view line);

// The error names the line and the column.
[[nodiscard]] Result<std::vector<Shape>> parse_shape_table(std::string_view csv);
// "-" is standard input.
[[nodiscard]] Result<std::vector<Shape>> read_shape_table(const std::filesystem::path& path);

// One problem's ratio, above 1 where ours is faster.
struct ShapeRatio {
  std::string problem;
  double ratio = 0;
};
struct ShapeSummary {
  int count = 0;
  double geometric_mean = 0;
  double worst = 0;
  std::string worst_of;
  int at_least_100 = 0, at_least_095 = 0;  // ratios of 1.00 and 0.95 or more
};
// All fields are zero where there are no ratios.
[[nodiscard]] ShapeSummary summarize(std::span<const ShapeRatio> ratios);

// What ratios say that are above 1 where something is slower.
struct ShapeSlowdown {
  double median = 0, p95 = 0, worst = 0;
  std::string worst_of;
};
// There must be ratios.
[[nodiscard]] ShapeSlowdown slowdown(std::span<const ShapeRatio> ratios);

// Rows of CSV below a line of the columns' names.
class CsvText {
 public:
  explicit CsvText(std::span<const std::string_view> columns);
  // Takes one field for each column, and quotes it where it has to be.
  [[nodiscard]] Status add(std::span<const std::string> fields);
  [[nodiscard]] const std::string& text() const { return text_; }
  std::string take() { return std::exchange(text_, {}); }

 private:
  size_t columns_;
  std::string text_;
};

// A CSV file that has each row as soon as it is added, so that it holds what was measured before a
// crash; what was there before stays until the first row. "-" is standard output.
class CsvFile {
 public:
  CsvFile() = default;  // writes nothing
  [[nodiscard]] static Result<CsvFile> create(const std::filesystem::path& path,
                                              std::span<const std::string_view> columns);
  [[nodiscard]] Status add(std::span<const std::string> fields);

 private:
  struct Open {
    GrowingFile file;
    CsvText rows;
  };
  std::optional<Open> open_;
};

}  // namespace f8::tuner
