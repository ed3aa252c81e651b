// Where a linear's buffers lie in the workspace and in the saved buffer. Offsets are multiples of
// kAlign bytes, fixed at plan time for the largest m; row strides follow the m of the call, so a
// smaller call uses the front of each part.
//
//   forward   amax (x, w) | x q | w q | 1/scale of their rows (tensor: scale, 1/scale each, of a
//             forward that saves nothing) | matmul's own
//   saved     x qt | w qt | 1/scale of their rows (tensor: scale, 1/scale each)
//   backward  amax (dy) | dy q | dy qt | scales of dy | matmuls' own
// An axis amax has its parts end to end, the one that depends on m last, so that one memset clears
// them: forward x's columns, w's rows, w's columns, x's rows; backward dy's columns, dy's rows.
#pragma once

#include <cstddef>

#include "codegen/kernel_spec.hpp"
#include "recipes/problem.hpp"

namespace f8::runtime {

inline constexpr size_t kAlign = 256;

// Hands out offsets from 0.
class Arena {
 public:
  size_t take(size_t bytes) {
    const size_t at = size_;
    size_ += (bytes + kAlign - 1) / kAlign * kAlign;
    return at;
  }
  [[nodiscard]] size_t size() const { return size_; }

 private:
  size_t size_ = 0;
};

struct LinearLayout {
  struct Forward {
    size_t amax, w_amax, x_q, w_q, x_inv, w_inv, gemm;  // w_amax: tensor alone
  } forward{};
  struct Saved {
    size_t x_qt, w_qt, x_scale, w_scale;
  } saved{};
  struct Backward {
    size_t amax, dy_q, dy_qt, dy_row_scale, dy_col_scale, gemm;
  } backward{};
  size_t workspace_bytes = 0;
  size_t saved_bytes = 0;
};

// `gemm_forward` and `gemm_backward` are what the matmuls ask for.
[[nodiscard]] LinearLayout linear_layout(Shape shape, codegen::ScaleMode scale, int sm_count,
                                         size_t gemm_forward, size_t gemm_backward);

}  // namespace f8::runtime
