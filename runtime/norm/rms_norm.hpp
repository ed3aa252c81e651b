// RMSNorms and their gradients (codegen/kernels/norm): checks and launches.
#pragma once

#include "float8/norm.h"
#include "runtime/device/context.hpp"

namespace f8::runtime {

[[nodiscard]] Status rms_norm(Context& context, const float8_rms_norm_args& args, Stream stream);
[[nodiscard]] Status rms_norm_backward(Context& context, const float8_rms_norm_backward_args& args,
                                       Stream stream);
[[nodiscard]] size_t rms_norm_backward_workspace_bytes(const Context& context, int64_t rows,
                                                       int64_t cols);

}  // namespace f8::runtime
