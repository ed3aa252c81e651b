// The loaders of activations, of their products with another matrix and of gradients: what cast.cuh and
// amax.cuh read in place of a tensor's elements. Each element is rounded to the type of what it is of.
#pragma once

#include "codegen/kernels/cast/activations.cuh"
#include "codegen/kernels/cast/matrix_tile.cuh"

namespace f8::kernels {

struct DeviceMath {
  static F8_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  static F8_DEVICE float magnitude(float x) { return fabsf(x); }
  static F8_DEVICE float least(float a, float b) {
    float r;
    asm("min.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  }
  static F8_DEVICE float greatest(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
  }
  // A Newton step makes of what rcp.approx finds what a division would, without its branch.
  static F8_DEVICE float inverse(float d) {
    float r;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(d));
    return __fmaf_rn(r, __fmaf_rn(-d, r, 1.0F), r);
  }
  static F8_DEVICE u32 bits(float x) { return __float_as_uint(x); }
  static F8_DEVICE float value(u32 bits) { return __uint_as_float(bits); }
};

// Eight elements of x become what a Function of activations.cuh makes of them, and of those of `other` where
// it has pairs.
template <class Function, Input kInput>
F8_DEVICE void apply(Vec8<kInput>& x, const Vec8<kInput>& other) {
  const auto of = [&](int e) {
    return Function::template of<DeviceMath, kInput == Input::kF32>(
        x.value(e), Function::kPair ? other.value(e) : 0.0F);
  };
#pragma unroll
  for (int w = 0; w < Vec8<kInput>::kWords; ++w) {
    if constexpr (kInput == Input::kF32) {
      x.word[w] = __float_as_uint(of(w));
    } else {
      x.word[w] = pack_pair<kInput>(of(2 * w), of(2 * w + 1));
    }
  }
}

// x of the tensor is the function's first operand.
template <Input kInput, class Function>
struct LoadFunction {
  const void* other;
  i64 ld_other;

  template <class Tensor>
  F8_DEVICE void prefetch(const Tensor& t, i32 row0, i32 column0) const {
    prefetch_tile<kInput>(t.x, t.ld, t.rows, t.cols, row0, column0);
    if constexpr (Function::kPair) {
      prefetch_tile<kInput>(other, ld_other, t.rows, t.cols, row0, column0);
    }
  }
  template <class Tensor>
  F8_DEVICE void load(const Tensor& t, i32 row0, i32 column0,
                      ThreadFragment<kInput>& fragment) const {
    fragment.load(t.x, t.ld, t.rows, t.cols, row0, column0);
    ThreadFragment<kInput> of_other;
    if constexpr (Function::kPair) {
      of_other.load(other, ld_other, t.rows, t.cols, row0, column0);
    }
#pragma unroll
    for (int i = 0; i < kFragment; ++i) apply<Function>(fragment.rows[i], of_other.rows[i]);
  }
};

// Eight elements of gate and of up become those of their gradients.
template <Activation kActivation, Input kInput>
F8_DEVICE void to_gradients(Vec8<kInput>& gate, Vec8<kInput>& up, const Vec8<kInput>& grad) {
  const auto gradients = [&](int e) {
    return glu_backward<kActivation, DeviceMath, kInput == Input::kF32>(gate.value(e), up.value(e),
                                                                        grad.value(e));
  };
#pragma unroll
  for (int w = 0; w < Vec8<kInput>::kWords; ++w) {
    if constexpr (kInput == Input::kF32) {
      const GluGradients of = gradients(w);
      gate.word[w] = __float_as_uint(of.gate);
      up.word[w] = __float_as_uint(of.up);
    } else {
      const GluGradients low = gradients(2 * w);
      const GluGradients high = gradients(2 * w + 1);
      gate.word[w] = pack_pair<kInput>(low.gate, high.gate);
      up.word[w] = pack_pair<kInput>(low.up, high.up);
    }
  }
}

// x of a tensor is gate, and `other` up, or with kUpFirst the other way. The tensor's own fragment becomes its
// gradient, and the other one's is left in `of_other`, both in the visit of gate, up and grad.
template <Input kInput, Activation kActivation, class Other, bool kUpFirst = false>
struct LoadGluGradient {
  const Other& other;  // its x and ld
  const void* grad;
  i64 ld_grad;
  ThreadFragment<kInput>& of_other;

  template <class Tensor>
  F8_DEVICE void prefetch(const Tensor& t, i32 row0, i32 column0) const {
    prefetch_tile<kInput>(t.x, t.ld, t.rows, t.cols, row0, column0);
    prefetch_tile<kInput>(other.x, other.ld, t.rows, t.cols, row0, column0);
    prefetch_tile<kInput>(grad, ld_grad, t.rows, t.cols, row0, column0);
  }
  template <class Tensor>
  F8_DEVICE void load(const Tensor& t, i32 row0, i32 column0,
                      ThreadFragment<kInput>& fragment) const {
    ThreadFragment<kInput> of_grad;
    fragment.load(t.x, t.ld, t.rows, t.cols, row0, column0);
    of_other.load(other.x, other.ld, t.rows, t.cols, row0, column0);
    of_grad.load(grad, ld_grad, t.rows, t.cols, row0, column0);
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      if constexpr (kUpFirst) {
        to_gradients<kActivation>(of_other.rows[i], fragment.rows[i], of_grad.rows[i]);
      } else {
        to_gradients<kActivation>(fragment.rows[i], of_other.rows[i], of_grad.rows[i]);
      }
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

// The tiles of a tensor whose columns are gate's and as many of up's, both whole tiles: each block has two, the one
// of `index` in the first half and the one as far in the second.
struct MergedTiles {
  i32 first, second;  // in the tensor
  i32 half;           // of the columns

  F8_DEVICE MergedTiles(i32 cols, i32 index) : half(cols / 2) {
    const i32 across = half / kCastTile;
    first = index + index / across * across;
    second = first + across;
  }
};
struct SecondHalf {
  const void* x;
  i64 ld;
};
template <Input kInput, class Tensor>
F8_DEVICE SecondHalf second_half(const Tensor& t) {
  return {static_cast<const u8*>(t.x) + i64{t.cols / 2} * Vec8<kInput>::kElementBytes, t.ld};
}

}  // namespace f8::kernels
