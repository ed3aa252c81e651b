// A tile's block scales: bulk copies bring those of each stage beside its operands. Of a stage:
//   of a: kTileM floats
//   of b: kTileN floats or, of blocks of 128x128, 4 floats of 1 or 2 rows of blocks
#pragma once

#include "gemm_schedule.cuh"

namespace f8::kernels {

template <class Config>
struct GemmBlockScales {
  static constexpr bool kColumnBlocks = Config::kScale == Scale::kBlock1x128;
  static constexpr bool kSquareBlocks = Config::kScale == Scale::kBlock128x128;
  static constexpr bool kUsed = kColumnBlocks || kSquareBlocks;
  static constexpr int kSquareRows = square_rows(Config::kTileN);
  static constexpr int kBytesA = kUsed ? Config::kTileM * 4 : 0;
  static constexpr int kBytesB = kColumnBlocks   ? Config::kTileN * 4
                                 : kSquareBlocks ? kSquareRows * kSquareBytes
                                                 : 0;
  static constexpr int kBytes = kBytesA + kBytesB;
  // Four copies a stage are more than one thread issues while the products of three stages run; but
  // where a CTA has a tile or two, a second warp is later with its first stage.
  static constexpr bool kOwnWarp = kSquareBlocks && (Config::kTileM * Config::kTileN > 128 * 128 ||
                                                     GemmSchedule<Config>::kClusterSize > 1);

  const GemmProblem& problem;
  i32 row, column;
  u32 bytes_a, bytes_b;  // of a stage

  F8_DEVICE GemmBlockScales(const GemmProblem& of, const GemmTile& tile)
      : problem(of),
        row(tile.row),
        column(tile.column),
        bytes_a(kUsed ? line_bytes(of.m, tile.row, kBytesA) : 0),
        bytes_b(kColumnBlocks ? line_bytes(of.n, tile.column, kBytesB) : kBytesB) {}

  // Those of a block of k to a stage's place in shared memory.
  F8_DEVICE void copy(u32 smem, u32 block, u32 full) const {
    if (bytes_a > 0) {
      copy_line_in(smem, problem.inv_scale_a + static_cast<u64>(block) * problem.stride_a + row,
                   full, bytes_a);
    }
    const u32 smem_b = smem + kBytesA;
    if constexpr (kColumnBlocks) {
      if (bytes_b > 0) {
        copy_line_in(smem_b,
                     problem.inv_scale_b + static_cast<u64>(block) * problem.stride_b + column,
                     full, bytes_b);
      }
    }
    if constexpr (kSquareBlocks) {
      const u32 row_of_squares = column / 128;
      const u32 to_second = (row_of_squares + 1) * 128 < problem.n ? problem.stride_b : 0;
      const float* squares =
          problem.inv_scale_b + static_cast<u64>(row_of_squares) * problem.stride_b + block / 4 * 4;
#pragma unroll
      for (int i = 0; i < kSquareRows; ++i) {
        copy_line_in(smem_b + i * kSquareBytes, squares + i * to_second, full, kSquareBytes);
      }
    }
  }

 private:
  // A line of scales ends at the matrix, rounded up to 16 bytes.
  static F8_DEVICE u32 line_bytes(u32 extent, i32 first, u32 most) {
    return min((extent - min(static_cast<u32>(first), extent) + 3) / 4 * 16, most);
  }
};

}  // namespace f8::kernels
