#include "codegen/mma_text.hpp"

#include <fmt/ranges.h>

namespace f8::codegen {

int gemm_mma_n(const GemmSpec& spec) {
  const int tile_n = spec.config.tile_n;
  return !spec.fast && tile_n > 192 ? tile_n / 2 : tile_n;
}

GemmRegisters gemm_registers(int warpgroups) {
  // 65536 registers: one math warpgroup needs no redistribution, a thread cannot use more than 255.
  if (warpgroups == 1) return {.math = 255, .copy = 0};
  if (warpgroups == 2) return {.math = 240, .copy = 24};
  return {.math = 160, .copy = 32};
}

std::string mma_function(Dtype a, Dtype b, int n) {
  const int count = n / 2;
  std::string places;
  std::string operands;
  for (int i = 0; i < count; ++i) {
    const bool last = i + 1 == count;
    const bool line_end = i % 8 == 7 && !last;
    places += fmt::format("%{}{}", i, last ? "" : line_end ? ",\"\n        \"" : ", ");
    operands += fmt::format("\"+f\"(d[{}]){}", i, last ? "" : line_end ? ",\n          " : ", ");
  }
  return fmt::format(
      "  static F8_DEVICE void mma(float (&d)[{0}], u64 a, u64 b, bool accumulate) {{\n"
      "    asm volatile(\n"
      "        \"{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{1}, 0;\\n\"\n"
      "        \"wgmma.mma_async.sync.aligned.m64n{2}k32.f32.{3}.{4} \"\n"
      "        \"{{{5}}}, \"\n"
      "        \"%{6}, %{7}, p, 1, 1;\\n}}\\n\"\n"
      "        : {8}\n"
      "        : \"l\"(a), \"l\"(b), \"r\"(static_cast<u32>(accumulate)));\n"
      "  }}\n",
      count, count + 2, n, to_string(a), to_string(b), places, count, count + 1, operands);
}

}  // namespace f8::codegen
