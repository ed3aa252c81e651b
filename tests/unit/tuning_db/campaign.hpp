// Tests that try many cases are short by default; FLOAT8_CAMPAIGN=long, which scripts/check sets,
// makes them long.
#pragma once

#include <cstdlib>
#include <string_view>

namespace f8::testing {

[[nodiscard]] inline int cases(int few, int many) {
  const char* campaign = std::getenv("FLOAT8_CAMPAIGN");
  return campaign != nullptr && std::string_view(campaign) == "long" ? many : few;
}

}  // namespace f8::testing
