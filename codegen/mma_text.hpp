// The part of a GEMM's stub that a C++ template cannot express: one wgmma with its list of
// accumulators.
#pragma once

#include <string>
#include <string_view>

#include "codegen/kernel_spec.hpp"

namespace f8::codegen {

// How a consumer warpgroup multiplies its rows of a tile: the n of one wgmma, and how many
// promotion accumulators of 64 x n it holds beside its sums. Fast accumulation needs none. Precise
// accumulation needs one, better as wide as the tile than half of it, and keeps the tensor core
// busy with two where the registers allow it.
struct GemmMma {
  int n = 0;
  int promotion_accumulators = 0;
};
[[nodiscard]] GemmMma gemm_mma(const GemmSpec& spec);
// fp32 registers that a consumer thread's accumulators take, promotion included, and how many fit.
[[nodiscard]] int gemm_accumulators(const GemmSpec& spec);
[[nodiscard]] int max_accumulators(int warpgroups);

// Registers a thread of the consumer and of the producer warpgroups; producer 0: the registers are
// not redistributed.
struct GemmRegisters {
  int consumer = 0;
  int producer = 0;
};
[[nodiscard]] GemmRegisters gemm_registers(int warpgroups);

// `static void mma(float (&d)[n / 2], u64 a, u64 b, bool accumulate)`, wgmma.m64nNk32 of the
// spec's operands; of 16 bits wgmma.m64nNk16, which is told of each whether it is MN-major.
[[nodiscard]] std::string mma_function(const GemmSpec& spec, int n);
// That of fp8 with a name, and with a in shared memory or `const u32* a`, four words.
enum class MmaA { kShared, kRegisters };
[[nodiscard]] std::string mma_function(std::string_view name, Dtype a, Dtype b, int n,
                                       MmaA where = MmaA::kShared);

}  // namespace f8::codegen
