// Amax and cast of groups in one launch, for dynamic tensor and axis scales, with the results of the
// two kernels of group_cast.cuh. Tiles are read twice, but the second time from L2 where a group and
// the tiles of a grid fit there: the amaxes of a group are found shortly before its casts, in place
// of those of all groups before any cast.
//
// The work is a sequence of items, each the amaxes or the cast of one tile. First come the amaxes of
// the first group and of `lead` tiles behind it. Then a part for each group has its casts, by turns
// with the amaxes that the next group's casts need: those of its tiles and of `lead` behind them.
// Blocks take items from a counter, in this order, until there is none. A cast waits until all tiles
// of its group are counted as done; all that it waits for was taken before it. By induction over the
// sequence every item ends, however few blocks are resident, so this is no cooperative launch.
// Maxima do not depend on the order, so the results do not either.
#pragma once

#include "codegen/kernels/experts/group_cast.cuh"

namespace f8::kernels {

// What a block keeps from item to item, in shared memory: a tile takes all registers.
struct GroupItems {
  i32 groups, across, tiles, lead;  // tiles, or pairs
  bool ended, casts;                // whether the item is none, a cast
  GroupTile tile;
  i32 first_row[kMaxExperts + 1];  // the first row of tiles of each group; then their number

  // All threads take part. `of_matrix`: the tiles, or pairs, that are side by side.
  F8_DEVICE void begin(const GroupQuantizeArgs& args, i32 of_matrix) {
    const GroupsOf& of = args.cast.groups;
    const i32 count = of.words == nullptr ? of.count : of.layout.experts;
    const i32 rows_of_tiles = GroupTile::rows_of_tiles(of);
    for (i32 e = static_cast<i32>(threadIdx.x); e < count; e += kTileThreads) {
      first_row[e] = of.words == nullptr
                         ? e * GroupTile::down(of.rows)
                         : static_cast<i32>(load_global(reinterpret_cast<const u32*>(of.words) +
                                                        of.layout.at_blocks() + e));
    }
    if (threadIdx.x == 0) {
      first_row[count] = rows_of_tiles;
      groups = count;
      across = of_matrix;
      tiles = rows_of_tiles * across;
      lead = args.lead;
    }
    __syncthreads();
  }
  // The first tile of a group, and how many amaxes come before its first cast.
  F8_DEVICE i32 first_tile(i32 group) const { return first_row[group] * across; }
  F8_DEVICE i32 amaxes_before(i32 group) const { return min(tiles, first_tile(group + 1) + lead); }
  F8_DEVICE i32 first_item(i32 group) const { return first_tile(group) + amaxes_before(group); }

  // Takes an item from the counter.
  F8_DEVICE void take(const GroupQuantizeArgs& args) {
    const i32 ticket = static_cast<i32>(atomicAdd(args.tickets, 1U));
    ended = ticket >= 2 * tiles;
    if (ended) return;
    i32 index = ticket;
    casts = false;
    if (ticket >= first_item(0)) {
      i32 group = 0;  // the last one whose part begins at the item or before
      for (i32 beyond = groups; beyond - group > 1;) {
        const i32 middle = (group + beyond) / 2;
        if (first_item(middle) <= ticket) {
          group = middle;
        } else {
          beyond = middle;
        }
      }
      const i32 own = tiles_of(group);
      const i32 ahead = group + 1 < groups ? amaxes_before(group + 1) - amaxes_before(group) : 0;
      const i32 both = min(own, ahead);
      const i32 of_part = ticket - first_item(group);
      const bool by_turns = of_part < 2 * both;
      casts = by_turns ? of_part % 2 == 1 : own > ahead;
      index = by_turns ? of_part / 2 : of_part - both;
      index += casts ? first_tile(group) : amaxes_before(group);
    }
    tile.at(args.cast.groups, index / across, index % across);
  }
  F8_DEVICE i32 tiles_of(i32 group) const { return first_tile(group + 1) - first_tile(group); }
};

// Config is that of Cast, with tensor and axis scales that are not delayed, and 16-bit inputs.
template <class Config>
struct GroupQuantize {
  // Of a pair that both copies are made of, with scales of rows and columns, the second tile would spill.
  static constexpr bool kStash = Config::kSource == RowSource::kSwigluBackward &&
                                 Config::kRowMajor && Config::kTransposed &&
                                 (Cast<Config>::kRowAxis || Cast<Config>::kColumnAxis);
  static constexpr i32 kSharedBytes = kStash ? kStashBytes : 0;  // dynamic
  // What is read the second time and what is written is not needed again soon.
  using Casts = GroupCast<Config, Evict::kFirst, Evict::kFirst, kStash>;
  using Copies = typename Casts::Copies;
  struct AmaxConfig {
    static constexpr Input kInput = Config::kInput;
    static constexpr RowSource kSource = Config::kSource;
    static constexpr bool kTensor = Copies::kTensorScale;
    static constexpr bool kRow = Copies::kRowAxis;
    static constexpr bool kCol = Copies::kColumnAxis;
    static constexpr bool kBlock = false;
    static constexpr bool kNoopFlag = false;
  };
  // What is read the first time stays in L2 for the second.
  using Maxima = GroupAmax<AmaxConfig, Evict::kLast, kStash>;
  static_assert(Config::kInput != Input::kF32 && !Copies::kTileAmax && Copies::kAfterAmax);

  static F8_DEVICE void find_amax(const GroupQuantizeArgs& args, const GroupTile& tile) {
    Maxima::find(maxima_of(args.cast), tile);
    __syncthreads();
    if (threadIdx.x == 0) add_release(args.done + tile.group, 1);
  }
  static F8_DEVICE void cast(const GroupQuantizeArgs& args, const GroupItems& items) {
    const GroupTile& tile = items.tile;
    Casts::cast(args.cast, tile, [&] {
      if (threadIdx.x == 0) {
        const u32 all = static_cast<u32>(items.tiles_of(tile.group));
        while (load_acquire(args.done + tile.group) < all) {
        }
      }
      __syncthreads();
    });
    __syncthreads();
  }

  // An item is taken when the one before it is done: what blocks have taken and not begun would
  // let casts wait, or take a greater lead, of which L2 holds less.
  static F8_DEVICE void run(const GroupQuantizeArgs& args) {
    grid_dependency_wait();
    launch_dependents();
    __shared__ GroupItems items;
    items.begin(args, tiles_across(Config::kSource, false, args.cast.tensor.cols));
    for (;;) {
      if (threadIdx.x == 0) items.take(args);
      __syncthreads();
      if (items.ended) return;
      if (items.casts) {
        cast(args, items);
      } else {
        find_amax(args, items.tile);
      }
    }
  }
};

}  // namespace f8::kernels
