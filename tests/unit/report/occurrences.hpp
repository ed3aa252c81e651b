// How often a text has a part.
#pragma once

#include <string_view>

namespace f8::report {

inline size_t occurrences(std::string_view text, std::string_view part) {
  size_t n = 0;
  for (size_t at = text.find(part); at != std::string_view::npos; at = text.find(part, at + 1)) ++n;
  return n;
}

}  // namespace f8::report
