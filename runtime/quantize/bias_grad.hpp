// The gradient of a bias, db[n] = sum over m of dy[m][n], in two launches and a fixed order
// (reference::column_sums): the sums of each 128 rows, which a cast of dy may leave on its way, and
// those of these sums.
#pragma once

#include "codegen/kernels/kernel_args.cuh"
#include "runtime/device/launch.hpp"

namespace f8::runtime {

// The bytes of the sums of each 128 rows.
[[nodiscard]] size_t column_sums_bytes(int64_t rows, int64_t cols);

// x[rows][cols], rows `ld` elements apart (0: dense), cols a multiple of 8.
[[nodiscard]] Status launch_column_sums(const Driver& driver, const Kernel& kernel,
                                        const kernels::ColumnSumsArgs& args, bool programmatic,
                                        Stream stream);
[[nodiscard]] Status launch_bias_grad(const Driver& driver, const Kernel& kernel,
                                      const kernels::BiasGradArgs& args, bool programmatic,
                                      Stream stream);

[[nodiscard]] kernels::ColumnSumsArgs column_sums_args(const void* x, int64_t ld, int64_t rows,
                                                       int64_t cols, float* sums);
// `rows` are those of x. out[cols] is overwritten, or added to.
[[nodiscard]] kernels::BiasGradArgs bias_grad_args(const float* sums, int64_t rows, int64_t cols,
                                                   void* out, bool add);

}  // namespace f8::runtime
