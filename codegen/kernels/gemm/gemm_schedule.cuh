// The tile schedule of the persistent GEMM: which tiles of d a CTA computes, and in which order. A
// cluster computes one cluster tile (kClusterM x kClusterN tiles) a wave. Cluster tiles are
// rasterised in groups of args.raster_group tiles of m, whose operands stay in L2, and every other
// group goes back through n. In a grouped GEMM the tiles of the second problem, which has the
// smaller K, come after those of the first: clusters that got one tile of the first less than
// others begin with args.tail_offset of the second (the tail-balancing offset).
#pragma once

#include "codegen/kernels/experts/group_args.cuh"
#include "codegen/kernels/gemm/gemm_layout.cuh"
#include "codegen/kernels/ptx.cuh"

namespace f8::kernels {

struct WorkTile {
  u32 problem;
  i32 row, column;    // the first ones of the tile in d
  u32 first_k_block;  // of a stage's k; of a group of K in 16 bits the first of k
  u32 k_blocks;
  i32 group;  // with groups alone
  // With groups of rows alone: the end of the group's, and where block scales of a have the first row.
  i32 end_row, scale_row;
  u32 last_of_k;  // of a group of K in 16 bits alone: of the last block
};

// The place of a cluster tile among tiles_m x tiles_n, which go through raster groups of so many
// tiles of m; every other one goes back through n.
struct RasterPlace {
  u32 tile_m, tile_n;
  F8_DEVICE RasterPlace(u32 index, u32 tiles_m, u32 tiles_n, u32 raster_group) {
    const u32 first = index / (raster_group * tiles_n) * raster_group;
    const u32 size = min(tiles_m - first, raster_group);
    const u32 in_group = index - first * tiles_n;
    tile_n = in_group / size;
    tile_m = first + (in_group - tile_n * size);
    if (first / raster_group % 2 != 0) tile_n = tiles_n - 1 - tile_n;
  }
};

template <class Config>
struct GemmSchedule {
  using Args = GemmArgs;
  static constexpr int kClusterSize = Config::kClusterM * Config::kClusterN * Config::kSplitK;
  static constexpr u32 kClusterTileM = Config::kTileM * Config::kClusterM;
  static constexpr u32 kClusterTileN = Config::kTileN * Config::kClusterN;
  static constexpr u32 kBlockK = kStageK / Config::kOperandBytes;  // elements of k in a stage

  const GemmArgs& args;
  u32 cluster, clusters;
  u32 rank_m, rank_n, rank_k;  // of this CTA in its cluster

  F8_DEVICE GemmSchedule(const GemmArgs& arguments, u32 rank) : args(arguments) {
    cluster = blockIdx.x / kClusterSize;
    if constexpr (kClusterSize == 2) cluster = args.cluster_remap[cluster];
    clusters = gridDim.x / kClusterSize;
    rank_m = rank % Config::kClusterM;
    rank_n = Config::kSplitK > 1 ? 0 : rank / Config::kClusterM;
    rank_k = Config::kSplitK > 1 ? rank : 0;
  }

  F8_DEVICE u32 cluster_tiles(u32 problem) const {
    const GemmProblem& of = args.problems[problem];
    return ((of.m + kClusterTileM - 1) / kClusterTileM) *
           ((of.n + kClusterTileN - 1) / kClusterTileN);
  }

  // The cluster tile of the second problem that this cluster computes in its `turn` there.
  F8_DEVICE u32 tile_of_second(u32 turn) const {
    const u32 busy = cluster_tiles(0) % clusters;  // that got one tile of the first more
    const u32 first_turns = busy > 0 ? args.tail_offset * (clusters - busy) : 0;
    if (busy == 0 || cluster < busy) return first_turns + turn * clusters + cluster;
    if (turn < args.tail_offset) return turn * (clusters - busy) + cluster - busy;
    return first_turns + (turn - args.tail_offset) * clusters + cluster;
  }

  // Calls work(tile) for each tile of this CTA. The problem is the counter of a loop, which the
  // compiler keeps in a uniform register, and with it what is looked up by it: the main loop's
  // bound, hence the ring's state and the descriptors of its MMAs.
  template <class Work>
  F8_DEVICE void each_tile(const Work& work) const {
    WorkTile tile;
#pragma unroll 1
    for (tile.problem = 0; tile.problem < Config::kProblems; ++tile.problem) {
      const u32 tiles = cluster_tiles(tile.problem);
      for (u32 turn = 0;; ++turn) {
        u32 index = turn * clusters + cluster;
        if (Config::kProblems > 1 && tile.problem > 0) index = tile_of_second(turn);
        if (index >= tiles) break;
        place(tile, index);
        work(tile);
      }
    }
  }

  // Gives the tile its place in d and its part of K; `index` is that of the cluster tile.
  F8_DEVICE void place(WorkTile& tile, u32 index) const {
    const GemmProblem& problem = args.problems[tile.problem];
    const u32 tiles_m = (problem.m + kClusterTileM - 1) / kClusterTileM;
    const u32 tiles_n = (problem.n + kClusterTileN - 1) / kClusterTileN;
    const u32 raster_group = max(args.raster_group / Config::kClusterM, 1U);  // in cluster tiles
    const auto [tile_m, tile_n] = RasterPlace(index, tiles_m, tiles_n, raster_group);
    tile.row = static_cast<i32>((tile_m * Config::kClusterM + rank_m) * Config::kTileM);
    tile.column = static_cast<i32>((tile_n * Config::kClusterN + rank_n) * Config::kTileN);
    tile.first_k_block = 0;
    tile.k_blocks = (problem.k + kBlockK - 1) / kBlockK;
    if constexpr (Config::kSplitK > 1) {
      // The CTAs get equal parts of K; what lies beyond it reads as zero.
      tile.k_blocks = (tile.k_blocks + Config::kSplitK - 1) / Config::kSplitK;
      tile.first_k_block = tile.k_blocks * rank_k;
    }
  }

  // What a tile has of its problem: the end of its rows, and where its inverse scales begin.
  F8_DEVICE u32 end_row(const WorkTile& tile) const {
    return args.problems[tile.problem].m;
  }
  F8_DEVICE const float* inv_scale_a(const WorkTile& tile) const {
    return args.problems[tile.problem].inv_scale_a;
  }
  F8_DEVICE const float* inv_scale_b(const WorkTile& tile) const {
    return args.problems[tile.problem].inv_scale_b;
  }
};

}  // namespace f8::kernels
