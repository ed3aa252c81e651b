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

namespace {

std::string mma_text(std::string_view name, Dtype a, Dtype b, int n, MmaA where,
                     std::string_view majors) {
  const int count = n / 2;
  std::string places;
  std::string operands;
  for (int i = 0; i < count; ++i) {
    const bool last = i + 1 == count;
    const bool line_end = i % 8 == 7 && !last;
    places += f8::format("%{}{}", i, last ? "" : line_end ? ",\"\n        \"" : ", ");
    operands += f8::format("\"+f\"(d[{}]){}", i, last ? "" : line_end ? ",\n          " : ", ");
  }
  const bool shared = where == MmaA::kShared;
  const int first = count + (shared ? 1 : 4);  // behind a
  const std::string of_a =
      shared ? f8::format("%{}", count)
             : f8::format("{{%{}, %{}, %{}, %{}}}", count, count + 1, count + 2, count + 3);
  return f8::format(
      "  static F8_DEVICE void {11}(float (&d)[{0}], {12} a, u64 b, bool accumulate) {{\n"
      "    asm volatile(\n"
      "        \"{{\\n.reg .pred p;\\nsetp.ne.b32 p, %{1}, 0;\\n\"\n"
      "        \"wgmma.mma_async.sync.aligned.m64n{2}k{9}.f32.{3}.{4} \"\n"
      "        \"{{{5}}}, \"\n"
      "        \"{6}, %{7}, p, 1, 1{10};\\n}}\\n\"\n"
      "        : {8}\n"
      "        : {13}, \"l\"(b), \"r\"(static_cast<u32>(accumulate)));\n"
      "  }}\n",
      count, first + 1, n, to_string(a), to_string(b), places, of_a, first, operands,
      is_fp8(a) ? 32 : 16, majors, name, shared ? "u64" : "const u32*",
      shared ? "\"l\"(a)" : "\"r\"(a[0]), \"r\"(a[1]), \"r\"(a[2]), \"r\"(a[3])");
}

}  // namespace

std::string mma_function(const GemmSpec& spec, int n) {
  return mma_text("mma", spec.a, spec.b, n, MmaA::kShared,
                  is_fp8(spec.a)
                      ? std::string()
                      : f8::format(", {:d}, {:d}", spec.mn_major_a(), spec.mn_major_b()));
}

std::string mma_function(std::string_view name, Dtype a, Dtype b, int n, MmaA where) {
  return mma_text(name, a, b, n, where, "");
}

}  // namespace f8::codegen
