// One linear over ranks, beside the same linear on one device. Each rank holds rows of the weight
// (FSDP) and takes a share of the tokens:
//
//   copies   the gathered fp8 copies of the weight, beside a cast of the whole weight: bits
//   y, dx    of a rank's tokens with the gathered copies, beside the linear with the whole weight: bits
//   dw       the reduce-scattered sum of the ranks' gradients, beside their sum in the ranks' order:
//            bits where a sum has one order, else SQNR
//   batch    y, dx and dw of all tokens, beside one device's that takes all of them at once: SQNR
//   kernels  what the ranks' linears run, in words: equal
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "tools/float8-tune/dist/device_rank.hpp"

namespace f8::cli {

struct ShardedProblem {
  std::string recipe;
  int64_t tokens = 0;  // of all ranks
  int64_t n = 0;
  int64_t k = 0;
  bool one_order = false;  // sums over ranks have one order
};

struct Finding {
  std::string check;
  bool bits = true;      // the rule: equal bits, else an SQNR of at least `needed_db`
  size_t different = 0;  // bytes
  double sqnr_db = 0;    // infinite for equal results
  double needed_db = 0;

  [[nodiscard]] bool is_good() const { return bits ? different == 0 : sqnr_db >= needed_db; }
};

// The ratio of the power of `expected` to that of the difference, in dB.
[[nodiscard]] double sqnr_db(const std::vector<float>& expected, const std::vector<float>& got);

// All ranks are joined.
[[nodiscard]] Result<std::vector<Finding>> verify_sharded(const DeviceRanks& ranks,
                                                          const ShardedProblem& problem);

}  // namespace f8::cli
