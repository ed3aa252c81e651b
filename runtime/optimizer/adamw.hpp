// AdamW of a list of weights (codegen/kernels/optimizer/adamw.cuh): its checks and launches.
#pragma once

#include "float8/float8.h"
#include "runtime/device/call_array.hpp"
#include "runtime/device/context.hpp"

namespace f8::runtime {

using AdamwWeight = float8_adamw_tensor;
using AdamwWeights = CallArray<AdamwWeight>;

// A step of `weights`, with the options of `args`, whose tensors it does not look at.
[[nodiscard]] Status adamw(Context& context, const float8_adamw_args& args,
                           const AdamwWeights& weights, Stream stream);

}  // namespace f8::runtime
