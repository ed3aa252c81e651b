// The parameters of the kernels of an RMSNorm (rms_norm.cuh, rms_norm_backward.cuh), shared with the host like those
// of kernel_args.cuh, and the order of their sums, which the emulation repeats.
//
// A kernel is for rows of up to kCols elements, a power of two. The threads of a row have `vectors` times 8 elements
// each: thread t has elements 8 (v threads + t) .. +7 of it, for each v.
//   the sum of a row   each thread adds its elements by fmaf, from the first to the last; then threads 16, 8, 4, 2 and 1
//                      apart (as many as a row has) add their sums to each other; then warps, from the first to the last
//   dweight            each of a block's groups of threads adds the rows that it has, from the first to the last, by fmaf;
//                      then groups, from the first to the last; then blocks, as bias_grad does (column_sums.cuh)
#pragma once

#include "codegen/kernels/kernel_args.cuh"

namespace f8::kernels {

inline constexpr i32 kMinNormCols = 64;
inline constexpr i32 kMaxNormCols = 32768;

// The columns of the kernel for these.
F8_BOTH constexpr i32 norm_kernel_cols(i64 cols) {
  i32 most = kMinNormCols;
  while (most < cols) most *= 2;
  return most;
}

// How threads share rows.
struct NormThreads {
  i32 of_row;
  i32 of_block;
  i32 vectors;  // of 8 elements, of a thread and a row
  i32 rows;     // that a thread has at once
  F8_BOTH constexpr i32 groups() const { return of_block / of_row; }
  F8_BOTH constexpr i32 rows_of_block() const { return groups() * rows; }
};
F8_BOTH constexpr NormThreads norm_threads(i32 kernel_cols, bool backward) {
  const i32 all = kernel_cols / 8;
  if (all <= 256) return {all, 256, 1, all <= 32 ? 4 : 2};
  // Forward has more vectors in a thread, so that an SM has more of the long rows; backward keeps sums beside them.
  const i32 wanted = all / (backward ? 2 : 4);
  const i32 of_row = wanted < 256 ? 256 : wanted < 1024 ? wanted : 1024;
  return {of_row, of_row, all / of_row, 1};
}
// The blocks that an SM has at once: threads of the forward have up to 64 registers, those of backward 128.
F8_BOTH constexpr i32 norm_blocks_of_sm(i32 kernel_cols, bool backward) {
  const i32 blocks = (backward ? 512 : 1024) / norm_threads(kernel_cols, backward).of_block;
  return blocks < 1 ? 1 : blocks;
}
F8_BOTH constexpr i64 norm_backward_blocks(i64 rows, i32 kernel_cols, i32 sm_count) {
  const i32 at_once = norm_threads(kernel_cols, true).rows_of_block();
  const i64 all = (rows + at_once - 1) / at_once;
  const i64 resident = i64{norm_blocks_of_sm(kernel_cols, true)} * sm_count;
  return all < resident ? all : resident;
}

// Row strides are in elements.
struct RmsNormArgs {
  const void* x;       // [rows][cols]
  const void* weight;  // [cols]
  void* y;
  float* rstd;  // [rows], or null
  i64 ld_x;
  i64 ld_y;
  i32 rows;
  i32 cols;
  float eps;
  float weight_offset;  // -0 for none: a sum with it has all bits of a weight
};

struct RmsNormBackwardArgs {
  const void* dy;
  const void* x;
  const void* weight;
  const float* rstd;
  void* dx;         // or null
  float* partials;  // [blocks][cols], the sums of each block for dweight; or null
  i64 ld_dy;
  i64 ld_x;
  i64 ld_dx;
  i32 rows;
  i32 cols;
  float weight_offset;
  i32 padding;
};

}  // namespace f8::kernels
