// The choice among cuBLASLt's suggestions for a GEMM in 16 bits where none was measured. The library
// lists them in an order of its own, whose first is far from the fastest for grad_weight; this model
// ranks them by their tiles, clusters and splits of K. Deterministic; no GPU needed.
#pragma once

#include <array>
#include <span>

#include "recipes/problem.hpp"
#include "runtime/gemm/cost_model.hpp"

namespace f8::runtime {

// Hopper's tiled GEMM, which the model ranks, and the product of two vectors, which is the fastest
// wherever it is offered (K = 1).
constexpr int kTiledAlgorithm = 66;
constexpr int kVectorAlgorithm = 12;

// A suggestion as cuBLASLt describes it. Tiles and clusters are those of the row-major d [m][n], and of no
// size where they are none that is known here.
struct Suggestion {
  int algorithm = 0;  // CUBLASLT_ALGO_CONFIG_ID
  int tile_m = 0, tile_n = 0;
  int cluster_m = 0, cluster_n = 0;
  int split_k = 1;
  bool operator==(const Suggestion&) const = default;
  [[nodiscard]] bool is_ranked() const {
    return algorithm == kTiledAlgorithm && tile_m > 0 && cluster_m > 0;
  }
};

// The terms of the lag of a ranked suggestion behind the fastest (log time); `shape` is the GEMM's own.
[[nodiscard]] std::array<double, CostModel::kSuggestionTerms> suggestion_terms(
    const Suggestion& suggestion, Shape shape, int sm_count);

// Gives the index of the suggestion that ranks first: a product of vectors, else the one with the least
// lag. Of equals, and where nothing is known of any, it is the first.
[[nodiscard]] size_t rank_first(std::span<const Suggestion> suggestions, Shape shape, int sm_count,
                                const CostModel& model = CostModel::fitted());

}  // namespace f8::runtime
