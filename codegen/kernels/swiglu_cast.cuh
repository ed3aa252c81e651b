// The cast of h = silu(gate) up, and the casts of its gradients dgate and dup, none of which is ever in
// memory: each element is rounded to the type of gate and up, and then amax, scales and copies are those
// of cast.cuh. Where each element is computed once, the scales are delayed, or those of blocks. A
// tensor's scale in a first step takes a launch before that records the amax.
#pragma once

#include "cast.cuh"
#include "swiglu.cuh"

namespace f8::kernels {

struct DeviceMath {
  static F8_DEVICE float fma(float a, float b, float c) { return __fmaf_rn(a, b, c); }
  static F8_DEVICE float magnitude(float x) { return fabsf(x); }
  static F8_DEVICE float least(float a, float may_be_nan) { return fminf(a, may_be_nan); }
  static F8_DEVICE u32 bits(float x) { return __float_as_uint(x); }
  static F8_DEVICE float value(u32 bits) { return __uint_as_float(bits); }
};

template <Input kInput>
F8_DEVICE u32 pack_pair(float low, float high) {
  return kInput == Input::kBf16 ? pack_bf16(low, high) : pack_f16(low, high);
}

// x of the tensor is gate.
template <Input kInput>
struct LoadSwiglu {
  const void* up;
  i64 ld_up;

  F8_DEVICE void prefetch(const CastTensor& t, i32 row0, i32 column0) const {
    prefetch_tile<kInput>(t.x, t.ld, t.rows, t.cols, row0, column0);
    prefetch_tile<kInput>(up, ld_up, t.rows, t.cols, row0, column0);
  }
  F8_DEVICE void load(const CastTensor& t, i32 row0, i32 column0,
                      ThreadFragment<kInput>& fragment) const {
    using Values = Vec8<kInput>;
    ThreadFragment<kInput> of_up;
    fragment.load(t.x, t.ld, t.rows, t.cols, row0, column0);
    of_up.load(up, ld_up, t.rows, t.cols, row0, column0);
#pragma unroll
    for (int i = 0; i < kFragment; ++i) {
      Values& gate = fragment.rows[i];
      const auto product = [&](int e) {
        return swiglu<DeviceMath, kInput == Input::kF32>(gate.value(e), of_up.rows[i].value(e));
      };
#pragma unroll
      for (int w = 0; w < Values::kWords; ++w) {
        if constexpr (kInput == Input::kF32) {
          gate.word[w] = __float_as_uint(product(w));
        } else {
          gate.word[w] = pack_pair<kInput>(product(2 * w), product(2 * w + 1));
        }
      }
    }
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

template <class Config>
F8_DEVICE void swiglu_cast(const SwigluCastArgs& args) {
  Cast<Config>::run(args.cast, LoadSwiglu<Config::kInput>{args.up, args.ld_up});
}

// Both gradients are computed in the visit of gate, up and grad, and cast one after the other.
template <class Config>
F8_DEVICE void swiglu_backward_cast(const SwigluBackwardArgs& args) {
  constexpr Input kInput = Config::kInput;
  const CastTensor& gate = args.cast.tensors[0];
  const CastTensor& up = args.cast.tensors[1];
  const i32 rows = gate.rows;
  const i32 cols = gate.cols;
  const i32 index = Cast<Config>::index_of_tile(gate);
  const TileCoord tile(rows, cols, index);
  const i32 row0 = tile.row * kCastTile;
  const i32 column0 = tile.column * kCastTile;
  if constexpr (!Cast<Config>::kAfterAmax) {
    prefetch_tile<kInput>(gate.x, gate.ld, rows, cols, row0, column0);
    prefetch_tile<kInput>(up.x, up.ld, rows, cols, row0, column0);
    prefetch_tile<kInput>(args.grad, args.ld_grad, rows, cols, row0, column0);
  }
  begin_overlapped(args.cast.overlap);
  ThreadFragment<kInput> of_gate;
  ThreadFragment<kInput> of_up;
  of_gate.load(gate.x, gate.ld, rows, cols, row0, column0);
  of_up.load(up.x, up.ld, rows, cols, row0, column0);
  ThreadFragment<kInput> grad;
  grad.load(args.grad, args.ld_grad, rows, cols, row0, column0);
#pragma unroll
  for (int i = 0; i < kFragment; ++i) to_gradients(of_gate.rows[i], of_up.rows[i], grad.rows[i]);
  Cast<Config>::cast_fragment(args.cast, 0, tile, index == 0, of_gate);
  __syncthreads();
  Cast<Config>::cast_fragment(args.cast, 1, tile, index == 0, of_up);
  end_overlapped();
}

}  // namespace f8::kernels
