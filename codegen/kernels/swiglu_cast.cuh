// The cast of h = silu(gate) up, and the casts of its gradients dgate and dup, none of which is ever in
// memory: each element is rounded to the type of gate and up, and then amax, scales and copies are those
// of cast.cuh. Where each element is computed once, the scales are delayed, or those of blocks. The first
// step's scale is the tensor's, whose amax a launch with a delayed scale has recorded before.
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

// x of a tensor is gate. Its own fragment becomes dgate, and dup is left in `of_up`, both in the visit of
// gate, up and grad.
template <Input kInput>
struct LoadGateGradient {
  const CastTensor& up;
  const void* grad;
  i64 ld_grad;
  ThreadFragment<kInput>& of_up;

  F8_DEVICE void prefetch(const CastTensor& t, i32 row0, i32 column0) const {
    prefetch_tile<kInput>(t.x, t.ld, t.rows, t.cols, row0, column0);
    prefetch_tile<kInput>(up.x, up.ld, t.rows, t.cols, row0, column0);
    prefetch_tile<kInput>(grad, ld_grad, t.rows, t.cols, row0, column0);
  }
  F8_DEVICE void load(const CastTensor& t, i32 row0, i32 column0,
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

  F8_DEVICE void prefetch(const CastTensor&, i32, i32) const {}
  F8_DEVICE void load(const CastTensor&, i32, i32, ThreadFragment<kInput>& fragment) const {
    fragment = from;
  }
};

// One of the tensors of a launch, as a cast takes its arguments.
struct CastOfOne {
  i32 count;
  i32 overlap;
  const CastTensor* tensors;
  CastCounters* const* counters;
  const u32* noop_flag = nullptr;
  float* sums = nullptr;
};

template <class Config>
F8_DEVICE void swiglu_cast(const SwigluCastArgs& args) {
  Cast<Config>::run(args.cast, LoadSwiglu<Config::kInput>{args.up, args.ld_up});
}

// Both gradients are computed at once, and cast one after the other: a block has a tile of each.
template <class Config>
F8_DEVICE void swiglu_backward_cast(const SwigluBackwardArgs& args) {
  constexpr Input kInput = Config::kInput;
  const CastTensor* const tensors = args.cast.tensors;
  CastCounters* const* const counters = args.cast.counters;
  ThreadFragment<kInput> of_up;
  Cast<Config>::run(CastOfOne{1, args.cast.overlap, tensors, counters},
                    LoadGateGradient<kInput>{tensors[1], args.grad, args.ld_grad, of_up});
  __syncthreads();  // before the shared memory of the first cast is written again
  Cast<Config>::run(CastOfOne{1, args.cast.overlap, tensors + 1, counters + 1},
                    LoadNothing<kInput>{of_up});
}

}  // namespace f8::kernels
