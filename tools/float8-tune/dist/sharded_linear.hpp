// One linear over ranks, compared with the same linear on one device. Each rank holds rows of the weight
// (FSDP) and takes a share of the tokens:
//
//   kernels  what the ranks' linears run, in words: equal
//   scales   of delayed scaling, behind a step of all ranks: equal
//   copies   the gathered fp8 copies of the weight, against a cast of the whole weight: bits
//   y, dx    of a rank's tokens with the gathered copies, against the linear with the whole weight: bits
//   dw       the reduce-scattered sum of the ranks' gradients, against their sum in the ranks' order:
//            bits where a sum has one order, else SQNR
//   batch    y, dx and dw of all tokens, against one device's that takes all of them at once: SQNR
//
// The checks of tensor_parallel.hpp follow.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "recipes/recipe.hpp"
#include "tools/float8-tune/dist/finding.hpp"

namespace f8::cli {

struct ShardedProblem {
  std::string recipe;       // the name of a named one
  Shape shape;              // of all ranks
  bool one_order = false;   // sums over ranks have one order
  bool one_kernel = false;  // a part of a GEMM adds up K in the order of the whole one
  [[nodiscard]] Recipe settings() const { return recipe_of_label(recipe); }
};

// All ranks are joined.
[[nodiscard]] Result<std::vector<Finding>> verify_sharded(const DeviceRanks& ranks,
                                                          const ShardedProblem& problem);

}  // namespace f8::cli
