// Traits that follow from a GEMM configuration and concern all parts of the kernel: the shapes of a
// warpgroup's work and the layout of shared memory. Traits of one part live with that part.
//
// Dynamic shared memory, which begins at a 1024-byte boundary:
//   kStages x { a: kTileM rows of 128 bytes, b: kTileN rows of 128 bytes }     128-byte swizzle
//   kWarpgroups x kOutBuffers x 64 rows of 128 or 64 bytes                     swizzle of as many
//   GemmSplitK
//   kStages x full barrier, kStages x empty barrier
//   kStages x GemmBlockScales
//   GemmEpilogueOperands
#pragma once

#include "gemm_block_scales.cuh"
#include "gemm_epilogue_operands.cuh"
#include "gemm_split.cuh"

namespace f8::kernels {

// The tensor maps of each problem.
template <int kCount>
struct GemmMaps {
  struct {
    TensorMap a, b, d;
  } problems[kCount];
};

template <class Config>
struct GemmTraits {
  using Schedule = GemmSchedule<Config>;
  using SplitK = GemmSplitK<Config>;
  using BlockScales = GemmBlockScales<Config>;
  using EpilogueOperands = GemmEpilogueOperands<Config>;
  using Maps = GemmMaps<Config::kProblems>;

  static constexpr int kThreads = 128 * (Config::kWarpgroups + 1);  // consumers, and the producer
  // A consumer warpgroup's rows of a tile are kMmaTilesM x kMmaTilesN MMAs of 64 x kMmaN.
  static constexpr int kWarpgroupM =
      Config::kPingpong ? Config::kTileM : Config::kTileM / Config::kWarpgroups;
  static constexpr int kMmaTilesM = kWarpgroupM / 64;
  static constexpr int kMmaTilesN = Config::kTileN / Config::kMmaN;
  static constexpr int kMmaTiles = kMmaTilesM * kMmaTilesN;
  static constexpr int kConsumersOfTile = Config::kPingpong ? 1 : Config::kWarpgroups;
  using Accumulators = float[kMmaTiles][Config::kMmaN / 2];
  // fp32 registers of a consumer thread, promotion accumulators included.
  static constexpr int kAccumulators =
      (kMmaTiles + Config::kPromotionAccumulators) * Config::kMmaN / 2;

  static constexpr int kStageBytesA = Config::kTileM * kStageK;
  static constexpr int kStageBytesB = Config::kTileN * kStageK;
  static constexpr int kStageBytes = kStageBytesA + kStageBytesB;

  // d leaves shared memory in boxes of kOutRows x kOutColumns.
  static constexpr int kOutElementBytes = Config::kFloatOutput ? 4 : 2;
  static constexpr int kOutColumns = out_columns(SplitK::kColumns, kOutElementBytes);
  static constexpr int kOutRowBytes = kOutColumns * kOutElementBytes;
  static constexpr int kOutBufferBytes = kOutRows * kOutRowBytes;

  static constexpr int kSharedBytes =
      Config::kStages * (kStageBytes + 2 * 8 + BlockScales::kBytes) +
      Config::kWarpgroups * Config::kOutBuffers * kOutBufferBytes +
      static_cast<int>(SplitK::kBytes + EpilogueOperands::kBytes);

  static_assert(kWarpgroupM % 64 == 0 && Config::kTileN % Config::kMmaN == 0 &&
                SplitK::kColumns % kOutColumns == 0);

  // This warpgroup's first row in its tile.
  static F8_DEVICE u32 first_row(u32 warpgroup) {
    return Config::kPingpong ? 0 : warpgroup * kWarpgroupM;
  }
};

// Addresses in shared memory.
template <class Config>
struct GemmShared {
  using Traits = GemmTraits<Config>;
  u32 stages;
  u32 out;
  u32 full;
  u32 empty;
  u32 scales;
  typename Traits::EpilogueOperands operands;
  typename Traits::SplitK split;
  F8_DEVICE explicit GemmShared(const u8* memory)
      : stages(smem_address(memory)),
        out(stages + Config::kStages * Traits::kStageBytes),
        full(out + Config::kWarpgroups * Config::kOutBuffers * Traits::kOutBufferBytes +
             Traits::SplitK::kBytes),
        empty(full + 8 * Config::kStages),
        scales(empty + 8 * Config::kStages),
        operands(scales + Config::kStages * Traits::BlockScales::kBytes),
        split(full - Traits::SplitK::kBytes) {}
  F8_DEVICE u32 a(u32 stage) const { return stages + stage * Traits::kStageBytes; }
  F8_DEVICE u32 b(u32 stage) const { return a(stage) + Traits::kStageBytesA; }
  F8_DEVICE u32 scales_a(u32 stage) const { return scales + stage * Traits::BlockScales::kBytes; }
  F8_DEVICE u32 scales_b(u32 stage) const { return scales_a(stage) + Traits::BlockScales::kBytesA; }
};

}  // namespace f8::kernels
