// The casts of what is computed as it is read: an activation, its product with up, or what a norm makes of
// x, for a linear that reads it, and the gradients of these for the backward of the linears before. It is
// one launch, after another for the maxima where the scales come from these, as those of tensors and rows
// do, and in a first step of delayed scaling; and before one for the sums of a gradient's columns. The launch
// of the maxima leaves an activation or its gradients in the workspace, where the cast reads them. Where ranks
// have other columns, the maxima are a call of their own, and what it leaves stays in the workspace.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "runtime/linear/plan/kernels.hpp"
#include "runtime/linear/plan/launches.hpp"
#include "runtime/linear/plan/layout.hpp"

namespace f8::runtime {

// The kernels of a cast, and of the maxima that it needs before.
struct ComputedPass {
  std::optional<codegen::ComputedAmaxSpec> amax;
  codegen::KernelSpec cast;  // a CastSpec of what the maxima's launch left, or a ComputedCastSpec
  FusedCast fused;
};
// What is computed.
struct ComputedSource {
  codegen::Computed source = codegen::Computed::kGlu;
  codegen::Activation activation = codegen::Activation::kSilu;
  bool sums = false;            // of the columns of what is cast
  bool given_maxima = false;    // casts are given the maxima that a call of their own found
  bool keeps_columns = false;   // those of columns are kept, where the tensor has them
  bool less_workspace = false;  // of kGluBackward: both launches compute the gradients

  // A tensor's maximum is one word, which each tile raises.
  [[nodiscard]] bool raises_tensors() const {
    return given_maxima || is_merged(source) || less_workspace;
  }
};
[[nodiscard]] std::vector<ComputedPass> computed_passes(const LinearKernels& kernels,
                                                        CopySet copies,
                                                        const ComputedSource& source,
                                                        bool first_step);

// The arguments of a call. The second tensor is that of a GLU's backward alone, whose x is up.
struct ComputedCall {
  CallArguments first = {};
  CallArguments second = {};
  const void* factor = nullptr;  // up, the gradient of what forward made, or the norm's weight
  int64_t ld_factor = 0;         // of a matrix; 0: dense
  const float* rstd = nullptr;   // of a norm
  const float* mean = nullptr;   // of a LayerNorm, as its bias
  const void* bias = nullptr;
  float* sums = nullptr;  // of columns
  bool first_step = false;
};

class ComputedCasts {
 public:
  // Calls have up to `rows` rows, and leave the first `reserved` bytes of the workspace alone. `at` says
  // where copies go.
  [[nodiscard]] static Result<ComputedCasts> plan(Context& context, const LinearKernels& kernels,
                                                  CopySet copies, const TensorBuffers& at,
                                                  int64_t rows, size_t reserved,
                                                  const ComputedSource& source);
  [[nodiscard]] Status run(const Context::State& context, const ComputedCall& call,
                           Stream stream) const;
  // Finds the maxima that casts are given, in words that the caller cleared.
  [[nodiscard]] Status find(const Context::State& context, const ComputedCall& call,
                            Stream stream) const;
  // `first_step`: of delayed scaling.
  [[nodiscard]] size_t workspace_bytes(bool first_step) const {
    return first_step ? workspace_bytes_ : later_bytes_;
  }

 private:
  struct Pass {
    const Kernel* amax;  // null: its scales need none
    const Kernel* cast;
    std::array<CastOperand, 2> operands;
  };
  // The operands of a call's one tensor, or of its two.
  [[nodiscard]] static std::array<QuantizeOperand, 2> operands_of(const Pass& pass,
                                                                  const ComputedCall& call);
  // Finds where the maxima of one tensor, or of two, lie in the workspace. The passes behind `of_step` are
  // those of a first step.
  void lay_out(std::span<const ComputedPass> passes, size_t of_step, int64_t rows, size_t reserved,
               int sm_count, std::span<TensorBuffers> tensors);
  // The blocks of a launch of maxima of tensors, which are the maxima that it leaves.
  [[nodiscard]] int32_t partials_of(const Context::State& context, int32_t most) const;
  [[nodiscard]] Status find_maxima(const Context::State& context, const Pass& pass,
                                   const ComputedCall& call,
                                   std::span<const QuantizeOperand> operands, Stream stream) const;
  [[nodiscard]] Status cast(const Context::State& context, const Pass& pass,
                            const ComputedCall& call, std::span<const QuantizeOperand> operands,
                            Stream stream) const;

  template <class Of, class Args>
  [[nodiscard]] Status launch(const Context::State& context, const Kernel& kernel, const Args& args,
                              const ComputedCall& call, Stream stream) const;

  ComputedSource source_;
  std::vector<Pass> casts_;
  std::vector<Pass> first_;           // of a first step
  ClearWords clear_;                  // of maxima that are raised
  std::array<Ref, 2> results_ = {};   // of the launches of maxima of activations
  const Kernel* add_sums_ = nullptr;  // of the tiles' sums of each tensor; null: there are none
  Ref tile_sums_ = {};
  size_t workspace_bytes_ = 0, later_bytes_ = 0;
};

}  // namespace f8::runtime
