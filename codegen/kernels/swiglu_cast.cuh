// The cast of h = silu(gate) up, which is never in memory: each element is rounded to the type of gate
// and up, and then amax, scales and copies are those of cast.cuh. Every element is computed once, so
// the cast is one whose scales need no amax before: delayed, and those of blocks.
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

template <class Config>
F8_DEVICE void swiglu_cast(const SwigluCastArgs& args) {
  Cast<Config>::run(args.cast, LoadSwiglu<Config::kInput>{args.up, args.ld_up});
}

}  // namespace f8::kernels
