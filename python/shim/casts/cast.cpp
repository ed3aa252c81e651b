#include "python/shim/casts/cast.hpp"

#include <span>
#include <stdexcept>
#include <string>

#include "python/shim/base/errors.hpp"
#include "python/shim/plans/workspace.hpp"
#include "python/shim/scales/scales.hpp"

namespace float8_torch {

void check_copy(const Tensor& copy, size_t bytes, const Device& device, const char* name) {
  check_dense(copy, 1, device, name);
  if (static_cast<size_t>(copy.numel()) == bytes) return;
  throw std::invalid_argument(std::string("float8: ") + name + " has " +
                              std::to_string(copy.numel()) + " bytes; it needs " +
                              std::to_string(bytes) + ", as float8 makes it for this shape");
}

void check_words(const Tensor& words, int64_t count, const Device& device) {
  check_dense(words, sizeof(uint32_t), device, "maxima of a shard");
  if (words.numel() == count && dtype_of(words) == aoti_torch_dtype_int32()) return;
  throw std::invalid_argument("float8: maxima of a shard are not the " + std::to_string(count) +
                              " words that quantize_amax gives");
}

Tensor empty_words(int64_t count, const Device& device) {
  return empty(std::span(&count, 1), aoti_torch_dtype_int32(), device);
}

void run_quantizer(const Quantizer& quantizer, const Place& place, const Tensor& q,
                   const Tensor& qt, float8_quantize_args args) {
  const int32_t first = args.step == nullptr ? 0 : args.step->first_step;
  const Workspace workspace(place,
                            float8_quantizer_step_workspace_bytes(quantizer.quantizer, first));
  const bool has_q = quantizer.q_bytes > 0;  // else qt is all of the tensor
  args.tensor.data = (has_q ? q : qt).mutable_data_ptr();
  args.transposed.data = has_q && quantizer.qt_bytes > 0 ? qt.mutable_data_ptr() : nullptr;
  float8_step step = args.step == nullptr ? float8_step{} : *args.step;
  step.launch_counts.data = workspace.launch_counts();
  args.step = &step;
  args.workspace.data = workspace.data();
  check(float8_quantize(quantizer.quantizer, &args, place.stream));
}

QuantizerKey cast_key(Config config, const Place& place, float8_operand operand, int64_t rows,
                      int64_t cols, int32_t dtype, int64_t copies) {
  return {.config = config.of_casts(),
          .rows_max = operand == FLOAT8_WEIGHT ? rows : kRows * row_blocks(rows),
          .cols = cols,
          .device = place.key(),
          .operand = static_cast<int8_t>(operand),
          .dtype = static_cast<int8_t>(element_type(dtype, "x")),
          .copies = checked_copies(copies)};
}

Cast::Cast(const Tensor& x, int64_t config_bits, int64_t operand, int64_t copies,
           const ShardRows& shard, int64_t dtype)
    : place(place_of(x, Config(config_bits))), rows(as_matrix(x)), first_row(shard.first) {
  key = cast_key(Config(config_bits), place, operand_of(operand), rows.rows, rows.cols, dtype_of(x),
                 copies);
  if (dtype != kOwnType) round_to(dtype);
  if (shard.most == 0) return;
  key.over_ranks = true;
  key.rows_max = shard.most;
  key.whole_rows = shard.whole;
}

void Cast::round_to(int64_t dtype) {
  if (dtype == key.dtype) return;
  if (key.dtype != FLOAT8_F32 || (dtype != FLOAT8_BF16 && dtype != FLOAT8_F16)) {
    throw std::invalid_argument(
        "float8: an x in float32 alone is rounded, to the dtype 0 (bfloat16) "
        "or 2 (float16); got the dtype " +
        std::to_string(dtype) + "; cast x to it first");
  }
  key.dtype = static_cast<int8_t>(dtype);
  key.f32_source = true;
}

float8_quantize_args Cast::args() const {
  float8_quantize_args args;
  args.x.data = rows.data;
  args.x.ld = rows.stride;
  args.rows = rows.rows;
  args.first_row = first_row;
  return args;
}

void Cast::set_scales(float8_scale_slots& slots, float8_step& step, const Tensor& state,
                      int64_t layout, bool evaluate) const {
  if (device_of(state) != place.device) {
    throw std::invalid_argument("float8: the scale state is on another device than x");
  }
  const Config config(key.config);
  const Scales scales(state, layout, config, place);
  AnyPlan plan = any_plan(key.config, key.device);
  if (!plan.is_there()) {
    const PlanKey any{.config = key.config,
                      .m_max = kRows,
                      .n = rows.cols,
                      .k = rows.cols,
                      .device = key.device,
                      .tensor_dtype = key.dtype,
                      .grad_dtype = key.dtype};
    plan.linear = plan_for(any, place).linear;
  }
  slots = scales.slots(plan);
  if (scales.first_step()) step.first_step = 1;
  step.evaluate = evaluate;
}

}  // namespace float8_torch
