// The maxima of silu(gate) up, and those of its gradients dgate and dup, for the casts of swiglu_cast.cuh:
// the elements are computed here and there, to the same bits, and are never in memory.
#pragma once

#include "codegen/kernels/cast/amax.cuh"
#include "codegen/kernels/cast/swiglu_load.cuh"

namespace f8::kernels {

template <Input kInput>
struct AmaxOfSwiglu : LoadSwiglu<kInput> {
  using Values = Vec8<kInput>;
  struct Read {
    Values gate, up;
  };
  static constexpr int kInFlight = 4;
  static constexpr int kResults = 1;

  F8_DEVICE bool is_dense(const AmaxTensor& t) const {
    return t.ld == t.cols && this->ld_up == t.cols;
  }
  F8_DEVICE void read(const AmaxTensor& t, i64 row, i64 element, Read& to) const {
    to.gate.load(t.x, row * t.ld + element);
    to.up.load(this->up, row * this->ld_up + element);
  }
  static F8_DEVICE void raise(Read& from, Values (&most)[kResults]) {
    to_product(from.gate, from.up);
    from.gate.raise(most[0]);
  }
};

// Of dgate and of dup, where rows and columns have none.
template <Input kInput>
struct AmaxOfGradients {
  using Values = Vec8<kInput>;
  struct Read {
    Values gate, up, grad;
  };
  static constexpr int kInFlight = 1;  // two spill where six blocks an SM are resident
  static constexpr int kResults = 2;
  const AmaxTensor& up;
  const void* grad;
  i64 ld_grad;

  F8_DEVICE bool is_dense(const AmaxTensor& t) const {
    return t.ld == t.cols && up.ld == t.cols && ld_grad == t.cols;
  }
  F8_DEVICE void read(const AmaxTensor& t, i64 row, i64 element, Read& to) const {
    to.gate.load(t.x, row * t.ld + element);
    to.up.load(up.x, row * up.ld + element);
    to.grad.load(grad, row * ld_grad + element);
  }
  static F8_DEVICE void raise(Read& from, Values (&most)[kResults]) {
    to_gradients(from.gate, from.up, from.grad);
    from.gate.raise(most[0]);
    from.up.raise(most[1]);
  }
};

template <class Config>
F8_DEVICE void swiglu_amax(const SwigluAmaxArgs& args) {
  Amax<Config>::run(args.amax, AmaxOfSwiglu<Config::kInput>{{args.up, args.ld_up}});
}

// Both gradients are computed at once: a block has a tile of each, or as many elements.
template <class Config>
F8_DEVICE void swiglu_backward_amax(const SwigluBackwardAmaxArgs& args) {
  constexpr Input kInput = Config::kInput;
  const AmaxTensor* const tensors = args.amax.tensors;
  grid_dependency_wait();
  launch_dependents();
  if constexpr (Config::kRow || Config::kCol) {
    ThreadFragment<kInput> of_up;
    Amax<Config>::rows_and_columns(
        tensors[0], blockIdx.x,
        LoadGateGradient<kInput, AmaxTensor>{tensors[1], args.grad, args.ld_grad, of_up});
    __syncthreads();  // before the shared memory of the first maxima is written again
    Amax<Config>::rows_and_columns(tensors[1], blockIdx.x, LoadNothing<kInput>{of_up});
  } else {
    Amax<Config>::tensor(tensors, blockIdx.x,
                         AmaxOfGradients<kInput>{tensors[1], args.grad, args.ld_grad});
  }
}

}  // namespace f8::kernels
