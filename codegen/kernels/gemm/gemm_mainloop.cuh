// The main loop of the GEMM: a ring of stages of 128 bytes of k. load_tile fills it, compute_tile
// consumes it.
//
// A stage is full when its copies have completed on its full barrier. It is refilled when every
// warp that reads it (every lane, where it has block scales), in every CTA that the refill writes
// to, has arrived at its empty barrier.
//
// Fast accumulation keeps the sums in the tensor core's accumulators. Precise accumulation
// promotes: each 128 of k is summed in the tensor core (the promotion accumulators), scaled by its
// block scales, and added to fp32 registers.
#pragma once

#include "codegen/kernels/gemm/gemm_traits.cuh"

namespace f8::kernels {

// A position in the ring of stages; its phase is the parity of the barriers and flips with every
// turn of the ring.
template <int kStages>
struct PipelineState {
  u32 stage = 0;
  u32 phase = 0;
  F8_DEVICE void advance() {
    if (++stage == kStages) {
      stage = 0;
      phase ^= 1;
    }
  }
  F8_DEVICE void skip(u32 count) {
    const u32 position = stage + count;
    phase ^= (position / kStages) & 1;
    stage = position % kStages;
  }
};

template <class Config>
struct GemmMainloop {
  using Traits = GemmTraits<Config>;
  using Schedule = typename Traits::Schedule;
  using Scales = typename Traits::BlockScales;
  using Maps = typename Traits::Maps;
  using Shared = GemmShared<Config>;
  using Pipeline = PipelineState<Config::kStages>;
  using Accumulators = typename Traits::Accumulators;
  using MmaAccumulators = float[Config::kMmaN / 2];  // of one MMA tile of 64 x kMmaN

  // --- load: the producer warps
  // This CTA loads its part of each operand's tile and multicasts it to the `kSharers` CTAs of the
  // mask, which work on the same tile.
  template <int kSharers, class... Matrix>
  static F8_DEVICE void load_part(u32 smem, const TensorMap* map, u32 barrier, u16 mask, i32 k,
                                  i32 row, Matrix... matrix) {
    if constexpr (kSharers > 1) {
      tma_load_multicast(smem, map, barrier, mask, k, row, matrix...);
    } else {
      tma_load(smem, map, barrier, k, row, matrix...);
    }
  }

  // Fetches into L2 a part of the d that the result is added to. The parts are spread over the
  // blocks of k: all at once, they would hold up the operands.
  static F8_DEVICE void prefetch_d(const Maps& maps, const WorkTile& tile, u32 rank_k, u32 i) {
    constexpr u32 kAcross = Traits::SplitK::kColumns / Traits::kOutColumns;
    constexpr u32 kParts = kAcross * (Config::kTileM / 64);
    const u32 apart = max(tile.k_blocks / kParts, 1U);
    const u32 part = i / apart;
    if (i % apart != 0 || part >= kParts) return;
    const TensorMap* map_d = &maps.problems[tile.problem].d;
    const i32 column = tile.column + static_cast<i32>(rank_k * Traits::SplitK::kColumns +
                                                      part % kAcross * Traits::kOutColumns);
    const i32 row = tile.row + static_cast<i32>(part / kAcross * 64);
    if constexpr (Config::kGroup == Group::kK) {
      tma_prefetch(map_d, column, row, tile.group);
    } else {
      tma_prefetch(map_d, column, row);
    }
  }

  // Loads boxes of 64 columns of an MN-major operand, from row `k` on.
  template <int kSharers, int kColumns, class... Matrix>
  static F8_DEVICE void load_boxes(u32 smem, const TensorMap* map, u32 barrier, u16 mask,
                                   i32 column, i32 k, Matrix... matrix) {
#pragma unroll
    for (int box = 0; box < kColumns / kMnBox; ++box) {
      load_part<kSharers>(smem + box * kMnBoxBytes, map, barrier, mask, column + box * kMnBox, k,
                          matrix...);
    }
  }

  static F8_DEVICE void load_tile(const Maps& maps, const Shared& shared, const Schedule& schedule,
                                  const WorkTile& tile, Pipeline& pipeline) {
    constexpr int kRowsA = Config::kTileM / Config::kClusterN;
    constexpr int kRowsB = Config::kTileN / Config::kClusterM;
    u16 mask_a = 0;
    u16 mask_b = 0;
#pragma unroll
    for (int i = 0; i < Config::kClusterN; ++i)
      mask_a |= static_cast<u16>(1U << (schedule.rank_m + i * Config::kClusterM));
#pragma unroll
    for (int i = 0; i < Config::kClusterM; ++i)
      mask_b |= static_cast<u16>(1U << (schedule.rank_n * Config::kClusterM + i));
    const TensorMap* map_a = &maps.problems[tile.problem].a;
    const TensorMap* map_b = &maps.problems[tile.problem].b;
    const Scales scales(schedule, tile);
    for (u32 i = 0; i < tile.k_blocks; ++i, pipeline.advance()) {
      const u32 k_block = tile.first_k_block + i;
      const u32 full = shared.full + 8 * pipeline.stage;
      barrier_wait(shared.empty + 8 * pipeline.stage, pipeline.phase ^ 1);
      if (!elect_one()) continue;
      barrier_expect(full, Traits::kStageBytes + scales.bytes_a + scales.bytes_b);
      const i32 k = static_cast<i32>(k_block * Schedule::kBlockK);
      if constexpr (Config::kAdd) prefetch_d(maps, tile, schedule.rank_k, i);
      const u32 a = shared.a(pipeline.stage) + schedule.rank_n * kRowsA * kStageK;
      const i32 row_a = tile.row + static_cast<i32>(schedule.rank_n * kRowsA);
      if constexpr (Config::kMnMajorA) {  // over groups of K, and b likewise
        const i32 first = static_cast<i32>(tile.first_k_block + i * kMnBox);
        load_boxes<Config::kClusterN, kRowsA>(a, map_a, full, mask_a, row_a, first);
        const u32 part_b = schedule.rank_m * kRowsB;
        load_boxes<Config::kClusterM, kRowsB>(shared.b(pipeline.stage) + part_b * kStageK, map_b,
                                              full, mask_b, tile.column + static_cast<i32>(part_b),
                                              first);
        continue;
      }
      load_part<Config::kClusterN>(a, map_a, full, mask_a, k, row_a);
      const u32 b = shared.b(pipeline.stage) + schedule.rank_m * kRowsB * kStageK;
      i32 row_b = tile.column + static_cast<i32>(schedule.rank_m * kRowsB);
      i32 k_b = k;
      // The shards' rows follow each other. Rows behind n, of columns that nobody writes, are then
      // those of the next shard.
      if constexpr (Config::kShards) {
        const GemmProblem& problem = schedule.args.problems[tile.problem];
        const u32 shard = k_block / problem.shard_blocks;
        k_b -= static_cast<i32>(shard * problem.shard_blocks * kStageK);
        row_b += static_cast<i32>(shard * problem.n);
      }
      if constexpr (Config::kMnMajorB) {
        load_boxes<Config::kClusterM, kRowsB>(b, map_b, full, mask_b, row_b, k_b, tile.group);
      } else if constexpr (Config::kGroup == Group::kM) {
        load_part<Config::kClusterM>(b, map_b, full, mask_b, k_b, row_b, tile.group);
      } else {
        load_part<Config::kClusterM>(b, map_b, full, mask_b, k_b, row_b);
      }
      if constexpr (Scales::kUsed && !Scales::kOwnWarp)
        scales.load(shared.scales_a(pipeline.stage), k_block, full);
    }
  }

  static F8_DEVICE void load_tile_scales(const Shared& shared, const Schedule& schedule,
                                         const WorkTile& tile, Pipeline& pipeline) {
    const Scales scales(schedule, tile);
    for (u32 i = 0; i < tile.k_blocks; ++i, pipeline.advance()) {
      barrier_wait(shared.empty + 8 * pipeline.stage, pipeline.phase ^ 1);
      if (!elect_one()) continue;
      scales.load(shared.scales_a(pipeline.stage), tile.first_k_block + i,
                  shared.full + 8 * pipeline.stage);
    }
  }

  // --- release: from the consumers back to the producers
  // The CTAs that share an a tile or a b tile with this one, itself included.
  static constexpr int kSharers = Config::kClusterM + Config::kClusterN - 1;
  // Arrivals at an empty barrier: those of the CTA's own readers, and those of the other CTAs that
  // its copies reach.
  static constexpr u32 kOwnArrivals = (Scales::kUsed ? 128 : 4) * Traits::kConsumersOfTile;
  static constexpr u32 kEmptyArrivals =
      kOwnArrivals + 4 * Traits::kConsumersOfTile * (kSharers - 1);

  // Tells every CTA that refills this stage here that this warp has read it. Block scales are read
  // by ordinary loads, for which each lane arrives itself.
  static F8_DEVICE void release(const Shared& shared, const Schedule& schedule, u32 stage) {
    const u32 lane = threadIdx.x % 32;
    const u32 empty = shared.empty + 8 * stage;
    if (Scales::kUsed || (kSharers == 1 && lane == 0)) barrier_arrive(empty);
    if constexpr (kSharers > 1) {
      const u32 peer_m = lane % Config::kClusterM;
      const u32 peer_n = lane / Config::kClusterM;
      const bool own = peer_m == schedule.rank_m && peer_n == schedule.rank_n;
      const bool shares = peer_m == schedule.rank_m || peer_n == schedule.rank_n;
      if (lane < Schedule::kClusterSize && shares && !(Scales::kUsed && own))
        barrier_arrive_remote(empty, lane);
    }
  }

  // With ping-pong a warpgroup enters the ring when the other has seen all stages of the tile
  // before: the parity of a barrier tells a turn of the ring from the next one, not from the one
  // after.
  static constexpr u32 kOrderBarrier = 1 + Config::kWarpgroups;  // and the following one
  static F8_DEVICE void order_wait(u32 warpgroup) {
    if constexpr (Config::kPingpong) warpgroup_pair_sync(kOrderBarrier + warpgroup);
  }
  static F8_DEVICE void order_arrive(u32 warpgroup) {
    if constexpr (Config::kPingpong) warpgroup_pair_arrive(kOrderBarrier + 1 - warpgroup);
  }

  // --- compute: the consumer warpgroups
  // Multiplies this warpgroup's rows of a tile, over all of its blocks of k.
  static F8_DEVICE void compute_tile(Accumulators& acc, const Shared& shared,
                                     const Schedule& schedule, Pipeline& pipeline, u32 warpgroup,
                                     const WorkTile& tile) {
    order_wait(warpgroup);
    if constexpr (Config::kFast) {
      accumulate_fast(acc, shared, schedule, pipeline, warpgroup, tile.k_blocks, tile);
    } else {
      accumulate_promoted(acc, shared, schedule, pipeline, warpgroup, tile);
    }
  }

  // Low words of the descriptors of a stage's tiles. One multiplication separates them from what
  // does not change, since the tensor core waits for them between two stages.
  template <bool kMnMajor>
  static F8_DEVICE u32 descriptor_low(u32 smem) {
    if constexpr (kMnMajor) return wgmma_descriptor_low_mn(smem, kMnBoxBytes);
    return wgmma_descriptor_low(smem);
  }
  static F8_DEVICE u32 descriptor_a(const Shared& shared, u32 stage, u32 warpgroup) {
    return descriptor_low<Config::kMnMajorA>(shared.stages +
                                             Traits::first_row(warpgroup) * kStageK) +
           stage * (Traits::kStageBytes >> 4);
  }
  static F8_DEVICE u32 descriptor_b(const Shared& shared, u32 stage) {
    return descriptor_low<Config::kMnMajorB>(shared.stages + Traits::kStageBytesA) +
           stage * (Traits::kStageBytes >> 4);
  }

  // From the elements of an MMA to those of the next one in k: 32 bytes of a line, or 16 lines.
  static constexpr u32 kNextMmaA = Config::kMnMajorA ? 16 * 128 : 32;
  static constexpr u32 kNextMmaB = Config::kMnMajorB ? 16 * 128 : 32;

  // The MMAs of one stage for MMA tile i of this warpgroup.
  static F8_DEVICE void multiply(MmaAccumulators& acc, u32 a, u32 b, int i, bool accumulate) {
    a += (i / Traits::kMmaTilesN) * (64 * kStageK >> 4);
    b += (i % Traits::kMmaTilesN) * (Config::kMmaN * kStageK >> 4);
#pragma unroll
    for (int k = 0; k < kStageK / 32; ++k) {
      Config::mma(acc, wgmma_descriptor(a + k * (kNextMmaA >> 4)),
                  wgmma_descriptor(b + k * (kNextMmaB >> 4)), accumulate || k > 0);
    }
  }

  // Sets to zero the lines of a stage from `first` on, which are another group's: those of what this
  // warpgroup multiplies. Others that have the tile write the same to b.
  static F8_DEVICE void clear_lines(const Shared& shared, u32 stage, u32 warpgroup, u32 first) {
    const auto clear_boxes = [&](u32 boxes, u32 count) {
      for (u32 box = 0; box < count; ++box) {
        for (u32 at = first * 128 + threadIdx.x % 128 * 16; at < kMnBoxBytes; at += 128 * 16) {
          store_shared_zeros(boxes + box * kMnBoxBytes + at);
        }
      }
    };
    clear_boxes(shared.a(stage) + Traits::first_row(warpgroup) * kStageK, Traits::kMmaTilesM);
    clear_boxes(shared.b(stage), Config::kTileN / kMnBox);
    fence_async_proxy();
    warpgroup_sync(1 + warpgroup);
  }

  static F8_DEVICE void accumulate_fast(Accumulators& acc, const Shared& shared,
                                        const Schedule& schedule, Pipeline& pipeline, u32 warpgroup,
                                        u32 k_blocks, const WorkTile& tile) {
    u32 previous = 0;
    for (u32 block = 0; block < k_blocks; ++block, pipeline.advance()) {
      barrier_wait(shared.full + 8 * pipeline.stage, pipeline.phase);
      if constexpr (Config::kMnMajorA) {
        if (block + 1 == k_blocks && tile.last_of_k < kMnBox) {
          clear_lines(shared, pipeline.stage, warpgroup, tile.last_of_k);
        }
      }
      const u32 a = descriptor_a(shared, pipeline.stage, warpgroup);
      const u32 b = descriptor_b(shared, pipeline.stage);
#pragma unroll
      for (int i = 0; i < Traits::kMmaTiles; ++i) warpgroup_fence_operand(acc[i]);
      wgmma_fence();
#pragma unroll
      for (int i = 0; i < Traits::kMmaTiles; ++i) multiply(acc[i], a, b, i, block > 0);
      wgmma_commit();
#pragma unroll
      for (int i = 0; i < Traits::kMmaTiles; ++i) warpgroup_fence_operand(acc[i]);
      wgmma_wait<1>();
      if (block > 0) release(shared, schedule, previous);
      previous = pipeline.stage;
    }
    order_arrive(warpgroup);
    wgmma_wait<0>();
#pragma unroll
    for (int i = 0; i < Traits::kMmaTiles; ++i) warpgroup_fence_operand(acc[i]);
    release(shared, schedule, previous);
  }

  static F8_DEVICE void clear(Accumulators& acc) {
#pragma unroll
    for (int i = 0; i < Traits::kMmaTiles; ++i) {
#pragma unroll
      for (int j = 0; j < Config::kMmaN / 2; ++j) acc[i][j] = 0.0F;
    }
  }

  static F8_DEVICE void accumulate_promoted(Accumulators& acc, const Shared& shared,
                                            const Schedule& schedule, Pipeline& pipeline,
                                            u32 warpgroup, const WorkTile& tile) {
    clear(acc);
    // A tile of 192 columns may begin in the middle of a 128x128 block of b.
    const bool from_half = Config::kTileN % 128 != 0 && tile.column % 128 != 0;
    bool ready = barrier_test(shared.full + 8 * pipeline.stage, pipeline.phase);
    u32 block = 0;
    for (; block + kStepStages <= tile.k_blocks; block += kStepStages) {
      promoted_step<kStepStages>(acc, shared, schedule, pipeline, warpgroup, block, from_half,
                                 ready);
    }
    if constexpr (kStepStages > 1) {
      for (; block < tile.k_blocks; ++block) {
        promoted_step<1>(acc, shared, schedule, pipeline, warpgroup, block, from_half, ready);
      }
    }
    order_arrive(warpgroup);
  }

  // A step is a few stages, so that what a stage needs is computed while the one before is
  // promoted. With two promotion accumulators one is promoted while the tensor core computes the
  // other: two warpgroups alone do not keep it busy, since their MMAs progress side by side and end
  // together. All MMAs end within the step: across a loop's back edge the compiler cannot see which
  // one has ended, and serialises them (C7514).
  static constexpr int kStepStages =
      Config::kPromotionAccumulators == 2 || Scales::kScales2d ? 2 : 1;
  static constexpr int kBehind = Config::kPromotionAccumulators - 1;  // MMA tiles not yet promoted

  // `ready`: a barrier test issued during the previous MMAs says that the next stage is loaded.
  // Between two steps the tensor core has nothing to do, so the test must not wait for them.
  template <int kCount>
  static F8_DEVICE void promoted_step(Accumulators& acc, const Shared& shared,
                                      const Schedule& schedule, Pipeline& pipeline, u32 warpgroup,
                                      u32 block, bool from_half, bool& ready) {
    MmaAccumulators promotion[Config::kPromotionAccumulators];
    constexpr int kMmas = kCount * Traits::kMmaTiles;
    u32 stage[kCount];
    float scales_2d[kCount][Scales::kRows2d];
#pragma unroll
    for (int p = 0; p < kMmas + kBehind; ++p) {
      if (p < kMmas) {
        if (p % Traits::kMmaTiles == 0) {
          if (p > 0 || !ready) barrier_wait(shared.full + 8 * pipeline.stage, pipeline.phase);
          stage[p / Traits::kMmaTiles] = pipeline.stage;
          pipeline.advance();
        }
        start_mma(promotion[p % Config::kPromotionAccumulators], shared,
                  stage[p / Traits::kMmaTiles], warpgroup, p % Traits::kMmaTiles);
        if (Scales::kScales2d && p % Traits::kMmaTiles == 0) {
#pragma unroll
          for (int row = 0; row < Scales::kRows2d; ++row) {
            scales_2d[p / Traits::kMmaTiles][row] =
                load_shared(shared.scales_b(stage[p / Traits::kMmaTiles]) + row * kScaleBytes2d +
                            (block + p / Traits::kMmaTiles) % 4 * 4);
          }
        }
      }
      const int ended = p - kBehind;
      if (ended < 0) continue;
      const int step_stage = ended / Traits::kMmaTiles;
      const int mma_tile = ended % Traits::kMmaTiles;
      const bool last_of_stage = mma_tile == Traits::kMmaTiles - 1;
      float2 rows = make_float2(1.0F, 1.0F);
      if constexpr (Scales::kUsed) {
        rows = row_scales(shared, stage[step_stage], warpgroup, mma_tile);
      }
      if (ended == kMmas - 1) {
        ready = barrier_test(shared.full + 8 * pipeline.stage, pipeline.phase);
      }
      if (p < kMmas) {
        wgmma_wait<kBehind>();
      } else {
        wgmma_wait<0>();
      }
      warpgroup_fence_operand(promotion[ended % Config::kPromotionAccumulators]);
      if (last_of_stage && !Scales::kScales1d) release(shared, schedule, stage[step_stage]);
      promote(acc[mma_tile], promotion[ended % Config::kPromotionAccumulators], rows,
              scales_2d[step_stage], from_half, shared, stage[step_stage], mma_tile);
      if (last_of_stage && Scales::kScales1d) release(shared, schedule, stage[step_stage]);
    }
  }

  // Starts MMA tile i of this warpgroup's rows over one stage, from zero.
  static F8_DEVICE void start_mma(MmaAccumulators& promotion, const Shared& shared, u32 stage,
                                  u32 warpgroup, int i) {
    const u32 a = descriptor_a(shared, stage, warpgroup);
    const u32 b = descriptor_b(shared, stage);
    warpgroup_fence_operand(promotion);
    wgmma_fence();
    multiply(promotion, a, b, i, false);
    wgmma_commit();
  }

  // The scales of this thread's two rows in MMA tile i.
  static F8_DEVICE float2 row_scales(const Shared& shared, u32 stage, u32 warpgroup, int i) {
    const u32 row = Traits::first_row(warpgroup) + (i / Traits::kMmaTilesN) * 64 +
                    threadIdx.x % 128 / 32 * 16 + threadIdx.x % 32 / 4;
    const u32 scales = shared.scales_a(stage) + row * 4;
    return make_float2(load_shared(scales), load_shared(scales + 32));
  }

  // The 128x128 scale of b for the 8 columns from `column` of the tile.
  static F8_DEVICE float scale_2d(const float (&scales)[Scales::kRows2d], int column,
                                  bool from_half) {
    if (Scales::kRows2d == 1 || column < 64) return scales[0];
    if (column >= 128) return scales[Scales::kRows2d - 1];
    return from_half ? scales[Scales::kRows2d - 1] : scales[0];
  }

  // Adds a block of k of MMA tile i, scaled, to its fp32 sums.
  static F8_DEVICE void promote(MmaAccumulators& acc, const MmaAccumulators& promotion, float2 rows,
                                const float (&scales_2d)[Scales::kRows2d], bool from_half,
                                const Shared& shared, u32 stage, int i) {
#pragma unroll
    for (int j = 0; j < Config::kMmaN / 2; j += 4) {
      if constexpr (!Scales::kUsed) {
#pragma unroll
        for (int r = 0; r < 4; ++r) acc[j + r] += promotion[j + r];
        continue;
      }
      const int column = (i % Traits::kMmaTilesN) * Config::kMmaN + j * 2;  // the first of 8
      float2 columns;
      if constexpr (Scales::kScales1d) {
        columns = load_shared_pair(shared.scales_b(stage) + (column + threadIdx.x % 4 * 2) * 4);
      } else {
        columns.x = columns.y = scale_2d(scales_2d, column, from_half);
      }
      acc[j] += promotion[j] * (rows.x * columns.x);
      acc[j + 1] += promotion[j + 1] * (rows.x * columns.y);
      acc[j + 2] += promotion[j + 2] * (rows.y * columns.x);
      acc[j + 3] += promotion[j + 3] * (rows.y * columns.y);
    }
  }

  // A thread's sums of a whole tile: at(mma_m, column) points at 4 of them, in 2 rows and 2 columns
  // of the 8 columns from `column`.
  struct TileSums {
    static constexpr int kColumns = Config::kTileN;
    const Accumulators& acc;
    F8_DEVICE const float* at(int mma_m, int column) const {
      return &acc[mma_m * Traits::kMmaTilesN + column / Config::kMmaN][column % Config::kMmaN / 2];
    }
  };
};

}  // namespace f8::kernels
