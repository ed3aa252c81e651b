#include "base/text.hpp"

#include <algorithm>
#include <cstdint>

namespace f8 {
namespace {

// The length of the UTF-8 character at the front of `text`, if it is one that can be shown; else 0.
size_t shown_character(std::string_view text) {
  const auto byte = [text](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(0);
  if (first < 0x80) return first >= 0x20 && first != 0x7f ? 1 : 0;
  const size_t length = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
  if (first < 0xc2 || first > 0xf4 || text.size() < length) return 0;
  uint32_t code = first & (0x7fU >> length);
  for (size_t i = 1; i < length; ++i) {
    if ((byte(i) & 0xc0U) != 0x80) return 0;
    code = code << 6 | (byte(i) & 0x3fU);
  }
  constexpr uint32_t kLeast[] = {0xa0, 0x800, 0x10000};  // below: C1, or more bytes than needed
  const bool is_surrogate = code >= 0xd800 && code <= 0xdfff;
  return code >= kLeast[length - 2] && code <= 0x10ffff && !is_surrogate ? length : 0;
}

void append_escaped(std::string& out, char c) {
  constexpr std::string_view kDigits = "0123456789abcdef";
  const auto byte = static_cast<unsigned char>(c);
  out += "\\x";
  out += kDigits[byte >> 4];
  out += kDigits[byte & 15];
}

}  // namespace

std::string quote(std::string_view text, size_t longest) {
  std::string result = "'";
  for (const char c : text.substr(0, longest)) {
    if (c >= ' ' && c <= '~') {
      result += c;
    } else {
      append_escaped(result, c);
    }
  }
  return result + (text.size() > longest ? "'..." : "'");
}

std::string printable(std::string_view text) {
  std::string result;
  result.reserve(text.size());
  while (!text.empty()) {
    const size_t length = shown_character(text);
    if (length == 0) {
      append_escaped(result, text.front());
    } else {
      result.append(text.substr(0, length));
    }
    text.remove_prefix(std::max<size_t>(length, 1));
  }
  return result;
}

bool has_control(std::string_view text) {
  while (!text.empty()) {
    const size_t length = shown_character(text);
    if (length == 0) return true;
    text.remove_prefix(length);
  }
  return false;
}

std::string_view take_until(std::string_view& rest, char separator) {
  const size_t end = rest.find(separator);
  const std::string_view part = rest.substr(0, end);
  rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  return part;
}

}  // namespace f8
