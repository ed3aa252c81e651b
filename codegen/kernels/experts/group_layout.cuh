// The layout of a routing (group_args.cuh), from the ends of its groups: what every kernel of an
// expert linear reads in place of the offsets. Ends that fall, are negative or lie beyond m are
// clamped (the running maximum, then m), so that no later kernel leaves a buffer, and the first of
// them is kept as an error. One block does it, since each group's place depends on all before it.
#pragma once

#include "codegen/kernels/experts/group_args.cuh"
#include "codegen/kernels/ptx.cuh"

namespace f8::kernels {

struct Sum {
  F8_DEVICE i32 operator()(i32 a, i32 b) const { return a + b; }
};
struct Max {
  F8_DEVICE i32 operator()(i32 a, i32 b) const { return max(a, b); }
};

struct GroupScratch {
  alignas(16) i32 lengths[kGroupThreads];
  i32 ends[kGroupThreads];
  i32 scales[kGroupThreads];
  i32 first_tile[kRowTileTables][kGroupThreads + 1];  // of each group; then their number
  i32 warps[kRowTileTables + 1][kGroupThreads / 32];
  u32 first_bad;  // 4 * expert + error
};

// Replaces each thread's values by their sums (or maxima) over the threads up to it.
template <int kCount, class Op>
F8_DEVICE void scan_block(i32 (&value)[kCount], GroupScratch& scratch, const Op& op) {
  const i32 lane = static_cast<i32>(threadIdx.x % 32);
  const i32 warp = static_cast<i32>(threadIdx.x / 32);
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
      const i32 before = __shfl_up_sync(0xFFFFFFFFU, value[i], step);
      if (lane >= step) value[i] = op(value[i], before);
    }
    if (lane == 31) scratch.warps[i][warp] = value[i];
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kCount; ++i) {
    for (i32 before = 0; before < warp; ++before) value[i] = op(value[i], scratch.warps[i][before]);
  }
  __syncthreads();
}

F8_DEVICE void keep_first_error(const GroupLayoutArgs& args, i32 end, GroupScratch& scratch) {
  const i32 e = static_cast<i32>(threadIdx.x);
  if (e < args.layout.experts) {
    u32 error = kNoGroupError;
    if (end < 0) {
      error = kNegativeEnd;
    } else if (end > args.m) {
      error = kEndBeyondM;
    } else if (e > 0 && end < static_cast<i32>(load_global(
                                  reinterpret_cast<const u32*>(args.offsets + e - 1)))) {
      error = kFallingEnd;
    }
    if (error != kNoGroupError) atomicMin(&scratch.first_bad, static_cast<u32>(e) * 4 + error);
  }
  __syncthreads();
  if (e == 0 && scratch.first_bad != ~0U && args.words[kGroupError] == kNoGroupError) {
    args.words[kGroupError] = static_cast<i32>(scratch.first_bad % 4);
    args.words[kBadExpert] = static_cast<i32>(scratch.first_bad / 4);
  }
}

// The place of this thread's group among all by falling length.
F8_DEVICE i32 rank_of_group(const GroupLayout& layout, const GroupScratch& scratch) {
  const i32 e = static_cast<i32>(threadIdx.x);
  const i32 own = scratch.lengths[e];
  i32 rank = 0;
  for (i32 first = 0; first < layout.experts; first += 4) {
    const int4 four = *reinterpret_cast<const int4*>(scratch.lengths + first);
    const i32 length[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      rank += length[i] > own || (length[i] == own && first + i < e) ? 1 : 0;
    }
  }
  return rank;
}

F8_DEVICE void write_row_tiles(const GroupLayoutArgs& args, i32 table,
                               const GroupScratch& scratch) {
  const GroupLayout& layout = args.layout;
  const i32* const first_tile = scratch.first_tile[table];
  const i32 used = first_tile[layout.experts];
  const i32 rows = (table + 1) * kRowTileStep;
  int4* const to = reinterpret_cast<int4*>(args.words + layout.at_row_tiles(table));
  for (i32 i = static_cast<i32>(threadIdx.x); i < layout.row_tiles(table); i += kGroupThreads) {
    if (i >= used) {
      to[i] = make_int4(-1, 0, 0, 0);
      continue;
    }
    i32 group = 0;  // the last whose first tile is not behind i
    i32 behind = layout.experts;
    while (group + 1 < behind) {
      const i32 middle = (group + behind) / 2;
      if (first_tile[middle] <= i) {
        group = middle;
      } else {
        behind = middle;
      }
    }
    const i32 in_group = (i - first_tile[group]) * rows;
    const i32 end = scratch.ends[group];
    to[i] = make_int4(group, end - scratch.lengths[group] + in_group, end,
                      scratch.scales[group] + in_group);
  }
}

F8_DEVICE void group_layout(const GroupLayoutArgs& args) {
  __shared__ GroupScratch scratch;
  launch_dependents();
  grid_dependency_wait();
  const GroupLayout& layout = args.layout;
  const i32 e = static_cast<i32>(threadIdx.x);
  if (e == 0) scratch.first_bad = ~0U;
  const i32 given =
      e < layout.experts
          ? static_cast<i32>(load_global(reinterpret_cast<const u32*>(args.offsets + e)))
          : 0;
  i32 end[1] = {min(max(given, 0), args.m)};
  scan_block(end, scratch, Max{});
  keep_first_error(args, given, scratch);
  scratch.ends[e] = end[0];
  __syncthreads();
  const i32 start = e == 0 ? 0 : scratch.ends[e - 1];
  const i32 length = end[0] - start;
  scratch.lengths[e] = length;
  i32 sums[kRowTileTables + 1];
#pragma unroll
  for (int table = 0; table < kRowTileTables; ++table) {
    const i32 rows = (table + 1) * kRowTileStep;
    sums[table] = (length + rows - 1) / rows;
  }
  sums[kRowTileTables] = (length + 3) / 4 * 4;
  scan_block(sums, scratch, Sum{});
  scratch.scales[e] = sums[kRowTileTables] - (length + 3) / 4 * 4;
#pragma unroll
  for (int table = 0; table < kRowTileTables; ++table) {
    if (e == 0) scratch.first_tile[table][0] = 0;
    scratch.first_tile[table][e + 1] = sums[table];
  }
  const i32 in_use = __syncthreads_count(length > 0 ? 1 : 0);
  i32* const words = args.words;
  if (e < layout.experts) {
    words[layout.at_starts() + e] = start;
    words[layout.at_lengths() + e] = length;
    words[layout.at_blocks() + e] = scratch.first_tile[kCastTile / kRowTileStep - 1][e];
    words[layout.at_scales() + e] = scratch.scales[e];
    words[layout.at_order() + rank_of_group(layout, scratch)] = e;
  }
  if (e == 0) {
    words[kGroupRows] = scratch.ends[layout.experts - 1];
    words[kGroupsInUse] = in_use;
  }
  if (e < kRowTileTables) words[kRowTileCounts + e] = scratch.first_tile[e][layout.experts];
#pragma unroll 1
  for (i32 table = 0; table < kRowTileTables; ++table) write_row_tiles(args, table, scratch);
}

}  // namespace f8::kernels
