// The parameters of the AdamW kernel, shared with the host like those of kernel_args.cuh.
#pragma once

#include "codegen/kernels/cast/fingerprint_args.cuh"

namespace f8::kernels {

// A parameter [rows][cols], its gradient and its states, all dense and of one type.
struct AdamwTensor {
  void* param;
  void* grad;  // written where there is a grad_scale
  void* exp_avg;
  void* exp_avg_sq;
  void* max_exp_avg_sq;  // null: not AMSGrad
  const float* step;     // the number of this step, from 1 on
  // The maxima of what the update leaves, as in AmaxTensor: words that the caller zeroed.
  u32* amax;  // or null
  u32* row_amax;
  u32* col_amax;
  FingerprintState* fingerprint;  // of what the update leaves; or null
  u64 seed;                       // of the fingerprint
  i32 rows;
  i32 cols;
  i32 first_block;
  i32 blocks;
};

// These options are the same for all weights of a launch.
struct AdamwOptions {
  const float* lr_tensor;   // null: `lr`
  const float* grad_scale;  // what gradients are divided by; or null
  const float* found_inf;   // 1: the step is left out; or null
  float lr;
  float beta1;
  float beta2;
  float eps;
  float weight_decay;
  i32 maximize;
};

inline constexpr i32 kMaxAdamwTensors = 36;  // of a launch
struct AdamwArgs {
  i32 count;
  i32 padding;
  AdamwOptions options;
  AdamwTensor tensors[kMaxAdamwTensors];
};
static_assert(sizeof(AdamwTensor) == 104);
static_assert(sizeof(AdamwArgs) <= 4096);

// The update of weights, and the casts of what it leaves: their x are the parameters, in whole tiles.
struct AdamwCastArgs {
  CastArgs cast;
  AdamwOptions options;
  AdamwTensor tensors[kMaxTensors];
};

}  // namespace f8::kernels
