// Every GEMM of an emulated device: d = (a b^T) scaled, plus bias, plus what d held.
//
// Sums are fp64 in the order of K, so results do not depend on configuration or provider. The
// result is fp32 before the one rounding to d's type.
#pragma once

#include "codegen/kernel_spec.hpp"

namespace f8::runtime::emulation {

// A matrix whose element (i, k) lies `i * row_stride + k * column_stride` elements from base; the
// GEMM sums over k.
struct Elements {
  const void* base = nullptr;
  Dtype type = Dtype::kBf16;
  int64_t row_stride = 0;
  int64_t column_stride = 1;
  // Element (i, k) of K in shards lies in the shard k / shard_k, which begin shard_stride apart.
  int64_t shard_k = 0;  // 0: one piece
  int64_t shard_stride = 0;
};

// Inverse scales as kernels::GemmProblem has them; null: 1.
struct InverseScales {
  const float* values = nullptr;
  codegen::ScaleMode mode = codegen::ScaleMode::kTensor;
  int64_t stride = 0;
};

struct Matmul {
  int64_t m = 0;
  int64_t n = 0;
  int64_t k = 0;
  Elements a = {}, b = {};
  InverseScales scale_a = {}, scale_b = {};
  void* d = nullptr;
  Dtype d_type = Dtype::kBf16;
  int64_t ld_d = 0;              // elements
  const void* bias = nullptr;    // of d's type
  bool add = false;              // to what d held
  bool round_before_add = true;  // the result becomes d's type before it is added, as with a
                                 // reducing bulk copy; else the sum is rounded once
  uint32_t* amax = nullptr;      // raised to the bits of max |d| as fp32, before the rounding
};
void compute(const Matmul& matmul);

}  // namespace f8::runtime::emulation
