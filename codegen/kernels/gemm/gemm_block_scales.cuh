// The 1x128 (1D) and 128x128 (2D) scales of a tile: bulk copies load those of each stage together
// with its operands. A stage holds
//   of a: kTileM floats, 1x128 scales
//   of b: kTileN floats (1x128), or 4 floats for each of 1 or 2 rows of 128x128 blocks
#pragma once

#include "codegen/kernels/gemm/gemm_schedule.cuh"

namespace f8::kernels {

template <class Config>
struct GemmBlockScales {
  static constexpr bool kScales1d = Config::kScale == Scale::kBlock1x128;  // of b; a's always are
  static constexpr bool kScales2d = Config::kScale == Scale::kBlock128x128;
  static constexpr bool kUsed = kScales1d || kScales2d;
  static constexpr bool kRowGroups = Config::kGroup == Group::kM;
  static constexpr int kRows2d = kGemmLayout<Config>.scale_rows_2d();
  static constexpr int kBytesA = kGemmLayout<Config>.scales_a();
  static constexpr int kBytesB = kGemmLayout<Config>.scales_b();
  // The third producer warp copies the scales where one thread is too slow: it cannot issue four
  // copies a stage while the MMAs of three stages run. Where a CTA has only a tile or two, a second
  // warp would be later with its first stage.
  static constexpr bool kOwnWarp = kScales2d && (Config::kTileM * Config::kTileN > 128 * 128 ||
                                                 GemmSchedule<Config>::kClusterSize > 1);

  const GemmProblem& problem;
  i32 row, column;
  u32 bytes_a, bytes_b;  // of a stage
  u32 group_b = 0;       // where the group's scales of b begin

  template <class Schedule>
  F8_DEVICE GemmBlockScales(const Schedule& schedule, const WorkTile& tile)
      : problem(schedule.args.problems[tile.problem]),
        row(kRowGroups ? tile.scale_row : tile.row),
        column(tile.column),
        bytes_a(kUsed ? copied_bytes(schedule.end_row(tile), tile.row, kBytesA) : 0),
        bytes_b(kScales1d ? copied_bytes(problem.n, tile.column, kBytesB) : kBytesB) {
    if constexpr (kScales2d && kRowGroups) {
      group_b = static_cast<u32>(tile.group) * schedule.grouped.group_stride_b;
    }
  }

  // Copies the scales of one block of k to shared memory; they complete on the barrier `full`.
  F8_DEVICE void load(u32 smem, u32 k_block, u32 full) const {
    if (bytes_a > 0) {
      bulk_load(smem, problem.inv_scale_a + static_cast<u64>(k_block) * problem.stride_a + row,
                full, bytes_a);
    }
    const u32 smem_b = smem + kBytesA;
    if constexpr (kScales1d) {
      if (bytes_b > 0) {
        bulk_load(smem_b,
                  problem.inv_scale_b + static_cast<u64>(k_block) * problem.stride_b + column, full,
                  bytes_b);
      }
    }
    if constexpr (kScales2d) {
      const u32 row_2d = column / 128;
      const u32 to_second = (row_2d + 1) * 128 < problem.n ? problem.stride_b : 0;
      const float* scales = problem.inv_scale_b + group_b +
                            static_cast<u64>(row_2d) * problem.stride_b + k_block / 4 * 4;
#pragma unroll
      for (int i = 0; i < kRows2d; ++i) {
        bulk_load(smem_b + i * kScaleBytes2d, scales + i * to_second, full, kScaleBytes2d);
      }
    }
  }

 private:
  // The scales of a block of k end at the matrix, rounded up to 16 bytes.
  static F8_DEVICE u32 copied_bytes(u32 extent, i32 first, u32 most) {
    return min((extent - min(static_cast<u32>(first), extent) + 3) / 4 * 16, most);
  }
};

}  // namespace f8::kernels
