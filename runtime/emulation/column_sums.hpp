// Sums of columns in the order that column_sums.cuh fixes.
#pragma once

#include "recipes/reference/reference.hpp"

namespace f8::runtime::emulation {

// Gives the sums of each 128 rows: sums[ceil(rows/128)][cols].
void sum_columns(const reference::Matrix& x, float* sums);

}  // namespace f8::runtime::emulation
