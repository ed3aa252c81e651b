// The rows of a cast of groups, as they are read: those of x, in place or gathered, those of two tensors, or
// what SwiGLU makes of its operands. Each element is rounded to the type of the operands.
#pragma once

#include "codegen/kernels/cast/activation_load.cuh"
#include "codegen/kernels/experts/group_args.cuh"

namespace f8::kernels {

// Eight elements times a factor.
template <Input kInput>
F8_DEVICE void scale_elements(Vec8<kInput>& x, float factor) {
#pragma unroll
  for (int w = 0; w < Vec8<kInput>::kWords; ++w) {
    if constexpr (kInput == Input::kF32) {
      x.word[w] = __float_as_uint(x.value(w) * factor);
    } else {
      x.word[w] = pack_pair<kInput>(x.value(2 * w) * factor, x.value(2 * w + 1) * factor);
    }
  }
}

// The rows of `tensor`, which is the whole matrix; a group's begin at `start`.
template <RowSource kSource, Input kInput>
struct GroupRows {
  static constexpr bool kGathers =
      kSource == RowSource::kGather || kSource == RowSource::kGatherScore;
  static constexpr bool kPairs = kSource == RowSource::kSwigluBackward && kInput != Input::kF32;
  const void* x;
  i64 ld;
  const RowOperands& from;
  i32 start;
  i32 half;  // columns of gate's gradient

  template <class Tensor>
  F8_DEVICE GroupRows(const Tensor& tensor, const RowOperands& operands, i32 first_row)
      : x(tensor.x), ld(tensor.ld), from(operands), start(first_row), half(tensor.cols / 2) {}

  // Reads elements [column, column + 8) of a row of the whole matrix.
  F8_DEVICE void read(i64 row, i32 column, Vec8<kInput>& to) const {
    if constexpr (kSource == RowSource::kMatrix) {
      to.load(x, row * ld + column);
    } else if constexpr (kGathers) {
      to.load(x, from.index[row] * ld + column);
      if constexpr (kSource == RowSource::kGatherScore) scale_elements(to, from.score[row]);
    } else if constexpr (kSource == RowSource::kPair) {
      const u32 half = static_cast<u32>(from.half_rows);
      const u32 in_group = static_cast<u32>(row) % (2 * half);
      const i64 first = (row - in_group) / 2;  // of the group's, in each tensor
      if (in_group < half) {
        to.load(x, (first + in_group) * ld + column);
      } else {
        to.load(from.up, (first + in_group - half) * from.ld_up + column);
      }

    } else if constexpr (kSource == RowSource::kSwiglu) {
      Vec8<kInput> up;
      to.load(x, row * ld + column);
      up.load(from.up, row * from.ld_up + column);
      apply<Glu<Activation::kSilu>>(to, up);
    } else {
      const bool of_up = column >= half;
      Vec8<kInput> up;
      read_gradients(row, of_up ? column - half : column, to, up);
      if (of_up) to = up;
    }
  }
  // Both gradients of eight elements of the product.
  F8_DEVICE void read_gradients(i64 row, i32 column, Vec8<kInput>& gate, Vec8<kInput>& up) const {
    Vec8<kInput> grad;
    gate.load(x, row * ld + column);
    up.load(from.up, row * from.ld_up + column);
    grad.load(from.grad, row * from.ld_grad + column);
    to_gradients<Activation::kSilu>(gate, up, grad);
  }
  template <class Tensor>
  F8_DEVICE void prefetch_rows(const void* operand, i64 ld_operand, const Tensor& t, i32 row0,
                               i32 column0) const {
    const u8* const rows =
        static_cast<const u8*>(operand) + i64{start} * ld_operand * Vec8<kInput>::kElementBytes;
    const i32 cols = kSource == RowSource::kSwigluBackward ? half : t.cols;
    prefetch_tile<kInput>(rows, ld_operand, t.rows, cols, row0, column0);
  }
  // The elements of a tile of the group's matrix `t`.
  template <class Tensor>
  F8_DEVICE void load(const Tensor& t, i32 row0, i32 column0,
                      ThreadFragment<kInput>& fragment) const {
    if constexpr (kSource == RowSource::kMatrix) {
      fragment.load(t.x, t.ld, t.rows, t.cols, row0, column0);
    } else {
      fragment.set_origin(row0, column0);
#pragma unroll
      for (int i = 0; i < kFragment; ++i) {
        if (fragment.row + i < t.rows && fragment.column < t.cols) {
          read(i64{start} + fragment.row + i, fragment.column, fragment.rows[i]);
        } else {
          fragment.rows[i].clear();
        }
      }
    }
  }
  // A tile of gate's gradients, and the one of up's that is `half` columns behind it.
  template <class Tensor>
  F8_DEVICE void load_pair(const Tensor& t, i32 row0, i32 column0, ThreadFragment<kInput>& of_gate,
                           ThreadFragment<kInput>& of_up) const {
    of_gate.set_origin(row0, column0);
    of_up.set_origin(row0, column0 + half);
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      if (of_gate.row + i < t.rows) {
        read_gradients(i64{start} + of_gate.row + i, of_gate.column, of_gate.rows[i],
                       of_up.rows[i]);
      } else {
        of_gate.rows[i].clear();
        of_up.rows[i].clear();
      }
    }
  }
  // Fetches a tile of the group's matrix `t`, or what a pair is of, into L2. Tokens are mostly there.
  template <class Tensor>
  F8_DEVICE void prefetch(const Tensor& t, i32 row0, i32 column0) const {
    if constexpr (kSource == RowSource::kMatrix) {
      prefetch_tile<kInput>(t.x, t.ld, t.rows, t.cols, row0, column0);
    } else if constexpr (kSource == RowSource::kSwiglu) {
      prefetch_rows(x, ld, t, row0, column0);
      prefetch_rows(from.up, from.ld_up, t, row0, column0);
    } else if constexpr (kSource == RowSource::kSwigluBackward) {
      if (column0 >= half) column0 -= half;
      prefetch_rows(x, ld, t, row0, column0);
      prefetch_rows(from.up, from.ld_up, t, row0, column0);
      prefetch_rows(from.grad, from.ld_grad, t, row0, column0);
    }
  }
  // Reads a tile of the group's matrix `t`, or a pair, of which the second one goes to the stash.
  template <class Tensor>
  F8_DEVICE void load_tile(const Tensor& t, i32 row0, i32 column0, bool pairs,
                           ThreadFragment<kInput>& fragment) const {
    if constexpr (kPairs) {
      if (pairs) {
        ThreadFragment<kInput> of_up;
        load_pair(t, row0, column0, fragment, of_up);
        of_up.stash();
        return;
      }
    }
    load(t, row0, column0, fragment);
  }
  // Reads a tile of the group's matrix `t`, or a pair of them, and calls work(fragment, the tile's first
  // column) for each.
  template <class Tensor, class Work>
  F8_DEVICE void each_tile(const Tensor& t, i32 row0, i32 column0, const Work& work) const {
    ThreadFragment<kInput> fragment;
    if constexpr (kPairs) {
      const bool pairs = has_tile_pairs(kSource, kInput == Input::kF32, 2 * i64{half});
      ThreadFragment<kInput> of_up;
      if (pairs) {
        load_pair(t, row0, column0, fragment, of_up);
      } else {
        load(t, row0, column0, fragment);
      }
#pragma unroll 1
      for (bool up = false;; up = true) {
        work(fragment, up ? column0 + half : column0);
        if (up || !pairs) return;
        fragment = of_up;
        __syncthreads();  // before shared memory is written again
      }
    } else {
      load(t, row0, column0, fragment);
      work(fragment, column0);
    }
  }
};

}  // namespace f8::kernels
