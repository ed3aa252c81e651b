// What a call's casts work on, and which of them run side by side.
#include "runtime/linear/casts.hpp"

#include <algorithm>

namespace f8::runtime {

QuantizeOperand operand_of(const Visit& visit, const Place& place, const ScaleSlots& slots) {
  using codegen::ScaleMode;
  const codegen::CastSpec& cast = visit.cast;
  const bool lines = has_scale(cast, ScaleMode::kAxis);
  QuantizeOperand operand{.x = place.x, .rows = place.rows, .cols = place.cols, .ld = place.ld};
  operand.partials = lines ? place.words + place.word.tensor : place.partials;
  const auto amax = amax_before(cast);
  if (amax && takes_lines(*amax, place.rows, place.cols)) operand.lines = place.lines;
  operand.row_amax = place.words + place.word.row;
  operand.col_amax = place.words + place.word.column;
  operand.q = place.q;
  operand.qt = place.qt;
  operand.scale = cast.qt && cast.scale_qt == ScaleMode::kTensor ? place.qt_scale : place.q_scale;
  operand.inv_row = place.q_scale;
  operand.inv_col = place.qt_scale;
  if (visit.slot >= 0) {
    operand.delayed = slots.scale + visit.slot * kernels::kScaleStride;
    if (slots.amax != nullptr) operand.recorded_amax = slots.amax + visit.slot;
  }
  return operand;
}

PassOperands::PassOperands(const QuantizePass& pass, bool loaded_one,
                           const std::array<Place, 3>& places, const ScaleSlots& scales,
                           CastCounters* counters, int sm_count)
    : count(pass.visits.size()) {
  for (size_t v = 0; v < count; ++v) {
    const Visit& visit = pass.visits[v];
    const auto tensor = static_cast<size_t>(visit.tensor);
    list[v] = operand_of(visit, places[tensor], scales);
    tiles += cast_tiles(list[v].rows, list[v].cols);
    if (counters != nullptr) list[v].counters = counters + 2 * tensor;
  }
  if (loaded_one) launches = quantize_launches(*pass.one_launch, sm_count, all());
}

bool runs_beside(const QuantizePass& before, const PassOperands& operands_before,
                 const QuantizePass& pass, const PassOperands& operands, int sm_count) {
  const auto single = [](const QuantizePass& p, const PassOperands& o) {
    return !p.amax || o.launches == Launches::kOne;
  };
  if (!single(before, operands_before) || !single(pass, operands)) return false;
  for (const Visit& visit : pass.visits) {
    if (std::ranges::count(before.visits, visit.tensor, &Visit::tensor) > 0) return false;
  }
  const auto waits = [](const QuantizePass& p) {
    return p.amax && !codegen::scales_rows_alone(p.cast);
  };
  return (!waits(before) && !waits(pass)) ||
         operands_before.tiles + operands.tiles <= resident_quantize_blocks(sm_count);
}

}  // namespace f8::runtime
