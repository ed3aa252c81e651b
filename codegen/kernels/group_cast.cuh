// The amax and cast kernels over groups of rows: each group of x is a matrix of its own, with the
// scales that it has alone. A block works on one 128 x 128 tile of a group, by the code of amax.cuh and
// cast.cuh. The groups are those of a layout, or all of as many rows, as the weights of experts.
#pragma once

#include "amax.cuh"
#include "cast.cuh"
#include "group_args.cuh"

namespace f8::kernels {

// The tile of a block: rows [row, row + 128) and columns [column, column + 128) of its group's.
struct GroupTile : GroupPlace {
  i32 row, column;

  // `index` counts tiles from the last group's last one: what an amax kernel read last is in L2
  // still. False: there is no such tile.
  F8_DEVICE bool find(const GroupsOf& groups, i32 cols, i32 index) {
    const i32 across = (cols + kCastTile - 1) / kCastTile;
    const i32 from_last = index / across;
    column = index % across * kCastTile;
    qt_column = scale_start = 0;
    if (groups.words == nullptr) {
      const i32 down = (groups.rows + kCastTile - 1) / kCastTile;
      group = groups.count - 1 - from_last / down;
      start = group * groups.rows;
      length = groups.rows;
      row = (down - 1 - from_last % down) * kCastTile;
      return group >= 0;
    }
    const u32* const words = reinterpret_cast<const u32*>(groups.words);
    constexpr i32 kTable = kCastTile / kRowTileStep - 1;
    const i32 tile = static_cast<i32>(load_global(words + kRowTileCounts + kTable)) - 1 - from_last;
    if (tile < 0) return false;
    u32 entry[4];
    load_global_words(groups.words + groups.layout.at_row_tiles(kTable) + i64{tile} * 4, entry);
    group = static_cast<i32>(entry[0]);
    start = static_cast<i32>(load_global(words + groups.layout.at_starts() + group));
    length = static_cast<i32>(entry[2]) - start;
    row = static_cast<i32>(entry[1]) - start;
    scale_start = static_cast<i32>(entry[3]) - row;
    qt_column =
        static_cast<i32>(load_global(words + groups.layout.at_blocks() + group)) * kCastTile;
    return true;
  }
  // How many tiles there are, and how many the largest group has.
  static F8_DEVICE i32 count(const GroupsOf& groups, i32 cols) {
    const i32 across = (cols + kCastTile - 1) / kCastTile;
    if (groups.words == nullptr) {
      return groups.count * ((groups.rows + kCastTile - 1) / kCastTile) * across;
    }
    const u32* const words = reinterpret_cast<const u32*>(groups.words);
    constexpr i32 kTable = kCastTile / kRowTileStep - 1;
    return static_cast<i32>(load_global(words + kRowTileCounts + kTable)) * across;
  }
  static F8_DEVICE i32 most_of_a_group(const GroupsOf& groups, i32 cols) {
    const i32 across = (cols + kCastTile - 1) / kCastTile;
    i32 rows = groups.rows;
    if (groups.words != nullptr) {
      const u32* const words = reinterpret_cast<const u32*>(groups.words);
      const i32 largest = static_cast<i32>(load_global(words + groups.layout.at_order()));
      rows = static_cast<i32>(load_global(words + groups.layout.at_lengths() + largest));
    }
    return (rows + kCastTile - 1) / kCastTile * across;
  }
  // How many its group has.
  F8_DEVICE i32 of_group(i32 cols) const {
    return (length + kCastTile - 1) / kCastTile * ((cols + kCastTile - 1) / kCastTile);
  }
  // Its number among its group's tiles, row-major.
  F8_DEVICE i32 index(i32 cols) const {
    return row / kCastTile * ((cols + kCastTile - 1) / kCastTile) + column / kCastTile;
  }
};

template <class Config>
struct GroupAmax {
  static F8_DEVICE void run(const GroupAmaxArgs& args) {
    grid_dependency_wait();
    launch_dependents();
    GroupTile tile;
    if (!tile.find(args.groups, args.tensor.cols, static_cast<i32>(blockIdx.x))) return;
    const AmaxTensor t = group_of(args, tile, Vec8<Config::kInput>::kElementBytes);
    Amax<Config>::rows_and_columns(t, static_cast<u32>(tile.index(t.cols)));
  }
};

template <class Config>
struct GroupCast {
  using Copies = Cast<Config>;

  static F8_DEVICE void run(const GroupCastArgs& args) {
    grid_dependency_wait();
    launch_dependents();
    GroupTile tile;
    if (!tile.find(args.groups, args.tensor.cols, static_cast<i32>(blockIdx.x))) return;
    cast(args, tile, [] {});
  }

  // Casts a tile, whose group's amaxes are in the words when `wait` returns.
  template <class Wait>
  static F8_DEVICE void cast(const GroupCastArgs& args, const GroupTile& tile, const Wait& wait) {
    const auto group = [&] {
      return group_of(args, tile, Config::kScaleQ, Config::kScaleQt,
                      Vec8<Config::kInput>::kElementBytes);
    };
    const CastTensor from = group();
    ThreadFragment<Config::kInput> fragment;
    fragment.load(from.x, from.ld, from.rows, from.cols, tile.row, tile.column);
    wait();
    const CastTensor t = group();  // again: registers are few
    __shared__ typename Copies::Scales scales;
    if constexpr (Copies::kTileAmax) {
      __shared__ TileAmax<Config::kInput> tile_amax;
      find_tile_amax<Copies::kRowBlocks, Copies::kColumnBlocks, Copies::kTileBlocks>(fragment,
                                                                                     tile_amax);
      __syncthreads();
      Copies::block_scales(t, tile_amax, tile.row, tile.column, args.scale_rows, scales);
    }
    if constexpr (Copies::kTensorScale) {
      Copies::tensor_scale(t, tile.row == 0 && tile.column == 0, scales);
    }
    Copies::axis_scales(
        t, tile.row, tile.column, [&](i32 i) { return load_global(t.row_amax + tile.row + i); },
        [&](i32 i) { return load_global(t.col_amax + tile.column + i); }, scales);
    __syncthreads();
    if constexpr (Config::kRowMajor) Copies::write_row_major(t, fragment, scales);
    if constexpr (Config::kTransposed) {
      Copies::write_transposed(t, fragment, scales, tile.row, tile.column);
    }
  }
};

}  // namespace f8::kernels
