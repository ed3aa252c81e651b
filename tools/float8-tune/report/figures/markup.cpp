#include "tools/float8-tune/report/figures/markup.hpp"

#include "base/format.hpp"
#include "base/text.hpp"

namespace f8::report {
namespace {

constexpr size_t kLong = 60;  // longer cells of a table may be broken

}  // namespace

std::string escape(std::string_view text) {
  const std::string shown = printable(text);
  std::string out;
  out.reserve(shown.size());
  for (size_t i = 0; i < shown.size(); ++i) {
    const std::string_view rest = std::string_view(shown).substr(i);
    if (rest.starts_with("\xef\xbf\xbe") || rest.starts_with("\xef\xbf\xbf")) {  // U+FFFE, U+FFFF
      out += rest[2] == '\xbe' ? "\\xef\\xbf\\xbe" : "\\xef\\xbf\\xbf";
      i += 2;
      continue;
    }
    switch (shown[i]) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&quot;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += shown[i];
    }
  }
  return out;
}

std::string slug(std::string_view text) {
  std::string out;
  for (const char c : text) {
    const bool upper = c >= 'A' && c <= 'Z';
    const bool plain = (c >= 'a' && c <= 'z') || (c >= '0' && c <= '9');
    if (upper || plain) {
      out += upper ? static_cast<char>(c - 'A' + 'a') : c;
    } else if (!out.empty() && out.back() != '-') {
      out += '-';
    }
  }
  while (out.ends_with('-')) out.pop_back();
  return out.substr(0, 60);
}

std::string html(const DataTable& table) {
  std::string out = f8::format("<table><caption>{}</caption><thead><tr>", escape(table.caption));
  for (const std::string& column : table.columns) {
    out += f8::format("<th scope=\"col\">{}</th>", escape(column));
  }
  out += "</tr></thead><tbody>\n";
  for (const auto& row : table.rows) {
    out += "<tr>";
    for (size_t i = 0; i < row.size(); ++i) {
      out += i < table.heads
                 ? f8::format("<th scope=\"row\">{}</th>", escape(row[i]))
                 : f8::format("<td{}>{}</td>", row[i].size() > kLong ? " class=\"long\"" : "",
                              escape(row[i]));
    }
    out += "</tr>\n";
  }
  return out + "</tbody></table>\n";
}

std::string lines(const DataTable& table) {
  std::string out =
      f8::format("<pre data-caption=\"{}\" data-heads=\"{}\">", escape(table.caption), table.heads);
  const std::vector<std::string>* above = &table.columns;
  const auto add = [&](const std::vector<std::string>& row) {
    for (size_t i = 0; i < row.size(); ++i) {
      if (i > 0) out += '\t';
      const bool is_same = above != &table.columns && row[i] == (*above)[i];
      if (!is_same) out += escape(row[i]);
    }
    above = &row;
  };
  add(table.columns);
  for (const auto& row : table.rows) {
    out += '\n';
    add(row);
  }
  return out + "</pre>\n";
}

std::string microseconds(double ns) {
  const double us = ns / 1e3;
  return us < 99.95 ? f8::format("{:.1f}", us) : f8::format("{:.0f}", us);
}

std::string percent(double share) {
  return f8::format("{:.1f} %", 100 * share);
}

}  // namespace f8::report
