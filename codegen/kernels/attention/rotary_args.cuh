// The parameters of the kernel that gives queries and keys their positions (rotary.cuh), shared with the host
// like those of kernel_args.cuh.
#pragma once

#include "codegen/kernels/kernel_args.cuh"

namespace f8::kernels {

inline constexpr i32 kRotaryThreads = 64;

// Heads [batch][heads][tokens][head_dim] as they come and as they leave. Strides are in elements.
struct RotaryHeads {
  const void* in;
  void* out;
  i64 in_batch;
  i64 in_head;
  i64 in_token;
  i64 out_batch;
  i64 out_head;
  i64 out_token;
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
