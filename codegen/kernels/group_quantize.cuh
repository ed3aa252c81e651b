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

  // What stays from item to item: a tile takes all registers.
  struct Block {
    i32 tiles, distance;
    i32 ticket, next;
    GroupTile tile;
  };

  static F8_DEVICE i32 take(const GroupQuantizeArgs& args) {
    return static_cast<i32>(atomicAdd(args.tickets, 1U));
  }

  // Both take the next item while the tile is on its way.
  static F8_DEVICE void find_amax(const GroupQuantizeArgs& args, Block& block) {
    i32 next = 0;
    if (threadIdx.x == 0) next = take(args);
    const AmaxTensor t =
        group_of(maxima_of(args.cast), block.tile, Vec8<Config::kInput>::kElementBytes);
    Amax<AmaxConfig>::rows_and_columns(t, static_cast<u32>(block.tile.index(t.cols)));
    __syncthreads();
    if (threadIdx.x == 0) {
      add_release(args.done + block.tile.group, 1);
      block.next = next;
    }
  }
  static F8_DEVICE void cast(const GroupQuantizeArgs& args, Block& block) {
    GroupCast<Config>::cast(args.cast, block.tile, [&] {
      if (threadIdx.x == 0) {
        block.next = take(args);
        const u32 all = static_cast<u32>(block.tile.of_group(args.cast.tensor.cols));
        while (load_acquire(args.done + block.tile.group) < all) {
        }
      }
      __syncthreads();
    });
  }

  static F8_DEVICE void run(const GroupQuantizeArgs& args) {
    grid_dependency_wait();
    launch_dependents();
    __shared__ Block block;
    if (threadIdx.x == 0) {
      const GroupsOf& groups = args.cast.groups;
      const i32 cols = args.cast.tensor.cols;
      block.tiles = GroupTile::count(groups, cols);
      block.distance = min(block.tiles, GroupTile::most_of_a_group(groups, cols) + args.lead);
      block.next = take(args);
    }
    for (;;) {
      if (threadIdx.x == 0) {
        block.ticket = block.next;
        const GroupItem item(block.ticket, block.tiles, block.distance);
        if (block.ticket < 2 * block.tiles) {
          block.tile.find(args.cast.groups, args.cast.tensor.cols, item.tile);
        }
      }
      __syncthreads();
      if (block.ticket >= 2 * block.tiles) return;
      if (GroupItem(block.ticket, block.tiles, block.distance).casts) {
        cast(args, block);
      } else {
        find_amax(args, block);
      }
      __syncthreads();
    }
  }
};

}  // namespace f8::kernels
