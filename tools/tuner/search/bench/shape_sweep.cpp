#include "tools/tuner/search/bench/shape_sweep.hpp"

#include <algorithm>
#include <array>
#include <cmath>
#include <set>

#include "base/number.hpp"
#include "base/text.hpp"
#include "tools/tuner/statistics.hpp"

namespace f8::tuner {
namespace {

std::string_view trim(std::string_view text) {
  constexpr std::string_view kBlank = " \t\r\"";
  const size_t first = text.find_first_not_of(kBlank);
  if (first == std::string_view::npos) return {};
  return text.substr(first, text.find_last_not_of(kBlank) - first + 1);
}

std::string csv_field(std::string_view text) {
  if (text.find_first_of(",\"\n\r") == std::string_view::npos) return std::string(text);
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"') quoted += '"';
    quoted += c;
  }
  return quoted + '"';
}

}  // namespace

std::vector<std::string_view> csv_fields(std::string_view line) {
  std::vector<std::string_view> fields;
  while (true) {
    const size_t comma = line.find(',');
    fields.push_back(trim(line.substr(0, comma)));
    if (comma == std::string_view::npos) return fields;
    line.remove_prefix(comma + 1);
  }
}

Result<std::vector<Shape>> parse_shape_table(std::string_view csv) {
  constexpr std::array<std::string_view, 3> kNames = {"m", "n", "k"};
  std::array<size_t, 3> columns{};
  std::vector<Shape> shapes;
  std::set<Shape> seen;
  bool has_header = false;
  for (int64_t number = 1; !csv.empty(); ++number) {
    const std::string_view line = take_until(csv, '\n');
    if (trim(line).empty()) continue;
    const std::vector<std::string_view> fields = csv_fields(line);
    if (!has_header) {
      for (size_t i = 0; i < kNames.size(); ++i) {
        const auto found = std::ranges::find(fields, kNames[i]);
        if (found == fields.end()) {
          return fail(ErrorCode::kInvalidArgument,
                      "line {}: no column {}; the first line names the columns, m, n and k among "
                      "them",
                      number, kNames[i]);
        }
        columns[i] = static_cast<size_t>(found - fields.begin());
      }
      has_header = true;
      continue;
    }
    std::array<int64_t, 3> values{};
    for (size_t i = 0; i < kNames.size(); ++i) {
      const std::string_view text = columns[i] < fields.size() ? fields[columns[i]] : "";
      const auto value = number_of<int64_t>(text);
      if (!value) {
        return fail(ErrorCode::kInvalidArgument, "line {}: column {} is {}, no whole number",
                    number, kNames[i], quote(text));
      }
      values[i] = *value;
    }
    const Shape shape{values[0], values[1], values[2]};
    if (const Status valid = validate_shape(shape); !valid) {
      return fail(valid.error().code, "line {}: {}", number, valid.error().message);
    }
    if (seen.insert(shape).second) shapes.push_back(shape);
  }
  if (shapes.empty())
    return fail(ErrorCode::kInvalidArgument,
                "no shapes below the line of names; add some, such as 8192,4096,4096");
  return shapes;
}

Result<std::vector<Shape>> read_shape_table(const std::filesystem::path& path) {
  const std::string text = F8_TRY(read_input(path));
  auto shapes = parse_shape_table(text);
  if (!shapes) {
    return fail(shapes.error().code, "{}: {}", input_name(path), shapes.error().message);
  }
  return shapes;
}

ShapeSummary summarize(std::span<const ShapeRatio> ratios) {
  ShapeSummary summary;
  if (ratios.empty()) return summary;
  double logs = 0;
  for (const ShapeRatio& one : ratios) {
    logs += std::log(one.ratio);
    summary.at_least_100 += one.ratio >= 1.00 ? 1 : 0;
    summary.at_least_095 += one.ratio >= 0.95 ? 1 : 0;
    if (summary.count++ > 0 && one.ratio >= summary.worst) continue;
    summary.worst = one.ratio;
    summary.worst_of = one.problem;
  }
  summary.geometric_mean = std::exp(logs / summary.count);
  return summary;
}

ShapeSlowdown slowdown(std::span<const ShapeRatio> ratios) {
  std::vector<double> all;
  for (const ShapeRatio& one : ratios) all.push_back(one.ratio);
  const auto worst = std::ranges::max_element(ratios, {}, &ShapeRatio::ratio);
  return {.median = median(all),
          .p95 = percentile(all, 0.95),
          .worst = worst->ratio,
          .worst_of = worst->problem};
}

CsvText::CsvText(std::span<const std::string_view> columns) : columns_(columns.size()) {
  const std::vector<std::string> names(columns.begin(), columns.end());
  (void)add(names);
}

Status CsvText::add(std::span<const std::string> fields) {
  if (fields.size() != columns_) {
    return fail(ErrorCode::kInternal, "{} fields of CSV for {} columns", fields.size(), columns_);
  }
  for (size_t i = 0; i < fields.size(); ++i) {
    if (i > 0) text_ += ',';
    text_ += csv_field(fields[i]);
  }
  text_ += '\n';
  return {};
}

Result<CsvFile> CsvFile::create(const std::filesystem::path& path,
                                std::span<const std::string_view> columns) {
  CsvFile made;
  GrowingFile file = F8_TRY(GrowingFile::open(output_path(path)));
  made.open_.emplace(Open{std::move(file), CsvText(columns)});
  return made;
}

Status CsvFile::add(std::span<const std::string> fields) {
  if (!open_) return {};
  F8_TRY(open_->rows.add(fields));
  return open_->file.append(open_->rows.take());
}

}  // namespace f8::tuner
