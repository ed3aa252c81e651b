// The casts of silu(gate) up for a linear that reads it, and those of its gradients dgate and dup for
// the backward of the linears that made gate and up. One launch; in a first step of delayed scaling two,
// the first of which records the amaxes.
#pragma once

#include <array>
#include <vector>

#include "runtime/linear/kernels.hpp"
#include "runtime/linear/launches.hpp"
#include "runtime/linear/layout.hpp"

namespace f8::runtime {

// The arguments of a call: of the product's cast, or of those of dgate and dup.
struct SwigluCall {
  CallArguments gate = {};       // its x is gate
  CallArguments up = {};         // of backward: its x is up
  const void* factor = nullptr;  // up, or the product's gradient
  int64_t ld_factor = 0;         // 0: dense
  bool first_step = false;
};

class SwigluCasts {
 public:
  // kUnsupported where scales come from the tensor's maxima, but in a first step, whose amaxes lie at
  // `first` in the workspace.
  [[nodiscard]] static Result<SwigluCasts> plan(Context& context, const LinearKernels& kernels,
                                                CopySet copies, const TensorBuffers& at, Ref first,
                                                bool backward, std::string_view recipe);
  [[nodiscard]] Status run(const Context::State& context, SwigluCall& call, Stream stream) const;

 private:
  // A kernel, and where the copies go.
  struct Cast {
    const Kernel* kernel;
    CastOperand operand;
  };
  [[nodiscard]] Status launch(const Context::State& context, const Cast& cast,
                              const SwigluCall& call, Stream stream) const;

  bool backward_ = false;
  Ref amaxes_;  // of a first step: for each slot of gate, then of up
  size_t slots_ = 0;
  std::vector<Cast> casts_;
  std::vector<Cast> recording_;  // first step: for the amaxes
  std::vector<Cast> first_;      // with the scales of these
};
static_assert(kFirstWords >= 2, "a first step's amaxes of two tensors");

}  // namespace f8::runtime
