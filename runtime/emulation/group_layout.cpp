// The layout of a routing, as the reference has it.
#include <algorithm>
#include <span>

#include "codegen/kernels/experts/group_args.cuh"
#include "recipes/reference/groups.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/emulation/kernels.hpp"

namespace f8::runtime::emulation {

void emulate(const codegen::GroupLayoutSpec&, const Call& call) {
  const auto& args = call.args<kernels::GroupLayoutArgs>();
  const kernels::GroupLayout& layout = args.layout;
  if (call.launch.grid != 1) call.fault("group layout: grid {}", call.launch.grid);
  if (layout.experts < 1 || layout.experts > kernels::kMaxExperts) {
    call.fault("group layout: {} experts", layout.experts);
  }
  if (args.m < 0 || args.m > layout.m_max) {
    call.fault("group layout: m {} of {}", args.m, layout.m_max);
  }
  if (!is_aligned(args.offsets, 4) || args.offsets == nullptr || !is_aligned(args.words) ||
      args.words == nullptr) {
    call.fault("group layout: offsets or words misaligned or null");
  }
  if (!call.faults.empty()) return;
  int32_t* const words = args.words;
  if (words[kernels::kGroupError] < kernels::kNoGroupError ||
      words[kernels::kGroupError] > kernels::kEndBeyondM) {
    return call.fault("a layout's memory was not zeros before its first offsets");
  }
  const reference::Groups groups =
      reference::groups(std::span(args.offsets, static_cast<size_t>(layout.experts)), args.m);
  if (groups.error != reference::GroupError::kNone &&
      words[kernels::kGroupError] == kernels::kNoGroupError) {
    words[kernels::kGroupError] = static_cast<int32_t>(groups.error);
    words[kernels::kBadExpert] = groups.bad_expert;
  }
  words[kernels::kGroupRows] = groups.rows;
  words[kernels::kGroupsInUse] = groups.in_use();
  std::ranges::copy(groups.starts, words + layout.at_starts());
  std::ranges::copy(groups.lengths, words + layout.at_lengths());
  std::ranges::copy(groups.blocks, words + layout.at_blocks());
  std::ranges::copy(groups.scales, words + layout.at_scales());
  std::ranges::copy(groups.order, words + layout.at_order());
  for (int table = 0; table < kernels::kRowTileTables; ++table) {
    const auto tiles = reference::row_tiles(groups, (table + 1) * kernels::kRowTileStep);
    words[kernels::kRowTileCounts + table] = static_cast<int32_t>(tiles.size());
    auto* to = reinterpret_cast<kernels::RowTile*>(words + layout.at_row_tiles(table));
    std::fill_n(to, layout.row_tiles(table), kernels::RowTile{-1, 0, 0, 0});
    for (const auto& [group, row, end, scale_row] : tiles) *to++ = {group, row, end, scale_row};
  }
}

}  // namespace f8::runtime::emulation
