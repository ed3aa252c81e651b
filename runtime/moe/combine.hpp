// The sums over each token's rows of a mixture of experts, and the gradient of the scores
// (codegen/kernels/experts/combine.cuh).
#pragma once

#include "float8/moe_route.h"
#include "runtime/device/context.hpp"

namespace f8::runtime {

using CombineCall = float8_moe_combine_args;
using ScoreGradientCall = float8_moe_score_gradient_args;

struct CombineDesc {
  int64_t tokens_max = 0;
  int64_t cols = 0;
  int64_t top_k = 0;
  int64_t experts = 0;
  Dtype y = Dtype::kBf16;
  Dtype out = Dtype::kBf16;
};

class CombinePlan {
 public:
  // Loads the kernels.
  [[nodiscard]] static Result<CombinePlan> create(const std::shared_ptr<Context>& context,
                                                  const CombineDesc& desc);
  // Each enqueues one launch; none without tokens.
  [[nodiscard]] Status run(const CombineCall& call, Stream stream) const;
  [[nodiscard]] Status run(const ScoreGradientCall& call, Stream stream) const;

 private:
  CombinePlan(std::shared_ptr<Context> context, const CombineDesc& desc, const Kernel& combine,
              const Kernel& gradient)
      : context_(std::move(context)), desc_(desc), combine_(&combine), gradient_(&gradient) {}
  template <class Args>
  [[nodiscard]] Status launch(const Args& args, const Kernel& kernel, int64_t blocks,
                              Stream stream) const;

  std::shared_ptr<Context> context_;
  CombineDesc desc_;
  const Kernel* combine_;
  const Kernel* gradient_;
};

}  // namespace f8::runtime
