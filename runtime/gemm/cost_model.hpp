// The choice of a GEMM's configuration where nothing was measured: a model of its time in SM
// clocks, evaluated for every candidate. Deterministic; no GPU needed.
//
//   time  = waves x (blocks of 128 of K x block clocks + tile epilogue) + launch
//   block = max(tensor core, shared memory fill from L2, latency / stages)
// A persistent grid works through its tiles in waves. The last wave may be nearly empty, which is
// why small tiles win for small problems.
#pragma once

#include <array>
#include <span>
#include <vector>

#include "codegen/kernel_spec.hpp"
#include "recipes/problem.hpp"

namespace f8::runtime {

// The model's constants, in clocks and bytes a clock of one SM. They order candidates, they do not
// predict seconds.
struct CostModel {
  double l2_bytes_per_clock = 0;        // reads from L2 while all SMs read
  double port_bytes_per_clock = 0;      // reads from L2 while few SMs read
  double store_bytes_per_clock = 0;     // the result goes from registers to L2
  double tile_overhead = 0;             // draining wgmma, scales, setting up the store
  double latency = 0;                   // a stage is loaded so long after its request
  double launch = 0;                    // is added once
  double cluster_skew = 0;              // is added once for each further CTA of a cluster
  double pingpong_epilogue = 0;         // the share that the other tile's MMAs do not hide
  double exchange = 0;                  // a CTA of split-K waits for the others
  double exchange_bytes_per_clock = 0;  // the DSMEM reduction, there and back

  // The share of the tensor cores' rate that a tile's main loop sustains. Promoted fp32
  // accumulation and block scales add up between the MMAs; with ping-pong no other warpgroup's MMAs
  // hide that.
  struct Tile {
    int tile_m = 0, tile_n = 0, warpgroups = 0;
    bool pingpong = false;
    double fast = 0, precise = 0, block = 0;
  };
  std::vector<Tile> tiles;

  // The coefficients of library_terms(): what cuBLASLt's first suggestion takes under tensor scales.
  static constexpr size_t kLibraryTerms = 19;
  std::array<double, kLibraryTerms> library = {1};  // not fitted: far behind

  // The coefficients of suggestion_terms(): a suggestion of cuBLASLt's behind its fastest.
  static constexpr size_t kSuggestionTerms = 12;
  std::array<double, kSuggestionTerms> suggestions = {};

  // The constants that benchmarks/fit found for the built-in measurements.
  [[nodiscard]] static const CostModel& fitted();
};

// Predicts the clocks of one GEMM; `shape` is the GEMM's own.
[[nodiscard]] double predicted_clocks(const codegen::GemmSpec& spec, Shape shape, int sm_count,
                                      const CostModel& model = CostModel::fitted());

// The configuration that was the fastest at a measured shape, so many octaves from the one asked for.
struct NearbyWinner {
  GemmConfig config;
  double octaves = 0;
};
constexpr size_t kMostNearby = 8;

// The predicted clocks, less for a configuration that won nearby. Each winner has a vote, which
// counts the more the nearer it is; a configuration that has them all is taken for 12 % faster.
[[nodiscard]] double voted_clocks(const codegen::GemmSpec& spec, Shape shape, int sm_count,
                                  std::span<const NearbyWinner> nearby,
                                  const CostModel& model = CostModel::fitted());

// Gives the candidate with the fewest voted clocks; spec.config is ignored. Ties go to the larger
// tile, then to the smaller raster group, then to the smaller key. The rows of an M-grouped GEMM are
// `groups` groups, whose last tiles are half full in the mean.
[[nodiscard]] Result<GemmConfig> cheapest_config(const codegen::GemmSpec& spec, Shape shape,
                                                 int sm_count,
                                                 std::span<const NearbyWinner> nearby = {},
                                                 int64_t groups = 0);

// The terms of cuBLASLt's lag behind a generated kernel of so many clocks: a constant, and a line with
// bends in each of log2 of m, of n, of k and of the efficiency, which is the share of the tensor
// cores' rate that these clocks are.
[[nodiscard]] std::array<double, CostModel::kLibraryTerms> library_terms(Shape shape, int sm_count,
                                                                         double clocks);

// Tells whether cuBLASLt's first suggestion is taken in place of a generated kernel of so many
// clocks. The model is of tensor scales: under other scales generated kernels are ahead nearly always.
[[nodiscard]] bool prefers_library(const codegen::GemmSpec& spec, Shape shape, int sm_count,
                                   double clocks, const CostModel& model = CostModel::fitted());

}  // namespace f8::runtime
