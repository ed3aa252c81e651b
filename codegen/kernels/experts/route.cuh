// The routing of a mixture of experts: from the experts of each token to the row of each pair
// (moe_args.cuh), by counting. A first launch counts each chunk's pairs by expert; in a second one
// each block adds up the counts before its own, and gives its pairs their rows. Nothing depends on
// scheduling, so the rows are the same from run to run.
#pragma once

#include "codegen/kernels/experts/moe_args.cuh"
#include "codegen/kernels/ptx.cuh"

namespace f8::kernels {

inline constexpr i32 kRouteWarps = kRouteThreads / 32;
inline constexpr i32 kMaxBuckets = kMaxExperts + 1;  // the last one has the dropped pairs

template <class Id>
F8_DEVICE i32 bucket_of(const RouteArgs& args, i32 pair) {
  const Id id = static_cast<const volatile Id*>(args.ids)[pair];
  return id >= 0 && id < args.experts ? static_cast<i32>(id) : args.experts;
}

template <class Id>
F8_DEVICE void route_count(const RouteArgs& args) {
  __shared__ i32 counts[kMaxBuckets];
  const i32 thread = static_cast<i32>(threadIdx.x);
  launch_dependents();
  for (i32 b = thread; b <= args.experts; b += kRouteThreads) counts[b] = 0;
  __syncthreads();
  grid_dependency_wait();
  const i32 first = static_cast<i32>(blockIdx.x) * args.chunk;
  const i32 end = min(first + args.chunk, args.pairs);
  for (i32 pair = first + thread; pair < end; pair += kRouteThreads) {
    atomicAdd(&counts[bucket_of<Id>(args, pair)], 1);
  }
  __syncthreads();
  i32* const to = args.counts + i64{blockIdx.x} * (args.experts + 1);
  for (i32 b = thread; b <= args.experts; b += kRouteThreads) to[b] = counts[b];
}

struct RouteScratch {
  i32 rows[kRouteWarps][kMaxBuckets];  // the counts of each warp's pairs, then their next rows
  i32 totals[kMaxBuckets];             // of all chunks, then the first row of each bucket
  i32 before[kMaxBuckets];             // of the chunks before this one
  i32 warps[kRouteWarps];
};

F8_DEVICE void add_up_chunks(const RouteArgs& args, RouteScratch& scratch) {
  constexpr i32 kInFlight = 16;
  const i32 chunks = static_cast<i32>(gridDim.x);
  const i32 own = static_cast<i32>(blockIdx.x);
  for (i32 b = static_cast<i32>(threadIdx.x); b <= args.experts; b += kRouteThreads) {
    i32 total = 0;
    i32 before = 0;
    for (i32 chunk = 0; chunk < chunks; chunk += kInFlight) {
      i32 count[kInFlight];
#pragma unroll
      for (i32 i = 0; i < kInFlight; ++i) {
        const i32* const from = args.counts + i64{chunk + i} * (args.experts + 1) + b;
        count[i] = chunk + i < chunks
                       ? static_cast<i32>(load_global(reinterpret_cast<const u32*>(from)))
                       : 0;
      }
#pragma unroll
      for (i32 i = 0; i < kInFlight; ++i) {
        total += count[i];
        if (chunk + i < own) before += count[i];
      }
    }
    scratch.totals[b] = total;
    scratch.before[b] = before;
  }
}

// Replaces the totals by the sums of those before; each thread has neighbouring buckets.
F8_DEVICE void scan_totals(const RouteArgs& args, RouteScratch& scratch) {
  constexpr i32 kEach = (kMaxBuckets + kRouteThreads - 1) / kRouteThreads;
  const i32 lane = static_cast<i32>(threadIdx.x % 32);
  const i32 warp = static_cast<i32>(threadIdx.x / 32);
  const i32 first = static_cast<i32>(threadIdx.x) * kEach;
  const i32 end = min(first + kEach, args.experts + 1);
  i32 own = 0;
  for (i32 b = first; b < end; ++b) own += scratch.totals[b];
  i32 sum = own;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const i32 before = __shfl_up_sync(0xFFFFFFFFU, sum, step);
    if (lane >= step) sum += before;
  }
  if (lane == 31) scratch.warps[warp] = sum;
  __syncthreads();
  i32 row = sum - own;
  for (i32 before = 0; before < warp; ++before) row += scratch.warps[before];
  for (i32 b = first; b < end; ++b) {
    const i32 total = scratch.totals[b];
    scratch.totals[b] = row;
    row += total;
    if (blockIdx.x == 0 && b < args.experts) args.offsets[b] = row;
  }
}

// The pairs of a warp, 32 at a time: those of one bucket have neighbouring rows.
template <class Id>
F8_DEVICE void place_pairs(const RouteArgs& args, i32 pair, i32 end, i32* rows) {
  const u32 lane = threadIdx.x % 32;
  for (pair += static_cast<i32>(lane); pair - static_cast<i32>(lane) < end; pair += 32) {
    const bool is_pair = pair < end;
    const i32 bucket = is_pair ? bucket_of<Id>(args, pair) : -1;
    const u32 peers = __match_any_sync(0xFFFFFFFFU, bucket);
    const i32 rank = __popc(peers & ((1U << lane) - 1));
    const i32 row = is_pair ? rows[bucket] + rank : 0;
    __syncwarp();
    if (is_pair && rank == 0) rows[bucket] += __popc(peers);
    __syncwarp();
    if (!is_pair) continue;
    args.position[pair] = row;
    args.index[row] = static_cast<i32>(static_cast<u32>(pair) / static_cast<u32>(args.top_k));
    if (args.scores != nullptr) {
      args.row_scores[row] = bucket < args.experts ? load_global(args.scores + pair) : 0.0F;
    }
  }
}

template <class Id>
F8_DEVICE void route_place(const RouteArgs& args) {
  __shared__ RouteScratch scratch;
  const i32 thread = static_cast<i32>(threadIdx.x);
  const i32 warp = thread / 32;
  launch_dependents();
  for (i32 b = thread; b <= args.experts; b += kRouteThreads) {
#pragma unroll
    for (i32 w = 0; w < kRouteWarps; ++w) scratch.rows[w][b] = 0;
  }
  __syncthreads();
  grid_dependency_wait();
  const i32 part = args.chunk / kRouteWarps;
  const i32 first = static_cast<i32>(blockIdx.x) * args.chunk + warp * part;
  const i32 end = min(first + part, args.pairs);
  for (i32 pair = first + thread % 32; pair < end; pair += 32) {
    atomicAdd(&scratch.rows[warp][bucket_of<Id>(args, pair)], 1);
  }
  add_up_chunks(args, scratch);
  __syncthreads();
  scan_totals(args, scratch);
  __syncthreads();
  for (i32 b = thread; b <= args.experts; b += kRouteThreads) {
    i32 row = scratch.totals[b] + scratch.before[b];
#pragma unroll
    for (i32 w = 0; w < kRouteWarps; ++w) {
      const i32 count = scratch.rows[w][b];
      scratch.rows[w][b] = row;
      row += count;
    }
  }
  __syncthreads();
  place_pairs<Id>(args, first, end, scratch.rows[warp]);
}

}  // namespace f8::kernels
