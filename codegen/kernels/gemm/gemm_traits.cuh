// Traits that follow from a GEMM configuration and concern all parts of the kernel: the shapes of a
// warpgroup's work, and addresses in shared memory. Traits of one part live with that part.
#pragma once

#include "codegen/kernels/gemm/gemm_block_scales.cuh"
#include "codegen/kernels/gemm/gemm_epilogue_operands.cuh"
#include "codegen/kernels/gemm/gemm_group_schedule.cuh"
#include "codegen/kernels/gemm/gemm_split.cuh"

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
  using Schedule = typename ScheduleOf<Config>::Type;
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

  static constexpr GemmLayout kLayout = kGemmLayout<Config>;
  static constexpr int kStageBytesA = kLayout.stage_a();
  static constexpr int kStageBytes = kLayout.stage();
  // d leaves shared memory in boxes of kOutRows x kOutColumns.
  static constexpr int kOutColumns = kLayout.out_columns();
  static constexpr int kOutRowBytes = kLayout.out_row();
  static constexpr int kOutBufferBytes = kLayout.out_buffer();

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
  static constexpr u32 kOut = Traits::kLayout.at_out(), kSplit = Traits::kLayout.at_split(),
                       kBarriers = Traits::kLayout.at_barriers(),
                       kScales = Traits::kLayout.at_scales(),
                       kOperands = Traits::kLayout.at_operands();
  static constexpr u32 kScaleBytes = Traits::kLayout.scales();
  u32 stages;
  u32 out;
  u32 full;
  u32 empty;
  u32 scales;
  typename Traits::EpilogueOperands operands;
  typename Traits::SplitK split;
  F8_DEVICE explicit GemmShared(const u8* memory)
      : stages(smem_address(memory)),
        out(stages + kOut),
        full(stages + kBarriers),
        empty(full + kBarrierBytes * Config::kStages),
        scales(stages + kScales),
        operands(stages + kOperands),
        split(stages + kSplit) {}
  F8_DEVICE u32 a(u32 stage) const { return stages + stage * Traits::kStageBytes; }
  F8_DEVICE u32 b(u32 stage) const { return a(stage) + Traits::kStageBytesA; }
  F8_DEVICE u32 scales_a(u32 stage) const { return scales + stage * kScaleBytes; }
  F8_DEVICE u32 scales_b(u32 stage) const { return scales_a(stage) + Traits::BlockScales::kBytesA; }
};

}  // namespace f8::kernels
