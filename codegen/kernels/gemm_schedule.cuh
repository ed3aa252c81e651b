// Which tiles of the result a CTA of the matmul computes, and in which order. Clusters take units
// of kClusterM x kClusterN tiles in turn, ordered so that args.group tiles of m stay together and
// their operands in L2, and every other group goes back through n. The units of a second product,
// which has the shorter contraction, come after those of the first: workers that got one unit of
// the first less than others begin with args.extra of the second.
#pragma once

#include "ptx.cuh"

namespace f8::kernels {

struct GemmTile {
  u32 problem;
  i32 row, column;  // the first ones
  u32 first_block;  // of k
  u32 k_blocks;
};

template <class Config>
struct GemmSchedule {
  static constexpr int kClusterSize = Config::kClusterM * Config::kClusterN * Config::kSplitK;
  static constexpr u32 kUnitM = Config::kTileM * Config::kClusterM;
  static constexpr u32 kUnitN = Config::kTileN * Config::kClusterN;

  const GemmArgs& args;
  u32 units[Config::kProblems];
  u32 worker, workers, round;
  u32 rank_m, rank_n, rank_k;

  F8_DEVICE GemmSchedule(const GemmArgs& arguments, u32 rank) : args(arguments) {
#pragma unroll
    for (int i = 0; i < Config::kProblems; ++i) {
      const GemmProblem& problem = args.problems[i];
      units[i] = ((problem.m + kUnitM - 1) / kUnitM) * ((problem.n + kUnitN - 1) / kUnitN);
    }
    worker = blockIdx.x / kClusterSize;
    if constexpr (kClusterSize == 2) worker = args.places[worker];
    workers = gridDim.x / kClusterSize;
    round = 0;
    rank_m = rank % Config::kClusterM;
    rank_n = Config::kSplitK > 1 ? 0 : rank / Config::kClusterM;
    rank_k = Config::kSplitK > 1 ? rank : 0;
  }
  // The unit of the second product that this worker takes in its `turn`.
  F8_DEVICE u32 second_unit(u32 turn) const {
    const u32 busy = units[0] % workers;  // these got one of the first more
    const u32 first_turns = busy > 0 ? args.extra * (workers - busy) : 0;
    if (busy == 0 || worker < busy) return first_turns + turn * workers + worker;
    if (turn < args.extra) return turn * (workers - busy) + worker - busy;
    return first_turns + (turn - args.extra) * workers + worker;
  }
  F8_DEVICE bool take(GemmTile& tile) {
    u32 unit = round * workers + worker;
    tile.problem = 0;
    if (unit >= units[0]) {
      if constexpr (Config::kProblems == 1) return false;
      tile.problem = Config::kProblems - 1;
      unit = second_unit(round - (units[0] + workers - 1 - worker) / workers);
      if (unit >= units[tile.problem]) return false;
    }
    ++round;
    const GemmProblem& problem = args.problems[tile.problem];
    const u32 units_m = (problem.m + kUnitM - 1) / kUnitM;
    const u32 units_n = (problem.n + kUnitN - 1) / kUnitN;
    const u32 group_units = max(args.group / Config::kClusterM, 1U);
    const u32 first = unit / (group_units * units_n) * group_units;
    const u32 size = min(units_m - first, group_units);
    const u32 inside = unit - first * units_n;
    u32 unit_n = inside / size;
    const u32 unit_m = first + (inside - unit_n * size);
    if (first / group_units % 2 != 0) unit_n = units_n - 1 - unit_n;
    tile.row = static_cast<i32>((unit_m * Config::kClusterM + rank_m) * Config::kTileM);
    tile.column = static_cast<i32>((unit_n * Config::kClusterN + rank_n) * Config::kTileN);
    tile.first_block = 0;
    tile.k_blocks = (problem.k + kStageK - 1) / kStageK;
    if constexpr (Config::kSplitK > 1) {
      // Equal shares: what lies beyond k reads as zero.
      tile.k_blocks = (tile.k_blocks + Config::kSplitK - 1) / Config::kSplitK;
      tile.first_block = tile.k_blocks * rank_k;
    }
    return true;
  }
};

}  // namespace f8::kernels
