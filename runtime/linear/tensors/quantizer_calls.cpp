// The checks of the calls of a quantizer, and the memory that they touch.
#include <tuple>
#include <utility>

#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/linear/tensors/quantizer.hpp"
#include "runtime/quantize/cast_counters.hpp"

namespace f8::runtime {

bool Quantizer::over_ranks(const QuantizeCall& call) {
  return step_of(call).first_step != 0 && step_of(call).ranks != nullptr &&
         step_of(call).evaluate == 0;
}

Status Quantizer::check_kept_scale(const QuantizeCall& call) const {
  const float8_tensor* const q = call.x.fp8;
  const bool columns = kernels_.keeps_column_amax;
  if (!reads_kept() ||
      (q != nullptr && (columns ? q->qt_inverse_scale : q->q_inverse_scale) != nullptr)) {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              "{}.x.fp8 has no {}; qt takes what FLOAT8_Q_FOR_RECOMPUTE left with q: give its "
              "float8_quantizer_view",
              kArgs, columns ? "qt_inverse_scale" : "q_inverse_scale");
}

Status Quantizer::check_factors(const QuantizeCall& call, bool cast) const {
  const bool backward = desc_.source == CastSource::kGluBackward;
  const bool glu = desc_.source == CastSource::kGlu || backward;
  const bool layer_norm = desc_.source == CastSource::kLayerNorm;
  const bool norm = layer_norm || desc_.source == CastSource::kRmsNorm;
  for (const auto& [field, pointer, needed] :
       {std::tuple<const char*, const void*, bool>{"up.data", call.up.data, glu},
        {"grad.data", call.grad.data, casts_gradients()},
        {"up_tensor.data", cast ? call.up_tensor.data : nullptr, cast && backward},
        {"norm_weight", call.norm_weight, norm},
        {"rstd", call.rstd, norm},
        {"mean", call.mean, layer_norm},
        {"norm_bias", call.norm_bias, layer_norm && call.norm_bias != nullptr},
        {"column_sums", cast ? call.column_sums : nullptr, cast && desc_.column_sums}}) {
    if ((pointer != nullptr) == needed) [[likely]] {
      continue;
    }
    return fail(ErrorCode::kInvalidArgument, "{}.{} is {}; the quantizer's source is {}{}", kArgs,
                field, needed ? "NULL" : "given", name_of(desc_.source),
                desc_.column_sums ? ", with column_sums" : "");
  }
  if (backward && (call.transposed.data == nullptr) != (call.up_transposed.data == nullptr)) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.up_transposed.data is {} and transposed.data is {}; qt of both gradients lies "
                "apart, or follows q",
                kArgs, call.up_transposed.data == nullptr ? "NULL" : "given",
                call.transposed.data == nullptr ? "NULL" : "given");
  }
  if (desc_.source != CastSource::kPlain && over_ranks(call) && is_delayed()) {
    return fail(
        ErrorCode::kInvalidArgument,
        "float8_step.ranks is given in a first step, whose scales of what is computed from x "
        "are those of this rank: compute it, and quantize it with FLOAT8_PLAIN in that step");
  }
  return {};
}

Status Quantizer::check_rows(const char* name, int64_t rows) const {
  const bool weight = desc_.operand == Tensor::kWeight && !desc_.over_ranks;
  if (rows >= 0 && rows <= desc_.rows && (!weight || rows == 0 || rows == desc_.rows)) [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument, "{} is {}, the quantizer was planned for {}{}", name,
              rows, weight ? "0 or " : "0 to ", desc_.rows);
}

// Checks where the rows of a shard that may cut blocks are in the whole.
Status Quantizer::check_first_row(const QuantizeCall& call) const {
  if (whole_rows_ == 0 || (call.first_row >= 0 && call.first_row <= whole_rows_ - call.rows))
      [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              "{}.first_row is {}; a shard of {} rows is a part of the {} rows of the quantizer's "
              "whole_rows",
              kArgs, call.first_row, call.rows, whole_rows_);
}

// Checks the words of a call of `name`, which casts with them or finds them.
Status Quantizer::check_amax(const char* name, const QuantizeCall& call, bool cast) const {
  if (!desc_.over_ranks) {
    if (cast && call.amax == nullptr && call.row_amax == nullptr && call.up_amax == nullptr &&
        call.up_row_amax == nullptr) [[likely]] {
      return {};
    }
    return fail(ErrorCode::kInvalidArgument,
                "{}: the quantizer finds its maxima itself; set float8_quantizer_desc.over_ranks "
                "to find, reduce and use them in several calls",
                name);
  }
  const int64_t both = desc_.source == CastSource::kGluBackward ? 1 : 0;
  for (const auto& [field, words, count] :
       {std::tuple{"amax", call.amax, amax_words()},
        {"row_amax", call.row_amax, row_amax_words()},
        {"up_amax", call.up_amax, both * amax_words()},
        {"up_row_amax", call.up_row_amax, both * row_amax_words()}}) {
    if ((words == nullptr) == (count == 0)) continue;
    return fail(ErrorCode::kInvalidArgument,
                "{}.{} is {}; the quantizer is over ranks and has {} "
                "of these words, which float8_quantize_amax finds",
                kArgs, field, words == nullptr ? "NULL" : "given", count);
  }
  return {};
}

Status Quantizer::check_slots(const QuantizeCall& call, const char* name,
                              const float8_scale_slots& scales) const {
  if (!is_delayed()) return {};
  const auto [amax, scale, format] = ScaleSlots::of(scales);
  if (amax == nullptr || scale == nullptr || (over_ranks(call) && !format)) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}.{} is empty; recipe {} has delayed scaling, see float8_scales_slots", kArgs,
                name, desc_.recipe.name);
  }
  return step_of(call).first_step != 0 ? Status() : check_not_fresh(*context_, scales);
}

Status Quantizer::check_cast(const char* name, const QuantizeCall& call) const {
  F8_TRY(check_rows("float8_quantize_args.rows", call.rows));
  F8_TRY(check_amax(name, call, true));
  F8_TRY(check_first_row(call));
  if (call.rows == 0) return {};
  F8_TRY(check_factors(call, true));
  F8_TRY(check_kept_scale(call));
  for (const auto& [field, pointer] : {std::pair<const char*, const void*>{"x.data", call.x.data},
                                       {"tensor.data", call.tensor.data}}) {
    if (pointer == nullptr) [[unlikely]] {
      return fail(ErrorCode::kInvalidArgument, "{}.{} is NULL", kArgs, field);
    }
  }
  if ((call.counters != nullptr || call.up_counters != nullptr) && !desc_.count) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}.{}counters is given, the quantizer's casts do not count; set "
                "float8_quantizer_desc.count",
                kArgs, call.counters == nullptr ? "up_" : "");
  }
  if (call.noop_flag != nullptr && !desc_.noop_flag) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}.noop_flag is given, the quantizer's casts do not look at it; set "
                "float8_quantizer_desc.noop_flag",
                kArgs);
  }
  F8_TRY(check_slots(call, "scales", call.scales));
  return desc_.source == CastSource::kGluBackward ? check_slots(call, "up_scales", call.up_scales)
                                                  : Status();
}

Status Quantizer::check_find(const char* name, const QuantizeCall& call) const {
  F8_TRY(check_rows("float8_quantize_args.rows", call.rows));
  F8_TRY(check_amax(name, call, false));
  F8_TRY(check_first_row(call));
  if (call.rows == 0) return {};
  F8_TRY(check_factors(call, false));
  if (desc_.source != CastSource::kPlain) F8_TRY(check_workspace(call));
  if (call.x.data != nullptr) return {};
  return fail(ErrorCode::kInvalidArgument, "{}.x.data is NULL", kArgs);
}

Status Quantizer::check_workspace(const QuantizeCall& call) const {
  if (call.workspace.data != nullptr || needed_workspace(call) == 0) [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument, "{}.workspace.data is NULL", kArgs);
}

void Quantizer::add_operands(CallMemory& memory, const QuantizeCall& call) const {
  const bool merged = is_merged(desc_.source);
  memory.add_rows("x", call.x.data, call.rows, desc_.cols, call.x.ld,
                  desc_.f32_source ? Dtype::kF32 : desc_.dtype, Access::kRead);
  memory.add_rows("up", call.up.data, call.rows, desc_.cols, call.up.ld, desc_.dtype,
                  Access::kRead);
  memory.add_rows("grad", call.grad.data, call.rows, desc_.cols / (merged ? 2 : 1), call.grad.ld,
                  desc_.dtype, Access::kRead);
}

void Quantizer::add_amax(CallMemory& memory, const QuantizeCall& call, Access access) const {
  memory.add("amax", call.amax, sizeof(uint32_t) * static_cast<size_t>(amax_words()), access,
             alignof(uint32_t));
  memory.add("row_amax", call.row_amax, sizeof(uint32_t) * static_cast<size_t>(row_amax_words()),
             access, alignof(uint32_t));
  memory.add("up_amax", call.up_amax, sizeof(uint32_t) * static_cast<size_t>(amax_words()), access,
             alignof(uint32_t));
  memory.add("up_row_amax", call.up_row_amax,
             sizeof(uint32_t) * static_cast<size_t>(row_amax_words()), access, alignof(uint32_t));
}

void Quantizer::add_copies(CallMemory& memory, const CopyNames& names,
                           const QuantizeCall& call) const {
  const auto [amax, scale, format] = ScaleSlots::of(call.scales);
  const size_t slots = kernels_.slots.size();
  memory.add(names.tensor, call.tensor.data,
             call.transposed.data == nullptr ? tensor_bytes() : layout_.q_bytes, Access::kWrite);
  memory.add(names.transposed, call.transposed.data, layout_.qt_bytes, Access::kWrite);
  memory.add(names.counters, call.counters, kCountersOfLinear * sizeof(CastCounters),
             Access::kWrite, alignof(CastCounters));
  memory.add_beside("float8_scale_slots (amax)", amax, slots * sizeof(uint32_t), Access::kWrite,
                    alignof(uint32_t));
  memory.add_beside("float8_scale_slots (scale)", scale,
                    slots * kernels::kScaleStride * sizeof(float),
                    over_ranks(call) ? Access::kWrite : Access::kRead, alignof(float));
}

CallMemory Quantizer::cast_memory(const QuantizeCall& call) const {
  CallMemory memory(kArgs);
  add_operands(memory, call);
  if (kernels_.keeps_scale(desc_.operand)) {
    memory.add("x.fp8", call.x.fp8->q_inverse_scale, sizeof(float), Access::kRead, sizeof(float));
  } else if (reads_kept()) {
    memory.add("x.fp8", call.x.fp8->qt_inverse_scale,
               static_cast<size_t>(desc_.cols) * sizeof(float), Access::kRead, sizeof(float));
  }
  memory.add("norm_weight", call.norm_weight,
             static_cast<size_t>(desc_.cols) * size_bytes(desc_.dtype), Access::kRead);
  memory.add("rstd", call.rstd, static_cast<size_t>(call.rows) * sizeof(float), Access::kRead,
             alignof(float));
  memory.add("mean", call.mean, static_cast<size_t>(call.rows) * sizeof(float), Access::kRead,
             alignof(float));
  memory.add("norm_bias", call.norm_bias, static_cast<size_t>(desc_.cols) * size_bytes(desc_.dtype),
             Access::kRead);
  const size_t tensors = desc_.source == CastSource::kGluBackward ? 2 : 1;
  memory.add("column_sums", call.column_sums,
             tensors * static_cast<size_t>(desc_.cols) * sizeof(float), Access::kWrite,
             alignof(float));
  add_copies(memory, {"tensor", "transposed", "counters"}, call);
  memory.add("noop_flag", call.noop_flag, sizeof(uint32_t), Access::kWrite, alignof(uint32_t));
  add_amax(memory, call, Access::kRead);
  if (desc_.source == CastSource::kGluBackward) {
    add_copies(memory, {"up_tensor", "up_transposed", "up_counters"}, of_up(call));
  }
  return memory;
}

CallMemory Quantizer::find_memory(const QuantizeCall& call) const {
  CallMemory memory(kArgs);
  add_operands(memory, call);
  add_amax(memory, call, Access::kWrite);
  if (desc_.source != CastSource::kPlain) {
    memory.add("workspace", call.workspace.data, needed_workspace(call), Access::kWrite);
  }
  return memory;
}

void Quantizer::add_launch_counts(CallMemory& memory, const QuantizeCall& call) const {
  memory.add_beside("float8_step.launch_counts", step_of(call).launch_counts.data,
                    quantize_sync_bytes(context_->device().sm_count), Access::kWrite);
}

}  // namespace f8::runtime
