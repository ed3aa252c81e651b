// The parameters of the kernel that gives queries and keys their positions (rotary.cuh), shared with the host
// like those of kernel_args.cuh.
#pragma once

#include "codegen/kernels/kernel_args.cuh"

namespace f8::kernels {

inline constexpr i32 kRotaryThreads = 64;

// The strides of heads [batch][heads][tokens][head_dim], in elements.
struct HeadStrides {
  i64 of_batch;
  i64 of_head;
  i64 of_token;
  F8_BOTH constexpr i64 at(i64 batch, i64 head, i64 token) const {
    return batch * of_batch + head * of_head + token * of_token;
  }
};

// Heads as they come and as they leave.
struct RotaryHeads {
  const void* in;
  void* out;
  HeadStrides in_strides;
  HeadStrides out_strides;
};

struct RotaryArgs {
  RotaryHeads q;
  RotaryHeads k;
  const void* cos;  // [batch][tokens][head_dim]
  const void* sin;
  i64 cos_batch;  // of both; 0: all sequences have the same positions
  i64 cos_token;
  i32 tokens;
  i32 heads_q;
  i32 heads_k;
  i32 head_dim;  // a multiple of 16
};

}  // namespace f8::kernels
