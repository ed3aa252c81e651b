#include "tools/float8-tune/output.hpp"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "base/file.hpp"
#include "base/text.hpp"
#include "tools/float8-tune/options.hpp"
#include "tuning_db/json/json_text.hpp"

namespace f8::cli {
namespace {

// The width in code points: in what the tables print, each of them takes one column.
size_t width(std::string_view text) {
  return static_cast<size_t>(std::ranges::count_if(
      text, [](char c) { return (static_cast<unsigned char>(c) & 0xC0) != 0x80; }));
}

// Why standard output could not be written, from the first write that failed; 0: all went well.
int output_error = 0;

std::string reason_and_remedy(int error) {
  if (error == EPIPE) {
    return "its reader has gone before the end; let it read all, or write to a file";
  }
  return f8::format("{}; free some space, or redirect it", std::strerror(error));
}

void write_stderr(std::string_view text) {
  std::fwrite(text.data(), 1, text.size(), stderr);
}

// The text with all of its control characters but tabs and ends of lines escaped.
std::string printable_lines(std::string_view text) {
  std::string out;
  while (!text.empty()) {
    const size_t end = std::min(text.find_first_of("\n\t"), text.size());
    out += printable(text.substr(0, end));
    if (end < text.size()) out += text[end];
    text.remove_prefix(std::min(end + 1, text.size()));
  }
  return out;
}

}  // namespace

std::string json_text(const Json& value) {
  return tuning_db::without_controls(value.dump(2, ' ', false, Json::error_handler_t::replace) +
                                     "\n");
}

void print_json(const Json& value) {
  print_styled(json_text(value));
}

double rounded(double value, int digits) {
  if (value == 0 || !std::isfinite(value)) return value;
  return std::stod(f8::format("{:.{}g}", value, digits));
}

std::string csv_number(double value) {
  return f8::format("{}", rounded(value));
}

void add_interval(Json& json, const std::string& name, double value, double lo, double hi,
                  int digits) {
  json[name] = rounded(value, digits);
  json[name + "_lo"] = rounded(lo, digits);
  json[name + "_hi"] = rounded(hi, digits);
}

std::string microseconds(double ns) {
  return f8::format("{:.1f} us", ns / 1e3);
}

std::string interval_text(double lo, double hi, int digits) {
  return f8::format("[{:.{}f}, {:.{}f}]", lo, digits, hi, digits);
}

Table::Table(std::vector<Column> columns) : columns_(std::move(columns)) {
  for (const Column& column : columns_) widths_.push_back(width(column.title));
}

void Table::add(const std::vector<std::string>& row) {
  for (size_t i = 0; i < columns_.size(); ++i) {
    const size_t begin = cells_.size();
    if (i < row.size()) cells_ += has_control(row[i]) ? printable(row[i]) : row[i];
    ends_.push_back(cells_.size());
    widths_[i] = std::max(widths_[i], width(std::string_view(cells_).substr(begin)));
  }
}

std::string Table::text(bool color) const {
  std::string out = color ? "\x1b[1m" : "";
  const auto add_cell = [&](size_t i, std::string_view value) {
    const size_t padding = widths_[i] - width(value);
    const bool left = columns_[i].align == Align::kLeft;
    if (i > 0) out += "  ";
    if (!left) out.append(padding, ' ');
    out += value;
    if (left) out.append(padding, ' ');
  };
  const auto end_line = [&](std::string_view end) {
    while (out.ends_with(' ')) out.pop_back();
    out += end;
  };
  for (size_t i = 0; i < columns_.size(); ++i) add_cell(i, columns_[i].title);
  end_line(color ? "\x1b[0m\n" : "\n");
  std::string_view cells = cells_;
  for (size_t at = 0, begin = 0; at < ends_.size(); begin = ends_[at++]) {
    add_cell(at % columns_.size(), cells.substr(begin, ends_[at] - begin));
    if ((at + 1) % columns_.size() == 0) end_line("\n");
  }
  return out;
}

void print(std::string_view text) {
  print_styled(printable_lines(text));
}

void print_styled(std::string_view text) {
  if (output_error != 0) return;
  errno = 0;
  if (std::fwrite(text.data(), 1, text.size(), stdout) < text.size()) output_error = errno;
}

bool stdout_color(const Global& global) {
  if (global.color == "always") return true;
  return global.color == "auto" && ::isatty(STDOUT_FILENO) != 0;
}

bool stderr_is_terminal() {
  return ::isatty(STDERR_FILENO) != 0;
}

Status finish_output() {
  errno = 0;
  if (std::fflush(stdout) != 0 && output_error == 0) output_error = errno;
  if (output_error == 0 && std::ferror(stdout) == 0) return {};
  return fail(ErrorCode::kIo, "cannot write standard output: {}", reason_and_remedy(output_error));
}

Status check_output(const Global& global, std::string_view option,
                    const std::filesystem::path& file) {
  if (!file.empty()) F8_TRY(of_option(option, check_writable(output_path(file))));
  if (!is_standard_stream(file) || !global.json) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{} - and --json both want standard output; name a file for {}", option, option);
}

Status write_output(const Global& global, std::string_view option,
                    const std::filesystem::path& file, std::string_view bytes) {
  F8_TRY(of_option(option, write_file_atomic(output_path(file), bytes)));
  if (!is_standard_stream(file)) note(global, "wrote {}", file.string());
  return {};
}

void note_line(const Global& global, std::string_view line) {
  if (!global.quiet) write_stderr(printable_lines(line) + "\n");
}

void print_error(std::string_view message) {
  std::string line(message);
  std::ranges::replace(line, '\n', ' ');
  write_stderr("float8-tune: " + message_text(line) + "\n");
}

void print_out_of_memory() {
  constexpr std::string_view kLine =
      "float8-tune: out of memory; close other programs, or raise the limit (ulimit -v)\n";
  (void)!::write(STDERR_FILENO, kLine.data(), kLine.size());
}

Progress::Progress(const Global& global, std::chrono::milliseconds heartbeat)
    : quiet_(global.quiet), terminal_(stderr_is_terminal()), heartbeat_(heartbeat) {
  last_ = std::chrono::steady_clock::now();
}

void Progress::update(std::string_view line) {
  if (quiet_) return;
  const auto now = std::chrono::steady_clock::now();
  if (terminal_) {
    write_stderr("\r" + std::string(line) + "\x1b[K");
    shown_ = true;
  } else if (now - last_ >= heartbeat_) {
    write_stderr(std::string(line) + "\n");
    last_ = now;
  }
}

void Progress::clear() {
  if (shown_) write_stderr("\r\x1b[K");
  shown_ = false;
}

}  // namespace f8::cli
