// A contraction that the CTAs of a cluster share: each sums its part of k for the whole tile, sends
// the others their columns and adds up its own, ranks in order from its own. Sums travel as
// asynchronous stores that count on the receiver's barrier, so nobody waits but for data.
//
// Shared memory:
//   (kSplitK - 1) x kTileM x kTileN / kSplitK floats, in the order in which threads send them
//   kWarpgroups x { full barrier, empty barrier }
#pragma once

#include "gemm_schedule.cuh"

namespace f8::kernels {

template <class Config>
struct GemmSplit {
  static constexpr int kColumns = Config::kTileN / Config::kSplitK;  // that a CTA adds up
  static constexpr int kFours = kColumns / 8;                        // of a thread, in 64 rows
  static constexpr u32 kPeers = Config::kSplitK - 1;
  static constexpr u32 kThreads = Config::kWarpgroups * 128;
  static constexpr u32 kBytes =
      split_bytes(Config::kTileM, Config::kTileN, Config::kSplitK, Config::kWarpgroups);
  static constexpr u32 kSumBytes =
      kPeers > 0 ? kBytes - kSplitBarrierBytes* Config::kWarpgroups : 0;

  u32 sums;

  F8_DEVICE explicit GemmSplit(u32 smem) : sums(smem) {}

  F8_DEVICE u32 full(u32 warpgroup) const {
    return sums + kSumBytes + kSplitBarrierBytes * warpgroup;
  }
  F8_DEVICE u32 empty(u32 warpgroup) const { return full(warpgroup) + 8; }

  F8_DEVICE void init() const {
    for (int i = 0; kPeers > 0 && i < Config::kWarpgroups; ++i) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), 4 * kPeers);
    }
  }

  // A thread's sums of its CTA's columns.
  template <int kBlocksM>
  struct Share {
    static constexpr int kColumns = GemmSplit::kColumns;
    float sum[kBlocksM][kColumns / 2];
    F8_DEVICE const float* at(int block_m, int column) const { return &sum[block_m][column / 2]; }
  };

  // Of the tile whose number has this parity; by all threads of a math warpgroup, which meets only
  // the same warpgroup of the other CTAs.
  template <class Sums, int kBlocksM>
  F8_DEVICE void add_up(const Sums& mine, Share<kBlocksM>& share, u32 rank, u32 warpgroup,
                        u32 parity) const {
    const auto place = [&](u32 slot, int block_m, int i) {
      return sums + (((slot * kBlocksM + block_m) * kFours + i) * kThreads + threadIdx.x) * 16;
    };
    if (threadIdx.x % 128 == 0) {
      barrier_expect(full(warpgroup), kSumBytes / Config::kWarpgroups);
    }
    barrier_wait(empty(warpgroup), parity ^ 1);
#pragma unroll
    for (int to = 0; to < Config::kSplitK; ++to) {
      if (static_cast<u32>(to) == rank) continue;
      const u32 slot = (rank + Config::kSplitK - to) % Config::kSplitK - 1;
      const u32 there = cluster_address(place(slot, 0, 0), to);
      const u32 arrived = cluster_address(full(warpgroup), to);
#pragma unroll
      for (int block_m = 0; block_m < kBlocksM; ++block_m) {
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
          const float* x = mine.at(block_m, to * kColumns + i * 8);
          store_cluster(there + (block_m * kFours + i) * kThreads * 16, arrived, x[0], x[1], x[2],
                        x[3]);
        }
      }
    }
#pragma unroll
    for (int block_m = 0; block_m < kBlocksM; ++block_m) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        float own = mine.at(block_m, i / 4 * 8)[i % 4];
#pragma unroll
        for (int from = 1; from < Config::kSplitK; ++from) {
          if (static_cast<u32>(from) == rank)
            own = mine.at(block_m, from * kColumns + i / 4 * 8)[i % 4];
        }
        share.sum[block_m][i] = own;
      }
    }
    barrier_wait(full(warpgroup), parity);
#pragma unroll
    for (int slot = 0; slot < static_cast<int>(kPeers); ++slot) {
#pragma unroll
      for (int block_m = 0; block_m < kBlocksM; ++block_m) {
#pragma unroll
        for (int i = 0; i < kFours; ++i) {
          const float4 x = load_shared_four(place(slot, block_m, i));
          share.sum[block_m][i * 4] += x.x;
          share.sum[block_m][i * 4 + 1] += x.y;
          share.sum[block_m][i * 4 + 2] += x.z;
          share.sum[block_m][i * 4 + 3] += x.w;
        }
      }
    }
    // Each warp's lanes have read; a lane for each CTA says so.
    __syncwarp();
    const u32 lane = threadIdx.x % 32;
    if (lane < Config::kSplitK && lane != rank) barrier_arrive_at(empty(warpgroup), lane);
  }
};

}  // namespace f8::kernels
