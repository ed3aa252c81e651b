// The element types of the public headers.
#pragma once

#include <cstdint>

#include "float8/base.h"
#include "recipes/dtype.hpp"

namespace f8::runtime {

// The type of a float8_dtype, which somebody has checked.
[[nodiscard]] constexpr Dtype element_type(int32_t dtype) {
  return dtype == FLOAT8_F32 ? Dtype::kF32 : dtype == FLOAT8_F16 ? Dtype::kF16 : Dtype::kBf16;
}

}  // namespace f8::runtime
