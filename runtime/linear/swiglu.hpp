// The casts of silu(gate) up for a linear that reads it, and those of its gradients dgate and dup for
// the backward of the linears that made gate and up: one launch, after another for the maxima where the
// scales come from these, as those of tensors and rows do, and in a first step of delayed scaling.
#pragma once

#include <array>
#include <optional>
#include <vector>

#include "runtime/linear/kernels.hpp"
#include "runtime/linear/launches.hpp"
#include "runtime/linear/layout.hpp"

namespace f8::runtime {

// The kernels of a cast, and of the maxima that it needs before.
struct SwigluPass {
  std::optional<codegen::SwigluAmaxSpec> amax;
  codegen::SwigluCastSpec cast;
  FusedCast fused;
};
[[nodiscard]] std::vector<SwigluPass> swiglu_passes(const LinearKernels& kernels, CopySet copies,
                                                    bool backward, bool first_step);

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
  // Calls have up to `rows` rows, and leave the first `reserved` bytes of the workspace alone. `at` says
  // where copies go.
  [[nodiscard]] static Result<SwigluCasts> plan(Context& context, const LinearKernels& kernels,
                                                CopySet copies, const TensorBuffers& at,
                                                int64_t rows, size_t reserved, bool backward);
  [[nodiscard]] Status run(const Context::State& context, const SwigluCall& call,
                           Stream stream) const;
  [[nodiscard]] size_t workspace_bytes() const { return workspace_bytes_; }

 private:
  struct Pass {
    const Kernel* amax;  // null: its scales need none
    const Kernel* cast;
    std::array<CastOperand, 2> operands;  // of gate and of up
  };
  // Finds where the maxima of one tensor, or of two, lie in the workspace.
  void lay_out(std::span<const SwigluPass> passes, int64_t rows, size_t reserved, int sm_count,
               std::span<TensorBuffers> tensors);
  [[nodiscard]] Status find_maxima(const Context::State& context, const Pass& pass,
                                   const SwigluCall& call,
                                   std::span<const QuantizeOperand> operands, Stream stream) const;
  [[nodiscard]] Status cast(const Context::State& context, const Pass& pass, const SwigluCall& call,
                            std::span<const QuantizeOperand> operands, Stream stream) const;

  bool backward_ = false;
  std::vector<Pass> casts_;
  std::vector<Pass> first_;  // of a first step
  ClearWords clear_;         // of maxima that are raised
  size_t workspace_bytes_ = 0;
};

}  // namespace f8::runtime
