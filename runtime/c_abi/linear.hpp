// A linear's description in the C interface as the library's.
#pragma once

#include "float8/float8.h"
#include "runtime/linear/linear.hpp"

namespace f8::c_abi {

// All but shape and recipe.
[[nodiscard]] Result<runtime::LinearDesc> linear_options(const float8_linear_desc& known);
[[nodiscard]] Result<runtime::LinearDesc> linear_desc(const float8_linear_desc* desc);

}  // namespace f8::c_abi
