#include "recipes/reference/adamw.hpp"

#include <cmath>

namespace f8::reference {

Adamw::Adamw(const AdamwOptions& options, float step)
    : options_(options),
      decay_(options.lr * options.weight_decay),
      step_size_(options.lr / (1.0F - std::pow(options.beta1, step))),
      bias_correction2_sqrt_(std::sqrt(1.0F - std::pow(options.beta2, step))) {}

void Adamw::update(AdamwElement& e, bool amsgrad) const {
  if (options_.grad_scale != nullptr) e.grad /= *options_.grad_scale;
  const float grad = options_.maximize ? -e.grad : e.grad;
  if (options_.weight_decay != 0.0F) e.param = std::fma(-decay_, e.param, e.param);
  const float square = grad * grad;
  e.exp_avg = std::fma(options_.beta1, e.exp_avg, std::fma(-options_.beta1, grad, grad));
  e.exp_avg_sq = std::fma(options_.beta2, e.exp_avg_sq, std::fma(-options_.beta2, square, square));
  float second = e.exp_avg_sq;
  if (amsgrad) {
    if (e.max_exp_avg_sq < second) e.max_exp_avg_sq = second;
    second = e.max_exp_avg_sq;
  }
  const float denominator = std::sqrt(second) / bias_correction2_sqrt_ + options_.eps;
  e.param -= step_size_ * e.exp_avg / denominator;
}

}  // namespace f8::reference
