// RMSNorms.
#pragma once

#include <cstddef>
#include <cstdint>

#include "float8/context.hpp"
#include "float8/norm.h"

namespace float8 {

using RmsNormArgs = float8_rms_norm_args;
using RmsNormBackwardArgs = float8_rms_norm_backward_args;

inline Status rms_norm(const Context& context, const RmsNormArgs& args, float8_stream stream) {
  return Status(float8_rms_norm(context.get(), &args, stream));
}
inline Status rms_norm_backward(const Context& context, const RmsNormBackwardArgs& args,
                                float8_stream stream) {
  return Status(float8_rms_norm_backward(context.get(), &args, stream));
}
[[nodiscard]] inline std::size_t rms_norm_backward_workspace_bytes(const Context& context,
                                                                   std::int64_t rows,
                                                                   std::int64_t cols) {
  return float8_rms_norm_backward_workspace_bytes(context.get(), rows, cols);
}

}  // namespace float8
