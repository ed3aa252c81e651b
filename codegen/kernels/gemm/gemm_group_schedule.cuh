// The tile schedules of grouped GEMMs. What a CTA's next tile is, it reads from the layout one tile
// ahead. The grid follows from the host's bound of what the layout may have, so that CTAs may find
// nothing to do.
#pragma once

#include "codegen/kernels/gemm/gemm_schedule.cuh"

namespace f8::kernels {

// The compiler keeps what comes from one lane in uniform registers, and with it what depends on it.
F8_DEVICE u32 from_one_lane(u32 x) {
  return __shfl_sync(0xFFFFFFFFU, x, 0);
}

// That of an M-grouped GEMM: a tile's rows are an entry of the layout's table of row tiles, which
// belongs to one group.
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
    tile.k_blocks = (problem.k + Base::kBlockK - 1) / Base::kBlockK;
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
      if constexpr (Config::kScale == Scale::kBlock128x128) {
        tile.scale_row = static_cast<i32>(from_one_lane(next[3]));
      }
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
  F8_DEVICE void zero_rest() const {
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

// That of a K-grouped GEMM: each group has all tiles of d, over its own columns of a and b, or of
// 16 bits its own rows, from any row on. Groups come by falling length, and every other wave of tiles goes
// back, so that the clusters' sums of lengths stay close.
template <class Config>
struct KGroupedSchedule : GemmSchedule<Config> {
  using Base = GemmSchedule<Config>;
  using Args = KGroupedGemmArgs;
  using Base::cluster;
  using Base::clusters;
  static_assert(Config::kSplitK == 1 && Config::kProblems == 1);

  const KGroupedGemmArgs& grouped;
  const u32* words;
  u32 groups_in_use;

  F8_DEVICE KGroupedSchedule(const KGroupedGemmArgs& arguments, u32 rank)
      : Base(arguments, rank),
        grouped(arguments),
        words(reinterpret_cast<const u32*>(arguments.groups)) {
    groups_in_use = from_one_lane(load_global(words + kGroupsInUse));
  }

  template <class Work>
  F8_DEVICE void each_tile(const Work& work) const {
    const u32 tiles_of_group = this->cluster_tiles(0);
    const u32 tiles = groups_in_use * tiles_of_group;
    const GroupLayout& layout = grouped.layout;
    const auto index_at = [&](u32 turn) {
      return turn * clusters + (turn % 2 == 0 ? cluster : clusters - 1 - cluster);
    };
    u32 group = 0, length = 0, first_block = 0;  // of the next tile
    const auto read_next = [&](u32 index) {
      if (index >= tiles) return;
      group = load_global(words + layout.at_order() + index / tiles_of_group);
      length = load_global(words + layout.at_lengths() + group);
      first_block = load_global(
          words + (Config::kMnMajorA ? layout.at_starts() : layout.at_blocks()) + group);
    };
    WorkTile tile;
    tile.problem = 0;
    read_next(index_at(0));
#pragma unroll 1
    for (u32 turn = 0; turn * clusters < tiles; ++turn) {
      const u32 index = index_at(turn);
      if (index >= tiles) break;  // in the last wave
      this->place(tile, index % tiles_of_group);
      tile.group = static_cast<i32>(from_one_lane(group));
      tile.first_k_block = from_one_lane(first_block);
      if constexpr (Config::kMnMajorA) {
        tile.k_blocks = from_one_lane((length + kMnBox - 1) / kMnBox);
        tile.last_of_k = from_one_lane(length) - (tile.k_blocks - 1) * kMnBox;
      } else {
        tile.k_blocks = from_one_lane((length + kStageK - 1) / kStageK);
      }
      read_next(index_at(turn + 1));
      work(tile);
    }
  }

  F8_DEVICE const float* inv_scale_a(const WorkTile& tile) const {
    return grouped.problems[0].inv_scale_a + static_cast<u64>(tile.group) * grouped.group_stride_a;
  }
  F8_DEVICE const float* inv_scale_b(const WorkTile& tile) const {
    return grouped.problems[0].inv_scale_b + static_cast<u64>(tile.group) * grouped.group_stride_b;
  }

  // The consumers of all CTAs set the matrices of groups without columns to zero, unless d is added
  // to.
  template <u32 kElementBytes>
  F8_DEVICE void zero_rest() const {
    if constexpr (Config::kAdd) return;
    const GemmProblem& problem = grouped.problems[0];
    const u32 empty = static_cast<u32>(grouped.layout.experts) - groups_in_use;
    const u64 chunks_of_row = problem.n * kElementBytes / 16;
    const u64 chunks_of_group = problem.m * chunks_of_row;
    constexpr u32 kThreads = Config::kWarpgroups * 128;
    constexpr u32 kZeros[4] = {};
    for (u64 i = blockIdx.x * kThreads + threadIdx.x; i < empty * chunks_of_group;
         i += gridDim.x * kThreads) {
      const u64 group = load_global(words + grouped.layout.at_order() + groups_in_use +
                                    static_cast<u32>(i / chunks_of_group));
      const u64 row = group * problem.m + i % chunks_of_group / chunks_of_row;
      store_global_words(static_cast<u8*>(grouped.d) + row * grouped.ld_d + i % chunks_of_row * 16,
                         kZeros);
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
template <class Config>
struct ScheduleOf<Config, Group::kK> {
  using Type = KGroupedSchedule<Config>;
};

}  // namespace f8::kernels
