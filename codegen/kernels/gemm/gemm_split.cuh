// Cluster split-K: each CTA of a cluster accumulates its part of K for the whole tile. Then they
// reduce over distributed shared memory (DSMEM): each sends the others their columns and adds up
// its own, ranks in order from its own. Sums travel as asynchronous stores that complete on the
// receiver's barrier, so a CTA waits for data alone.
//
// Shared memory (split of gemm_layout.cuh):
//   (kSplitK - 1) x kTileM x kTileN / kSplitK floats, in the order in which threads send them
//   kWarpgroups x { full barrier, empty barrier }
#pragma once

#include "codegen/kernels/gemm/gemm_schedule.cuh"

namespace f8::kernels {

template <class Config>
struct GemmSplitK {
  static constexpr int kColumns = Config::kTileN / Config::kSplitK;  // that a CTA reduces
  static constexpr int kFloat4s = kColumns / 8;                      // of a thread, in 64 rows
  static constexpr u32 kPeers = Config::kSplitK - 1;
  static constexpr u32 kThreads = Config::kWarpgroups * 128;
  static constexpr u32 kSumBytes = kGemmLayout<Config>.split_sums();

  u32 sums;

  F8_DEVICE explicit GemmSplitK(u32 smem) : sums(smem) {}

  F8_DEVICE u32 full(u32 warpgroup) const {
    return sums + kSumBytes + 2 * kBarrierBytes * warpgroup;
  }
  F8_DEVICE u32 empty(u32 warpgroup) const { return full(warpgroup) + 8; }

  F8_DEVICE void init() const {
    for (int i = 0; kPeers > 0 && i < Config::kWarpgroups; ++i) {
      barrier_init(full(i), 1);
      barrier_init(empty(i), 4 * kPeers);
    }
  }

  // A thread's sums of its CTA's columns; at() as of the mainloop's accumulators.
  template <int kMmaTilesM>
  struct Reduced {
    static constexpr int kColumns = GemmSplitK::kColumns;
    float sum[kMmaTilesM][kColumns / 2];
    F8_DEVICE const float* at(int mma_m, int column) const { return &sum[mma_m][column / 2]; }
  };

  // All threads of a consumer warpgroup reduce the tile whose number has this parity. A warpgroup
  // exchanges with the same warpgroup of the other CTAs alone.
  template <class Sums, int kMmaTilesM>
  F8_DEVICE void reduce(const Sums& mine, Reduced<kMmaTilesM>& reduced, u32 rank, u32 warpgroup,
                        u32 parity) const {
    if (threadIdx.x % 128 == 0) {
      barrier_expect(full(warpgroup), kSumBytes / Config::kWarpgroups);
    }
    barrier_wait(empty(warpgroup), parity ^ 1);
    send<Sums, kMmaTilesM>(mine, rank, warpgroup);
#pragma unroll
    for (int mma_m = 0; mma_m < kMmaTilesM; ++mma_m) {
#pragma unroll
      for (int i = 0; i < kColumns / 2; ++i) {
        float own = mine.at(mma_m, i / 4 * 8)[i % 4];
#pragma unroll
        for (int from = 1; from < Config::kSplitK; ++from) {
          if (static_cast<u32>(from) == rank)
            own = mine.at(mma_m, from * kColumns + i / 4 * 8)[i % 4];
        }
        reduced.sum[mma_m][i] = own;
      }
    }
    barrier_wait(full(warpgroup), parity);
#pragma unroll
    for (int slot = 0; slot < static_cast<int>(kPeers); ++slot) {
#pragma unroll
      for (int mma_m = 0; mma_m < kMmaTilesM; ++mma_m) {
#pragma unroll
        for (int i = 0; i < kFloat4s; ++i) {
          const float4 x = load_shared_four(address<kMmaTilesM>(slot, mma_m, i));
          reduced.sum[mma_m][i * 4] += x.x;
          reduced.sum[mma_m][i * 4 + 1] += x.y;
          reduced.sum[mma_m][i * 4 + 2] += x.z;
          reduced.sum[mma_m][i * 4 + 3] += x.w;
        }
      }
    }
    // When all lanes of a warp have read, one lane for each CTA says so.
    __syncwarp();
    const u32 lane = threadIdx.x % 32;
    if (lane < Config::kSplitK && lane != rank) barrier_arrive_remote(empty(warpgroup), lane);
  }

 private:
  // The address of this thread's i-th float4 of a 64-row MMA tile in the slot of a peer.
  template <int kMmaTilesM>
  F8_DEVICE u32 address(u32 slot, int mma_m, int i) const {
    return sums + (((slot * kMmaTilesM + mma_m) * kFloat4s + i) * kThreads + threadIdx.x) * 16;
  }

  template <class Sums, int kMmaTilesM>
  F8_DEVICE void send(const Sums& mine, u32 rank, u32 warpgroup) const {
#pragma unroll
    for (int to = 0; to < Config::kSplitK; ++to) {
      if (static_cast<u32>(to) == rank) continue;
      const u32 slot = (rank + Config::kSplitK - to) % Config::kSplitK - 1;
      const u32 there = cluster_address(address<kMmaTilesM>(slot, 0, 0), to);
      const u32 arrived = cluster_address(full(warpgroup), to);
#pragma unroll
      for (int mma_m = 0; mma_m < kMmaTilesM; ++mma_m) {
#pragma unroll
        for (int i = 0; i < kFloat4s; ++i) {
          const float* x = mine.at(mma_m, to * kColumns + i * 8);
          store_async(there + (mma_m * kFloat4s + i) * kThreads * 16, arrived, x[0], x[1], x[2],
                      x[3]);
        }
      }
    }
  }
};

}  // namespace f8::kernels
