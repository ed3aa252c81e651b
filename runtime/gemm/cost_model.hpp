// The choice of a matmul's configuration where nothing was measured: a model of its time in SM
// clocks, evaluated for every candidate. Deterministic; no GPU needed.
//
//   time  = waves x (blocks of 128 of the contraction x block clocks + tile epilogue) + fill
//   block = max(tensor core, shared memory fill from L2, issue)
// A persistent grid works through its tiles in waves; the last one may be nearly empty, which is
// what makes small tiles win for small problems.
#pragma once

#include <vector>

#include "codegen/kernel_spec.hpp"
#include "recipes/problem.hpp"

namespace f8::runtime {

// The model's constants, in clocks and bytes a clock of one SM. They order candidates, they do not
// predict seconds.
struct CostModel {
  double l2_bytes_per_clock = 0;        // from L2 while all SMs read
  double port_bytes_per_clock = 0;      // from L2 while few SMs read
  double store_bytes_per_clock = 0;     // of the result, registers to L2
  double tile_overhead = 0;             // draining wgmma, scales, setting up the store
  double latency = 0;                   // from asking for a stage to having it
  double launch = 0;                    // once
  double cluster_skew = 0;              // once for each further CTA of a cluster
  double pingpong_epilogue = 0;         // the part that the other tile's products do not hide
  double exchange = 0;                  // a split's wait for the other CTAs
  double exchange_bytes_per_clock = 0;  // of its sums, there and back

  // The share of the tensor cores' rate that a tile's main loop sustains. Precise accumulation and
  // block scales promote between the products; with ping-pong no other warpgroup's products hide
  // that.
  struct Tile {
    int tile_m = 0, tile_n = 0, warpgroups = 0;
    bool pingpong = false;
    double fast = 0, precise = 0, block = 0;
  };
  std::vector<Tile> tiles;

  // As fitted to the built-in measurements by `float8-tune cost-model fit`.
  [[nodiscard]] static const CostModel& fitted();
};

// Predicted clocks of one product; `shape` is the GEMM's own.
[[nodiscard]] double predicted_clocks(const codegen::GemmSpec& spec, Shape shape, int sm_count,
                                      const CostModel& model = CostModel::fitted());

// The candidate with the fewest predicted clocks; spec.config is ignored. Ties go to the larger
// tile, then to the smaller group, then to the smaller key.
[[nodiscard]] Result<codegen::GemmConfig> cheapest_config(const codegen::GemmSpec& spec,
                                                          Shape shape, int sm_count);

}  // namespace f8::runtime
