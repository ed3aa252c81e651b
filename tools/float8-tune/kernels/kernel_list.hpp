// The keys of every kernel that a plan of a built-in recipe may load: what `emit --list` prints.
#pragma once

#include <set>
#include <string>

#include "base/error.hpp"

namespace f8::cli {

// Every candidate configuration of every GEMM (also grouped, and with each epilogue that a plan can
// ask for), and every amax, cast, quantize, column-sums, bias-gradient and scale-update kernel.
// The answer does not depend on a tuning table or on a device.
[[nodiscard]] Result<std::set<std::string>> tunable_kernels();

}  // namespace f8::cli
