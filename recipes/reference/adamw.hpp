// The CPU reference of AdamW: a step of one element, with the operations of PyTorch's fused CUDA kernel in
// their order, each rounded once. Decoupled weight decay comes first.
#pragma once

namespace f8::reference {

struct AdamwOptions {
  float lr = 0;
  float beta1 = 0;
  float beta2 = 0;
  float eps = 0;
  float weight_decay = 0;
  bool maximize = false;
  const float* grad_scale = nullptr;  // what gradients are divided by
};

struct AdamwElement {
  float param = 0;
  float grad = 0;  // a step leaves it divided by grad_scale
  float exp_avg = 0;
  float exp_avg_sq = 0;
  float max_exp_avg_sq = 0;  // of AMSGrad
};

class Adamw {
 public:
  // `step` counts from 1.
  Adamw(const AdamwOptions& options, float step);
  void update(AdamwElement& element, bool amsgrad) const;

 private:
  AdamwOptions options_;
  float decay_, step_size_, bias_correction2_sqrt_;
};

}  // namespace f8::reference
