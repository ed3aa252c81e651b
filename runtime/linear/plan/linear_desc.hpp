// What a linear is planned from: its shape, its recipe, and what its calls may ask for.
#pragma once

#include <array>
#include <optional>

#include "recipes/scales/scale.hpp"
#include "runtime/gemm/gemm.hpp"

namespace f8::runtime {

struct LinearDesc {
  Shape shape;  // m: the largest M that a call may have
  // Any legal one. What it leaves in high precision is multiplied as it comes, in tensor_dtype with
  // fp32 sums (f32 as fp32, not TF32): "bf16" in a recipe stands for that type.
  Recipe recipe;
  Dtype grad_weight_dtype = Dtype::kBf16;            // or f16, f32; in high precision or f32
  bool bias = false;                                 // y += bias
  bool accumulate_grad_weight = false;               // a call may add to the gradient that is there
  bool accumulate_grad_input = false;                // and to that of the input
  int sm_limit = 0;                                  // the most SMs that a GEMM takes; 0: all
  bool needs_grad_input = true;                      // false: a first layer, dx is never wanted
  std::array<std::optional<GemmChoice>, 3> choices;  // indexed by Gemm; empty: GemmPlan::choose
  Dtype tensor_dtype = Dtype::kBf16;                 // or f16, f32: of x, w, dy, y, dx and bias
  // Keep nothing in fp8 between forward and backward: backward reads x (and w, where it has no
  // w.fp8) and casts them again, to the same bits. Delayed scales must be those that forward had.
  bool recompute = false;
  bool bias_grad = false;                // backward may be asked for db
  Dtype bias_grad_dtype = Dtype::kBf16;  // or f16, f32
  // The policy for dynamic scales whose amax is not finite; DelayedOptions has that for delayed
  // ones.
  NonFinite non_finite = NonFinite::kPropagate;
  // Casts add to the counters that a call brings (cast_counters.hpp). It takes some time, and small
  // tensors are cast in two launches.
  bool count = false;
  bool weight_shards = false;     // qt of w.fp8 may lie in shards: float8_tensor::qt_shards
  bool needs_grad_weight = true;  // false: a frozen weight, dw is never wanted
  // Tells whether a call may ask for a GEMM.
  [[nodiscard]] bool needs(Gemm gemm) const {
    return gemm == Gemm::kOutput ||
           (gemm == Gemm::kGradInput ? needs_grad_input : needs_grad_weight);
  }
  bool operator==(const LinearDesc&) const = default;
};

}  // namespace f8::runtime
