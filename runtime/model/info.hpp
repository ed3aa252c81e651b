// A plan in words: for a trainer's log, and for the person who wonders why.
#pragma once

#include <string>

#include "runtime/linear/linear.hpp"

namespace f8::runtime {

// The device, the options and the tuning table that plans are made by.
[[nodiscard]] std::string describe(const Context& context);
// Each GEMM with its operands, its kernel and the reason for it; the launches of a call at the
// largest m; the bytes of the buffers. Several lines, the last one without an end.
[[nodiscard]] std::string describe(const Linear& linear);

}  // namespace f8::runtime
