// The arithmetic of AdamW, of one element: that of PyTorch's fused kernel (fused_adam_utils.cuh), with
// its order of operations. Where the compiler fuses a multiplication and an addition of that kernel,
// there is an fmaf here, and what it leaves apart is rounded by itself: the bits depend on no option of
// a compiler. recipes/reference/adamw.hpp is the specification.
#pragma once

#include "codegen/kernels/optimizer/adamw_args.cuh"
#include "codegen/kernels/ptx.cuh"

namespace f8::kernels {

// These factors are the same for all elements of a tensor.
struct AdamwFactors {
  float beta1, beta2, eps;
  float decay;      // lr * weight_decay
  float step_size;  // lr / bias_correction1
  float bias_correction2_sqrt;
  float grad_scale;
  bool decays, scales, maximizes;
};

struct AdamwElement {
  float param, grad, exp_avg, exp_avg_sq, max_exp_avg_sq;
};

F8_DEVICE AdamwFactors adamw_factors(const AdamwOptions& args, const AdamwTensor& t) {
  const float lr = args.lr_tensor == nullptr ? args.lr : *args.lr_tensor;
  const float step = *t.step;
  AdamwFactors f;
  f.beta1 = args.beta1;
  f.beta2 = args.beta2;
  f.eps = args.eps;
  f.decay = __fmul_rn(lr, args.weight_decay);
  f.step_size = __fdiv_rn(lr, __fsub_rn(1.0F, powf(args.beta1, step)));
  f.bias_correction2_sqrt = __fsqrt_rn(__fsub_rn(1.0F, powf(args.beta2, step)));
  f.scales = args.grad_scale != nullptr;
  f.grad_scale = f.scales ? *args.grad_scale : 1.0F;
  f.decays = args.weight_decay != 0.0F;
  f.maximizes = args.maximize != 0;
  return f;
}

// `e.grad` becomes the unscaled gradient.
template <bool kAmsgrad>
F8_DEVICE void adamw_update(const AdamwFactors& f, AdamwElement& e) {
  if (f.scales) e.grad = __fdiv_rn(e.grad, f.grad_scale);
  const float grad = f.maximizes ? -e.grad : e.grad;
  if (f.decays) e.param = __fmaf_rn(-f.decay, e.param, e.param);
  const float square = __fmul_rn(grad, grad);
  e.exp_avg = __fmaf_rn(f.beta1, e.exp_avg, __fmaf_rn(-f.beta1, grad, grad));
  e.exp_avg_sq = __fmaf_rn(f.beta2, e.exp_avg_sq, __fmaf_rn(-f.beta2, square, square));
  float second = e.exp_avg_sq;
  if constexpr (kAmsgrad) {
    if (e.max_exp_avg_sq < second) e.max_exp_avg_sq = second;
    second = e.max_exp_avg_sq;
  }
  const float denominator =
      __fadd_rn(__fdiv_rn(__fsqrt_rn(second), f.bias_correction2_sqrt), f.eps);
  e.param = __fsub_rn(e.param, __fdiv_rn(__fmul_rn(f.step_size, e.exp_avg), denominator));
}

}  // namespace f8::kernels
