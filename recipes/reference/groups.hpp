// The CPU reference of the groups of an expert linear: where the rows of each expert are, from the
// ends that a router gives.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace f8::reference {

enum class GroupError : int32_t { kNone, kNegative, kFalling, kBeyondM };

// Rows [row, min(row + the tile's rows, end)) of a group; scale_row is where block scales have the
// first of them.
struct RowTile {
  int32_t group, row, end, scale_row;
  bool operator==(const RowTile&) const = default;
};

struct Groups {
  GroupError error = GroupError::kNone;
  int32_t bad_expert = 0;  // the first one, where there is an error
  int32_t rows = 0;        // of all groups
  std::vector<int32_t> starts, lengths;
  std::vector<int32_t> blocks;  // of 128 rows in the groups before, each group's its own
  std::vector<int32_t> scales;  // rows in the groups before, each padded to 4
  std::vector<int32_t> order;   // by falling length, equal ones in their order

  // The number of groups that have rows.
  [[nodiscard]] int32_t in_use() const {
    return static_cast<int32_t>(lengths.size()) -
           static_cast<int32_t>(std::ranges::count(lengths, 0));
  }
};

// Group e ends at ends[e]. Ends that fall, are negative or lie beyond m are replaced by the largest
// up to them, and that by m.
[[nodiscard]] Groups groups(std::span<const int32_t> ends, int32_t m);
// The tiles of so many rows of all groups, in order.
[[nodiscard]] std::vector<RowTile> row_tiles(const Groups& groups, int32_t rows);

}  // namespace f8::reference
