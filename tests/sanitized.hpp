// Says whether a tool such as compute-sanitizer runs the test; scripts/gpu-test --sanitize tells
// it. racecheck keeps 2 to 3 GB of host memory for each second of kernels, until none is left.
#pragma once

#include <cstdlib>

namespace f8 {

[[nodiscard]] inline bool sanitized() {
  return std::getenv("FLOAT8_TEST_SANITIZED") != nullptr;
}

}  // namespace f8
