#include "runtime/experts/group_cast.hpp"

#include <algorithm>

#include "recipes/fp8_layout.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"
#include "runtime/device/memory.hpp"

namespace f8::runtime {
namespace {

// Rows alone are cast in one launch, whose blocks have whole rows.
std::optional<codegen::CastSpec> rows_spec(const codegen::CastSpec& spec) {
  codegen::CastSpec rows = spec;
  rows.one_launch = true;
  return codegen::scales_rows_alone(rows) ? std::optional(rows) : std::nullopt;
}

// The maxima that a cast needs; of blocks none.
codegen::AmaxSpec maxima_before(const codegen::CastSpec& spec) {
  return codegen::amax_before(spec).value_or(codegen::AmaxSpec{.tensor = false});
}

// The most tiles of 128 rows that the groups have.
int64_t most_row_tiles(const kernels::GroupsOf& groups, int64_t rows) {
  if (groups.words == nullptr) {
    return int64_t{groups.count} * ceil_div(groups.rows, kernels::kCastTile);
  }
  return rows / kernels::kCastTile + std::min<int64_t>(groups.layout.experts, rows);
}

int64_t count_of(const kernels::GroupsOf& groups) {
  return groups.words == nullptr ? groups.count : groups.layout.experts;
}

}  // namespace

std::vector<codegen::KernelSpec> GroupCastPlan::specs(const codegen::CastSpec& spec) {
  std::vector<codegen::KernelSpec> all = {spec};
  if (const auto amax = codegen::amax_before(spec)) all.emplace_back(*amax);
  if (const auto rows = rows_spec(spec)) all.emplace_back(*rows);
  return all;
}

Result<GroupCastPlan> GroupCastPlan::create(const std::shared_ptr<Context>& context,
                                            const codegen::CastSpec& spec, int64_t cols) {
  GroupCastPlan plan(context, spec, cols);
  F8_TRY(spec.validate());
  if (const auto amax = codegen::amax_before(spec)) plan.amax_ = F8_TRY(context->kernel(*amax));
  plan.cast_ = F8_TRY(context->kernel(spec));
  if (const auto rows = rows_spec(spec)) plan.rows_ = F8_TRY(context->kernel(*rows));
  return plan;
}

size_t GroupCastPlan::amax_words(int64_t rows, int64_t groups) const {
  const codegen::AmaxSpec amax = maxima_before(spec_);
  return static_cast<size_t>((amax.tensor ? groups : 0) + (amax.row ? rows : 0) +
                             (amax.col ? groups * cols_ : 0));
}

Status GroupCastPlan::quantize_rows(const kernels::CastTensor& tensor, const GroupCastCall& call,
                                    Stream stream) const {
  const Context::State& state = context_->state();
  kernels::GroupRowsArgs args{};
  args.cast.count = 1;
  args.cast.tensors[0] = tensor;
  const int64_t blocks = kernels::blocks_of_rows(call.rows, cols_);
  args.cast.tensors[0].blocks = static_cast<int32_t>(blocks);
  args.row_count = call.groups.words + kernels::kGroupRows;
  return launch_with(args, state.driver, *rows_, blocks, state.options.programmatic_launch, stream);
}

Status GroupCastPlan::run(const GroupCastCall& call, Stream stream) const {
  if (call.rows == 0) return {};
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const int64_t groups = count_of(call.groups);
  const codegen::AmaxSpec maxima = maxima_before(spec_);
  kernels::GroupAmaxArgs amax{.groups = call.groups, .tensor = {}};
  amax.tensor.x = call.x;
  amax.tensor.ld = call.ld == 0 ? cols_ : call.ld;
  amax.tensor.rows = static_cast<int32_t>(call.rows);
  amax.tensor.cols = static_cast<int32_t>(cols_);
  uint32_t* next = call.words;
  const auto take = [&](bool wanted, int64_t count) {
    uint32_t* const at = wanted ? next : nullptr;
    if (wanted) next += count;
    return at;
  };
  amax.tensor.partials = take(maxima.tensor, groups);
  amax.tensor.row_amax = take(maxima.row, call.rows);
  amax.tensor.col_amax = take(maxima.col, groups * cols_);
  kernels::GroupCastArgs cast{.groups = call.groups, .tensor = {}, .scale_rows = call.scale_rows};
  kernels::CastTensor& to = cast.tensor;
  to.x = call.x;
  to.ld = amax.tensor.ld;
  to.rows = amax.tensor.rows;
  to.cols = amax.tensor.cols;
  to.q = spec_.q ? call.q : nullptr;
  to.ld_q = row_pitch(cols_);
  to.qt = spec_.qt ? call.qt : nullptr;
  to.ld_qt = call.groups.words != nullptr ? call.ld_qt : row_pitch(call.groups.rows);
  to.partials = amax.tensor.partials;
  to.row_amax = amax.tensor.row_amax;
  to.col_amax = amax.tensor.col_amax;
  to.scale = call.scale;
  to.inv_scale_row = call.inv_row;
  to.inv_scale_col = call.inv_col;
  if (rows_ != nullptr && call.groups.words != nullptr) return quantize_rows(to, call, stream);
  const int64_t blocks =
      most_row_tiles(call.groups, call.rows) * ceil_div(cols_, kernels::kCastTile);
  const bool programmatic = state.options.programmatic_launch;
  if (amax_ != nullptr) {
    F8_TRY(set_words(state.driver, call.words, 0, static_cast<size_t>(next - call.words), stream));
    F8_TRY(launch_with(amax, state.driver, *amax_, blocks, programmatic, stream));
  }
  return launch_with(cast, state.driver, *cast_, blocks, programmatic, stream);
}

}  // namespace f8::runtime
