// What one database has and another has not, record by record: the exports of both, and the kernels
// that their tables choose. Times are compare.hpp's part.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "tuning_db/database.hpp"

namespace f8::tuning_db {

struct DiffRecord {
  std::string key;
  std::string text;  // what it is, for people
};

// The records of one kind: device, toolchain, method, run, problem, trial (a finished one) or
// decision (the kernel that the table chooses for a GEMM). Each list is sorted by key.
struct KindDiff {
  std::string kind;
  size_t in_a = 0, in_b = 0;
  std::vector<DiffRecord> only_a, only_b;
  std::vector<DiffRecord> changed;  // both have the key, with other values
};

// One element a kind, in the order above.
[[nodiscard]] Result<std::vector<KindDiff>> diff(const Database& a, const Database& b);

}  // namespace f8::tuning_db
