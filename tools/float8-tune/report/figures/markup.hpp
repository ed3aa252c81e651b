// Text for HTML and SVG. Names of layers, devices and files are input: all text passes escape().
#pragma once

#include <string>
#include <string_view>
#include <vector>

namespace f8::report {

// Returns the text for content and for quoted attributes: markup is escaped, and what XML does not
// allow (control characters, bytes that are not UTF-8, noncharacters) becomes \xNN.
[[nodiscard]] std::string escape(std::string_view text);
// Returns the text as a part of a file name and of an id: lower-case letters, digits and hyphens.
[[nodiscard]] std::string slug(std::string_view text);

// A table that says in numbers what a figure shows. The first `heads` cells of a row name it.
struct DataTable {
  std::string caption;
  std::vector<std::string> columns;
  std::vector<std::vector<std::string>> rows;
  size_t heads = 1;
};
[[nodiscard]] std::string html(const DataTable& table);
// The same in a tenth of the bytes: a line for each row, the columns' heads first, and tabs between the
// cells. A cell that is left empty is that of the row above. page.js makes a table of it.
[[nodiscard]] std::string lines(const DataTable& table);

[[nodiscard]] std::string microseconds(double ns);  // "12.3", three significant digits or more
[[nodiscard]] std::string percent(double share);    // "12.3 %"

}  // namespace f8::report
