#include "runtime/quantize/bias_grad.hpp"

#include "recipes/fp8_layout.hpp"
#include "runtime/quantize/quantize.hpp"

namespace f8::runtime {

size_t column_sums_bytes(int64_t rows, int64_t cols) {
  return static_cast<size_t>(ceil_div(rows, kernels::kCastTile) * cols) * sizeof(float);
}

kernels::ColumnSumsArgs column_sums_args(const void* x, int64_t ld, int64_t rows, int64_t cols,
                                         float* sums) {
  return {.x = x,
          .ld = ld == 0 ? cols : ld,
          .rows = static_cast<int32_t>(rows),
          .cols = static_cast<int32_t>(cols),
          .sums = sums};
}

kernels::BiasGradArgs bias_grad_args(const float* sums, int64_t rows, int64_t cols, void* out,
                                     bool add) {
  return {.sums = sums,
          .out = out,
          .count = static_cast<int32_t>(ceil_div(rows, kernels::kCastTile)),
          .cols = static_cast<int32_t>(cols),
          .add = add ? 1 : 0,
          .padding = 0};
}

Status launch_column_sums(const Driver& driver, const Kernel& kernel,
                          const kernels::ColumnSumsArgs& args, bool programmatic, Stream stream) {
  return launch_with(args, driver, kernel, cast_tiles(args.rows, args.cols), programmatic, stream);
}

Status launch_bias_grad(const Driver& driver, const Kernel& kernel,
                        const kernels::BiasGradArgs& args, bool programmatic, Stream stream) {
  return launch_with(args, driver, kernel, ceil_div(args.cols, kernels::kBiasColumns), programmatic,
                     stream);
}

}  // namespace f8::runtime
