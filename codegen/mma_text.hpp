// The part of a GEMM's stub that C++ templates cannot say: one wgmma with its list of accumulators.
#pragma once

#include <string>

#include "codegen/kernel_spec.hpp"

namespace f8::codegen {

// How a math warpgroup multiplies its rows of a tile: the n of one wgmma, and how many partial sums
// of that width it holds beside the accumulators. Fast accumulation needs none. Precise
// accumulation needs one, better as wide as the tile than in two halves, and keeps the tensor core
// busy with two where the registers allow it.
struct GemmProducts {
  int mma_n = 0;
  int partials = 0;
};
[[nodiscard]] GemmProducts gemm_products(const GemmSpec& spec);
// fp32 accumulators that a math thread holds at once, partial sums included, and how many fit.
[[nodiscard]] int gemm_accumulators(const GemmSpec& spec);
[[nodiscard]] int most_accumulators(int warpgroups);

// Registers a thread of the math and of the copy warpgroups; copy 0: no redistribution.
struct GemmRegisters {
  int math = 0;
  int copy = 0;
};
[[nodiscard]] GemmRegisters gemm_registers(int warpgroups);

// `static void mma(float (&d)[n / 2], u64 a, u64 b, bool accumulate)`, wgmma.m64nNk32 of these
// types.
[[nodiscard]] std::string mma_function(Dtype a, Dtype b, int n);

}  // namespace f8::codegen
