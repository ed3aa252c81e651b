// The linear of most of these tests: small, and no dimension is another's.
#pragma once

#include <cstdint>

#include "recipes/problem.hpp"

namespace f8::runtime {

inline constexpr int64_t kM = 40;
inline constexpr int64_t kN = 48;
inline constexpr int64_t kK = 32;
inline constexpr Shape kShape = {kM, kN, kK};

}  // namespace f8::runtime
