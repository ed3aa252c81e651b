// Activations, gated ones and their gradients with their maxima, for casts whose scales come from these: the
// elements are computed once, rounded and written, and cast.cuh reads them. To compute them in the cast again moves
// as many bytes for forward, and is bound by its instructions.
#pragma once

#include "codegen/kernels/cast/activation_load.cuh"
#include "codegen/kernels/cast/amax.cuh"

namespace f8::kernels {

template <class Values, bool kPair>
struct OperandsOf {
  Values x, other;
};
template <class Values>
struct OperandsOf<Values, false> {
  Values x;
};

template <Input kInput, class Function>
struct AmaxOfFunction : LoadFunction<kInput, Function> {
  using Values = Vec8<kInput>;
  using Read = OperandsOf<Values, Function::kPair>;
  void* result;
  static constexpr int kInFlight = Function::kPair ? 2 : 8;  // more spill
  // Gate and up that one linear made are rows apart; what has one operand is mostly dense.
  static constexpr int kStrided = Function::kPair && kInput != Input::kF32 ? 2 : 1;
  static constexpr int kResults = 1;

  F8_DEVICE bool is_dense(const AmaxTensor& t) const {
    return t.ld == t.cols && (!Function::kPair || this->ld_other == t.cols);
  }
  F8_DEVICE void read(const AmaxTensor& t, i64 row, i64 element, Read& to) const {
    to.x.load(t.x, row * t.ld + element);
    if constexpr (Function::kPair) to.other.load(this->other, row * this->ld_other + element);
  }
  F8_DEVICE void raise(Read& from, i64 element, Values (&most)[kResults]) const {
    if constexpr (Function::kPair) {
      apply<Function>(from.x, from.other);
    } else {
      apply<Function>(from.x, from.x);
    }
    from.x.store(result, element);
    from.x.raise(most[0]);
  }
  F8_DEVICE void load(const AmaxTensor& t, i32 row0, i32 column0,
                      ThreadFragment<kInput>& fragment) const {
    LoadFunction<kInput, Function>::load(t, row0, column0, fragment);
    fragment.store(result, t.cols, t.rows, t.cols);
  }
};

// dgate and dup where rows and columns have no maxima. With these the cast computes both again.
template <Input kInput, Activation kActivation>
struct AmaxOfGradients {
  using Values = Vec8<kInput>;
  struct Read {
    Values gate, up, grad;
  };
  static constexpr int kInFlight = 2;  // more spill
  static constexpr int kStrided = 1;
  static constexpr int kResults = 2;
  const AmaxTensor& up;
  const void* grad;
  i64 ld_grad;
  void* const* results;

  F8_DEVICE bool is_dense(const AmaxTensor& t) const {
    return t.ld == t.cols && up.ld == t.cols && ld_grad == t.cols;
  }
  F8_DEVICE void read(const AmaxTensor& t, i64 row, i64 element, Read& to) const {
    to.gate.load(t.x, row * t.ld + element);
    to.up.load(up.x, row * up.ld + element);
    to.grad.load(grad, row * ld_grad + element);
  }
  F8_DEVICE void raise(Read& from, i64 element, Values (&most)[kResults]) const {
    to_gradients<kActivation>(from.gate, from.up, from.grad);
    from.gate.store(results[0], element);
    from.up.store(results[1], element);
    from.gate.raise(most[0]);
    from.up.raise(most[1]);
  }
};

template <class Config, class Function>
F8_DEVICE void amax_of_function(const ComputedAmaxArgs& args) {
  Amax<Config>::run(args.of, AmaxOfFunction<Config::kInput, Function>{{args.factor, args.ld_factor},
                                                                      args.results[0]});
}
template <class Config>
F8_DEVICE void activation_amax(const ComputedAmaxArgs& args) {
  amax_of_function<Config, Activate<Config::kActivation>>(args);
}
template <class Config>
F8_DEVICE void activation_backward_amax(const ComputedAmaxArgs& args) {
  amax_of_function<Config, ActivateBackward<Config::kActivation>>(args);
}
template <class Config>
F8_DEVICE void glu_amax(const ComputedAmaxArgs& args) {
  amax_of_function<Config, Glu<Config::kActivation>>(args);
}

// Both gradients are computed at once: a block has a tile of each, or as many elements.
template <class Config>
F8_DEVICE void glu_backward_amax(const ComputedAmaxArgs& args) {
  constexpr Input kInput = Config::kInput;
  constexpr Activation kActivation = Config::kActivation;
  const AmaxTensor* const tensors = args.of.tensors;
  grid_dependency_wait();
  launch_dependents();
  if constexpr (Config::kRow || Config::kCol) {
    ThreadFragment<kInput> of_up;
    Amax<Config>::rows_and_columns(tensors[0], blockIdx.x,
                                   LoadGluGradient<kInput, kActivation, AmaxTensor>{
                                       tensors[1], args.factor, args.ld_factor, of_up});
    __syncthreads();  // before the shared memory of the first maxima is written again
    Amax<Config>::rows_and_columns(tensors[1], blockIdx.x, LoadNothing<kInput>{of_up});
  } else {
    Amax<Config>::tensor(tensors, blockIdx.x,
                         AmaxOfGradients<kInput, kActivation>{tensors[1], args.factor,
                                                              args.ld_factor, args.results});
  }
}

// Both are side by side in one tensor, whose maxima are found by tiles even where it alone has one.
template <class Config, bool kUpFirst>
F8_DEVICE void amax_of_merged(const ComputedAmaxArgs& args) {
  constexpr Input kInput = Config::kInput;
  const AmaxTensor& t = args.of.tensors[0];
  grid_dependency_wait();
  launch_dependents();
  const MergedTiles tiles(t.cols, static_cast<i32>(blockIdx.x));
  const SecondHalf second = second_half<kInput>(t);
  ThreadFragment<kInput> of_second;
  Amax<Config>::rows_and_columns(t, tiles.first,
                                 LoadGluGradient<kInput, Config::kActivation, SecondHalf, kUpFirst>{
                                     second, args.factor, args.ld_factor, of_second});
  __syncthreads();  // before the shared memory of the first maxima is written again
  Amax<Config>::rows_and_columns(t, tiles.second, LoadNothing<kInput>{of_second});
}
template <class Config>
F8_DEVICE void merged_glu_backward_amax(const ComputedAmaxArgs& args) {
  amax_of_merged<Config, false>(args);
}
template <class Config>
F8_DEVICE void merged_glu_backward_up_first_amax(const ComputedAmaxArgs& args) {
  amax_of_merged<Config, true>(args);
}

}  // namespace f8::kernels
