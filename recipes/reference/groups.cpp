#include "recipes/reference/groups.hpp"

#include <algorithm>
#include <numeric>

namespace f8::reference {
namespace {

GroupError error_of(int32_t end, int32_t before, int32_t m) {
  if (end < 0) return GroupError::kNegative;
  if (end > m) return GroupError::kBeyondM;
  return end < before ? GroupError::kFalling : GroupError::kNone;
}

}  // namespace

Groups groups(std::span<const int32_t> ends, int32_t m) {
  Groups all;
  int32_t given = 0;
  int32_t blocks = 0;
  int32_t scales = 0;
  for (size_t e = 0; e < ends.size(); ++e) {
    const GroupError error = error_of(ends[e], given, m);
    if (error != GroupError::kNone && all.error == GroupError::kNone) {
      all.error = error;
      all.bad_expert = static_cast<int32_t>(e);
    }
    given = ends[e];
    const int32_t end = std::max(all.rows, std::min(given, m));
    const int32_t length = end - all.rows;
    all.starts.push_back(all.rows);
    all.lengths.push_back(length);
    all.blocks.push_back(blocks);
    all.scales.push_back(scales);
    all.rows = end;
    blocks += (length + 127) / 128;
    scales += (length + 3) / 4 * 4;
  }
  all.order.resize(ends.size());
  std::iota(all.order.begin(), all.order.end(), 0);
  std::ranges::stable_sort(all.order, std::ranges::greater{},
                           [&](int32_t e) { return all.lengths[static_cast<size_t>(e)]; });
  return all;
}

std::vector<RowTile> row_tiles(const Groups& groups, int32_t rows) {
  std::vector<RowTile> tiles;
  for (size_t e = 0; e < groups.starts.size(); ++e) {
    for (int32_t at = 0; at < groups.lengths[e]; at += rows) {
      tiles.push_back({.group = static_cast<int32_t>(e),
                       .row = groups.starts[e] + at,
                       .end = groups.starts[e] + groups.lengths[e],
                       .scale_row = groups.scales[e] + at});
    }
  }
  return tiles;
}

}  // namespace f8::reference
