// The values that no format of fp8 has as they are.
#pragma once

#include <limits>

namespace f8 {

inline constexpr float kInf = std::numeric_limits<float>::infinity();
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

}  // namespace f8
