// What verify-dist finds of one check.
#pragma once

#include <string>
#include <vector>

#include "tools/float8-tune/dist/linear_on_rank.hpp"

namespace f8::cli {

inline constexpr double kCastDb = 20;   // casts of one tensor with other scales are this close
inline constexpr double kSumDb = 40;    // sums over ranks, of parts that are rounded to bf16
inline constexpr double kOrderDb = 90;  // fp32 sums in another order

struct Finding {
  std::string check;
  bool bits = true;      // the rule: equal bits, else an SQNR of at least `needed_db`
  size_t different = 0;  // bytes
  double sqnr_db = 0;    // infinite for equal results
  double needed_db = 0;
  std::vector<std::string> notes;  // for each rank that differs: "rank 1 differs in ..."

  [[nodiscard]] bool is_good() const { return bits ? different == 0 : sqnr_db >= needed_db; }
};

// The ratio of the power of `expected` to that of the difference, in dB.
[[nodiscard]] double sqnr_db(const std::vector<float>& expected, const std::vector<float>& got);

// Adds a rank's part to a finding of equal bits.
void add_bits(Finding& finding, int rank, const Bytes& expected, const Bytes& got);
[[nodiscard]] Finding close_by(std::string check, const Bytes& expected, const Bytes& got,
                               Dtype type, double needed_db);

}  // namespace f8::cli
