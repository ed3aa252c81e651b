#include "codegen/mma_text.hpp"

namespace f8::codegen {

namespace {

// Accumulators of a consumer thread for its part of the tile.
int tile_accumulators(const GemmConfig& c) {
  return c.tile_m / (c.pingpong ? 1 : c.warpgroups) / 64 * c.tile_n / 2;
}

}  // namespace

int max_accumulators(int warpgroups) {
  // About 40 registers hold addresses, descriptors and the schedule.
  return gemm_registers(warpgroups).consumer - 40;
}

GemmMma gemm_mma(const GemmSpec& spec) {
  const int n = spec.config.tile_n;
  if (spec.fast) return {.n = n, .promotion_accumulators = 0};
  const int room = max_accumulators(spec.config.warpgroups) - tile_accumulators(spec.config);
  if (n <= room) return {.n = n, .promotion_accumulators = 2};
  if (n / 2 > room) return {.n = n / 2, .promotion_accumulators = 1};
  // Block scales take longer to apply, so two halves in turn are better than a whole; but MMAs of
  // 64 columns read a too often.
  const bool halves = spec.scale == ScaleMode::kBlock128x128 && n / 2 > 64;
  return {.n = halves ? n / 2 : n, .promotion_accumulators = halves ? 2 : 1};
}

int gemm_accumulators(const GemmSpec& spec) {
  const GemmMma mma = gemm_mma(spec);
  return tile_accumulators(spec.config) + mma.promotion_accumulators * mma.n / 2;
}

GemmRegisters gemm_registers(int warpgroups) {
  // An SM has 65536 registers and a thread uses at most 255, so that one consumer warpgroup needs
  // no redistribution.
  if (warpgroups == 1) return {.consumer = 255, .producer = 0};
  if (warpgroups == 2) return {.consumer = 232, .producer = 40};
  return {.consumer = 160, .producer = 32};
}

std::string mma_function(const GemmSpec& spec, int n) {
  const bool fp8 = is_fp8(spec.a);
  const std::string majors =
      fp8 ? "" : f8::format(", {:d}, {:d}", spec.mn_major_a(), spec.mn_major_b());
  const int count = n / 2;
  std::string places;
  std::string operands;
  for (int i = 0; i < count; ++i) {
    const bool last = i + 1 == count;
    const bool line_end = i % 8 == 7 && !last;
    places += f8::format("%{}{}", i, last ? "" : line_end ? ",\"\n        \"" : ", ");
    operands += f8::format("\"+f\"(d[{}]){}", i, last ? "" : line_end ? ",\n          " : ", ");
  }
  return f8::format(
      "  static F8_DEVICE void mma(float (&d)[{0}], u64 a, u64 b, bool accumulate) {{\n"
      "    asm volatile(\n"
      "        \"{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{1}, 0;\\n\"\n"
      "        \"wgmma.mma_async.sync.aligned.m64n{2}k{9}.f32.{3}.{4} \"\n"
      "        \"{{{5}}}, \"\n"
      "        \"%{6}, %{7}, p, 1, 1{10};\\n}}\\n\"\n"
      "        : {8}\n"
      "        : \"l\"(a), \"l\"(b), \"r\"(static_cast<u32>(accumulate)));\n"
      "  }}\n",
      count, count + 2, n, to_string(spec.a), to_string(spec.b), places, count, count + 1, operands,
      fp8 ? 32 : 16, majors);
}

}  // namespace f8::codegen
