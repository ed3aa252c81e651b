// The layout of a GEMM's dynamic shared memory, which begins at a 1024-byte boundary. The kernel
// takes its addresses from it, and the host the bytes of a launch and the stages that fit.
//
//   stages      kStages x { a: kTileM rows of 128 bytes, b: kTileN rows of 128 bytes }
//                                                                    128-byte swizzle
//   out         kWarpgroups x kOutBuffers x 64 rows of 128 or 64 bytes   swizzle of as many
//   split       the sums of its columns that a CTA receives from its peers, and two barriers for
//               each consumer warpgroup, with cluster split-K alone
//   barriers    kStages x full barrier, kStages x empty barrier
//   scales      kStages x the block scales of a and b of a stage
//   operands    one buffer, with ping-pong two, of what the epilogue reads for each row and column,
//               and two barriers each
#pragma once

#include "codegen/kernels/kernel_args.cuh"

namespace f8::kernels {

inline constexpr i32 kScaleBytes2d = 16;  // a copy of one 128x128 scale: it has its neighbours
inline constexpr i32 kOutRows = 64;       // of a box of d
// A stage of an MN-major operand of 16 bits has so many of k, in boxes of as many rows or columns of d,
// each of them kMnBox lines of 128 bytes. A tile's boxes follow each other, in as many bytes as K-major ones.
inline constexpr i32 kMnBox = 64;
inline constexpr i32 kMnBoxBytes = kMnBox * kStageK;
inline constexpr i32 kBarrierBytes = 8;

struct GemmLayout {
  i32 tile_m, tile_n, stages, warpgroups, split_k;
  bool pingpong;
  Scale scale;
  bool bias;
  i32 element_bytes;  // of d
  i32 out_buffers;

  // A stage's operands.
  F8_BOTH constexpr i32 stage_a() const { return tile_m * kStageK; }
  F8_BOTH constexpr i32 stage() const { return (tile_m + tile_n) * kStageK; }

  // d leaves shared memory in boxes of kOutRows and as many columns: 128 bytes, but 64 where a CTA
  // writes two-byte columns that are not whole multiples of 64.
  F8_BOTH constexpr i32 out_columns() const {
    return element_bytes == 4 || tile_n / split_k % 64 != 0 ? 32 : 64;
  }
  F8_BOTH constexpr i32 out_row() const { return out_columns() * element_bytes; }
  F8_BOTH constexpr i32 out_buffer() const { return kOutRows * out_row(); }

  F8_BOTH constexpr i32 split_sums() const {
    return (split_k - 1) * tile_m * (tile_n / split_k) * 4;
  }
  F8_BOTH constexpr i32 split() const {
    return split_k == 1 ? 0 : split_sums() + 2 * kBarrierBytes * warpgroups;
  }

  // A stage's block scales. Those of 128x128 blocks lie in one or two rows of b's tile.
  F8_BOTH constexpr bool has_blocks() const {
    return scale == Scale::kBlock1x128 || scale == Scale::kBlock128x128;
  }
  F8_BOTH constexpr i32 scale_rows_2d() const { return tile_n > 128 ? 2 : 1; }
  F8_BOTH constexpr i32 scales_a() const { return has_blocks() ? 4 * tile_m : 0; }
  F8_BOTH constexpr i32 scales_b() const {
    return scale == Scale::kBlock1x128     ? 4 * tile_n
           : scale == Scale::kBlock128x128 ? scale_rows_2d() * kScaleBytes2d
                                           : 0;
  }
  F8_BOTH constexpr i32 scales() const { return scales_a() + scales_b(); }

  // The floats of a buffer of epilogue operands: inverse axis scales of rows and columns, and a bias.
  F8_BOTH constexpr i32 operand_floats() const {
    return (scale == Scale::kAxis ? tile_m + tile_n : 0) + (bias ? tile_n : 0);
  }
  F8_BOTH constexpr i32 operand_buffers() const { return pingpong ? 2 : 1; }
  F8_BOTH constexpr i32 operands() const {
    const i32 buffer = operand_floats() == 0 ? 0 : 4 * operand_floats() + 2 * kBarrierBytes;
    return operand_buffers() * buffer;
  }

  // Where each part begins.
  F8_BOTH constexpr i32 at_out() const { return stages * stage(); }
  F8_BOTH constexpr i32 at_split() const {
    return at_out() + warpgroups * out_buffers * out_buffer();
  }
  F8_BOTH constexpr i32 at_barriers() const { return at_split() + split(); }
  F8_BOTH constexpr i32 at_scales() const { return at_barriers() + 2 * kBarrierBytes * stages; }
  F8_BOTH constexpr i32 at_operands() const { return at_scales() + stages * scales(); }
  F8_BOTH constexpr i32 bytes() const { return at_operands() + operands(); }
};

template <class Config>
inline constexpr GemmLayout kGemmLayout = {
    Config::kTileM,      Config::kTileN,  Config::kStages,
    Config::kWarpgroups, Config::kSplitK, Config::kPingpong,
    Config::kScale,      Config::kBias,   Config::kFloatOutput ? 4 : 2,
    Config::kOutBuffers};

}  // namespace f8::kernels
