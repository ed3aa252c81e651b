// The tile schedule of an M-grouped GEMM: a tile's rows are an entry of the layout's table of row
// tiles, which belongs to one group. The entry of a CTA's next tile is read one tile ahead. The grid
// follows from the host's bound of the table, so that CTAs may find nothing to do.
#pragma once

#include "gemm_schedule.cuh"

namespace f8::kernels {

template <class Config>
struct GroupedSchedule : GemmSchedule<Config> {
  using Base = GemmSchedule<Config>;
  using Args = GroupedGemmArgs;
  using Base::cluster;
  using Base::clusters;
  static_assert(Config::kClusterM == 1 && Config::kSplitK == 1 && Config::kProblems == 1);

  const GroupedGemmArgs& grouped;
  u32 row_tiles;

  F8_DEVICE GroupedSchedule(const GroupedGemmArgs& arguments, u32 rank)
      : Base(arguments, rank), grouped(arguments) {
    row_tiles = from_one_lane(load_global(reinterpret_cast<const u32*>(grouped.row_tile_count)));
  }

  // The compiler keeps what comes from one lane in uniform registers, and with it what depends on it.
  static F8_DEVICE u32 from_one_lane(u32 x) { return __shfl_sync(0xFFFFFFFFU, x, 0); }

  F8_DEVICE RasterPlace place_of(u32 index, u32 tiles_n) const {
    return {index, row_tiles, tiles_n, max(grouped.raster_group, 1U)};
  }

  template <class Work>
  F8_DEVICE void each_tile(const Work& work) const {
    const GemmProblem& problem = grouped.problems[0];
    const u32 tiles_n = (problem.n + Base::kClusterTileN - 1) / Base::kClusterTileN;
    const u32 tiles = row_tiles * tiles_n;
    WorkTile tile;
    tile.problem = 0;
    tile.first_k_block = 0;
    tile.k_blocks = (problem.k + kStageK - 1) / kStageK;
    u32 next[4] = {};
    const auto read_next = [&](u32 index) {
      if (index < tiles) {
        load_global_words(grouped.row_tiles + place_of(index, tiles_n).tile_m, next);
      }
    };
    read_next(cluster);
#pragma unroll 1
    for (u32 index = cluster; index < tiles; index += clusters) {
      tile.group = static_cast<i32>(from_one_lane(next[0]));
      tile.row = static_cast<i32>(from_one_lane(next[1]));
      tile.end_row = static_cast<i32>(from_one_lane(next[2]));
      tile.column = static_cast<i32>(
          (place_of(index, tiles_n).tile_n * Config::kClusterN + this->rank_n) * Config::kTileN);
      read_next(index + clusters);
      work(tile);
    }
  }

  F8_DEVICE u32 end_row(const WorkTile& tile) const {
    return static_cast<u32>(tile.end_row);
  }
  F8_DEVICE const float* inv_scale_a(const WorkTile& tile) const {
    return grouped.problems[0].inv_scale_a + static_cast<u64>(tile.group) * grouped.group_stride_a;
  }
  F8_DEVICE const float* inv_scale_b(const WorkTile& tile) const {
    return grouped.problems[0].inv_scale_b + static_cast<u64>(tile.group) * grouped.group_stride_b;
  }

  // The consumers of all CTAs set the rows of d behind the last group to zero.
  template <u32 kElementBytes>
  F8_DEVICE void zero_tail() const {
    if (grouped.zero_tail == 0) return;
    const GemmProblem& problem = grouped.problems[0];
    const u32 rows = load_global(reinterpret_cast<const u32*>(grouped.groups) + kGroupRows);
    const u64 chunks_of_row = problem.n * kElementBytes / 16;
    const u64 chunks = (problem.m - rows) * chunks_of_row;
    constexpr u32 kThreads = Config::kWarpgroups * 128;
    constexpr u32 kZeros[4] = {};
    for (u64 i = blockIdx.x * kThreads + threadIdx.x; i < chunks; i += gridDim.x * kThreads) {
      u8* const row = static_cast<u8*>(grouped.d) + (rows + i / chunks_of_row) * grouped.ld_d;
      store_global_words(row + i % chunks_of_row * 16, kZeros);
    }
  }
};

template <class Config, Group kGroup = Config::kGroup>
struct ScheduleOf {
  using Type = GemmSchedule<Config>;
};
template <class Config>
struct ScheduleOf<Config, Group::kM> {
  using Type = GroupedSchedule<Config>;
};

}  // namespace f8::kernels
