// Tests that try many cases are short by default; FLOAT8_LONG_CAMPAIGN=1, which scripts/check sets,
// makes them long.
#pragma once

#include <cstdlib>

namespace f8::testing {

[[nodiscard]] inline int cases(int few, int many) {
  return std::getenv("FLOAT8_LONG_CAMPAIGN") != nullptr ? many : few;
}

}  // namespace f8::testing
