// The scaled matmul d[m][n] = (sum_k a[m][k] b[n][k]) * inv_scale_a * inv_scale_b, fp8 in, bf16,
// fp16 or fp32 out; optionally plus a bias, added to what d held, and with max |d| left behind. One
// launch computes one product or two.
//
// Persistent and warp-specialised: one warp copies tiles of 128 bytes of k into a ring of stages
// (bulk tensor copies, multicast within the cluster), the math warpgroups consume them with wgmma
// and write d through swizzled shared memory. With kPingpong each math warpgroup owns every other
// tile, so one's epilogue hides behind the other's products; else they share a tile's rows. With
// kSplitK the CTAs of a cluster share a tile's contraction and add up their sums in rank order.
// With kPow2 the results are rounded first and multiplied by their scales two at a time, in bf16.
//
// Dynamic shared memory, which begins at a 1024-byte boundary:
//   kStages x { a: kTileM rows of 128 bytes, b: kTileN rows of 128 bytes }     128-byte swizzle
//   kWarpgroups x kOutBuffers x 64 rows of 128 or 64 bytes                     swizzle of as many
//   GemmSplit
//   kStages x full barrier, kStages x empty barrier
//   kStages x GemmBlockScales
//   GemmVectors
//
// Invariants: rows and columns beyond the matrices read as zero and are not written. A stage is
// refilled when every warp that reads it (every lane, where it has block scales), in every CTA that
// the refill writes to, has arrived at its empty barrier. `precise` adds each 128 of k, summed in
// the tensor core and scaled by its blocks, to fp32 registers.
#pragma once

#include "gemm_block_scales.cuh"
#include "gemm_split.cuh"
#include "gemm_vectors.cuh"

namespace f8::kernels {

template <int kCount>
struct GemmMaps {  // of each product
  struct {
    TensorMap a, b, d;
  } problems[kCount];
};

// Config is the stub's: kTileM, kTileN, kStages, kClusterM, kClusterN, kSplitK, kWarpgroups,
// kPingpong, kFast, kScale, kFloatOutput, kHalfOutput, kBias, kAdd, kAmax, kPow2, kProblems,
// kMmaN, kPartials, kOutBuffers, kMathRegisters, kCopyRegisters; and mma(acc, desc_a, desc_b,
// accumulate), one wgmma of 64 x kMmaN x 32.
template <class Config>
struct Gemm {
  using Split = GemmSplit<Config>;
  static constexpr int kWarpgroupM =
      Config::kPingpong ? Config::kTileM : Config::kTileM / Config::kWarpgroups;
  static constexpr int kBlocksM = kWarpgroupM / 64;
  static constexpr int kBlocksN = Config::kTileN / Config::kMmaN;
  static constexpr int kBlocks = kBlocksM * kBlocksN;
  static constexpr int kBytesA = Config::kTileM * kStageK;
  static constexpr int kBytesB = Config::kTileN * kStageK;
  static constexpr int kStageBytes = kBytesA + kBytesB;
  static constexpr int kElementBytes = Config::kFloatOutput ? 4 : 2;  // of d
  static constexpr int kOutColumns = out_columns(Split::kColumns, kElementBytes);
  static constexpr int kOutRowBytes = kOutColumns * kElementBytes;
  static constexpr int kOutBufferBytes = kOutRows * kOutRowBytes;
  static constexpr int kConsumers = Config::kPingpong ? 1 : Config::kWarpgroups;
  // The CTAs that share an a tile or a b tile with this one, itself included.
  static constexpr int kPeers = Config::kClusterM + Config::kClusterN - 1;
  static_assert(kWarpgroupM % 64 == 0 && Config::kTileN % Config::kMmaN == 0 &&
                Split::kColumns % kOutColumns == 0);

  using Scales = GemmBlockScales<Config>;
  static constexpr bool kBlockScale = Scales::kUsed;
  static constexpr bool kColumnBlocks = Scales::kColumnBlocks;
  static constexpr bool kSquareBlocks = Scales::kSquareBlocks;
  static constexpr int kSquareRows = Scales::kSquareRows;

  using Accumulators = float[kBlocks][Config::kMmaN / 2];
  using Maps = GemmMaps<Config::kProblems>;
  using Vectors = GemmVectors<Config>;

  struct Shared {
    u32 stages;
    u32 out;
    u32 full;
    u32 empty;
    u32 scales;
    Vectors vectors;
    Split split;
    F8_DEVICE explicit Shared(const u8* memory)
        : stages(smem_address(memory)),
          out(stages + Config::kStages * kStageBytes),
          full(out + Config::kWarpgroups * Config::kOutBuffers * kOutBufferBytes + Split::kBytes),
          empty(full + 8 * Config::kStages),
          scales(empty + 8 * Config::kStages),
          vectors(scales + Config::kStages * Scales::kBytes),
          split(full - Split::kBytes) {}
    F8_DEVICE u32 a(u32 stage) const { return stages + stage * kStageBytes; }
    F8_DEVICE u32 b(u32 stage) const { return a(stage) + kBytesA; }
    F8_DEVICE u32 scales_a(u32 stage) const { return scales + stage * Scales::kBytes; }
    F8_DEVICE u32 scales_b(u32 stage) const { return scales_a(stage) + Scales::kBytesA; }
  };

  using Tile = GemmTile;
  using Schedule = GemmSchedule<Config>;
  static constexpr int kClusterSize = Schedule::kClusterSize;

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

  // This CTA's part of a tile, to the `kSharers` CTAs of the mask that work on it.
  template <int kSharers>
  static F8_DEVICE void copy_share(u32 smem, const TensorMap* map, u32 barrier, u16 mask, i32 k,
                                   i32 row) {
    if constexpr (kSharers > 1) {
      copy_tile_in_multicast(smem, map, barrier, mask, k, row);
    } else {
      copy_tile_in(smem, map, barrier, k, row);
    }
  }

  // Brings a part of what this CTA's result is added to into L2, with as many products between
  // parts as there are: all at once, they would hold up the operands.
  static F8_DEVICE void bring_result(const Maps& maps, const Tile& tile, u32 rank_k, u32 i) {
    constexpr u32 kAcross = Split::kColumns / kOutColumns;
    constexpr u32 kParts = kAcross * (Config::kTileM / 64);
    const u32 apart = max(tile.k_blocks / kParts, 1U);
    const u32 part = i / apart;
    if (i % apart != 0 || part >= kParts) return;
    prefetch_tile(
        &maps.problems[tile.problem].d,
        tile.column + static_cast<i32>(rank_k * Split::kColumns + part % kAcross * kOutColumns),
        tile.row + static_cast<i32>(part / kAcross * 64));
  }

  static F8_DEVICE void produce(const Maps& maps, const Shared& shared, const Schedule& schedule,
                                const Tile& tile, Ring& ring) {
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
    const TensorMap* map_a = &maps.problems[tile.problem].a;
    const TensorMap* map_b = &maps.problems[tile.problem].b;
    const Scales scales(schedule.args.problems[tile.problem], tile);
    for (u32 i = 0; i < tile.k_blocks; ++i, ring.advance()) {
      const u32 block = tile.first_block + i;
      const u32 full = shared.full + 8 * ring.stage;
      barrier_wait(shared.empty + 8 * ring.stage, ring.parity ^ 1);
      if (!elect_lane()) continue;
      barrier_expect(full, kStageBytes + scales.bytes_a + scales.bytes_b);
      const i32 k = static_cast<i32>(block * kStageK);
      if constexpr (Config::kAdd) bring_result(maps, tile, schedule.rank_k, i);
      const u32 a = shared.a(ring.stage) + schedule.rank_n * kRowsA * kStageK;
      const i32 row_a = tile.row + static_cast<i32>(schedule.rank_n * kRowsA);
      copy_share<Config::kClusterN>(a, map_a, full, mask_a, k, row_a);
      const u32 b = shared.b(ring.stage) + schedule.rank_m * kRowsB * kStageK;
      const i32 row_b = tile.column + static_cast<i32>(schedule.rank_m * kRowsB);
      copy_share<Config::kClusterM>(b, map_b, full, mask_b, k, row_b);
      if constexpr (kBlockScale && !Scales::kOwnWarp)
        scales.copy(shared.scales_a(ring.stage), block, full);
    }
  }
  static F8_DEVICE void produce_scales(const Shared& shared, const Schedule& schedule,
                                       const Tile& tile, Ring& ring) {
    const Scales scales(schedule.args.problems[tile.problem], tile);
    for (u32 i = 0; i < tile.k_blocks; ++i, ring.advance()) {
      barrier_wait(shared.empty + 8 * ring.stage, ring.parity ^ 1);
      if (!elect_lane()) continue;
      scales.copy(shared.scales_a(ring.stage), tile.first_block + i, shared.full + 8 * ring.stage);
    }
  }

  // Arrivals at an empty barrier: of a CTA's own readers and of the others that its copies reach.
  static constexpr u32 kOwnArrivals = (kBlockScale ? 128 : 4) * kConsumers;
  static constexpr u32 kArrivals = kOwnArrivals + 4 * kConsumers * (kPeers - 1);
  // Tells every CTA that refills this stage here that this warp is done with it. A stage's block
  // scales are read by ordinary loads, for which each lane answers itself.
  static F8_DEVICE void release(const Shared& shared, const Schedule& schedule, u32 stage) {
    const u32 lane = threadIdx.x % 32;
    const u32 empty = shared.empty + 8 * stage;
    if (kBlockScale || (kPeers == 1 && lane == 0)) barrier_arrive(empty);
    if constexpr (kPeers > 1) {
      const u32 peer_m = lane % Config::kClusterM;
      const u32 peer_n = lane / Config::kClusterM;
      const bool own = peer_m == schedule.rank_m && peer_n == schedule.rank_n;
      const bool shares = peer_m == schedule.rank_m || peer_n == schedule.rank_n;
      if (lane < kClusterSize && shares && !(kBlockScale && own)) barrier_arrive_at(empty, lane);
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

  // Low words of the descriptors of a stage's tiles: one multiplication away from what does not
  // change, since between two stages they are what the tensor core waits for.
  static F8_DEVICE u32 low_a(const Shared& shared, u32 stage, u32 warpgroup) {
    return mma_descriptor_low(shared.stages + first_row(warpgroup) * kStageK) +
           stage * (kStageBytes >> 4);
  }
  static F8_DEVICE u32 low_b(const Shared& shared, u32 stage) {
    return mma_descriptor_low(shared.stages + kBytesA) + stage * (kStageBytes >> 4);
  }

  // All products of one stage for one block of 64 x kMmaN.
  static F8_DEVICE void multiply(float (&acc)[Config::kMmaN / 2], u32 a, u32 b, bool accumulate) {
#pragma unroll
    for (int k = 0; k < kStageK / 32; ++k) {
      Config::mma(acc, mma_descriptor(a + k * (32 >> 4)), mma_descriptor(b + k * (32 >> 4)),
                  accumulate || k > 0);
    }
  }

  static F8_DEVICE void clear(Accumulators& acc) {
#pragma unroll
    for (int i = 0; i < kBlocks; ++i) {
#pragma unroll
      for (int j = 0; j < Config::kMmaN / 2; ++j) acc[i][j] = 0.0F;
    }
  }

  static F8_DEVICE void accumulate_fast(Accumulators& acc, const Shared& shared,
                                        const Schedule& schedule, Ring& ring, u32 warpgroup,
                                        u32 k_blocks) {
    u32 previous = 0;
    for (u32 block = 0; block < k_blocks; ++block, ring.advance()) {
      barrier_wait(shared.full + 8 * ring.stage, ring.parity);
      const u32 a = low_a(shared, ring.stage, warpgroup);
      const u32 b = low_b(shared, ring.stage);
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
                                           const Tile& tile) {
    clear(acc);
    // Whether a tile of 192 columns begins in the middle of a block of b.
    const bool from_half = Config::kTileN % 128 != 0 && tile.column % 128 != 0;
    bool filled = barrier_test(shared.full + 8 * ring.stage, ring.parity);
    u32 block = 0;
    for (; block + kStepStages <= tile.k_blocks; block += kStepStages) {
      precise_step<kStepStages>(acc, shared, schedule, ring, warpgroup, block, from_half, filled);
    }
    if constexpr (kStepStages > 1) {
      for (; block < tile.k_blocks; ++block)
        precise_step<1>(acc, shared, schedule, ring, warpgroup, block, from_half, filled);
    }
    pass_turn(warpgroup);
  }

  // A few stages, so that what a stage needs is worked out while the one before is promoted. With
  // two partial sums one is promoted while the tensor core computes the other: two warpgroups alone
  // do not keep it busy, since their products progress side by side and end together. All products
  // end within the step: across a loop's back edge the compiler cannot see which one has ended, and
  // serialises them (C7514).
  static constexpr int kStepStages = Config::kPartials == 2 || kSquareBlocks ? 2 : 1;
  // filled: the next stage is, says a test made while products ran; between two steps the tensor
  // core has nothing to do.
  template <int kCount>
  static F8_DEVICE void precise_step(Accumulators& acc, const Shared& shared,
                                     const Schedule& schedule, Ring& ring, u32 warpgroup, u32 block,
                                     bool from_half, bool& filled) {
    float partial[Config::kPartials][Config::kMmaN / 2];
    constexpr int kProducts = kCount * kBlocks;
    u32 stage[kCount];
    float square[kCount][kSquareRows];
#pragma unroll
    for (int p = 0; p < kProducts + Config::kPartials - 1; ++p) {
      if (p < kProducts) {
        if (p % kBlocks == 0) {
          if (p > 0 || !filled) barrier_wait(shared.full + 8 * ring.stage, ring.parity);
          stage[p / kBlocks] = ring.stage;
          ring.advance();
        }
        start_partial(partial[p % Config::kPartials], shared, stage[p / kBlocks], warpgroup,
                      p % kBlocks);
        if (kSquareBlocks && p % kBlocks == 0) {
#pragma unroll
          for (int row = 0; row < kSquareRows; ++row) {
            square[p / kBlocks][row] =
                load_shared(shared.scales_b(stage[p / kBlocks]) + row * kSquareBytes +
                            (block + p / kBlocks) % 4 * 4);
          }
        }
      }
      const int ended = p - (Config::kPartials - 1);
      if (ended < 0) continue;
      const bool last_of_stage = ended % kBlocks == kBlocks - 1;
      float2 rows = make_float2(1.0F, 1.0F);
      if constexpr (kBlockScale) {
        rows = row_scales(shared, stage[ended / kBlocks], warpgroup, ended % kBlocks);
      }
      if (ended == kProducts - 1) {
        filled = barrier_test(shared.full + 8 * ring.stage, ring.parity);
      }
      if (p < kProducts) {
        mma_wait<Config::kPartials - 1>();
      } else {
        mma_wait<0>();
      }
      pin(partial[ended % Config::kPartials]);
      if (last_of_stage && !kColumnBlocks) release(shared, schedule, stage[ended / kBlocks]);
      promote(acc[ended % kBlocks], partial[ended % Config::kPartials], rows,
              square[ended / kBlocks], from_half, shared, stage[ended / kBlocks], ended % kBlocks);
      if (last_of_stage && kColumnBlocks) release(shared, schedule, stage[ended / kBlocks]);
    }
  }

  // Starts block i of this warpgroup's rows over one stage, from zero.
  static F8_DEVICE void start_partial(float (&partial)[Config::kMmaN / 2], const Shared& shared,
                                      u32 stage, u32 warpgroup, int i) {
    const u32 a = low_a(shared, stage, warpgroup);
    const u32 b = low_b(shared, stage);
    pin(partial);
    mma_fence();
    multiply(partial, a + (i / kBlocksN) * (64 * kStageK >> 4),
             b + (i % kBlocksN) * (Config::kMmaN * kStageK >> 4), false);
    mma_commit();
  }

  // Of this thread's two rows in block i.
  static F8_DEVICE float2 row_scales(const Shared& shared, u32 stage, u32 warpgroup, int i) {
    const u32 row = first_row(warpgroup) + (i / kBlocksN) * 64 + threadIdx.x % 128 / 32 * 16 +
                    threadIdx.x % 32 / 4;
    const u32 scales = shared.scales_a(stage) + row * 4;
    return make_float2(load_shared(scales), load_shared(scales + 32));
  }

  // The scale of b of the 8 columns from `column` of the tile.
  static F8_DEVICE float square_of(const float (&square)[kSquareRows], int column, bool from_half) {
    if (kSquareRows == 1 || column < 64) return square[0];
    if (column >= 128) return square[kSquareRows - 1];
    return from_half ? square[kSquareRows - 1] : square[0];
  }

  static F8_DEVICE void promote(float (&acc)[Config::kMmaN / 2],
                                const float (&partial)[Config::kMmaN / 2], float2 rows,
                                const float (&square)[kSquareRows], bool from_half,
                                const Shared& shared, u32 stage, int i) {
#pragma unroll
    for (int j = 0; j < Config::kMmaN / 2; j += 4) {
      if constexpr (!kBlockScale) {
#pragma unroll
        for (int r = 0; r < 4; ++r) acc[j + r] += partial[j + r];
        continue;
      }
      const int column = (i % kBlocksN) * Config::kMmaN + j * 2;  // the first of 8
      float2 columns;
      if constexpr (kColumnBlocks) {
        columns = load_shared_pair(shared.scales_b(stage) + (column + threadIdx.x % 4 * 2) * 4);
      } else {
        columns.x = columns.y = square_of(square, column, from_half);
      }
      acc[j] += partial[j] * (rows.x * columns.x);
      acc[j + 1] += partial[j + 1] * (rows.x * columns.y);
      acc[j + 2] += partial[j + 2] * (rows.y * columns.x);
      acc[j + 3] += partial[j + 3] * (rows.y * columns.y);
    }
  }

  // A thread's sums of a tile: at(block_m, column) are 4 of them, in 2 rows and 2 columns of the 8
  // columns from `column`.
  struct WholeTile {
    static constexpr int kColumns = Config::kTileN;
    const Accumulators& acc;
    F8_DEVICE const float* at(int block_m, int column) const {
      return &acc[block_m * kBlocksN + column / Config::kMmaN][column % Config::kMmaN / 2];
    }
  };
  // Of 16 bytes of a row of an out buffer, where its swizzle puts them.
  static F8_DEVICE u32 out_address(u32 out, u32 row, u32 unit) {
    constexpr u32 kRowsTogether = 128 / kOutRowBytes;  // have the same swizzle
    const u32 at = unit ^ (row / kRowsTogether % (kOutRowBytes / 16));
    return out + row * kOutRowBytes + at * 16;
  }

  // Scales and writes this warpgroup's kWarpgroupM rows of the tile.
  template <class Sums>
  static F8_DEVICE void write_out(const Sums& sums, const Shared& shared, const Maps& maps,
                                  const Schedule& schedule, u32 warpgroup, const Tile& tile,
                                  float scale, u32 vector_parity, u32& buffer, u32& amax) {
    const GemmProblem& problem = schedule.args.problems[tile.problem];
    const TensorMap* map_d = &maps.problems[tile.problem].d;
    const u32 thread = threadIdx.x % 128;
    const u32 lane = thread % 32;
    const u32 warp_row = thread / 32 * 16;
    const u32 first_of_tile = first_row(warpgroup);
    const u32 first_column = schedule.rank_k * Sums::kColumns;  // of the tile
    // This warpgroup's buffer of vectors is filled once for each of its tiles.
    const u32 vector_buffer = Config::kPingpong ? warpgroup : 0;
    shared.vectors.wait(vector_buffer, vector_parity);
    float scale_a[kBlocksM][2];
    u32 packed_a[kBlocksM][2];
#pragma unroll
    for (int i = 0; i < kBlocksM * 2; ++i) {
      scale_a[i / 2][i % 2] = scale;
      if constexpr (Vectors::kAxisScale) {
        const u32 row = first_of_tile + i / 2 * 64 + i % 2 * 8 + warp_row + lane / 4;
        const float x = load_shared(shared.vectors.rows(vector_buffer) + row * 4);
        scale_a[i / 2][i % 2] = x;
        if constexpr (Config::kPow2) packed_a[i / 2][i % 2] = pack_bf16(x, x);
      }
    }
#pragma unroll
    for (int chunk = 0; chunk < Sums::kColumns / kOutColumns; ++chunk) {
      const u32 in_tile = first_column + chunk * kOutColumns;
      const i32 column_chunk = tile.column + static_cast<i32>(in_tile);
      if (column_chunk >= static_cast<i32>(problem.n)) break;
      float2 scale_b[kOutColumns / 8];  // of this thread's two columns in each 8
      u32 packed_b[kOutColumns / 8];
      float2 bias[kOutColumns / 8];
      if constexpr (Config::kPow2) {
#pragma unroll
        for (int i = 0; i < kOutColumns / 8; i += 4)
          shared.vectors.packed_columns(vector_buffer, in_tile + i * 8, packed_b + i);
      }
#pragma unroll
      for (int i = 0; i < kOutColumns / 8; ++i) {
        const u32 at = (in_tile + i * 8 + lane % 4 * 2) * 4;
        if constexpr (Vectors::kFloatColumns)
          scale_b[i] = load_shared_pair(shared.vectors.columns(vector_buffer) + at);
        if constexpr (Config::kBias)
          bias[i] = load_shared_pair(shared.vectors.bias(vector_buffer) + at);
      }
#pragma unroll
      for (int block_m = 0; block_m < kBlocksM; ++block_m) {
        const i32 row_block = tile.row + static_cast<i32>(first_of_tile) + block_m * 64;
        if (row_block >= static_cast<i32>(problem.m)) break;
        const u32 out = shared.out + (warpgroup * Config::kOutBuffers + buffer) * kOutBufferBytes;
        buffer = (buffer + 1) % Config::kOutBuffers;
        if (thread == 0) wait_copies_out_read<Config::kOutBuffers - 1>();
        warpgroup_sync(1 + warpgroup);
#pragma unroll
        for (int j = 0; j < kOutColumns / 16; ++j) {
          constexpr int kGroups = 2;  // of 8 columns, 4 values of this thread in each
          float value[4 * kGroups];
#pragma unroll
          for (int i = 0; i < 4 * kGroups; ++i) {
            value[i] = sums.at(block_m, chunk * kOutColumns + j * 16 + i / 4 * 8)[i % 4];
            if constexpr (Vectors::kFloatColumns) {
              const float2 pair = scale_b[j * kGroups + i / 4];
              value[i] *= scale_a[block_m][i / 2 % 2] * (i % 2 == 0 ? pair.x : pair.y);
            } else if constexpr (Config::kScale == Scale::kTensor) {
              value[i] *= scale_a[block_m][i / 2 % 2];
            }
            if constexpr (Config::kBias) {
              const float2 shift = bias[j * kGroups + i / 4];
              value[i] += i % 2 == 0 ? shift.x : shift.y;
            }
            if constexpr (Config::kAmax) {
              const i32 row = row_block + static_cast<i32>(warp_row + lane / 4 + 8 * (i / 2 % 2));
              const bool counts = row < static_cast<i32>(problem.m) &&
                                  column_chunk + j * 16 + i / 4 * 8 < static_cast<i32>(problem.n);
              if (counts) amax = max(amax, __float_as_uint(value[i]) & 0x7FFFFFFFU);
            }
          }
          if constexpr (Config::kFloatOutput) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // i: column group of 8, row group of 8
              const u32 r = warp_row + lane / 4 + 8 * (i % 2);
              const u32 unit = j * 4 + i / 2 * 2 + lane % 4 / 2;
              store_shared(out_address(out, r, unit) + lane % 2 * 8, value[i / 2 * 4 + i % 2 * 2],
                           value[i / 2 * 4 + i % 2 * 2 + 1]);
            }
          } else {
            const u32 r = warp_row + lane % 16;
            const u32 unit = j * 2 + lane / 16;
            u32 pairs[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {  // i: column group of 8, row group of 8
              pairs[i] = pack(value[2 * i], value[2 * i + 1]);
              if constexpr (Config::kPow2) {
                pairs[i] = multiply_bf16(pairs[i], packed_b[j * kGroups + i / 2]);
                pairs[i] = multiply_bf16(pairs[i], packed_a[block_m][i % 2]);
              }
            }
            store_matrices(out_address(out, r, unit), pairs[0], pairs[1], pairs[2], pairs[3]);
          }
        }
        fence_async_proxy();
        warpgroup_sync(1 + warpgroup);
        if (thread == 0) {
          if constexpr (Config::kAdd) {
            add_tile_out(map_d, out, column_chunk, row_block);
          } else {
            copy_tile_out(map_d, out, column_chunk, row_block);
          }
          commit_copies_out();
        }
      }
    }
    shared.vectors.release(vector_buffer);
    if constexpr (Config::kAmax) {
      const u32 most = warp_max(amax);
      if (lane == 0 && most > 0) atomicMax(problem.amax, most);
      amax = 0;
    }
  }

  static F8_DEVICE void consume(const Maps& maps, const Shared& shared, Schedule schedule,
                                u32 warpgroup) {
    Ring ring;
    u32 buffer = 0;
    u32 amax = 0;
    u32 vector_parity = 0;
    float scale[Config::kProblems] = {};
    if constexpr (Config::kScale == Scale::kTensor) {
#pragma unroll
      for (int i = 0; i < Config::kProblems; ++i) {
        const GemmProblem& problem = schedule.args.problems[i];
        scale[i] = load_global(problem.inv_scale_a) * load_global(problem.inv_scale_b);
      }
    }
    if (warpgroup == 1) pass_turn(warpgroup);  // the first tile is warpgroup 0's
    Tile tile;
    for (u32 count = 0; schedule.take(tile); ++count) {
      if constexpr (Config::kPingpong) {
        if (count % Config::kWarpgroups != warpgroup) {
          ring.skip(tile.k_blocks);
          continue;
        }
      }
      wait_turn(warpgroup);
      Accumulators acc;
      if constexpr (Config::kFast) {
        accumulate_fast(acc, shared, schedule, ring, warpgroup, tile.k_blocks);
      } else {
        accumulate_precise(acc, shared, schedule, ring, warpgroup, tile);
      }
      const float tile_scale = scale[Config::kProblems > 1 ? tile.problem : 0];
      if constexpr (Config::kSplitK == 1) {
        write_out(WholeTile{acc}, shared, maps, schedule, warpgroup, tile, tile_scale,
                  vector_parity, buffer, amax);
      } else {
        typename Split::template Share<kBlocksM> share;
        shared.split.add_up(WholeTile{acc}, share, schedule.rank_k, warpgroup, count % 2);
        write_out(share, shared, maps, schedule, warpgroup, tile, tile_scale, vector_parity, buffer,
                  amax);
      }
      vector_parity ^= 1;
    }
    if (threadIdx.x % 128 == 0) wait_copies_out();
  }

  static F8_DEVICE u32 pack(float low, float high) {
    if constexpr (!Config::kHalfOutput) return pack_bf16(low, high);
    u32 packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
  }

  // The tiles of this CTA, one after the other, for a warp of the copy warpgroup.
  template <class Work>
  static F8_DEVICE void each_tile(Schedule schedule, const Work& work) {
    Tile tile;
    while (schedule.take(tile)) work(tile);
  }

  // The copy warpgroup: its first warp copies the operands, its second warp loads what epilogues
  // need, its third one may copy block scales. Each has a loop of its own: in a common one the
  // compiler takes the ring and the tile out of uniform registers.
  static F8_DEVICE void feed(const Maps& maps, const Shared& shared, const Schedule& schedule) {
    const u32 warp = __shfl_sync(0xFFFFFFFFU, threadIdx.x / 32 - Config::kWarpgroups * 4, 0);
    if (warp == 0) {
      Ring ring;
      each_tile(schedule, [&](const Tile& tile) { produce(maps, shared, schedule, tile, ring); });
    } else if (Vectors::kUsed && warp == 1) {
      u32 count = 0;
      each_tile(schedule,
                [&](const Tile& tile) { shared.vectors.load(schedule.args, tile, count++); });
    } else if (Scales::kOwnWarp && warp == 2) {
      Ring ring;
      each_tile(schedule, [&](const Tile& tile) { produce_scales(shared, schedule, tile, ring); });
    }
  }

  static F8_DEVICE void run(const Maps& maps, const GemmArgs& args, u8* dynamic_shared) {
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
        barrier_init(shared.empty + 8 * i, kArrivals);
      }
      shared.vectors.init(128 * kConsumers);
      shared.split.init();
      barrier_init_fence();
    }
    if constexpr (kClusterSize > 1) {
      cluster_sync();
    } else {
      __syncthreads();
    }
    let_next_kernel_start();
    wait_for_previous_kernel();
    const Schedule schedule(args, blockIdx.x % kClusterSize);
    // The last warpgroup copies, so that the math warpgroups start at thread 0. Taken from one
    // lane, so that the compiler keeps what depends on it in uniform registers.
    const u32 warpgroup = __shfl_sync(0xFFFFFFFFU, threadIdx.x / 128, 0);
    if (warpgroup == Config::kWarpgroups) {
      if constexpr (Config::kCopyRegisters > 0) lower_registers<Config::kCopyRegisters>();
      feed(maps, shared, schedule);
    } else {
      if constexpr (Config::kCopyRegisters > 0) raise_registers<Config::kMathRegisters>();
      consume(maps, shared, schedule, warpgroup);
    }
    // No CTA leaves while a peer may still write to its shared memory or arrive at its barriers.
    if constexpr (kClusterSize > 1) cluster_sync();
  }
};

}  // namespace f8::kernels
