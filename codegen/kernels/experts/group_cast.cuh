// The amax and cast kernels over groups of rows: each group of x is a matrix of its own, with the
// scales that it has alone. A block works on one 128 x 128 tile of a group, by the code of amax.cuh and
// cast.cuh. The groups are those of a layout, or all of as many rows, as the weights of experts.
#pragma once

#include "codegen/kernels/cast/amax.cuh"
#include "codegen/kernels/cast/cast.cuh"
#include "codegen/kernels/experts/group_rows.cuh"

namespace f8::kernels {

// A tile, or the first one of a pair: rows [row, row + 128) and columns [column, column + 128) of its group's.
struct GroupTile : GroupPlace {
  i32 row, column;

  // The rows of tiles of a group of so many rows.
  static F8_DEVICE i32 down(i32 rows) { return (rows + kCastTile - 1) / kCastTile; }
  // Those of all groups.
  static F8_DEVICE i32 rows_of_tiles(const GroupsOf& groups) {
    if (groups.words == nullptr) return groups.count * down(groups.rows);
    return static_cast<i32>(
        load_global(reinterpret_cast<const u32*>(groups.words) + kRowTileCounts + kTable));
  }

  // Tile `tile_column` of the row of tiles `tile_row` of all groups.
  F8_DEVICE void at(const GroupsOf& groups, i32 tile_row, i32 tile_column) {
    column = tile_column * kCastTile;
    qt_column = scale_start = 0;
    if (groups.words == nullptr) {
      group = tile_row / down(groups.rows);
      start = group * groups.rows;
      length = groups.rows;
      row = tile_row % down(groups.rows) * kCastTile;
      return;
    }
    const u32* const words = reinterpret_cast<const u32*>(groups.words);
    u32 entry[4];
    load_global_words(groups.words + groups.layout.at_row_tiles(kTable) + i64{tile_row} * 4, entry);
    group = static_cast<i32>(entry[0]);
    start = static_cast<i32>(load_global(words + groups.layout.at_starts() + group));
    length = static_cast<i32>(entry[2]) - start;
    row = static_cast<i32>(entry[1]) - start;
    scale_start = static_cast<i32>(entry[3]) - row;
    qt_column =
        static_cast<i32>(load_global(words + groups.layout.at_blocks() + group)) * kCastTile;
  }
  static F8_DEVICE i32 group_of(const GroupsOf& groups, i32 tile_row) {
    const i64 at = groups.layout.at_row_tiles(kTable) + i64{tile_row} * 4;
    return static_cast<i32>(load_global(reinterpret_cast<const u32*>(groups.words) + at));
  }
  // The tile of a block. Blocks have tiles from the last row of tiles on: what an amax kernel read
  // last is in L2 still. False: there is no such tile.
  template <class Config>
  F8_DEVICE bool of_block(const GroupsOf& groups, i32 cols) {
    const i32 block = static_cast<i32>(blockIdx.x);
    const i32 across = tiles_across(Config::kSource, Config::kInput == Input::kF32, cols);
    const i32 tile_row = rows_of_tiles(groups) - 1 - block / across;
    if (tile_row < 0) return false;
    at(groups, tile_row, block % across);
    return true;
  }

 private:
  static constexpr i32 kTable = kCastTile / kRowTileStep - 1;
};

template <class Config>
struct GroupAmax {
  static F8_DEVICE void run(const GroupAmaxArgs& args) {
    constexpr Input kInput = Config::kInput;
    grid_dependency_wait();
    launch_dependents();
    if (Config::kNoopFlag && is_noop(args.noop_flag)) return;
    GroupTile tile;
    if (!tile.of_block<Config>(args.groups, args.tensor.cols)) return;
    const AmaxTensor t = group_of(args, tile, Vec8<kInput>::kElementBytes);
    GroupRows<Config::kSource, kInput>(args.tensor, args.source, tile.start)
        .each_tile(t, tile.row, tile.column,
                   [&](const ThreadFragment<kInput>& fragment, i32 column) {
                     Amax<Config>::of_tile(t, fragment, tile.row, column);
                   });
  }
};

// kStores is how long L2 keeps the copies.
template <class Config, Evict kStores = Evict::kByAge>
struct GroupCast {
  using Copies = Cast<Config, kStores>;

  static F8_DEVICE void run(const GroupCastArgs& args) {
    grid_dependency_wait();
    launch_dependents();
    if (Config::kNoopFlag && is_noop(args.noop_flag)) return;
    GroupTile tile;
    if (!tile.of_block<Config>(args.groups, args.tensor.cols)) return;
    GroupRows<Config::kSource, Config::kInput>(args.tensor, args.source, tile.start)
        .each_tile(matrix_of(args, tile), tile.row, tile.column,
                   [&](ThreadFragment<Config::kInput>& fragment, i32 column) {
                     cast_tile(
                         args, tile, column, fragment, [] {}, [] {});
                   });
  }

  static F8_DEVICE CastTensor matrix_of(const GroupCastArgs& args, const GroupTile& tile) {
    return group_of(args, tile, Config::kScaleQ, Config::kScaleQt, Config::kDelayed,
                    Vec8<Config::kInput>::kElementBytes);
  }
  // Casts a tile, whose amaxes are in the words. Behind the scales it calls `before`, waits for all threads,
  // calls `after`, and writes the copies.
  template <class Before, class After>
  static F8_DEVICE void cast_tile(const GroupCastArgs& args, const GroupTile& tile, i32 column,
                                  ThreadFragment<Config::kInput>& fragment, const Before& before,
                                  const After& after) {
    const CastTensor t = matrix_of(args, tile);  // again: registers are few
    const bool first = tile.row == 0 && column == 0;
    __shared__ typename Copies::Scales scales;
    if constexpr (Copies::kTileAmax) {
      __shared__ TileAmax<Config::kInput> tile_amax;
      constexpr bool kTile = Copies::kTileBlocks || Copies::kDelayed;
      find_tile_amax<Copies::kRowBlocks, Copies::kColumnBlocks, kTile>(fragment, tile_amax);
      __syncthreads();
      Copies::block_scales(t, tile_amax, tile.row, column, args.scale_rows, scales);
      if constexpr (Copies::kDelayed) {
        // Each group's first tile publishes the one scale of all groups.
        Copies::delayed_scale(t, tile_amax, first, scales);
        if (!Config::kSaturate && tile_amax.amax() >= 0x7F800000U) fragment.infinities_to_nan();
      }
    }
    if constexpr (Copies::kTensorScale && !Copies::kDelayed) {
      Copies::tensor_scale(t, first, scales);
    }
    Copies::axis_scales(
        t, tile.row, column, [&](i32 i) { return load_global(t.row_amax + tile.row + i); },
        [&](i32 i) { return load_global(t.col_amax + column + i); }, scales);
    before();
    __syncthreads();
    after();
    if constexpr (Config::kRowMajor) Copies::write_row_major(t, fragment, scales);
    if constexpr (Config::kTransposed) {
      Copies::write_transposed(t, fragment, scales, tile.row, column);
    }
  }
};

}  // namespace f8::kernels
