// The casts of activations, of gated ones and of their gradients, none of which is ever in memory: amax,
// scales, sums and copies are those of cast.cuh, of elements rounded to the type of what they are of. Delayed
// scales and those of blocks need one pass; for others activation_amax.cuh finds the maxima before.
#pragma once

#include "codegen/kernels/cast/activation_load.cuh"
#include "codegen/kernels/cast/cast.cuh"

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

template <class Config, class Function>
F8_DEVICE void cast_of_function(const ComputedCastArgs& args) {
  Cast<Config>::run(args.of, LoadFunction<Config::kInput, Function>{args.factor, args.ld_factor});
}
template <class Config>
F8_DEVICE void activation_cast(const ComputedCastArgs& args) {
  cast_of_function<Config, Activate<Config::kActivation>>(args);
}
template <class Config>
F8_DEVICE void activation_backward_cast(const ComputedCastArgs& args) {
  cast_of_function<Config, ActivateBackward<Config::kActivation>>(args);
}
template <class Config>
F8_DEVICE void glu_cast(const ComputedCastArgs& args) {
  cast_of_function<Config, Glu<Config::kActivation>>(args);
}

// Both gradients are computed at once, and cast one after the other: a block has a tile of each.
template <class Config>
F8_DEVICE void glu_backward_cast(const ComputedCastArgs& args) {
  constexpr Input kInput = Config::kInput;
  const CastTensor* const tensors = args.of.tensors;
  CastCounters* const* const counters = args.of.counters;
  float* const sums = Config::kSums ? args.of.sums : nullptr;  // [2][rows of tiles][cols]
  const i64 count = i64{(tensors->rows + kCastTile - 1) / kCastTile} * tensors->cols;
  ThreadFragment<kInput> of_up;
  Cast<Config>::run(CastOfOne{1, args.of.overlap, tensors, counters, nullptr, sums},
                    LoadGluGradient<kInput, Config::kActivation, CastTensor>{
                        tensors[1], args.factor, args.ld_factor, of_up});
  __syncthreads();  // before the shared memory of the first cast is written again
  Cast<Config>::run(CastOfOne{1, args.of.overlap, tensors + 1, counters + 1, nullptr,
                              Config::kSums ? sums + count : nullptr},
                    LoadNothing<kInput>{of_up});
}

// Both are side by side in one tensor, as gate and up are in x.
template <class Config, bool kUpFirst>
F8_DEVICE void cast_of_merged(const ComputedCastArgs& args) {
  constexpr Input kInput = Config::kInput;
  const CastTensor& t = args.of.tensors[0];
  const i32 index = t.blocks - 1 - static_cast<i32>(blockIdx.x);
  const MergedTiles tiles(t.cols, index);
  const SecondHalf second = second_half<kInput>(t);
  ThreadFragment<kInput> of_second;
  Cast<Config>::of_tile(args.of, 0, TileCoord(t.rows, t.cols, tiles.first), index == 0,
                        LoadGluGradient<kInput, Config::kActivation, SecondHalf, kUpFirst>{
                            second, args.factor, args.ld_factor, of_second});
  of_second.column += tiles.half;
  __syncthreads();  // before the shared memory of the first cast is written again
  Cast<Config>::of_tile(args.of, 0, TileCoord(t.rows, t.cols, tiles.second), false,
                        LoadNothing<kInput>{of_second});
}
template <class Config>
F8_DEVICE void merged_glu_backward_cast(const ComputedCastArgs& args) {
  cast_of_merged<Config, false>(args);
}
template <class Config>
F8_DEVICE void merged_glu_backward_up_first_cast(const ComputedCastArgs& args) {
  cast_of_merged<Config, true>(args);
}

}  // namespace f8::kernels
