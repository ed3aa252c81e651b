// The rows of a cast of groups, as they are read: those of x, in place or gathered, or what SwiGLU makes
// of its operands. Each element is rounded to the type of the operands.
#pragma once

#include "group_args.cuh"
#include "swiglu_load.cuh"

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
template <RowSource kSource, Input kInput, Evict kEvict = Evict::kByAge>
struct GroupRows {
  static constexpr bool kGathers =
      kSource == RowSource::kGather || kSource == RowSource::kGatherScore;
  // Tokens are read by several groups.
  static constexpr Evict kReads = kGathers ? Evict::kByAge : kEvict;
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
      to.template load<kReads>(x, row * ld + column);
    } else if constexpr (kGathers) {
      to.template load<kReads>(x, from.index[row] * ld + column);
      if constexpr (kSource == RowSource::kGatherScore) scale_elements(to, from.score[row]);
    } else if constexpr (kSource == RowSource::kSwiglu) {
      Vec8<kInput> up;
      to.template load<kReads>(x, row * ld + column);
      up.template load<kReads>(from.up, row * from.ld_up + column);
      to_product(to, up);
    } else {
      const bool of_up = column >= half;
      const i32 in_half = of_up ? column - half : column;
      Vec8<kInput> up, grad;
      to.template load<kReads>(x, row * ld + in_half);
      up.template load<kReads>(from.up, row * from.ld_up + in_half);
      grad.template load<kReads>(from.grad, row * from.ld_grad + in_half);
      to_gradients(to, up, grad);
      if (of_up) to = up;
    }
  }
  // The elements of a tile of the group's matrix `t`.
  template <class Tensor>
  F8_DEVICE void load(const Tensor& t, i32 row0, i32 column0,
                      ThreadFragment<kInput>& fragment) const {
    if constexpr (kSource == RowSource::kMatrix) {
      fragment.template load<kReads>(t.x, t.ld, t.rows, t.cols, row0, column0);
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
};

}  // namespace f8::kernels
