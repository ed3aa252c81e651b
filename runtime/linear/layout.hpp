// The layout of a linear's buffers: the workspace, the saved buffer and the weight cache.
// Offsets are multiples of kAlign bytes, fixed at plan time for the largest m. Row strides follow
// the m of the call, so a smaller call uses the front of each part.
//
//   forward   := sync | first | amax buffer (w, x) | tile amax of x | of w | partials of x | of w |
//                x q | w q | scales of x q | of w q | own workspace of the GEMM
//   saved     := x qt | its scales | w qt | its scales
//   cache     := w q | w qt | scales of each
//   backward  := sync | first | amax buffer (dy) | tile amax of dy | partials of dy |
//                dy q | dy qt | scales of each | again | column sums of dy | own workspace of GEMMs
//   again     := tile amax of x | of w | partials of x | of w |
//                x qt | its scales | w qt | its scales           only where the linear recomputes
//
// A linear that recomputes saves nothing: `saved` is empty, and backward casts again.
//
// sync       is the reserved bytes of the workspace (float8.h, convention 6), which belong to the
//            one-launch kernels (quantize.cuh) of all linears. Every linear has it at the start of
//            its workspace, and nobody else writes to it between calls, but to set all of it to 0.
// first      has kFirstWords words for each delayed scale, for a first step over ranks.
// scales     are a tensor's scale and 1/scale, else the inverse scales as scale_floats() counts
//            them. Two copies with one tensor scale keep it with qt, where qt is written.
// partials   are the maxima that the blocks of a tensor's amax launch leave.
// tile amax  are the maxima of each tile's rows and columns (tile_amax.cuh), for every m for which
//            the matrix fits them. They are written before they are read, and never cleared.
// amax buffer  holds the other maxima of rows and columns, and a tensor's beside them. They are
//            raised atomically, so they are cleared before; one memset clears those of a call:
//              forward   := w rows | w columns | w | x columns | x | x rows
//              backward  := again w columns | w | x columns | x, then dy columns | dy | dy rows
#pragma once

#include <cstddef>

#include "recipes/problem.hpp"
#include "runtime/linear/kernels.hpp"

namespace f8::runtime {

struct CopyLayout {
  size_t q, qt, q_scale, qt_scale;
};

// The places of a tensor's maxima.
struct AmaxBuffers {
  static constexpr int64_t kTensorWords = 4;  // the tensor's own, with padding
  int64_t row = 0, column = 0, tensor = 0;    // words of the amax buffer
  size_t tile_amax = 0, partials = 0;         // bytes
};

struct LinearLayout {
  size_t sync = 0;   // at the start of both workspaces, in every linear's
  size_t first = 0;  // after it in both
  size_t amax = 0;   // the amax buffer, after those in both; 0 bytes where no scale is an axis's
  AmaxBuffers x_amax, w_amax, dy_amax;
  AmaxBuffers x_again, w_again;  // of what backward casts again
  int64_t input_amax = 0;        // the word where those of x begin
  CopyLayout x{}, w{};           // q in the workspace, qt in saved, or in backward's workspace
  CopyLayout cache{};
  CopyLayout dy{};
  size_t sums = 0;
  size_t forward_gemm = 0, backward_gemm = 0;
  size_t workspace_bytes = 0;
  size_t saved_bytes = 0;
  size_t saved_input_bytes = 0;  // its part without the weight's
  size_t cache_bytes = 0;
};

// `gemm_forward` and `gemm_backward` are the bytes that the GEMMs ask for.
[[nodiscard]] LinearLayout linear_layout(Shape shape, const LinearKernels& kernels, int sm_count,
                                         size_t gemm_forward, size_t gemm_backward);

}  // namespace f8::runtime
