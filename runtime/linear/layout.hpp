// Where a linear's buffers lie in the workspace, in the saved buffer and in the weight cache.
// Offsets are multiples of kAlign bytes, fixed at plan time for the largest m; row strides follow
// the m of the call, so a smaller call uses the front of each part.
//
//   forward   sync | words of a first step over ranks | amax words (w, x) | lines of x, of w |
//             partial maxima of x, of w | x q | w q | their scales | matmul's own
//   saved     x qt | its scales | w qt | its scales
//   cache     w q | w qt | scales of each
//   backward  sync | the same | amax words (dy) | lines | partial maxima | dy q | dy qt |
//             scales of each | what is cast again: lines and partial maxima of x, of w, x qt |
//             its scales | w qt | its scales | column sums of dy | matmuls' own
// Recomputing, saved is empty.
// sync is the reserved bytes of the workspace (float8.h, convention 6), which belong to the
// one-launch kernels (quantize.cuh) of all linears: every linear has it at the start of its
// workspace, and nobody else writes to it between calls, unless to set all of it to 0. Scales:
// scale and 1/scale of a tensor, else the inverse scales as scale_floats() counts them. Two copies
// with one tensor scale keep it with qt, where that is written.
//
// Lines are the tiles' line maxima (tile_amax.cuh), for every m with which a matrix takes them;
// nothing of them is cleared. Other axis maxima, and a tensor's beside them, are amax words, raised
// atomically, so that one memset clears those of a call:
//   forward   w rows | w columns | w | x columns | x | x rows
//   backward  what is cast again: w columns | w | x columns | x, then dy columns | dy | rows
#pragma once

#include <cstddef>

#include "recipes/problem.hpp"
#include "runtime/linear/kernels.hpp"

namespace f8::runtime {

struct CopyLayout {
  size_t q, qt, q_scale, qt_scale;
};

// Words from the start of the amax words; the tensor's own is followed by padding.
struct WordLayout {
  static constexpr int64_t kTensorWords = 4;
  int64_t row, column, tensor;
};

struct LinearLayout {
  size_t sync = 0;   // at the start of both workspaces, in every linear's
  size_t first = 0;  // kFirstWords for each delayed scale, after it in both
  size_t words = 0;  // behind those in both; 0 bytes where no scale is an axis's
  WordLayout x_words{}, w_words{}, dy_words{};
  int64_t input_words = 0;  // where those of x begin
  size_t x_lines = 0, w_lines = 0, dy_lines = 0;
  size_t x_partials = 0, w_partials = 0, dy_partials = 0;
  CopyLayout x{}, w{};  // q in the workspace, qt in saved, or in backward's workspace
  CopyLayout cache{};
  CopyLayout dy{};
  struct Again {  // of a copy that backward casts again
    WordLayout words{};
    size_t lines = 0, partials = 0;
  };
  Again x_again, w_again;
  size_t sums = 0;
  size_t forward_gemm = 0, backward_gemm = 0;
  size_t workspace_bytes = 0;
  size_t saved_bytes = 0;
  size_t saved_input_bytes = 0;  // its part without the weight's
  size_t cache_bytes = 0;
};

// `gemm_forward` and `gemm_backward` are what the matmuls ask for.
[[nodiscard]] LinearLayout linear_layout(Shape shape, const LinearKernels& kernels, int sm_count,
                                         size_t gemm_forward, size_t gemm_backward);

}  // namespace f8::runtime
