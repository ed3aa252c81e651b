// The scaled GEMM d[m][n] = (sum_k a[m][k] b[n][k]) * inv_scale_a * inv_scale_b: fp8 operands; d is
// bf16, fp16 or fp32. Over groups a and b may be bf16 or fp16 without scales, each of them K-major, [m][k] and [n][k], or
// MN-major, [k][m] and [k][n].
// Optionally a bias is added, the result is added to what d held, and max |d|
// is recorded. One launch computes one GEMM, or two, or with kGroup one for each group of the rows
// of a, or of K.
//
// The kernel is persistent and warp-specialised:
//   load      GemmMainloop::load_tile      the producer warps copy a tile's operands by TMA into a
//                                          ring of stages, multicast within the cluster
//   compute   GemmMainloop::compute_tile   the consumer warpgroups multiply the stages with wgmma
//   (reduce)  GemmSplitK::reduce           with kSplitK the CTAs of a cluster share K and reduce
//   finish    GemmEpilogue::store_tile     the consumers scale their sums and write d by TMA
// GemmSchedule says which tiles a CTA computes; GemmTraits has the shapes and the shared memory.
// With kPingpong each consumer warpgroup owns every other tile, so that the epilogue of one is
// hidden behind the MMAs of the other; else they share the rows of a tile.
//
// Rows and columns beyond the matrices read as zero and are not written.
#pragma once

#include "codegen/kernels/gemm/gemm_epilogue.cuh"
#include "codegen/kernels/gemm/gemm_mainloop.cuh"

namespace f8::kernels {

// Config is the stub's: kTileM, kTileN, kStages, kClusterM, kClusterN, kSplitK, kWarpgroups,
// kPingpong, kProblems, kGroup, kConsumerRegisters, kProducerRegisters; of the main loop kScale, kFast,
// kMmaN, kPromotionAccumulators, kShards, kOperandBytes, kMnMajorA, kMnMajorB, and
// mma(acc, desc_a, desc_b, accumulate), one wgmma of 64 x kMmaN x 32 bytes of k; of the epilogue kFloatOutput, kHalfOutput, kBias, kAdd, kAmax, kPow2,
// kOutBuffers.
template <class Config>
struct Gemm {
  using Traits = GemmTraits<Config>;
  using Mainloop = GemmMainloop<Config>;
  using Epilogue = GemmEpilogue<Config>;
  using Schedule = typename Traits::Schedule;
  using Maps = typename Traits::Maps;
  using Shared = GemmShared<Config>;
  using Pipeline = typename Mainloop::Pipeline;

  // The producer warpgroup: its first warp loads the operands, its second one the epilogue
  // operands, its third one may load block scales. Each has a loop of its own: in a common one the
  // compiler takes the pipeline state and the tile out of uniform registers.
  static F8_DEVICE void producer_loop(const Maps& maps, const Shared& shared,
                                      const Schedule& schedule) {
    const u32 warp = __shfl_sync(0xFFFFFFFFU, threadIdx.x / 32 - Config::kWarpgroups * 4, 0);
    if (warp == 0) {
      Pipeline pipeline;
      schedule.each_tile([&](const WorkTile& tile) {
        Mainloop::load_tile(maps, shared, schedule, tile, pipeline);
      });
    } else if (Traits::EpilogueOperands::kUsed && warp == 1) {
      u32 count = 0;
      schedule.each_tile(
          [&](const WorkTile& tile) { shared.operands.load(schedule, tile, count++); });
    } else if (Traits::BlockScales::kOwnWarp && warp == 2) {
      Pipeline pipeline;
      schedule.each_tile([&](const WorkTile& tile) {
        Mainloop::load_tile_scales(shared, schedule, tile, pipeline);
      });
    }
  }

  static F8_DEVICE void consumer_loop(const Maps& maps, const Shared& shared,
                                      const Schedule& schedule, u32 warpgroup) {
    Pipeline pipeline;
    u32 out_buffer = 0;      // the next one
    u32 amax = 0;            // bits of this thread's max |d|
    u32 operands_phase = 0;  // flips with each of this warpgroup's tiles
    float scale[Config::kProblems] = {};
    if constexpr (Config::kScale == Scale::kTensor && Config::kGroup == Group::kNone) {
#pragma unroll
      for (int i = 0; i < Config::kProblems; ++i) {
        const GemmProblem& problem = schedule.args.problems[i];
        scale[i] = load_global(problem.inv_scale_a) * load_global(problem.inv_scale_b);
      }
    }
    if (warpgroup == 1) Mainloop::order_arrive(warpgroup);  // the first tile is warpgroup 0's
    u32 count = 0;
    schedule.each_tile([&](const WorkTile& tile) {
      const u32 turn = count++;
      if constexpr (Config::kPingpong) {
        if (turn % Config::kWarpgroups != warpgroup) {
          pipeline.skip(tile.k_blocks);
          return;
        }
      }
      // A group's scales arrive while its MMAs run.
      float group_scales[2] = {};
      if constexpr (Config::kScale == Scale::kTensor && Config::kGroup != Group::kNone &&
                    Config::kOperandBytes == 1) {
        group_scales[0] = load_global(schedule.inv_scale_a(tile));
        group_scales[1] = load_global(schedule.inv_scale_b(tile));
      }
      typename Traits::Accumulators acc;
      Mainloop::compute_tile(acc, shared, schedule, pipeline, warpgroup, tile);
      const typename Mainloop::TileSums sums{acc};
      // An index would put both into local memory, whose loads wait behind the operands'.
      float tile_scale = scale[0];
      if constexpr (Config::kGroup != Group::kNone) tile_scale = group_scales[0] * group_scales[1];
      if constexpr (Config::kOperandBytes > 1) tile_scale = 1.0F;
      if (Config::kProblems > 1 && tile.problem > 0) tile_scale = scale[Config::kProblems - 1];
      if constexpr (Config::kSplitK == 1) {
        Epilogue::store_tile(sums, shared, maps, schedule, warpgroup, tile, tile_scale,
                             operands_phase, out_buffer, amax);
      } else {
        typename Traits::SplitK::template Reduced<Traits::kMmaTilesM> reduced;
        shared.split.reduce(sums, reduced, schedule.rank_k, warpgroup, turn % 2);
        Epilogue::store_tile(reduced, shared, maps, schedule, warpgroup, tile, tile_scale,
                             operands_phase, out_buffer, amax);
      }
      operands_phase ^= 1;
    });
    if (threadIdx.x % 128 == 0) tma_store_wait();
    if constexpr (Config::kGroup != Group::kNone) {
      schedule.template zero_rest<Config::kFloatOutput ? 4 : 2>();
    }
  }

  static F8_DEVICE void run(const Maps& maps, const typename Schedule::Args& args,
                            u8* dynamic_shared) {
    const Shared shared(dynamic_shared);
    if (threadIdx.x == 0) {
#pragma unroll
      for (int i = 0; i < Config::kProblems; ++i) {
        prefetch_tensor_map(&maps.problems[i].a);
        prefetch_tensor_map(&maps.problems[i].b);
        prefetch_tensor_map(&maps.problems[i].d);
      }
      for (int i = 0; i < Config::kStages; ++i) {
        barrier_init(shared.full + 8 * i, 1);
        barrier_init(shared.empty + 8 * i, Mainloop::kEmptyArrivals);
      }
      shared.operands.init(128 * Traits::kConsumersOfTile);
      shared.split.init();
      barrier_init_fence();
    }
    if constexpr (Schedule::kClusterSize > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
    launch_dependents();
    grid_dependency_wait();
    const Schedule schedule(args, blockIdx.x % Schedule::kClusterSize);
    // The producer is the last warpgroup, so that the consumers begin at thread 0. The index comes
    // from one lane, so that the compiler keeps what depends on it in uniform registers.
    const u32 warpgroup = __shfl_sync(0xFFFFFFFFU, threadIdx.x / 128, 0);
    if (warpgroup == Config::kWarpgroups) {
      if constexpr (Config::kProducerRegisters > 0)
        warpgroup_reg_dealloc<Config::kProducerRegisters>();
      producer_loop(maps, shared, schedule);
    } else {
      if constexpr (Config::kProducerRegisters > 0)
        warpgroup_reg_alloc<Config::kConsumerRegisters>();
      consumer_loop(maps, shared, schedule, warpgroup);
    }
    // No CTA leaves while a peer may still write to its shared memory or arrive at its barriers.
    if constexpr (Schedule::kClusterSize > 1) cluster_sync();
  }
};

}  // namespace f8::kernels
