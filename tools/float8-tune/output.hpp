// The output of a command. Standard output holds the data, as a table or as JSON; standard error
// holds progress, notes and errors. There are no escape sequences where the stream is no terminal.
#pragma once

#include <chrono>
#include <nlohmann/json.hpp>
#include <string>
#include <string_view>
#include <vector>

#include "base/format.hpp"
#include "tools/float8-tune/command.hpp"

namespace f8::cli {

using Json = nlohmann::ordered_json;

// The text has two-space indents and a final newline. Equal values give equal bytes.
[[nodiscard]] std::string json_text(const Json& value);
void print_json(const Json& value);
// Rounded to `digits` significant digits: printed numbers carry no noise of the last bits.
[[nodiscard]] double rounded(double value, int digits = 6);
// A number as a CSV field: six significant digits.
[[nodiscard]] std::string csv_number(double value);
// Adds a value and the ends of its interval, rounded: NAME, NAME_lo and NAME_hi.
void add_interval(Json& json, const std::string& name, double value, double lo, double hi,
                  int digits = 6);
[[nodiscard]] std::string microseconds(double ns);                          // "181.0 us"
[[nodiscard]] std::string interval_text(double lo, double hi, int digits);  // "[lo, hi]"

// Columns are as wide as their widest cell.
class Table {
 public:
  enum class Align { kLeft, kRight };
  struct Column {
    std::string title;
    Align align = Align::kRight;
  };
  explicit Table(std::vector<Column> columns);
  // Control characters are escaped. Cells that are missing at the end are empty.
  void add(const std::vector<std::string>& row);
  [[nodiscard]] std::string text(bool color) const;

 private:
  std::vector<Column> columns_;
  std::vector<size_t> widths_;
  // All cells, one after the other, and where each ends: a table may have a million rows.
  std::string cells_;
  std::vector<size_t> ends_;
};

// Writes lines of text to standard output. Control characters that the text brings along are escaped.
void print(std::string_view text);
// Prints text as it is: JSON, and tables whose cells are escaped already and whose heads may be bold.
void print_styled(std::string_view text);
[[nodiscard]] bool stdout_color(const Global& global);
[[nodiscard]] bool stderr_is_terminal();
// Fails where standard output could not be written: a full disk shows here, and a reader that has
// gone.
[[nodiscard]] Status finish_output();

// An output file that the option names, or none. Before anything is done it is refused where it cannot
// be written. "-" is standard output, which then holds nothing else: --json beside it is refused.
[[nodiscard]] Status check_output(const Global& global, std::string_view option,
                                  const std::filesystem::path& file);
// Writes it and says so.
[[nodiscard]] Status write_output(const Global& global, std::string_view option,
                                  const std::filesystem::path& file, std::string_view bytes);
// Prints a line on standard error, unless --quiet.
void note_line(const Global& global, std::string_view line);
template <class... Args>
void note(const Global& global, fmt::format_string<Args...> format, Args&&... args) {
  note_line(global, f8::format(format, std::forward<Args>(args)...));
}
// Prints the one line of a failure, with control characters escaped, so that no input can break it.
void print_error(std::string_view message);
void print_out_of_memory();  // needs none

// A status line on standard error: rewritten in place on a terminal, else a line at most every
// `heartbeat`. Silent under --quiet.
class Progress {
 public:
  explicit Progress(const Global& global,
                    std::chrono::milliseconds heartbeat = std::chrono::seconds(5));
  ~Progress() { clear(); }
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  void update(std::string_view line);
  void clear();  // wipes the line, so that another may be printed

 private:
  bool quiet_;
  bool terminal_;
  bool shown_ = false;
  std::chrono::milliseconds heartbeat_;
  std::chrono::steady_clock::time_point last_;
};

}  // namespace f8::cli
