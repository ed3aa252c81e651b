#include "base/text.hpp"

#include <algorithm>
#include <cstdint>
#include <utility>

namespace f8 {
namespace {

// True of characters that nobody sees, or that turn the order of others around.
bool hides(uint32_t code) {
  constexpr std::pair<uint32_t, uint32_t> kRanges[] = {
      {0xad, 0xad},     {0x61c, 0x61c},   {0x180e, 0x180e}, {0x200b, 0x200f},   {0x2028, 0x202e},
      {0x2060, 0x206f}, {0xfeff, 0xfeff}, {0xfff9, 0xfffb}, {0xe0000, 0xe007f},
  };
  return std::ranges::any_of(
      kRanges, [code](const auto& range) { return code >= range.first && code <= range.second; });
}

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
  const bool is_shown = code >= kLeast[length - 2] && code <= 0x10ffff && !is_surrogate;
  return is_shown && !hides(code) ? length : 0;
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

std::string message_text(std::string_view text) {
  constexpr size_t kLongestWord = 4096 + 64;  // a path, and what is written around it
  constexpr size_t kShown = 80;
  std::string clipped;
  while (!text.empty() && clipped.size() < kLongestMessage) {
    const size_t end = std::min(text.find_first_of(" \n"), text.size());
    const std::string_view word = text.substr(0, end);
    clipped += word.size() > kLongestWord ? word.substr(0, kShown) : word;
    if (word.size() > kLongestWord) clipped += "...";
    const size_t spaces = std::min(text.find_first_not_of(" \n", end), text.size()) - end;
    clipped += text.substr(end, spaces);
    text.remove_prefix(end + spaces);
  }
  if (clipped.size() > kLongestMessage) clipped.resize(kLongestMessage);
  return printable(clipped);
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

std::vector<std::string> split(std::string_view text, char separator) {
  std::vector<std::string> items;
  for (bool last = false; !last;) {
    last = !text.contains(separator);
    items.emplace_back(take_until(text, separator));
  }
  return items;
}

bool take(std::string_view& text, std::string_view word) {
  if (!text.starts_with(word)) return false;
  text.remove_prefix(word.size());
  return true;
}

bool take_off_end(std::string_view& text, std::string_view word) {
  if (!text.ends_with(word)) return false;
  text.remove_suffix(word.size());
  return true;
}

}  // namespace f8
