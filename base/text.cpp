#include "base/text.hpp"

#include "base/format.hpp"

namespace f8 {

std::string quote(std::string_view text, size_t longest) {
  std::string result = "'";
  for (const char c : text.substr(0, longest)) {
    if (c >= ' ' && c <= '~') {
      result += c;
    } else {
      result += f8::format("\\x{:02x}", static_cast<unsigned char>(c));
    }
  }
  return result + (text.size() > longest ? "'..." : "'");
}

std::string_view take_until(std::string_view& rest, char separator) {
  const size_t end = rest.find(separator);
  const std::string_view part = rest.substr(0, end);
  rest.remove_prefix(end == std::string_view::npos ? rest.size() : end + 1);
  return part;
}

}  // namespace f8
