// The parameters of the kernels that route tokens to experts and combine their rows (route.cuh,
// combine.cuh), shared with the host like those of kernel_args.cuh.
//
// A pair is a token and one of its experts; pair p is that of token p / top_k. Its row is its place in
// the order by expert, in which the pairs of one expert keep their order. A pair whose id is no expert's
// is dropped: the dropped pairs' rows are the last ones, from the end of the last expert's.
#pragma once

#include "codegen/kernels/experts/group_args.cuh"

namespace f8::kernels {

inline constexpr i32 kRouteThreads = 256;
// A chunk of pairs is a block's, in as many parts as it has warps, each of whole 32 pairs.
inline constexpr i32 kMinRouteChunk = 1024;
inline constexpr i32 kMaxRouteChunks = 128;

struct RouteArgs {
  const void* ids;      // i32 or i64 [pairs]
  const float* scores;  // [pairs], or null
  i32* counts;          // [chunks][experts + 1]: the pairs of each expert, then those dropped
  i32* index;           // [pairs]: the token of each row
  i32* position;        // [pairs]: the row of each pair
  i32* offsets;         // [experts]: the end of each one's rows
  float*
      row_scores;  // [pairs]: the score of each row, 0 where it is dropped; unused without scores
  i32 pairs;
  i32 top_k;
  i32 experts;
  i32 chunk;  // pairs

  // Also without pairs there is a chunk, so that the offsets are written.
  static F8_BOTH constexpr i32 chunk_of(i32 pairs) {
    const i32 least = (pairs + kMaxRouteChunks - 1) / kMaxRouteChunks;
    const i32 whole = (least + kRouteThreads - 1) / kRouteThreads * kRouteThreads;
    return whole < kMinRouteChunk ? kMinRouteChunk : whole;
  }
  static F8_BOTH constexpr i32 chunks_of(i32 pairs) {
    return pairs == 0 ? 1 : (pairs - 1) / chunk_of(pairs) + 1;
  }
};

struct CombineArgs {
  const void* y;        // [tokens top_k][cols]
  const float* scores;  // [tokens][top_k]; null: all are 1
  const i32* position;  // as RouteArgs
  const i32* rows;      // the last one of RouteArgs' offsets: rows from there on are not read
  void* out;            // [tokens][cols]
  i32 tokens;
  i32 cols;
  i32 top_k;
  i32 padding;
};

struct ScoreGradientArgs {
  const void* dout;     // [tokens][cols]
  const void* y;        // as CombineArgs
  const i32* position;  // as CombineArgs
  const i32* rows;      // as CombineArgs
  float* dscores;       // [tokens][top_k]
  i32 tokens;
  i32 cols;
  i32 top_k;
  i32 padding;
};

}  // namespace f8::kernels
