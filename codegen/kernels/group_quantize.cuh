// Amax and cast of groups in one launch, for dynamic tensor and axis scales, with the results of the
// two kernels of group_cast.cuh. Tiles are read twice, but the second time from L2 where a group and
// the tiles of a grid fit there: the amaxes of a group are found shortly before its casts, in place
// of those of all groups before any cast.
//
// The work is a sequence of items: the amaxes of the first `distance` tiles, then by turns the cast
// of one tile and the amaxes of the one that is so far ahead, then the casts that are left. Blocks
// take items from a counter, in this order, until there is none. A cast waits until all tiles of
// its group are counted as done. The distance is at least the largest group, so what a cast waits
// for was taken before it; by induction over the sequence every item ends, however few blocks are
// resident. So it is no cooperative launch. Maxima do not depend on the order, so the results do
// not either.
#pragma once

#include "group_cast.cuh"

namespace f8::kernels {

struct GroupItem {
  bool casts;
  i32 tile;

  // Item `ticket` of the sequence over so many tiles.
  F8_DEVICE GroupItem(i32 ticket, i32 tiles, i32 distance) {
    const i32 by_turns = ticket - distance;
    if (by_turns < 0) {
      casts = false;
      tile = ticket;
    } else if (by_turns < 2 * (tiles - distance)) {
      casts = by_turns % 2 == 1;
      tile = by_turns / 2 + (casts ? 0 : distance);
    } else {
      casts = true;
      tile = ticket - tiles;
    }
  }
};

// Config is that of Cast, with tensor and axis scales that are not delayed, and 16-bit inputs.
template <class Config>
struct GroupQuantize {
  using Copies = Cast<Config>;
  struct AmaxConfig {
    static constexpr Input kInput = Config::kInput;
    static constexpr bool kTensor = Copies::kTensorScale;
    static constexpr bool kRow = Copies::kRowAxis;
    static constexpr bool kCol = Copies::kColumnAxis;
    static constexpr bool kBlock = false;
    static constexpr bool kNoopFlag = false;
  };
  static_assert(Config::kInput != Input::kF32 && !Copies::kTileAmax && Copies::kAfterAmax);

  static F8_DEVICE void find_amax(const GroupQuantizeArgs& args, const GroupTile& tile) {
    const AmaxTensor t =
        group_of(maxima_of(args.cast), tile, Vec8<Config::kInput>::kElementBytes);
    Amax<AmaxConfig>::rows_and_columns(t, static_cast<u32>(tile.index(t.cols)));
    __syncthreads();
    if (threadIdx.x == 0) add_release(args.done + tile.group, 1);
  }

  static F8_DEVICE void cast(const GroupQuantizeArgs& args, const GroupTile& tile) {
    GroupCast<Config>::cast(args.cast, tile, [&] {
      if (threadIdx.x == 0) {
        const u32 all = static_cast<u32>(tile.of_group(args.cast.tensor.cols));
        while (load_acquire(args.done + tile.group) < all) {
        }
      }
      __syncthreads();
    });
  }

  static F8_DEVICE void run(const GroupQuantizeArgs& args) {
    grid_dependency_wait();
    launch_dependents();
    const GroupsOf& groups = args.cast.groups;
    const i32 cols = args.cast.tensor.cols;
    const i32 tiles = GroupTile::count(groups, cols);
    const i32 distance = min(tiles, GroupTile::most_of_a_group(groups, cols) + args.lead);
    __shared__ i32 ticket;
    i32 next = 0;
    if (threadIdx.x == 0) next = static_cast<i32>(atomicAdd(args.tickets, 1U));
    for (;;) {
      if (threadIdx.x == 0) ticket = next;
      __syncthreads();
      const i32 taken = ticket;
      if (taken >= 2 * tiles) return;
      // The next item is taken before this one is begun; its number comes meanwhile.
      if (threadIdx.x == 0) next = static_cast<i32>(atomicAdd(args.tickets, 1U));
      const GroupItem item(taken, tiles, distance);
      GroupTile tile;
      tile.find(groups, cols, item.tile);
      if (item.casts) {
        cast(args, tile);
      } else {
        find_amax(args, tile);
      }
      __syncthreads();
    }
  }
};

}  // namespace f8::kernels
