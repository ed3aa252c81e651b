#include "codegen/ptxas_log.hpp"

#include <algorithm>
#include <cctype>
#include <charconv>
#include <vector>

#include "base/format.hpp"

namespace f8::codegen {
namespace {

constexpr size_t kQuotedErrors = 3;

std::string_view trim(std::string_view line) {
  while (!line.empty() && std::isspace(static_cast<unsigned char>(line.front()))) {
    line.remove_prefix(1);
  }
  while (!line.empty() &&
         (line.back() == '\0' || std::isspace(static_cast<unsigned char>(line.back())))) {
    line.remove_suffix(1);
  }
  return line;
}

std::vector<std::string_view> lines_of(std::string_view text) {
  std::vector<std::string_view> lines;
  while (!text.empty()) {
    const size_t end = text.find('\n');
    if (const auto line = trim(text.substr(0, end)); !line.empty()) lines.push_back(line);
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
  }
  return lines;
}

bool is_digit(char c) {
  return c >= '0' && c <= '9';
}

bool is_word(char c) {
  return std::isalnum(static_cast<unsigned char>(c)) || c == '_';
}

// The number in front of `unit`, as in "Used 168 registers"; 0 where the line has no such unit.
int number_before(std::string_view line, std::string_view unit) {
  const size_t at = line.find(unit);
  if (at == std::string_view::npos) return 0;
  size_t end = at;
  while (end > 0 && line[end - 1] == ' ') --end;
  size_t begin = end;
  while (begin > 0 && is_digit(line[begin - 1])) --begin;
  int value = 0;
  std::from_chars(line.data() + begin, line.data() + end, value);
  return value;
}

bool has_c75_code(std::string_view line) {
  for (size_t at = line.find("C75"); at != std::string_view::npos; at = line.find("C75", at + 1)) {
    const bool starts = at == 0 || !is_word(line[at - 1]);
    const bool digits = at + 5 <= line.size() && is_digit(line[at + 3]) && is_digit(line[at + 4]);
    if (starts && digits && (at + 5 == line.size() || !is_word(line[at + 5]))) return true;
  }
  return false;
}

bool is_error(std::string_view line) {
  return line.find("error:") != std::string_view::npos ||
         line.find("error   :") != std::string_view::npos ||
         line.find("fatal   :") != std::string_view::npos;
}

}  // namespace

PtxasReport parse_ptxas_log(std::string_view log, std::string_view entry) {
  const std::string opening = f8::format("Compiling entry function '{}'", entry);
  PtxasReport report;
  bool inside = false;
  for (const std::string_view line : lines_of(log)) {
    if (line.find("Compiling entry function") != std::string_view::npos) {
      inside = line.find(opening) != std::string_view::npos;
    } else if (inside) {
      report.spill_bytes +=
          number_before(line, "bytes spill stores") + number_before(line, "bytes spill loads");
      if (line.find("Used ") != std::string_view::npos) {
        report.registers = number_before(line, "registers");
        report.smem_bytes = number_before(line, "bytes smem");
      }
    }
  }
  return report;
}

std::string_view find_c75_line(std::string_view log) {
  for (const std::string_view line : lines_of(log)) {
    if (has_c75_code(line)) return line;
  }
  return {};
}

std::string summarize_errors(std::string_view log) {
  std::vector<std::string_view> all = lines_of(log);
  std::vector<std::string_view> errors;
  for (const std::string_view line : all) {
    if (is_error(line)) errors.push_back(line);
  }
  if (errors.empty()) errors = std::move(all);
  if (errors.empty()) return "the log is empty";
  const size_t quoted = std::min(errors.size(), kQuotedErrors);
  std::string text = f8::format(
      "{}", fmt::join(errors.begin(), errors.begin() + static_cast<std::ptrdiff_t>(quoted), " | "));
  if (errors.size() > quoted) text += f8::format(" | and {} more", errors.size() - quoted);
  return text;
}

}  // namespace f8::codegen
