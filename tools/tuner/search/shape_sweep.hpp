// Many benchmarks as one: the shapes that a file names, the ratios summed up, a table to read by
// other programs.
//
// The file of shapes is CSV: its first line names the columns, of which m, n and k are read,
// wherever they stand; a shape counts once. Fields hold no commas or line ends.
#pragma once

#include <filesystem>
#include <fstream>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/error.hpp"
#include "recipes/problem.hpp"

namespace f8::tuner {

// The error names the line and the column.
[[nodiscard]] Result<std::vector<Shape>> parse_shape_table(std::string_view csv);
[[nodiscard]] Result<std::vector<Shape>> read_shape_table(const std::filesystem::path& path);

// A figure that a survey has of one problem: a ratio, above 1 where ours is faster.
struct SurveyRatio {
  std::string problem;
  double ratio = 0;
};
struct SurveySummary {
  int count = 0;
  double geometric_mean = 0;
  double worst = 0;
  std::string worst_of;
  int at_least_100 = 0, at_least_095 = 0;  // ratios of 1.00 and 0.95 or more
};
// All zero where there are none.
[[nodiscard]] SurveySummary summarize(std::span<const SurveyRatio> ratios);

// Written line by line, so that what was measured before a crash is there.
class CsvFile {
 public:
  CsvFile() = default;  // writes nothing
  [[nodiscard]] static Result<CsvFile> create(const std::filesystem::path& path,
                                              std::span<const std::string_view> columns);
  // One field a column; quoted where it has to be.
  [[nodiscard]] Status add(std::span<const std::string> fields);

 private:
  std::filesystem::path path_;
  std::ofstream out_;
  size_t columns_ = 0;
};

}  // namespace f8::tuner
