// Rotary positions of queries and keys (codegen/kernels/attention/rotary.cuh): checks and a launch.
#pragma once

#include "float8/rotary.h"
#include "runtime/device/context.hpp"

namespace f8::runtime {

[[nodiscard]] Status rotary(Context& context, const float8_rotary_args& args, Stream stream);

}  // namespace f8::runtime
