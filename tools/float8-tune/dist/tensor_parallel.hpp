// A linear over tensor-parallel ranks, compared with one device's:
//
//   column   w is sharded by rows of N. x is sharded by the sequence, cast over ranks and gathered in
//            fp8; dy by columns; the ranks' dx are summed and scattered.
//   row      w and x are sharded by columns of K, and dy by the sequence; the ranks' y are summed and
//            scattered.
//
// All scales are those of whole tensors. y and dw of the first, and dx and dw of the second, are parts of
// one device's results: bits where a part of a GEMM adds up K in the same order. Sums over ranks are SQNR.
// A shape that the ranks do not share equally has no checks.
#pragma once

#include "tools/float8-tune/dist/sharded_linear.hpp"

namespace f8::cli {

// `whole` is one device's results.
[[nodiscard]] Result<std::vector<Finding>> verify_tensor_parallel(const DeviceRanks& ranks,
                                                                  const ShardedProblem& problem,
                                                                  const Inputs& inputs,
                                                                  const Results& whole);

}  // namespace f8::cli
