// The scaled matmul d[m][n] = (sum_k a[m][k] b[n][k]) * inv_scale_a * inv_scale_b, fp8 in, bf16 or
// fp32 out.
//
// Persistent and warp-specialised: one warp copies tiles of 128 bytes of k into a ring of stages
// (bulk tensor copies, multicast within the cluster), the math warpgroups consume them with wgmma
// and write d through swizzled shared memory. With kPingpong each math warpgroup owns every other
// tile, so one's epilogue hides behind the other's products; else they share a tile's rows.
//
// Shared memory, from a 1024-byte boundary:
//   kStages x { a: kTileM rows of 128 bytes, b: kTileN rows of 128 bytes }     128-byte swizzle
//   kWarpgroups x kOutBuffers x 64 rows of 128 bytes                           128-byte swizzle
//   kStages x full barrier, kStages x empty barrier
//
// Invariants: rows and columns beyond the matrices read as zero and are not written. A stage is
// refilled when every warp that reads it, in every CTA that the refill writes to, has arrived at
// its empty barrier. `precise` adds each 128 of k, summed in the tensor core, to fp32 registers.
#pragma once

#include "ptx.cuh"

namespace f8::kernels {

inline constexpr int kStageK = 128;  // bytes, which are elements
inline constexpr int kOutBuffers = 2;
inline constexpr int kOutBufferBytes = 64 * 128;

// Config is the stub's: kTileM, kTileN, kStages, kClusterM, kClusterN, kWarpgroups, kPingpong,
// kFast, kAxisScale, kFloatOutput, kMmaN, kPartials, kMathRegisters, kCopyRegisters; and
// mma(acc, desc_a, desc_b, accumulate), one wgmma of 64 x kMmaN x 32.
template <class Config>
struct Gemm {
  static constexpr int kWarpgroupM =
      Config::kPingpong ? Config::kTileM : Config::kTileM / Config::kWarpgroups;
  static constexpr int kBlocksM = kWarpgroupM / 64;
  static constexpr int kBlocksN = Config::kTileN / Config::kMmaN;
  static constexpr int kBlocks = kBlocksM * kBlocksN;
  static constexpr int kClusterSize = Config::kClusterM * Config::kClusterN;
  static constexpr int kBytesA = Config::kTileM * kStageK;
  static constexpr int kBytesB = Config::kTileN * kStageK;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kOutColumns = Config::kFloatOutput ? 32 : 64;  // of 128 bytes
  static constexpr int kConsumers = Config::kPingpong ? 1 : Config::kWarpgroups;
  // The CTAs that share an a tile or a b tile with this one, itself included.
  static constexpr int kPeers = Config::kClusterM + Config::kClusterN - 1;
  static_assert(kWarpgroupM % 64 == 0 && Config::kTileN % Config::kMmaN == 0 &&
                Config::kTileN % 64 == 0);

  using Accumulators = float[kBlocks][Config::kMmaN / 2];

  struct Shared {
    u32 stages;
    u32 out;
    u32 full;
    u32 empty;
    F8_DEVICE u32 a(u32 stage) const { return stages + stage * kStageBytes; }
    F8_DEVICE u32 b(u32 stage) const { return a(stage) + kBytesA; }
  };

  // The tiles of this CTA, in order: clusters take units of kClusterM x kClusterN tiles in turn,
  // ordered so that args.group tiles of m stay together and their operands in L2.
  struct Schedule {
    u32 units_m, units_n, units, group_units, next, step;
    u32 rank_m, rank_n;

    F8_DEVICE Schedule(const GemmArgs& args, u32 rank) {
      constexpr u32 kUnitM = Config::kTileM * Config::kClusterM;
      constexpr u32 kUnitN = Config::kTileN * Config::kClusterN;
      units_m = (args.m + kUnitM - 1) / kUnitM;
      units_n = (args.n + kUnitN - 1) / kUnitN;
      units = units_m * units_n;
      group_units = max(args.group / Config::kClusterM, 1U);
      next = blockIdx.x / kClusterSize;
      step = gridDim.x / kClusterSize;
      rank_m = rank % Config::kClusterM;
      rank_n = rank / Config::kClusterM;
    }
    // The next tile's first row and column.
    F8_DEVICE bool take(i32& row, i32& column) {
      if (next >= units) return false;
      const u32 group = next / (group_units * units_n);
      const u32 first = group * group_units;
      const u32 size = min(units_m - first, group_units);
      const u32 inside = next - first * units_n;
      const u32 unit_n = inside / size;
      const u32 unit_m = first + (inside - unit_n * size);
      row = static_cast<i32>((unit_m * Config::kClusterM + rank_m) * Config::kTileM);
      column = static_cast<i32>((unit_n * Config::kClusterN + rank_n) * Config::kTileN);
      next += step;
      return true;
    }
  };

  // A position in the ring of stages: the parity flips with every turn.
  struct Ring {
    u32 stage = 0;
    u32 parity = 0;
    F8_DEVICE void advance() {
      if (++stage == Config::kStages) {
        stage = 0;
        parity ^= 1;
      }
    }
    F8_DEVICE void skip(u32 count) {
      const u32 position = stage + count;
      parity ^= (position / Config::kStages) & 1;
      stage = position % Config::kStages;
    }
  };

  static F8_DEVICE void produce(const TensorMap* map_a, const TensorMap* map_b,
                                const Shared& shared, Schedule schedule, u32 k_blocks) {
    // This CTA copies its share of each tile and multicasts it to the CTAs that work on the same
    // tile.
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
    Ring ring;
    i32 row;
    i32 column;
    while (schedule.take(row, column)) {
      for (u32 block = 0; block < k_blocks; ++block, ring.advance()) {
        const u32 full = shared.full + 8 * ring.stage;
        barrier_wait(shared.empty + 8 * ring.stage, ring.parity ^ 1);
        barrier_expect(full, kStageBytes);
        const i32 k = static_cast<i32>(block * kStageK);
        const u32 a = shared.a(ring.stage) + schedule.rank_n * kRowsA * kStageK;
        const i32 row_a = row + static_cast<i32>(schedule.rank_n * kRowsA);
        if constexpr (Config::kClusterN > 1) {
          copy_tile_in_multicast(a, map_a, full, mask_a, k, row_a);
        } else {
          copy_tile_in(a, map_a, full, k, row_a);
        }
        const u32 b = shared.b(ring.stage) + schedule.rank_m * kRowsB * kStageK;
        const i32 row_b = column + static_cast<i32>(schedule.rank_m * kRowsB);
        if constexpr (Config::kClusterM > 1) {
          copy_tile_in_multicast(b, map_b, full, mask_b, k, row_b);
        } else {
          copy_tile_in(b, map_b, full, k, row_b);
        }
      }
    }
  }

  // Tells every CTA that refills this stage here that this warp is done with it.
  static F8_DEVICE void release(const Shared& shared, const Schedule& schedule, u32 stage) {
    const u32 lane = threadIdx.x % 32;
    const u32 empty = shared.empty + 8 * stage;
    if constexpr (kClusterSize == 1) {
      if (lane == 0) barrier_arrive(empty);
    } else {
      const u32 peer_m = lane % Config::kClusterM;
      const u32 peer_n = lane / Config::kClusterM;
      if (lane < kClusterSize && (peer_m == schedule.rank_m || peer_n == schedule.rank_n)) {
        barrier_arrive_at(empty, lane);
      }
    }
  }

  // This warpgroup's first row in its tile.
  static F8_DEVICE u32 first_row(u32 warpgroup) {
    return Config::kPingpong ? 0 : warpgroup * kWarpgroupM;
  }

  // Ping-pong: a warpgroup enters the ring when the other has seen all stages of the tile before,
  // since a barrier's parity tells the next turn of a stage from this one, not from the one after.
  static constexpr u32 kTurnBarrier = 1 + Config::kWarpgroups;  // and the following one
  static F8_DEVICE void wait_turn(u32 warpgroup) {
    if constexpr (Config::kPingpong) pair_wait(kTurnBarrier + warpgroup);
  }
  static F8_DEVICE void pass_turn(u32 warpgroup) {
    if constexpr (Config::kPingpong) pair_arrive(kTurnBarrier + 1 - warpgroup);
  }

  // All products of one stage for one block of 64 x kMmaN.
  static F8_DEVICE void multiply(float (&acc)[Config::kMmaN / 2], u64 a, u64 b, bool accumulate) {
#pragma unroll
    for (int k = 0; k < kStageK / 32; ++k) {
      Config::mma(acc, a + k * (32 >> 4), b + k * (32 >> 4), accumulate || k > 0);
    }
  }

  static F8_DEVICE void accumulate_fast(Accumulators& acc, const Shared& shared,
                                        const Schedule& schedule, Ring& ring, u32 warpgroup,
                                        u32 k_blocks) {
    u32 previous = 0;
    for (u32 block = 0; block < k_blocks; ++block, ring.advance()) {
      barrier_wait(shared.full + 8 * ring.stage, ring.parity);
      const u64 a = mma_descriptor(shared.a(ring.stage) + first_row(warpgroup) * kStageK);
      const u64 b = mma_descriptor(shared.b(ring.stage));
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) pin(acc[i]);
      mma_fence();
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) {
        multiply(acc[i], a + (i / kBlocksN) * (64 * kStageK >> 4),
                 b + (i % kBlocksN) * (Config::kMmaN * kStageK >> 4), block > 0);
      }
      mma_commit();
#pragma unroll
      for (int i = 0; i < kBlocks; ++i) pin(acc[i]);
      mma_wait<1>();
      if (block > 0) release(shared, schedule, previous);
      previous = ring.stage;
    }
    pass_turn(warpgroup);
    mma_wait<0>();
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) pin(acc[i]);
    release(shared, schedule, previous);
  }

  static F8_DEVICE void accumulate_precise(Accumulators& acc, const Shared& shared,
                                           const Schedule& schedule, Ring& ring, u32 warpgroup,
                                           u32 k_blocks) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < Config::kMmaN / 2; ++j) acc[i][j] = 0.0F;
    }
    u32 block = 0;
    for (; block + kStepStages <= k_blocks; block += kStepStages) {
      precise_step<kStepStages>(acc, shared, schedule, ring, warpgroup);
    }
    if constexpr (kStepStages > 1) {
      for (; block < k_blocks; ++block) precise_step<1>(acc, shared, schedule, ring, warpgroup);
    }
    pass_turn(warpgroup);
  }

  // A few stages. With two partial sums one is promoted while the tensor core computes the other:
  // two warpgroups alone do not keep it busy, since their products progress side by side and end
  // together. All products end within the step: across a loop's back edge the compiler cannot see
  // which one has ended, and serialises them (C7514).
  static constexpr int kStepStages = Config::kPartials == 2 ? 2 : 1;
  template <int kCount>
  static F8_DEVICE void precise_step(Accumulators& acc, const Shared& shared,
                                     const Schedule& schedule, Ring& ring, u32 warpgroup) {
    float partial[Config::kPartials][Config::kMmaN / 2];
    constexpr int kProducts = kCount * kBlocks;
    u32 stage[kCount];
#pragma unroll
    for (int p = 0; p < kProducts + Config::kPartials - 1; ++p) {
      if (p < kProducts) {
        if (p % kBlocks == 0) {
          barrier_wait(shared.full + 8 * ring.stage, ring.parity);
          stage[p / kBlocks] = ring.stage;
          ring.advance();
        }
        start_partial(partial[p % Config::kPartials], shared, stage[p / kBlocks], warpgroup,
                      p % kBlocks);
      }
      const int ended = p - (Config::kPartials - 1);
      if (ended < 0) continue;
      if (p < kProducts) {
        mma_wait<Config::kPartials - 1>();
      } else {
        mma_wait<0>();
      }
      pin(partial[ended % Config::kPartials]);
      if (ended % kBlocks == kBlocks - 1) release(shared, schedule, stage[ended / kBlocks]);
      promote(acc[ended % kBlocks], partial[ended % Config::kPartials]);
    }
  }

  // Starts block i of this warpgroup's rows over one stage, from zero.
  static F8_DEVICE void start_partial(float (&partial)[Config::kMmaN / 2], const Shared& shared,
                                      u32 stage, u32 warpgroup, int i) {
    const u64 a = mma_descriptor(shared.a(stage) + first_row(warpgroup) * kStageK);
    const u64 b = mma_descriptor(shared.b(stage));
    pin(partial);
    mma_fence();
    multiply(partial, a + (i / kBlocksN) * (64 * kStageK >> 4),
             b + (i % kBlocksN) * (Config::kMmaN * kStageK >> 4), false);
    mma_commit();
  }

  static F8_DEVICE void promote(float (&acc)[Config::kMmaN / 2],
                                const float (&partial)[Config::kMmaN / 2]) {
#pragma unroll
    for (int j = 0; j < Config::kMmaN / 2; ++j) acc[j] += partial[j];
  }

  // Scales and writes this warpgroup's kWarpgroupM rows of the tile at (row, column).
  static F8_DEVICE void write_out(Accumulators& acc, const Shared& shared, const TensorMap* map_d,
                                  const GemmArgs& args, u32 warpgroup, i32 row, i32 column,
                                  u32& buffer) {
    const u32 thread = threadIdx.x % 128;
    const u32 lane = thread % 32;
    const u32 warp_row = thread / 32 * 16;
    const float scale_a0 = Config::kAxisScale ? 0.0F : load_global(args.inv_scale_a);
    const float scale_b0 = Config::kAxisScale ? 0.0F : load_global(args.inv_scale_b);
    constexpr int kChunks = Config::kTileN / kOutColumns;
#pragma unroll
    for (int block_m = 0; block_m < kBlocksM; ++block_m) {
      const i32 row_block = row + block_m * 64;
      if (row_block >= static_cast<i32>(args.m)) break;
      float scale_a[2] = {scale_a0, scale_a0};
      if constexpr (Config::kAxisScale) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const i32 r = row_block + static_cast<i32>(warp_row + lane / 4 + 8 * i);
          scale_a[i] = r < static_cast<i32>(args.m) ? load_global(args.inv_scale_a + r) : 0.0F;
        }
      }
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const i32 column_chunk = column + chunk * kOutColumns;
        if (column_chunk >= static_cast<i32>(args.n)) break;
        const u32 out = shared.out + (warpgroup * kOutBuffers + buffer) * kOutBufferBytes;
        buffer = (buffer + 1) % kOutBuffers;
        float2 scale_b[kOutColumns / 8];  // of this thread's two columns in each 8
#pragma unroll
        for (int i = 0; i < kOutColumns / 8; ++i) {
          scale_b[i] = make_float2(scale_b0, scale_b0);
          if constexpr (Config::kAxisScale) {
            const i32 c = column_chunk + i * 8 + static_cast<i32>(lane % 4 * 2);
            if (c < static_cast<i32>(args.n)) {
              scale_b[i] = load_global(reinterpret_cast<const float2*>(args.inv_scale_b + c));
            }
          }
        }
        if (thread == 0) wait_copies_out_read<kOutBuffers - 1>();
        warpgroup_sync(1 + warpgroup);
#pragma unroll
        for (int j = 0; j < kOutColumns / 16; ++j) {
          constexpr int kGroups = 2;  // of 8 columns, 4 values of this thread in each
          const int tile_column = chunk * kOutColumns + j * 16;
          float(&from)[Config::kMmaN / 2] = acc[block_m * kBlocksN + tile_column / Config::kMmaN];
          const int base = tile_column % Config::kMmaN / 2;
          float value[4 * kGroups];
#pragma unroll
          for (int i = 0; i < 4 * kGroups; ++i) {
            const float2 pair = scale_b[j * kGroups + i / 4];
            value[i] = from[base + i] * scale_a[i / 2 % 2] * (i % 2 == 0 ? pair.x : pair.y);
          }
          if constexpr (Config::kFloatOutput) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // i: column group of 8, row group of 8
              const u32 r = warp_row + lane / 4 + 8 * (i % 2);
              const u32 unit = j * 4 + i / 2 * 2 + lane % 4 / 2;
              store_shared(out + r * 128 + ((unit ^ (r % 8)) * 16) + lane % 2 * 8,
                           value[i / 2 * 4 + i % 2 * 2], value[i / 2 * 4 + i % 2 * 2 + 1]);
            }
          } else {
            const u32 r = warp_row + lane % 16;
            const u32 unit = j * 2 + lane / 16;
            store_matrices(out + r * 128 + ((unit ^ (r % 8)) * 16), pack_bf16(value[0], value[1]),
                           pack_bf16(value[2], value[3]), pack_bf16(value[4], value[5]),
                           pack_bf16(value[6], value[7]));
          }
        }
        fence_async_proxy();
        warpgroup_sync(1 + warpgroup);
        if (thread == 0) {
          copy_tile_out(map_d, out, column_chunk, row_block);
          commit_copies_out();
        }
      }
    }
  }

  static F8_DEVICE void consume(const TensorMap* map_d, const Shared& shared, const GemmArgs& args,
                                Schedule schedule, u32 k_blocks, u32 warpgroup) {
    Ring ring;
    u32 buffer = 0;
    if (warpgroup == 1) pass_turn(warpgroup);  // the first tile is warpgroup 0's
    i32 row;
    i32 column;
    for (u32 tile = 0; schedule.take(row, column); ++tile) {
      if constexpr (Config::kPingpong) {
        if (tile % Config::kWarpgroups != warpgroup) {
          ring.skip(k_blocks);
          continue;
        }
      }
      wait_turn(warpgroup);
      Accumulators acc;
      if constexpr (Config::kFast) {
        accumulate_fast(acc, shared, schedule, ring, warpgroup, k_blocks);
      } else {
        accumulate_precise(acc, shared, schedule, ring, warpgroup, k_blocks);
      }
      write_out(acc, shared, map_d, args, warpgroup, row + static_cast<i32>(first_row(warpgroup)),
                column, buffer);
    }
    if (threadIdx.x % 128 == 0) wait_copies_out();
  }

  static F8_DEVICE void run(const TensorMap* map_a, const TensorMap* map_b, const TensorMap* map_d,
                            const GemmArgs& args, u8* dynamic_shared) {
    Shared shared;
    shared.stages = (smem_address(dynamic_shared) + 1023) / 1024 * 1024;
    shared.out = shared.stages + Config::kStages * kStageBytes;
    shared.full = shared.out + Config::kWarpgroups * kOutBuffers * kOutBufferBytes;
    shared.empty = shared.full + 8 * Config::kStages;
    if (threadIdx.x == 0) {
      prefetch_tensor_map(map_a);
      prefetch_tensor_map(map_b);
      prefetch_tensor_map(map_d);
      for (int i = 0; i < Config::kStages; ++i) {
        barrier_init(shared.full + 8 * i, 1);
        barrier_init(shared.empty + 8 * i, 4 * kConsumers * kPeers);
      }
      barrier_init_fence();
    }
    if constexpr (kClusterSize > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
    let_next_kernel_start();
    wait_for_previous_kernel();
    const Schedule schedule(args, kClusterSize > 1 ? cluster_rank() : 0);
    const u32 k_blocks = (args.k + kStageK - 1) / kStageK;
    // The last warpgroup copies, so that the math warpgroups start at thread 0.
    const u32 warpgroup = threadIdx.x / 128;
    if (warpgroup == Config::kWarpgroups) {
      if constexpr (Config::kCopyRegisters > 0) lower_registers<Config::kCopyRegisters>();
      if (threadIdx.x == Config::kWarpgroups * 128)
        produce(map_a, map_b, shared, schedule, k_blocks);
    } else {
      if constexpr (Config::kCopyRegisters > 0) raise_registers<Config::kMathRegisters>();
      consume(map_d, shared, args, schedule, k_blocks, warpgroup);
    }
    // No CTA leaves while a peer may still write to its shared memory or arrive at its barriers.
    if constexpr (kClusterSize > 1) cluster_sync();
  }
};

}  // namespace f8::kernels
