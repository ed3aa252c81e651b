#include "runtime/linear/plan_casts.hpp"

#include <algorithm>

#include "runtime/device/memory.hpp"

namespace f8::runtime {
namespace {

using codegen::ScaleMode;
using Kind = Launch::Kind;

// `recorded`: where the amaxes of delayed scaling go.
CastOperand cast_operand(const FusedCast& fused, const TensorBuffers& at, Ref recorded) {
  const codegen::CastSpec& cast = fused.cast;
  CastOperand operand{.x = at.x, .rows = at.rows, .cols = at.cols};
  operand.partials = has_scale(cast, ScaleMode::kAxis) ? at.amax : at.partials;
  operand.tile_amax = at.tile_amax;
  operand.row_amax = at.row_amax;
  operand.col_amax = at.col_amax;
  operand.q = at.q;
  operand.qt = at.qt;
  operand.scale = cast.qt && cast.scale_qt == ScaleMode::kTensor ? at.qt_scale : at.q_scale;
  operand.inv_row = at.q_scale;
  operand.inv_col = at.qt_scale;
  if (fused.slot >= 0) {
    operand.delayed = word_at(Slot::kScale, fused.slot * kernels::kScaleStride);
    operand.recorded_amax = word_at(recorded, fused.slot);
  }
  operand.counters =
      Ref(Slot::kCounters) + 2 * static_cast<size_t>(fused.tensor) * sizeof(kernels::CastCounters);
  return operand;
}

}  // namespace

CastOperand cache_operand(const LinearLayout& layout, const FusedCast& cast) {
  return cast_operand(cast, layout.cache, Slot::kAmax);
}

Launch clear_amax(Ref begin, Ref end, std::optional<int64_t> rows) {
  const auto words = static_cast<int64_t>((end.offset() - begin.offset()) / sizeof(uint32_t));
  return {.kind = Kind::kSetWords,
          .name = "clear amax",
          .out = begin,
          .count = words + rows.value_or(0),
          .count_m = rows == 0};
}

// The largest m of a call for which `holds`, which then holds for every smaller one; 0: none.
template <class Holds>
int64_t CastPlanner::largest_m(Holds&& holds) const {
  int64_t below = 0;
  int64_t above = m_max_ + 1;
  while (above - below > 1) {
    const int64_t middle = below + (above - below) / 2;
    (holds(middle) ? below : above) = middle;
  }
  return below;
}

Result<std::vector<CastPlanner::Pass>> CastPlanner::passes(CopySet copies, bool first_step) {
  const auto [at, is_new] = passes_.try_emplace({copies, first_step});
  if (!is_new) return at->second;
  const ContextOptions& options = context_.options();
  for (KernelPass& spec : kernels_.passes(copies, first_step)) {
    Pass pass{.spec = std::move(spec)};
    if (pass.spec.amax) pass.amax = F8_TRY(context_.kernel(*pass.spec.amax));
    pass.cast = F8_TRY(context_.kernel(pass.spec.cast));
    if (const auto& one = pass.spec.one_launch;
        one && (options.cooperative_launch || !codegen::is_cooperative(*one))) {
      pass.quantize = F8_TRY(context_.kernel(*one));
    }
    if (pass.spec.summing) pass.summing = F8_TRY(context_.kernel(*pass.spec.summing));
    at->second.push_back(std::move(pass));
  }
  return at->second;
}

void CastPlanner::set_operands(Pass& pass, const CastSection& section) const {
  const Ref recorded = section.recording ? shared_.first : Slot::kAmax;
  for (const FusedCast& fused : pass.spec.casts) {
    CastOperand operand = cast_operand(fused, section.tensors.of(fused.tensor), recorded);
    if (section.recording) operand.counters = {};
    if (const auto amax = amax_before(fused.cast)) {
      operand.tile_amax_up_to_m = largest_m(
          [&](int64_t m) { return fits_tile_amax(*amax, operand.rows_at(m), operand.cols); });
    }
    pass.operands.push_back(operand);
  }
}

// The largest m for which a pass goes as `launches` says, or in fewer launches.
int64_t CastPlanner::largest_m(const Pass& pass, Launches launches) const {
  if (pass.quantize == nullptr) return 0;
  return largest_m([&](int64_t m) {
    std::vector<QuantizeOperand> sizes;
    for (const CastOperand& x : pass.operands) {
      sizes.push_back({.rows = x.rows_at(m), .cols = x.cols});
    }
    return quantize_launches(*pass.spec.one_launch, context_.device().sm_count, sizes) <= launches;
  });
}

// Up to which m a pass may overlap the one before it: one launch each, of different tensors; and
// where blocks wait for each other, so small that all are resident.
int64_t CastPlanner::overlaps_up_to(const Pass& before, const Pass& pass) const {
  for (const FusedCast& cast : pass.spec.casts) {
    if (std::ranges::count(before.spec.casts, cast.tensor, &FusedCast::tensor) > 0) return 0;
  }
  int64_t m = m_max_;
  bool waits = false;
  for (const Pass* each : {&before, &pass}) {
    if (!each->spec.amax) continue;
    m = std::min(m, each->one_launch_up_to_m);
    waits = waits || !codegen::scales_rows_alone(each->spec.cast);
  }
  const int64_t resident = resident_quantize_blocks(context_.device().sm_count);
  return !waits ? m
                : std::min(m, largest_m([&](int64_t at) {
                             return tiles_of(before.operands, at) + tiles_of(pass.operands, at) <=
                                    resident;
                           }));
}

// The clear of the amax buffer before a launch that raises words of it, for the m for which no
// launch before has had it cleared.
void CastPlanner::add_clear(CastSection& section, const Pass& pass, int64_t above_m) const {
  if (!pass.spec.amax->row && !pass.spec.amax->col) return;
  Launch& clear = section.clear;
  clear.above_m = std::max(
      above_m,
      std::ranges::min(pass.operands, {}, &CastOperand::tile_amax_up_to_m).tile_amax_up_to_m);
  clear.up_to_m = section.cleared_above_m;
  if (clear.above_m >= clear.up_to_m) return;
  section.cleared_above_m = clear.above_m;
  section.list.push_back(clear);
}

void CastPlanner::add_pass(CastSection& section, Pass& pass, const Pass* before) const {
  const KernelPass& spec = pass.spec;
  set_operands(pass, section);
  const int64_t one = pass.one_launch_up_to_m = largest_m(pass, Launches::kOne);
  const int64_t each = largest_m(pass, Launches::kOneEach);
  const int64_t overlaps = before == nullptr ? 0 : overlaps_up_to(*before, pass);
  const auto read = static_cast<double>(size_bytes(spec.cast.in));
  const double moved = read + (spec.cast.q ? 1 : 0) + (spec.cast.qt ? 1 : 0);
  Launch quantize{.kind = Kind::kQuantize, .name = spec.quantize_name, .kernel = pass.quantize};
  quantize.bytes_per_element = moved;
  quantize.up_to_m = one;
  quantize.overlaps_up_to_m = overlaps;
  quantize.operands = pass.operands;
  quantize.workspace = shared_.sync;
  if (one > 0) section.list.push_back(quantize);
  for (size_t i = 0; each > one && i < pass.operands.size(); ++i) {
    quantize.name = spec.casts[i].quantize_name;
    quantize.above_m = one;
    quantize.up_to_m = each;
    quantize.overlaps_up_to_m = 0;
    quantize.operands = {pass.operands[i]};
    section.list.push_back(quantize);
  }
  if (each == m_max_) return;
  if (spec.amax) {
    add_clear(section, pass, each);
    Launch amax{.kind = Kind::kAmax, .name = spec.amax_name, .kernel = pass.amax};
    amax.bytes_per_element = read;
    amax.above_m = each;
    amax.operands = pass.operands;
    section.list.push_back(std::move(amax));
  }
  Launch cast{.kind = Kind::kCast, .name = spec.cast_name, .kernel = pass.cast};
  cast.bytes_per_element = moved;
  cast.above_m = each;
  if (!spec.amax) cast.overlaps_up_to_m = overlaps;
  cast.operands = pass.operands;
  if (section.sums && pass.summing != nullptr) {
    cast.kernel = pass.summing;
    cast.sums = shared_.sums;
    section.summed_above_m = each;
  }
  section.list.push_back(std::move(cast));
}

Status CastPlanner::add_passes(CastSection& section, CopySet copies, bool first_step) {
  section.cleared_above_m = section.summed_above_m = m_max_;
  std::vector<Pass> all = F8_TRY(passes(copies, first_step));
  for (size_t i = 0; i < all.size(); ++i) {
    add_pass(section, all[i], i == 0 ? nullptr : &all[i - 1]);
  }
  return {};
}

// A first step over ranks runs the casts of later steps: first for the maxima that they record,
// then with the scales of these over all ranks.
Status CastPlanner::add(CastSection& section, CopySet copies, CallKind kind) {
  if ((kind & kOverRanks) == 0) return add_passes(section, copies, (kind & kFirstStep) != 0);
  Launch first{.kind = Kind::kSetWords, .name = "clear amax"};
  first.out = shared_.first;
  const auto slots = static_cast<int64_t>(kernels_.slots.size());
  first.count = static_cast<int64_t>(kFirstWords) * slots;
  section.list.push_back(first);
  CastSection recording = section;
  recording.recording = true;
  recording.sums = false;
  F8_TRY(add_passes(recording, copies, false));
  first.kind = Kind::kReduceAmax;
  first.name = "reduce amax";
  first.count = slots;
  section.list.push_back(first);
  first.kind = Kind::kFirstScales;
  first.name = "first scales";
  first.kernel = F8_TRY(context_.kernel(codegen::ScaleUpdateSpec{}));
  first.hold = kernels_.hold;
  section.list.push_back(first);
  return add_passes(section, copies, false);
}

}  // namespace f8::runtime
