#include "runtime/experts/group_cast.hpp"

#include <algorithm>
#include <tuple>

#include "recipes/fp8_layout.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"
#include "runtime/device/memory.hpp"

namespace f8::runtime {
namespace {

// The SMs of an H100 and an H200. Of groups of more tiles than their blocks hold, one launch takes 1.05 to 1.15
// of the time of two (measured on an H200).
constexpr int64_t kSms = 132;

codegen::CastSpec in_one_launch(const codegen::CastSpec& spec) {
  codegen::CastSpec one = spec;
  one.one_launch = true;
  return one;
}

// The tiles, or pairs, that are side by side.
int64_t tiles_across(const codegen::CastSpec& spec, int64_t cols) {
  return kernels::tiles_across(spec.source, codegen::memory_type(spec) == Dtype::kF32, cols);
}

// True where amax and cast are one launch, of which a block holds its tiles from the one to the other: groups of
// so many rows, or their columns of tiles, have no more tiles than that.
bool holds_groups(const codegen::CastSpec& spec, int64_t rows, int64_t cols) {
  if (!codegen::can_be_one_launch(spec) || codegen::scales_rows_alone(spec)) return false;
  return codegen::scales_columns_alone(spec) ||
         ceil_div(rows, kernels::kCastTile) * tiles_across(spec, cols) <=
             kSms * codegen::quantize_tiles_per_sm(spec);
}

// True where a launch finds the scale of each row in its registers, without a word of memory.
bool casts_rows(const codegen::CastSpec& spec, Maxima maxima) {
  return maxima == Maxima::kOwn && codegen::scales_rows_alone(spec);
}

bool is_one_launch(const codegen::CastSpec& spec, int64_t rows, int64_t cols, Maxima maxima) {
  return maxima != Maxima::kApart && maxima != Maxima::kAlone && holds_groups(spec, rows, cols);
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

std::vector<codegen::KernelSpec> GroupCastPlan::specs(const codegen::CastSpec& spec, int64_t rows,
                                                      int64_t cols, Maxima maxima) {
  if (casts_rows(spec, maxima) || is_one_launch(spec, rows, cols, maxima)) {
    return {in_one_launch(spec)};
  }
  std::vector<codegen::KernelSpec> all;
  if (maxima != Maxima::kAlone) all.emplace_back(spec);
  if (const auto amax = codegen::amax_before(spec)) all.emplace_back(*amax);
  return all;
}

Result<GroupCastPlan> GroupCastPlan::create(const std::shared_ptr<Context>& context,
                                            const codegen::CastSpec& spec, int64_t rows,
                                            int64_t cols, Maxima maxima) {
  GroupCastPlan plan(context, spec, cols);
  F8_TRY(spec.validate());
  plan.maxima_ = maxima;
  if (casts_rows(spec, maxima)) {
    plan.rows_ = F8_TRY(context->kernel(in_one_launch(spec)));
    return plan;
  }
  if (is_one_launch(spec, rows, cols, maxima)) {
    plan.one_launch_ = F8_TRY(context->kernel(in_one_launch(spec)));
    return plan;
  }
  if (const auto amax = codegen::amax_before(spec)) plan.amax_ = F8_TRY(context->kernel(*amax));
  if (maxima != Maxima::kAlone) plan.cast_ = F8_TRY(context->kernel(spec));
  return plan;
}

size_t GroupCastPlan::words_of_groups(const codegen::CastSpec& spec, int64_t groups, int64_t cols) {
  const codegen::AmaxSpec amax = maxima_before(spec);
  return static_cast<size_t>((amax.tensor ? groups : 0) + (amax.col ? groups * cols : 0));
}

size_t GroupCastPlan::words_of_tensors(const codegen::CastSpec& spec, int64_t groups) {
  return maxima_before(spec).tensor ? static_cast<size_t>(groups) : 0;
}

size_t GroupCastPlan::words_of_rows(const codegen::CastSpec& spec, int64_t rows) {
  return maxima_before(spec).row ? static_cast<size_t>(rows) : 0;
}

size_t GroupCastPlan::words(int64_t rows, int64_t groups) const {
  if (rows_ != nullptr || maxima_ == Maxima::kApart) return 0;
  return words_of_groups(spec_, groups, cols_) + words_of_rows(spec_, rows) +
         (one_launch_ != nullptr ? counters(groups) : 0);
}

size_t GroupCastPlan::counters(int64_t groups) const {
  const int64_t units = codegen::scales_columns_alone(spec_) ? tiles_across(spec_, cols_) : 1;
  return static_cast<size_t>(1 + groups * units);
}

Status GroupCastPlan::quantize_rows(const kernels::CastTensor& tensor, const GroupCastCall& call,
                                    Stream stream) const {
  const Context::State& state = context_->state();
  kernels::GroupRowsArgs args{};
  args.cast.count = 1;
  args.cast.tensors[0] = tensor;
  const int64_t blocks = kernels::blocks_of_rows(call.rows, cols_);
  args.cast.tensors[0].blocks = static_cast<int32_t>(blocks);
  args.source = call.source;
  if (call.groups.words != nullptr) args.row_count = call.groups.words + kernels::kGroupRows;
  return launch_with(args, state.driver, *rows_, blocks, state.options.programmatic_launch, stream);
}

kernels::GroupCastArgs GroupCastPlan::args_of(const GroupCastCall& call) const {
  kernels::GroupCastArgs args{.groups = call.groups,
                              .tensor = {},
                              .scale_rows = call.scale_rows,
                              .source = call.source,
                              .noop_flag = call.noop_flag};
  kernels::CastTensor& t = args.tensor;
  t.x = call.x;
  t.ld = call.ld == 0 ? cols_ : call.ld;
  t.rows = static_cast<int32_t>(call.rows);
  t.cols = static_cast<int32_t>(cols_);
  t.q = spec_.q ? call.q : nullptr;
  t.ld_q = row_pitch(cols_);
  t.qt = spec_.qt ? call.qt : nullptr;
  t.ld_qt = call.groups.words != nullptr ? call.ld_qt : row_pitch(call.groups.rows);
  t.delayed = call.delayed;
  t.amax = call.amax;
  t.scale = call.scale;
  t.inv_scale_row = call.inv_row;
  t.inv_scale_col = call.inv_col;
  // The words: the groups', those of their columns, and those of rows behind them or apart.
  const codegen::AmaxSpec maxima = maxima_before(spec_);
  const int64_t groups = count_of(call.groups);
  uint32_t* next = call.words;
  const auto take = [&](bool wanted, int64_t count) {
    uint32_t* const at = wanted ? next : nullptr;
    if (wanted) next += count;
    return at;
  };
  t.partials = take(maxima.tensor, groups);
  t.col_amax = take(maxima.col, groups * cols_);
  if (call.row_words != nullptr) next = call.row_words;
  t.row_amax = take(maxima.row, call.rows);
  return args;
}

int64_t GroupCastPlan::tiles_of(const GroupCastCall& call) const {
  return most_row_tiles(call.groups, call.rows) * tiles_across(spec_, cols_);
}

Status GroupCastPlan::find_maxima(const GroupCastCall& call, Stream stream) const {
  if (call.rows == 0 || amax_ == nullptr) return {};
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  for (const auto& [words, count] :
       {std::pair{call.words, words_of_groups(spec_, count_of(call.groups), cols_)},
        {call.row_words, words_of_rows(spec_, call.rows)}}) {
    if (count > 0) F8_TRY(set_words(state.driver, words, 0, count, stream));
  }
  return launch_with(kernels::maxima_of(args_of(call)), state.driver, *amax_, tiles_of(call),
                     state.options.programmatic_launch, stream);
}

Status GroupCastPlan::begin_words(const GroupCastCall& call, Stream stream) const {
  const Driver& driver = context_->state().driver;
  const int64_t groups = count_of(call.groups);
  F8_TRY(set_words(driver, call.words, 0, words(call.rows, groups), stream));
  uint32_t* const of_rows = call.words + words_of_groups(spec_, groups, cols_);
  for (const auto& [to, from, count] :
       {std::tuple{call.words, call.group_maxima, words_of_tensors(spec_, groups)},
        {of_rows, call.row_maxima, words_of_rows(spec_, call.rows)}}) {
    if (from == nullptr || count == 0) continue;
    const size_t bytes = count * sizeof(uint32_t);
    F8_TRY(copy_lines(driver, to, bytes, from, bytes, bytes, 1, stream));
  }
  return {};
}

Status GroupCastPlan::run(const GroupCastCall& call, Stream stream) const {
  if (call.rows == 0) return {};
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const kernels::GroupCastArgs cast = args_of(call);
  if (rows_ != nullptr) return quantize_rows(cast.tensor, call, stream);
  const int64_t tiles = tiles_of(call);
  const bool programmatic = state.options.programmatic_launch;
  if (maxima_ == Maxima::kApart) {
    return launch_with(cast, state.driver, *cast_, tiles, programmatic, stream);
  }
  if (one_launch_ != nullptr) {
    const size_t words =
        words_of_groups(spec_, count_of(call.groups), cols_) + words_of_rows(spec_, call.rows);
    const int64_t sms = context_->device().sm_count;
    kernels::GroupQuantizeArgs args{};
    args.cast = cast;
    args.tickets = call.words + words;
    args.done = args.tickets + 1;
    F8_TRY(begin_words(call, stream));
    const int64_t blocks = std::min(tiles, sms * codegen::quantize_blocks_per_sm(spec_));
    return launch_with(args, state.driver, *one_launch_, blocks, programmatic, stream);
  }
  if (amax_ != nullptr) {
    F8_TRY(begin_words(call, stream));
    F8_TRY(
        launch_with(kernels::maxima_of(cast), state.driver, *amax_, tiles, programmatic, stream));
  }
  return launch_with(cast, state.driver, *cast_, tiles, programmatic, stream);
}

}  // namespace f8::runtime
