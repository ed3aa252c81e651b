// AdamW of a list of weights (codegen/kernels/optimizer/adamw.cuh), and of those that are cast with it:
// checks and launches.
#pragma once

#include <span>

#include "float8/float8.h"
#include "runtime/device/calls/call_array.hpp"
#include "runtime/device/context.hpp"
#include "runtime/linear/tensors/quantizer.hpp"

namespace f8::runtime {

using AdamwWeight = float8_adamw_tensor;
using AdamwWeights = CallArray<AdamwWeight>;

// The cast of a weight in the launch that updates it; none where the quantizer is null.
struct AdamwCast {
  const Quantizer* quantizer = nullptr;
  QuantizeCall call = {};
};

// A step of `weights`, with the options of `args`, whose tensors it does not look at. `casts` are those of
// the weights, or empty.
[[nodiscard]] Status adamw(Context& context, const float8_adamw_args& args,
                           const AdamwWeights& weights, std::span<AdamwCast> casts, Stream stream);

}  // namespace f8::runtime
