// The layout of a linear's buffers: the workspace and the saved buffer.
// Offsets are multiples of kAlign bytes, fixed at plan time for the largest m. Row strides follow
// the m of the call, so a smaller call uses the front of each part.
//
//   forward   := sync | first | amax buffer (w, x) | partial maxima of x | of w |
//                own workspace of the GEMM | q of x and of w
//   saved     := qt of x | of w         without what a call is given as a tensor in fp8;
//                scale of x | of w      where the linear recomputes
//   backward  := sync | first | amax buffer (dy) | partial maxima of dy | again |
//                column sums of dy | own workspace of GEMMs | q and qt of dy
//   again     := partial maxima of x | of w     only where the linear recomputes, and qt of x and of w with dy's copies
//
// Copies come last, those of the largest tensor behind the others, so that a call that is given a tensor in
// fp8 needs less.
//
// q and qt are a tensor's copies (kernels.hpp), each followed by its scales. Partial maxima are a
// tensor's tile amax and its partials.
//
// A linear that recomputes saves no copy, and backward casts again: with the scale that forward
// found, where one scale is that of the whole tensor and of both copies.
//
// sync       is the reserved bytes of the workspace (float8.h, convention 6), which belong to the
//            one-launch kernels (quantize.cuh) of all linears. Every linear has it at the start of
//            its workspace, and nobody else writes to it between calls, but to set all of it to 0.
//            A call may have it elsewhere.
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
#include <span>
#include <vector>

#include "recipes/problem.hpp"
#include "runtime/linear/plan/call_arguments.hpp"
#include "runtime/linear/plan/kernels.hpp"

namespace f8::runtime {

// What GEMMs read of a tensor in fp8.
struct Fp8Refs {
  Ref q = {}, q_inverse = {}, qt = {}, qt_inverse = {};
};

// A tensor of a kind of call, and where its maxima and its copies lie.
struct TensorBuffers {
  Ref x = {};
  int64_t rows = 0;  // 0: the call's m
  int64_t cols = 0;
  Ref row_amax = {}, col_amax = {},
      amax = {};  // in the amax buffer, but for kept maxima of columns
  Ref tile_amax = {}, partials = {};
  Ref block_amax = {};  // of a shard that cuts blocks
  Ref q = {}, qt = {}, q_scale = {}, qt_scale = {};
  Ref kept_scale = {};  // which forward leaves, and backward reads
};

// `with_qt`: a cast made qt with q, and so may have left their scale with it.
[[nodiscard]] Fp8Refs fp8_refs(const Copies& copies, const TensorBuffers& at, bool with_qt = true);

struct CallTensors {
  TensorBuffers x = {}, w = {}, dy = {};

  [[nodiscard]] const TensorBuffers& of(Tensor tensor) const {
    return tensor == Tensor::kInput ? x : tensor == Tensor::kWeight ? w : dy;
  }
  [[nodiscard]] TensorBuffers& of(Tensor tensor) {
    return tensor == Tensor::kInput ? x : tensor == Tensor::kWeight ? w : dy;
  }
};

// Hands out the words of an amax buffer.
class AmaxWords {
 public:
  static constexpr int64_t kTensor = 4;  // a tensor's own, with padding

  explicit AmaxWords(Ref begin) : begin_(begin) {}
  Ref take(int64_t words) {
    const Ref at = begin_ + bytes_;
    bytes_ += sizeof(uint32_t) * static_cast<size_t>(words);
    return at;
  }
  [[nodiscard]] size_t bytes() const { return bytes_; }

 private:
  Ref begin_;
  size_t bytes_ = 0;
};

// The bytes of a workspace whose last parts are copies of tensors.
struct WorkspaceBytes {
  size_t without_copies = 0;
  std::array<size_t, 3> end = {};  // of each tensor's copies; indexed by Tensor

  // Returns those of a call that is given these tensors in fp8. `x` has the copy that the call reads.
  [[nodiscard]] size_t of(bool x, bool w, bool dy) const;
};

struct LinearLayout {
  Ref sync = Slot::kLaunchCounts;  // at the start of both workspaces, or apart
  Ref first;                       // after it in both
  Ref amax;                        // the amax buffer, after those in both
  CallTensors forward;             // of which q is in the workspace, qt in `saved`
  CallTensors backward;            // of x and w: qt in `saved`, or made again in the workspace
  // GEMMs read these of the tensors that a call casts: in forward by whether it has a `saved`, and of
  // dy by whether its qt is cast.
  std::array<Fp8Refs, 2> forward_x, forward_w, backward_dy;
  Fp8Refs backward_x, backward_w;
  Ref sums;
  Ref forward_gemm, backward_gemm;
  WorkspaceBytes forward_bytes, backward_bytes;
  size_t saved_bytes = 0;
  size_t saved_input_bytes = 0;  // its part without the weight's

  // A forward with a `saved` keeps the scales of a linear that recomputes there.
  [[nodiscard]] CallTensors forward_tensors(bool keeps) const;
  // The bytes of `saved` for calls that are given x, or w, in fp8.
  [[nodiscard]] size_t saved_bytes_of(bool x_fp8, bool w_fp8) const {
    return (x_fp8 ? 0 : saved_input_bytes) + (w_fp8 ? 0 : saved_bytes - saved_input_bytes);
  }
};

// A tensor that is cast alone: its buffers, and the bytes of the workspace and of its copies, which
// may lie apart. `whole_rows` is not 0 for a shard of so many rows, which cuts blocks: scales of
// 128x128 blocks are those of the whole then. `scale_apart`: q's scale lies in qt's place, as do kept maxima of columns.
struct QuantizerLayout {
  Ref sync = Slot::kLaunchCounts;
  Ref first, amax;
  CallTensors tensors;
  Fp8Refs refs;
  size_t workspace_bytes = 0;
  size_t q_bytes = 0;
  size_t qt_bytes = 0;
};
[[nodiscard]] QuantizerLayout quantizer_layout(Shape shape, const LinearKernels& kernels,
                                               int sm_count, Tensor tensor, bool with_qt,
                                               int64_t whole_rows = 0, bool scale_apart = false);

// `gemm_forward` and `gemm_backward` are the bytes that the GEMMs ask for.
[[nodiscard]] LinearLayout linear_layout(Shape shape, const LinearKernels& kernels, int sm_count,
                                         size_t gemm_forward, size_t gemm_backward);

// The bytes that a linear saves of x and of w, which follow from its description alone.
struct SavedBytes {
  size_t x = 0, w = 0;
};
struct LinearDesc;
[[nodiscard]] Result<SavedBytes> saved_bytes_of(const LinearDesc& desc);

}  // namespace f8::runtime
