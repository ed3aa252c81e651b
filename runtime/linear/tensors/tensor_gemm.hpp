// A GEMM of a linear over tensors in fp8 that quantizers made. Plan once, run often; a plan is
// immutable and shared between threads.
#pragma once

#include <array>
#include <memory>

#include "runtime/linear/plan/kernels.hpp"

namespace f8::runtime {

struct TensorGemmDesc {
  Gemm gemm = Gemm::kOutput;
  Shape shape;  // the linear's; m is the largest M that a call has
  Recipe recipe;
  Dtype d = Dtype::kBf16;
  bool bias = false;
  bool add = false;
  int sm_limit = 0;
};

using TensorGemmCall = float8_gemm_args;

class TensorGemm {
 public:
  [[nodiscard]] static Result<TensorGemm> plan(const std::shared_ptr<Context>& context,
                                               const TensorGemmDesc& desc);
  [[nodiscard]] size_t workspace_bytes() const { return plan_->workspace_bytes(); }
  [[nodiscard]] Status run(const TensorGemmCall& call, Stream stream) const;

 private:
  TensorGemm() = default;
  std::shared_ptr<Context> context_;
  GemmPlanPtr plan_;
  std::array<Copies, 2> copies_;      // of a and b
  std::array<bool, 2> reads_q_ = {};  // which copy it reads of each; else qt
};

}  // namespace f8::runtime
