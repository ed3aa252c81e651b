// The loaders of silu(gate) up and of its gradients: what cast.cuh and amax.cuh read in place of a
// tensor's elements. Each element is rounded to the type of gate and up.
#pragma once

#include "codegen/kernels/cast/matrix_tile.cuh"
#include "codegen/kernels/cast/swiglu.cuh"

namespace f8::kernels {

struct DeviceMath {
  static F8_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  static F8_DEVICE float magnitude(float x) { return fabsf(x); }
  static F8_DEVICE float least(float a, float may_be_nan) { return fminf(a, may_be_nan); }
  static F8_DEVICE u32 bits(float x) { return __float_as_uint(x); }
  static F8_DEVICE float value(u32 bits) { return __uint_as_float(bits); }
};

// Eight elements of gate become those of the product.
template <Input kInput>
F8_DEVICE void to_product(Vec8<kInput>& gate, const Vec8<kInput>& up) {
  const auto product = [&](int e) {
    return swiglu<DeviceMath, kInput == Input::kF32>(gate.value(e), up.value(e));
  };
#pragma unroll
  for (int w = 0; w < Vec8<kInput>::kWords; ++w) {
    if constexpr (kInput == Input::kF32) {
      gate.word[w] = __float_as_uint(product(w));
    } else {
      gate.word[w] = pack_pair<kInput>(product(2 * w), product(2 * w + 1));
    }
  }
}

// x of the tensor is gate.
template <Input kInput>
struct LoadSwiglu {
  const void* up;
  i64 ld_up;

  template <class Tensor>
  F8_DEVICE void prefetch(const Tensor& t, i32 row0, i32 column0) const {
    prefetch_tile<kInput>(t.x, t.ld, t.rows, t.cols, row0, column0);
    prefetch_tile<kInput>(up, ld_up, t.rows, t.cols, row0, column0);
  }
  template <class Tensor>
  F8_DEVICE void load(const Tensor& t, i32 row0, i32 column0,
                      ThreadFragment<kInput>& fragment) const {
    ThreadFragment<kInput> of_up;
    fragment.load(t.x, t.ld, t.rows, t.cols, row0, column0);
    of_up.load(up, ld_up, t.rows, t.cols, row0, column0);
#pragma unroll
    for (int i = 0; i < kFragment; ++i) to_product(fragment.rows[i], of_up.rows[i]);
  }
};

// Eight elements of gate and of up become those of their gradients.
template <Input kInput>
F8_DEVICE void to_gradients(Vec8<kInput>& gate, Vec8<kInput>& up, const Vec8<kInput>& grad) {
  const auto gradients = [&](int e) {
    return swiglu_backward<DeviceMath, kInput == Input::kF32>(gate.value(e), up.value(e),
                                                              grad.value(e));
  };
#pragma unroll
  for (int w = 0; w < Vec8<kInput>::kWords; ++w) {
    if constexpr (kInput == Input::kF32) {
      const SwigluGradients of = gradients(w);
      gate.word[w] = __float_as_uint(of.gate);
      up.word[w] = __float_as_uint(of.up);
    } else {
      const SwigluGradients low = gradients(2 * w);
      const SwigluGradients high = gradients(2 * w + 1);
      gate.word[w] = pack_pair<kInput>(low.gate, high.gate);
      up.word[w] = pack_pair<kInput>(low.up, high.up);
    }
  }
}

// x of a tensor is gate. Its own fragment becomes dgate, and dup is left in `of_up`, both in the visit of
// gate, up and grad.
template <Input kInput, class Tensor>
struct LoadGateGradient {
  const Tensor& up;
  const void* grad;
  i64 ld_grad;
  ThreadFragment<kInput>& of_up;

  F8_DEVICE void prefetch(const Tensor& t, i32 row0, i32 column0) const {
    prefetch_tile<kInput>(t.x, t.ld, t.rows, t.cols, row0, column0);
    prefetch_tile<kInput>(up.x, up.ld, t.rows, t.cols, row0, column0);
    prefetch_tile<kInput>(grad, ld_grad, t.rows, t.cols, row0, column0);
  }
  F8_DEVICE void load(const Tensor& t, i32 row0, i32 column0,
                      ThreadFragment<kInput>& fragment) const {
    ThreadFragment<kInput> of_grad;
    fragment.load(t.x, t.ld, t.rows, t.cols, row0, column0);
    of_up.load(up.x, up.ld, t.rows, t.cols, row0, column0);
    of_grad.load(grad, ld_grad, t.rows, t.cols, row0, column0);
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      to_gradients(fragment.rows[i], of_up.rows[i], of_grad.rows[i]);
    }
  }
};

// The elements are there already.
template <Input kInput>
struct LoadNothing {
  const ThreadFragment<kInput>& from;

  template <class Tensor>
  F8_DEVICE void prefetch(const Tensor&, i32, i32) const {}
  template <class Tensor>
  F8_DEVICE void load(const Tensor&, i32, i32, ThreadFragment<kInput>& fragment) const {
    fragment = from;
  }
};

}  // namespace f8::kernels
