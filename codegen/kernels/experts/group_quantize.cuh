// Amax and cast of groups in one launch, for dynamic tensor and axis scales, with the results of the
// two kernels of group_cast.cuh. A block holds a tile from its amaxes to its cast, so that it is read,
// and computed, once.
//
// A unit is the tiles whose amaxes a cast needs: those of a group, or of a group's column of tiles where
// columns alone have scales. Blocks take tiles from a counter, unit by unit. A block finds the amaxes of
// its tile and counts it as done. Then it casts the tile that it took before, whose unit is mostly done
// by then, and holds the new one in shared memory. A pair has one of its tiles there, so it is cast before
// the next one is taken.
//
// Two things make a block leave its tile when its amaxes are found, and take the next one: its unit has
// more tiles than the grid's blocks hold, or after a while the unit has tiles that no block has taken, since
// other kernels have the SMs that blocks wait for. It reads the tiles that it left again when all of the
// unit are taken, the last one first, as L2 may have it still. So no block waits for a tile that nobody
// has taken while it has room to leave its own, and this is no cooperative launch. Maxima do not depend on
// the order, so the results do not either.
#pragma once

#include "codegen/kernels/experts/group_cast.cuh"

namespace f8::kernels {

// It has the beginnings of a layout's groups in shared memory, where there is room for all of them.
struct GroupStarts {
  static constexpr i32 kMost = 320;
  i32 count;                 // of the groups that are here
  i32 first_row[kMost + 1];  // of tiles; the last one is the number of these
  i32 start[kMost + 1];

  F8_DEVICE void load(const GroupsOf& of, i32 rows_of_tiles) {
    const i32 groups = of.words == nullptr || of.layout.experts > kMost ? 0 : of.layout.experts;
    const u32* const words = reinterpret_cast<const u32*>(of.words);
    for (i32 e = static_cast<i32>(threadIdx.x); e < groups; e += kTileThreads) {
      first_row[e] = static_cast<i32>(load_global(words + of.layout.at_blocks() + e));
      start[e] = static_cast<i32>(load_global(words + of.layout.at_starts() + e));
    }
    if (threadIdx.x != 0) return;
    count = groups;
    if (groups == 0) return;
    first_row[groups] = rows_of_tiles;
    start[groups] = static_cast<i32>(load_global(words + kGroupRows));
  }
  // The group that has a row of tiles: the last one that begins there or before.
  F8_DEVICE i32 group_of(i32 tile_row) const {
    i32 group = 0;
    for (i32 beyond = count; beyond - group > 1;) {
      const i32 middle = (group + beyond) / 2;
      if (first_row[middle] <= tile_row) {
        group = middle;
      } else {
        beyond = middle;
      }
    }
    return group;
  }
};

// A tile, or a pair, that a block has taken, and what becomes of it.
struct GroupStep : GroupTile {
  enum class Casts { kNone, kTile, kHeld };

  bool takes;   // there is a tile
  bool again;   // which the block had left: its amaxes are found
  bool keeps;   // which is held in the next step
  bool counts;  // which is to be counted as done
  Casts casts;  // what the block casts in this step
  i32 number;   // of the tile among those of the launch
  i32 unit, tiles_of_unit;
  i32 end_of_unit;  // the number of the tile behind the unit

  template <bool kColumnUnits>
  F8_DEVICE void locate(const GroupsOf& groups, const GroupStarts& starts, i32 across) {
    const i32 tile_row = number / across;
    i32 first = 0;  // row of tiles of the group
    if (groups.words == nullptr) {
      length = groups.rows;
      group = tile_row / down(length);
      start = group * length;
      first = group * down(length);
    } else if (starts.count > 0) {
      group = starts.group_of(tile_row);
      start = starts.start[group];
      length = starts.start[group + 1] - start;
      first = starts.first_row[group];
    } else {
      const u32* const words = reinterpret_cast<const u32*>(groups.words);
      group = group_of(groups, tile_row);
      start = static_cast<i32>(load_global(words + groups.layout.at_starts() + group));
      length = static_cast<i32>(load_global(words + groups.layout.at_lengths() + group));
      first = static_cast<i32>(load_global(words + groups.layout.at_blocks() + group));
    }
    qt_column = first * kCastTile;
    scale_start = 0;
    const i32 in_group = number - first * across;
    const i32 of_column = kColumnUnits ? in_group / down(length) : number - tile_row * across;
    const i32 of_row = kColumnUnits ? in_group - of_column * down(length) : tile_row - first;
    row = of_row * kCastTile;
    column = of_column * kCastTile;
    unit = kColumnUnits ? group * across + of_column : group;
    tiles_of_unit = kColumnUnits ? down(length) : down(length) * across;
    end_of_unit = number - (kColumnUnits ? of_row : in_group) + tiles_of_unit;
  }
};

// The tiles of a block, in shared memory: one takes all registers.
template <bool kColumnUnits, bool kHoldsTwo>
struct GroupTiles {
  using Casts = GroupStep::Casts;
  static constexpr i32 kPatience = 64;  // polls

  i32 across, tiles;  // tiles, or pairs
  bool held_is_done;  // the unit of the tile that is held
  // The tiles that the block left are of one unit, but for the first one, which may be of the next unit.
  i32 left, end_of_left, end_of_first;
  i32 numbers[kMostLeft];
  GroupStep steps[3];  // the last one, this one and the next one, by turns
  GroupStarts starts;

  // All threads take part. `of_matrix`: the tiles, or pairs, that are side by side.
  F8_DEVICE void begin(const GroupQuantizeArgs& args, i32 of_matrix) {
    const i32 rows_of_tiles = GroupTile::rows_of_tiles(args.cast.groups);
    starts.load(args.cast.groups, rows_of_tiles);
    __syncthreads();
    if (threadIdx.x == 0) {
      across = of_matrix;
      tiles = rows_of_tiles * across;
      left = 0;
      steps[2].keeps = false;
      take(args, steps[0], steps[2], next(args));
    }
    __syncthreads();
  }
  // One thread calls the functions below. This one gives the number of a tile, unless those that were left come
  // first.
  F8_DEVICE i32 next(const GroupQuantizeArgs& args) const {
    if (left > 0 && are_taken(args, end_of_left)) return tiles;
    return static_cast<i32>(atomicAdd(args.tickets, 1U));
  }
  // Takes the tile of that number for a step behind `before`; where there is none, one that was left.
  F8_DEVICE void take(const GroupQuantizeArgs& args, GroupStep& step, const GroupStep& before,
                      i32 number) {
    step.keeps = false;
    step.again = number >= tiles && left > 0 && !before.keeps;
    step.takes = step.again || number < tiles;
    if (!step.takes) return;
    if (step.again) {
      number = numbers[--left];
      if (left == 1) end_of_left = end_of_first;
    }
    step.number = number;
    step.template locate<kColumnUnits>(args.cast.groups, starts, across);
  }
  F8_DEVICE void look_at_held(const GroupQuantizeArgs& args, const GroupStep& held) {
    held_is_done = held.keeps && is_done(args, held);
  }
  // Counts the tile of a step as done: its amaxes are found.
  static F8_DEVICE void count(const GroupQuantizeArgs& args, const GroupStep& step) {
    if (step.takes && !step.again) add_release(args.done + step.unit, 1);
  }
  // Says what is cast in a step, whose unit is done, and returns the number of the next tile. A block takes it
  // when it has no unit to wait for before that tile's amaxes, and counts its own tile before it waits.
  F8_DEVICE i32 publish(const GroupQuantizeArgs& args, GroupStep& step, const GroupStep& held) {
    constexpr i32 kHeld = kHoldsTwo ? 2 : 1;
    const bool leaves = step.takes && !step.again && has_room() &&
                        (left > 0 || step.tiles_of_unit > kHeld * static_cast<i32>(gridDim.x));
    const bool keeps = kHoldsTwo && step.takes && !step.again && !leaves;
    const bool at_once =
        left == 0 && !leaves && (keeps || !step.takes) && (!held.keeps || held_is_done);
    step.counts = at_once;
    i32 number = 0;
    if (at_once) {
      number = next(args);
    } else {
      count(args, step);
    }
    if (leaves) leave(step);
    step.keeps = keeps;
    step.casts = Casts::kNone;
    if (held.keeps) {
      if (held_is_done || finish(args, held)) step.casts = Casts::kHeld;
    } else if (step.takes && !keeps && !leaves) {
      if (finish(args, step)) step.casts = Casts::kTile;
    }
    return at_once ? number : next(args);
  }

 private:
  F8_DEVICE bool has_room() const { return left < kMostLeft; }
  static F8_DEVICE bool are_taken(const GroupQuantizeArgs& args, i32 end) {
    return static_cast<i32>(load_acquire(args.tickets)) >= end;
  }
  static F8_DEVICE bool is_done(const GroupQuantizeArgs& args, const GroupStep& step) {
    return load_acquire(args.done + step.unit) >= static_cast<u32>(step.tiles_of_unit);
  }
  // Waits until the unit is done. False: it has tiles that no block has taken, and the block leaves its own.
  F8_DEVICE bool finish(const GroupQuantizeArgs& args, const GroupStep& step) {
    for (i32 polls = 1; !is_done(args, step); ++polls) {
      if (polls % kPatience == 0 && has_room() && !are_taken(args, step.end_of_unit)) {
        leave(step);
        return false;
      }
    }
    return true;
  }
  F8_DEVICE void leave(const GroupStep& step) {
    i32 to = left++;
    if (to == 0) {
      end_of_left = end_of_first = step.end_of_unit;
    } else if (step.end_of_unit != end_of_left) {  // of the next unit: it becomes the first one
      numbers[to] = numbers[0];
      end_of_first = step.end_of_unit;
      to = 0;
    }
    numbers[to] = step.number;
  }
};

// Config is that of Cast, with tensor and axis scales that are not delayed, and 16-bit inputs.
template <class Config>
struct GroupQuantize {
  static constexpr Input kInput = Config::kInput;
  using Rows = GroupRows<Config::kSource, kInput>;
  // The tile that a block holds waits in dynamic shared memory, or of a pair the one that is not worked on.
  static constexpr i32 kSharedBytes = kStashBytes;
  // No kernel reads the copies soon, so L2 gives their lines up first.
  using Casts = GroupCast<Config, Evict::kFirst>;
  using Copies = typename Casts::Copies;
  struct AmaxConfig {
    static constexpr Input kInput = Config::kInput;
    static constexpr bool kTensor = Copies::kTensorScale;
    static constexpr bool kRow = Copies::kRowAxis;
    static constexpr bool kCol = Copies::kColumnAxis;
    static constexpr bool kBlock = false;
    static constexpr bool kNoopFlag = false;
  };
  using Tiles = GroupTiles<!Copies::kTensorScale && !Copies::kRowAxis, !Rows::kPairs>;
  static_assert(kInput != Input::kF32 && !Copies::kTileAmax && Copies::kAfterAmax);

  // Calls work(column) for the tile, or for both of a pair, each of which the thread has in `fragment`
  // while it works on it; afterwards the first one.
  template <class Work>
  static F8_DEVICE void for_each_tile(const GroupTile& tile, i32 half,
                                      ThreadFragment<kInput>& fragment, const Work& work) {
    if constexpr (Rows::kPairs) {
#pragma unroll 1
      for (bool second = false;; second = true) {
        work(second ? tile.column + half : tile.column);
        if (half == 0) return;
        fragment.swap_with_stash(tile.row, second ? tile.column : tile.column + half);
        __syncthreads();  // before shared memory is written again
        if (second) return;
      }
    } else {
      work(tile.column);
    }
  }

  // The indices and the factors of a tile's rows, which are loaded while the tile before it is cast.
  struct Ahead {
    static constexpr bool kScores = Config::kSource == RowSource::kGatherScore;
    i32 index;
    float score;

    F8_DEVICE void load(const RowOperands& from, const GroupStep& step) {
      if constexpr (Rows::kGathers) {
        const i32 row = step.row + static_cast<i32>(threadIdx.x);
        if (!step.takes || threadIdx.x >= kCastTile || row >= step.length) return;
        index = from.index[step.start + row];
        if (kScores) score = from.score[step.start + row];
      }
    }
    F8_DEVICE void keep() const {
      if constexpr (Rows::kGathers) {
        if (threadIdx.x >= kCastTile) return;
        rows().index[threadIdx.x] = index;
        if (kScores) rows().score[threadIdx.x] = score;
      }
    }
    // The step's rows are `operands`' from its first one on.
    F8_DEVICE void give(const GroupStep& step, RowOperands& operands) const {
      if constexpr (Rows::kGathers) {
        operands.index = rows().index - (step.start + step.row);
        if (kScores) operands.score = rows().score - (step.start + step.row);
      }
    }

   private:
    struct OfTile {
      i32 index[kCastTile];
      float score[kScores ? kCastTile : 1];
    };
    static F8_DEVICE OfTile& rows() {
      __shared__ OfTile of_tile;
      return of_tile;
    }
  };

  static F8_DEVICE void run(const GroupQuantizeArgs& args) {
    grid_dependency_wait();
    launch_dependents();
    __shared__ Tiles tiles;
    const i32 cols = args.cast.tensor.cols;
    const i32 half = has_tile_pairs(Config::kSource, false, cols) ? cols / 2 : 0;
    tiles.begin(args, tiles_across(Config::kSource, false, cols));
    GroupStep* held = tiles.steps + 2;
    GroupStep* step = tiles.steps;
    GroupStep* coming = tiles.steps + 1;
    RowOperands operands = args.cast.source;
    Ahead ahead;
    ahead.load(args.cast.source, *step);
    ahead.keep();
    __syncthreads();
    while (step->takes || held->keeps) {
      ThreadFragment<kInput> fragment;
      if (step->takes) {
        ahead.give(*step, operands);
        Rows(args.cast.tensor, operands, step->start)
            .load_tile(Casts::matrix_of(args.cast, *step), step->row, step->column, half > 0,
                       fragment);
      }
      if (threadIdx.x == kLooks) tiles.look_at_held(args, *held);
      if (step->takes && !step->again) {
        const AmaxTensor t = group_of(maxima_of(args.cast), *step, Vec8<kInput>::kElementBytes);
        for_each_tile(*step, half, fragment, [&](i32 column) {
          Amax<AmaxConfig>::of_tile(t, fragment, step->row, column);
        });
      }
      __syncthreads();
      i32 number = 0;
      if (threadIdx.x == 0) number = tiles.publish(args, *step, *held);
      __syncthreads();
      if (threadIdx.x == kCounts && step->counts) Tiles::count(args, *step);
      const bool casts_held = step->casts == GroupStep::Casts::kHeld;
      const GroupStep& cast = casts_held ? *held : *step;
      if (casts_held && step->keeps) {
        fragment.swap_with_stash(cast.row, cast.column);
      } else if (casts_held) {
        fragment.restore(cast.row, cast.column);
      } else if (step->keeps) {
        fragment.stash();
      }
      if (step->casts == GroupStep::Casts::kNone) {
        if (threadIdx.x == 0) tiles.take(args, *coming, *step, number);
        __syncthreads();
        ahead.load(args.cast.source, *coming);
      } else {
        for_each_tile(cast, half, fragment, [&](i32 column) {
          const bool first = column == cast.column;
          Casts::cast_tile(
              args.cast, cast, column, fragment,
              [&] {
                if (first && threadIdx.x == 0) tiles.take(args, *coming, *step, number);
              },
              [&] {
                if (!first || !coming->takes) return;
                ahead.load(args.cast.source, *coming);
                Rows(args.cast.tensor, args.cast.source, coming->start)
                    .prefetch(Casts::matrix_of(args.cast, *coming), coming->row, coming->column);
              });
        });
      }
      ahead.keep();
      GroupStep* const last = held;
      held = step;
      step = coming;
      coming = last;
      __syncthreads();
    }
  }

 private:
  // Threads that do what thread 0 has no time for: one looks whether the held tile's unit is done, and one
  // counts a tile as done, which waits for the block's stores.
  static constexpr u32 kLooks = 32, kCounts = 64;
};

}  // namespace f8::kernels
