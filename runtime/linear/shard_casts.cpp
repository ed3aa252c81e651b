#include "runtime/linear/shard_casts.hpp"

#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"

namespace f8::runtime {
namespace {

using codegen::ScaleMode;

// An amax of a tensor alone leaves a word of each block. One that finds rows beside it raises a
// single word, which ranks can reduce.
std::optional<codegen::AmaxSpec> amax_of(const KernelPass& pass) {
  std::optional<codegen::AmaxSpec> amax = pass.amax;
  if (amax && amax->tensor && !amax->col) amax->row = true;
  return amax;
}

bool has_blocks_of_rows(const codegen::CastSpec& cast) {
  return (cast.q && cast.scale_q == ScaleMode::kBlock128x128) ||
         (cast.qt && codegen::is_block(cast.scale_qt));
}

}  // namespace

Result<ShardCasts> ShardCasts::plan(Context& context, const std::vector<KernelPass>& passes,
                                    int64_t rows, int64_t cols) {
  std::vector<codegen::KernelSpec> specs;
  for (const KernelPass& pass : passes) {
    if (has_blocks_of_rows(pass.cast) && rows % kernels::kCastTile != 0) {
      return fail(ErrorCode::kUnsupported,
                  "shards of {} rows cut the blocks of 128 rows that have a scale; give shards "
                  "whole blocks: all but the last have the quantizer's rows_max",
                  rows);
    }
    if (const auto amax = amax_of(pass)) specs.emplace_back(*amax);
    specs.emplace_back(pass.cast);
  }
  F8_TRY(context.compile(specs));
  ShardCasts casts;
  bool tensor = false;
  for (const KernelPass& pass : passes) {
    Pass& to = casts.passes_.emplace_back();
    to.cast = F8_TRY(context.kernel(pass.cast));
    const auto amax = amax_of(pass);
    if (!amax) continue;
    to.amax = F8_TRY(context.kernel(*amax));
    if (amax->col) casts.columns_ = cols;
    if (amax->row) casts.row_amax_words_ = rows;
    tensor = tensor || amax->tensor;
  }
  casts.amax_words_ = casts.columns_ + (tensor ? 1 : 0);
  return casts;
}

void ShardCasts::set_tensor_word(QuantizeOperand& shard) const {
  if (shard.col_amax != nullptr) shard.partials = shard.col_amax + columns_;
}

Status ShardCasts::find(const Context::State& context, QuantizeOperand shard, Stream stream) const {
  if (amax_words_ > 0) {
    F8_TRY(set_words(context.driver, shard.col_amax, 0, static_cast<size_t>(amax_words_), stream));
  }
  if (shard.rows == 0) return {};
  if (row_amax_words_ > 0) {
    F8_TRY(set_words(context.driver, shard.row_amax, 0, static_cast<size_t>(shard.rows), stream));
  }
  set_tensor_word(shard);
  for (const Pass& pass : passes_) {
    if (pass.amax == nullptr) continue;
    const auto args = amax_args(std::get<codegen::AmaxSpec>(pass.amax->spec), context.info.sm_count,
                                std::span(&shard, 1));
    F8_TRY(
        launch_amax(context.driver, *pass.amax, args, context.options.programmatic_launch, stream));
  }
  return {};
}

Status ShardCasts::cast(const Context::State& context, QuantizeOperand shard, Stream stream) const {
  set_tensor_word(shard);
  for (const Pass& pass : passes_) {
    const auto& spec = std::get<codegen::CastSpec>(pass.cast->spec);
    shard.scale = spec.qt && spec.scale_qt == ScaleMode::kTensor ? shard.inv_col : shard.inv_row;
    auto args = cast_args(spec, context.info.sm_count, std::span(&shard, 1));
    if (args.tensors[0].partial_count > 0) args.tensors[0].partial_count = 1;
    F8_TRY(
        launch_cast(context.driver, *pass.cast, args, context.options.programmatic_launch, stream));
  }
  return {};
}

}  // namespace f8::runtime
