// The choice among cuBLASLt's suggestions for a GEMM in 16 bits where none was measured. The library
// lists them in an order of its own, whose first is far from the fastest for grad_weight; this model
// ranks them by their tiles, clusters and splits of K. Deterministic; no GPU needed.
#pragma once

#include <array>
#include <span>

#include "recipes/problem.hpp"
#include "runtime/gemm/cost_model.hpp"

namespace f8::runtime {

// What cuBLASLt says of a suggestion. Tiles and clusters are those of the row-major d [m][n].
struct Suggestion {
  int algorithm = 0;           // CUBLASLT_ALGO_CONFIG_ID
  int tile_m = 0, tile_n = 0;  // 0: a tile that is not known here
  int cluster_m = 1, cluster_n = 1;
  int split_k = 1;
  bool operator==(const Suggestion&) const = default;
};

// The algorithms that are known here: Hopper's tiled GEMM, which the model ranks, and the product of
// two vectors, which is the fastest wherever it is offered (K = 1).
constexpr int kTiledAlgorithm = 66;
constexpr int kVectorAlgorithm = 12;

// The terms of the lag of a suggestion behind the fastest (log time); `shape` is the GEMM's own.
[[nodiscard]] std::array<double, CostModel::kSuggestionTerms> suggestion_terms(
    const Suggestion& suggestion, Shape shape, int sm_count);

// Gives the index of the suggestion with the least lag; of equals, and where nothing is known of any,
// the first.
[[nodiscard]] size_t fastest_suggestion(std::span<const Suggestion> suggestions, Shape shape,
                                        int sm_count, const CostModel& model = CostModel::fitted());

}  // namespace f8::runtime
