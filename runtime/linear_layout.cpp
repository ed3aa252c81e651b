// Adding up a linear's buffers.
#include "runtime/linear_layout.hpp"

#include <algorithm>

#include "runtime/gemm.hpp"
#include "runtime/quantize.hpp"

namespace f8::runtime {

LinearLayout linear_layout(Shape shape, codegen::ScaleMode scale, int sm_count, size_t gemm_forward,
                           size_t gemm_backward) {
  const bool axis = scale == codegen::ScaleMode::kAxis;
  const auto m = static_cast<size_t>(shape.m);
  const auto n = static_cast<size_t>(shape.n);
  const auto k = static_cast<size_t>(shape.k);
  const auto ld_m = static_cast<size_t>(padded(shape.m));
  // A smaller m never has more partial maxima than the largest.
  const auto partials = [&](int64_t rows, int64_t cols, size_t count) {
    return static_cast<size_t>(amax_partials(rows, cols, sm_count, count));
  };
  constexpr size_t kWord = 4;
  constexpr size_t kPair = (kernels::kInverse + 1) * sizeof(float);

  LinearLayout layout;
  Arena forward;
  layout.forward.amax =
      forward.take(kWord * (axis ? k + n + k + m : partials(shape.m, shape.k, 2)));
  layout.forward.w_amax = forward.take(axis ? 0 : kWord * partials(shape.n, shape.k, 2));
  layout.forward.x_q = forward.take(m * k);
  layout.forward.w_q = forward.take(n * k);
  layout.forward.x_inv = forward.take(axis ? kWord * m : kPair);
  layout.forward.w_inv = forward.take(axis ? kWord * n : kPair);
  layout.forward.gemm = forward.take(gemm_forward);

  Arena saved;
  layout.saved.x_qt = saved.take(k * ld_m);
  layout.saved.w_qt = saved.take(k * n);
  layout.saved.x_scale = saved.take(axis ? kWord * k : kPair);
  layout.saved.w_scale = saved.take(axis ? kWord * k : kPair);

  Arena backward;
  layout.backward.amax = backward.take(kWord * (axis ? n + m : partials(shape.m, shape.n, 1)));
  layout.backward.dy_q = backward.take(m * n);
  layout.backward.dy_qt = backward.take(n * ld_m);
  layout.backward.dy_row_scale = backward.take(axis ? kWord * m : kPair);
  layout.backward.dy_col_scale = backward.take(axis ? kWord * n : 0);
  layout.backward.gemm = backward.take(gemm_backward);

  layout.workspace_bytes = std::max(forward.size(), backward.size());
  layout.saved_bytes = saved.size();
  return layout;
}

}  // namespace f8::runtime
