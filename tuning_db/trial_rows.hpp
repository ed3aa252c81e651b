// Trials as rows of one select, with the ids that tell which of them are comparable. Internal to
// tuning_db.
#pragma once

#include <string>
#include <tuple>
#include <vector>

#include "tuning_db/rows.hpp"

namespace f8::tuning_db {

struct IdentifiedRow {
  int64_t problem = 0, device_class = 0, toolchain = 0, method = 0;  // row ids
  TrialRow row;

  [[nodiscard]] bool is_comparable(const IdentifiedRow& other) const {
    return toolchain == other.toolchain && method == other.method;
  }
};

// For people: "driver 580.65.06, CUDA 13.0, ...".
[[nodiscard]] std::string describe(const Toolchain& toolchain);

// SELECT ... FROM trial t JOIN run r, problem p, candidate c, device_unit u, device_class d,
// toolchain tc, method m: the columns that read_row expects.
[[nodiscard]] std::string select_rows();
[[nodiscard]] Result<IdentifiedRow> read_row(const Statement& statement, const std::string& layer);

using RowGroup = std::tuple<int64_t, int64_t, Impl>;  // problem, device class, implementation
[[nodiscard]] RowGroup group_of(const IdentifiedRow& row);
// The rows that count now: for each problem, device class and implementation only those of the
// toolchain and method measured last. Without this an old row could be best for ever.
[[nodiscard]] std::vector<IdentifiedRow> newest(std::vector<IdentifiedRow> rows);

}  // namespace f8::tuning_db
