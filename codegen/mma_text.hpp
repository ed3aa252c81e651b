// The part of a GEMM's stub that C++ templates cannot say: one wgmma with its list of accumulators.
#pragma once

#include <string>

#include "codegen/kernel_spec.hpp"

namespace f8::codegen {

// The n of one wgmma. Precise accumulation holds a second set of accumulators, of one wgmma, so
// wide tiles are computed in parts.
[[nodiscard]] int gemm_mma_n(const GemmSpec& spec);

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
