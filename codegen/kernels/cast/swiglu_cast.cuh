// The cast of h = silu(gate) up, and the casts of its gradients dgate and dup, none of which is ever in
// memory: amax, scales and copies are those of cast.cuh, of elements rounded to the type of gate and up.
// Delayed scales and those of blocks need one visit; for others swiglu_amax.cuh finds the maxima before.
#pragma once

#include "codegen/kernels/cast/cast.cuh"
#include "codegen/kernels/cast/swiglu_load.cuh"

namespace f8::kernels {

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
  Cast<Config>::run(
      CastOfOne{1, args.cast.overlap, tensors, counters},
      LoadGateGradient<kInput, CastTensor>{tensors[1], args.grad, args.ld_grad, of_up});
  __syncthreads();  // before the shared memory of the first cast is written again
  Cast<Config>::run(CastOfOne{1, args.cast.overlap, tensors + 1, counters + 1},
                    LoadNothing<kInput>{of_up});
}

}  // namespace f8::kernels
