#include "python/shim/experts/weights.hpp"

#include <torch/csrc/stable/ops.h>

#include <stdexcept>
#include <string>

#include "python/shim/base/errors.hpp"
#include "python/shim/casts/casts.hpp"
#include "python/shim/linear/gemm.hpp"
#include "python/shim/plans/plans.hpp"
#include "python/shim/plans/workspace.hpp"
#include "python/shim/scales/scales.hpp"

namespace float8_torch {
namespace {

constexpr int64_t kWeightsOwnType = -1;

// The bytes from one line of a copy to the next one.
int64_t pitch_of(int64_t length) {
  return (length + 127) / 128 * 128;
}

// The floats of the inverse scales of all experts' copies [lines][length], from the first one on.
int64_t scales_of_experts(const float8_cast_setting& setting, int64_t experts, int64_t lines,
                          int64_t length) {
  if (setting.scaling == FLOAT8_DELAYED) return 1;
  if (setting.granularity == FLOAT8_TENSOR) return (experts - 1) * FLOAT8_EXPERT_SCALE_STRIDE + 1;
  return experts * scale_count(setting.granularity, lines, length);
}

// `tensors`: those that the rows of each expert are in.
ExpertQuantizerKey key_of(const Tensor& w, const Place& place, int64_t config, int64_t dtype,
                          bool over_ranks, int64_t tensors = 1) {
  if (w.dim() != 3)
    throw std::invalid_argument("float8: the weights of experts have three dimensions");
  const float8_dtype own = element_type(dtype_of(w), "the weight");
  if (dtype != kWeightsOwnType && dtype != own &&
      (own != FLOAT8_F32 || (dtype != FLOAT8_BF16 && dtype != FLOAT8_F16))) {
    throw std::invalid_argument(
        "float8: experts' weights in float32 alone are rounded, to the dtype 0 (bfloat16) or 2 "
        "(float16); cast others to their type first");
  }
  return {.config = Config(config).of_casts(),
          .n = tensors * w.size(1),
          .k = w.size(2),
          .experts = static_cast<int32_t>(w.size(0)),
          .device = place.key(),
          .dtype = static_cast<int8_t>(dtype == kWeightsOwnType ? int64_t{own} : dtype),
          .f32_source = dtype != kWeightsOwnType && dtype != own,
          .over_ranks = over_ranks,
          .two_tensors = tensors == 2};
}

void check_size(const Tensor& tensor, size_t count, size_t element, const Device& device,
                const char* name) {
  check_dense(tensor, element, device, name);
  if (static_cast<size_t>(tensor.numel()) == count) return;
  throw std::invalid_argument(std::string("float8: ") + name + " has " +
                              std::to_string(tensor.numel()) + " elements; it needs " +
                              std::to_string(count));
}

uint32_t* words_of(const std::optional<Tensor>& words, size_t count, const Device& device) {
  if (!words) throw std::invalid_argument("float8: the maxima of a shard are amax and row_amax");
  check_size(*words, count, sizeof(uint32_t), device, "maxima of a shard");
  return count == 0 ? nullptr : static_cast<uint32_t*>(words->mutable_data_ptr());
}

void check_alike(const Tensor& w, const Tensor& second) {
  bool alike =
      second.dim() == 3 && dtype_of(second) == dtype_of(w) && device_of(second) == device_of(w);
  for (int64_t i = 0; alike && i < 3; ++i) alike = second.size(i) == w.size(i);
  if (alike) return;
  throw std::invalid_argument(
      "float8: two weights of experts that are cast together have one size, type and device");
}

float8_expert_quantize_args args_of(const Matrix& rows) {
  float8_expert_quantize_args args;
  set(args.w, rows);
  return args;
}

}  // namespace

ExpertWeight::ExpertWeight(const std::optional<Tensor>& weight, const std::optional<Tensor>& copy,
                           const std::optional<Tensor>& scales, const Size& size, Config config,
                           int32_t dtype, const Device& device, bool q) {
  const auto [experts, n, k] = size;
  if (!copy) {
    if (!weight || weight->dim() != 3 || weight->size(0) != experts || weight->size(1) != n ||
        weight->size(2) != k || device_of(*weight) != device) {
      throw std::invalid_argument(
          "float8: backward casts the experts' weights again: give it those of forward");
    }
    elements_ = as_matrix(to_dtype(*weight, dtype));
    return;
  }
  if (!scales) throw std::invalid_argument("float8: a weight in fp8 is given without its scales");
  const int64_t lines = q ? n : k, length = q ? k : n;
  const float8_recipe recipe = config.recipe();
  float8_tensor view{};
  view.struct_size = sizeof view;
  view.rows = experts * n;
  view.cols = k;
  view.ld_q = pitch_of(k);
  view.ld_qt = pitch_of(n);
  view.q_setting = recipe.output.b;
  view.qt_setting = recipe.grad_input.b;
  check_size(*copy, static_cast<size_t>(experts * lines * pitch_of(length)), 1, device,
             "the experts' weights in fp8");
  check_dense(*scales, sizeof(float), device, "the scales of experts' weights in fp8");
  const float8_cast_setting& setting = q ? view.q_setting : view.qt_setting;
  if (scales->numel() < scales_of_experts(setting, experts, lines, length) ||
      dtype_of(*scales) != aoti_torch_dtype_float32()) {
    throw std::invalid_argument(
        "float8: the experts' weights in fp8 have not their scales in float32");
  }
  (q ? view.q : view.qt) = copy->mutable_data_ptr();
  (q ? view.q_inverse_scale : view.qt_inverse_scale) =
      static_cast<const float*>(scales->mutable_data_ptr());
  view_ = view;
}

void ExpertWeight::set(float8_matrix& field) const {
  field.data = elements_.data;
  field.ld = elements_.stride;
  field.fp8 = view_ ? &*view_ : nullptr;
}

static void check_buffers(const ExpertQuantizer& quantizer, const Place& place, const Tensor& q,
                          const Tensor& qt) {
  const float8_layout& at = quantizer.layout;
  check_size(q, at.tensor_bytes - at.transposed_bytes, 1, place.device, "q of experts' weights");
  check_size(qt, at.transposed_bytes, 1, place.device, "qt of experts' weights");
}

// Casts into the buffers of a weight's copies.
static void cast_into(const ExpertQuantizer& quantizer, const Place& place, const Tensor& q,
                      const Tensor& qt, float8_expert_quantize_args& args) {
  args.tensor = {q.mutable_data_ptr(), static_cast<size_t>(q.numel())};
  args.transposed = {qt.mutable_data_ptr(), static_cast<size_t>(qt.numel())};
  const Workspace workspace(place, quantizer.workspace_bytes, Counts::kNone);
  args.workspace = {workspace.data(), quantizer.workspace_bytes};
  check(float8_expert_quantize(quantizer.quantizer, &args, place.stream));
}

// Sets the part of a scale state that a cast reads and raises, whose slots are those of any linear of the recipe.
static void set_scales(float8_expert_quantize_args& args, float8_step& step,
                       const ExpertQuantizerKey& key, const Place& place, const Tensor& state,
                       int64_t layout) {
  if (device_of(state) != place.device) {
    throw std::invalid_argument("float8: a scale state is on another device than the weight");
  }
  AnyPlan plan = any_plan(key.config, key.device);
  if (!plan.is_there()) {
    constexpr uint64_t kRecompute = 1U << 5;  // as calls with weights in fp8 have it
    const ExpertsKey linear{.config = key.config | kRecompute,
                            .m_max = kExpertRows,
                            .n = (key.n + 15) / 16 * 16,
                            .k = key.k,
                            .experts = key.experts,
                            .device = key.device,
                            .tensor_dtype = key.dtype,
                            .grad_dtype = key.dtype};
    plan.experts = experts_for(linear, place).experts;
  }
  const Scales scales(state, layout, Config(key.config), place);
  args.scales = scales.slots(plan);
  if (scales.first_step()) step.first_step = 1;
}

void experts_cast(const Tensor& w, const Tensor& q, const Tensor& qt,
                  const std::optional<Tensor>& amax, const std::optional<Tensor>& row_amax,
                  int64_t config, int64_t dtype, const std::optional<Tensor>& second_w,
                  const std::optional<Tensor>& scales, int64_t scale_layout) {
  const Place place = place_of(w, Config(config));
  if (second_w) check_alike(w, *second_w);
  const bool over_ranks = amax.has_value() || scales.has_value();
  const ExpertQuantizerKey key = key_of(w, place, config, dtype, over_ranks, second_w ? 2 : 1);
  const ExpertQuantizer& quantizer = expert_quantizer_for(key, place);
  check_buffers(quantizer, place, q, qt);
  const Matrix rows = as_matrix(w);
  float8_expert_quantize_args args = args_of(rows);
  std::optional<Matrix> second;  // until the call has read it
  if (second_w) set(args.second_w, second.emplace(as_matrix(*second_w)));
  if (amax) {
    args.amax = words_of(amax, quantizer.layout.amax_words, place.device);
    args.row_amax = words_of(row_amax, quantizer.layout.row_amax_words, place.device);
  }
  float8_step step{.first_step = scales && amax ? 1 : 0};
  args.step = &step;
  if (scales) set_scales(args, step, key, place, *scales, scale_layout);
  cast_into(quantizer, place, q, qt, args);
}

void experts_refresh(const Tensor& w, const Tensor& q, const Tensor& qt, const Tensor& state,
                     const Tensor& like, int64_t config, const std::optional<Tensor>& second_w) {
  const Place place = place_of(w, Config(config));
  const float8_dtype own = element_type(dtype_of(w), "the weight");
  const float8_dtype wanted = element_type(dtype_of(like), "x");
  const bool rounds = own == FLOAT8_F32 && wanted != FLOAT8_F32;
  const Tensor typed = rounds ? w : to_dtype(w, dtype_of(like));
  if (second_w) check_alike(w, *second_w);
  ExpertQuantizerKey key = key_of(typed, place, config, rounds ? int64_t{wanted} : kWeightsOwnType,
                                  false, second_w ? 2 : 1);
  key.noop_flag = true;
  const ExpertQuantizer& quantizer = expert_quantizer_for(key, place);
  check_buffers(quantizer, place, q, qt);
  check_size(state, (second_w ? 2 : 1) * kWeightStateBytes, 1, place.device,
             "the state of experts' weights");
  const Matrix bytes = as_matrix(w), rows = as_matrix(typed);
  compare_and_cast(quantizer.context, bytes, own, wanted, state, place, [&](uint32_t* flag) {
    float8_expert_quantize_args args = args_of(rows);
    args.noop_flag = flag;
    std::optional<Matrix> second;  // until the call has read it
    if (second_w) {
      const Tensor of_second = torch::stable::narrow(const_cast<Tensor&>(state), 0,
                                                     kWeightStateBytes, kWeightStateBytes);
      compare_weight(quantizer.context, as_matrix(*second_w), own, wanted, of_second, place, flag);
      second = as_matrix(rounds ? *second_w : to_dtype(*second_w, dtype_of(like)));
      set(args.second_w, *second);
    }
    cast_into(quantizer, place, q, qt, args);
  });
}

std::tuple<Tensor, Tensor> experts_amax(const Tensor& w, int64_t config, int64_t dtype,
                                        const std::optional<Tensor>& second_w) {
  const Place place = place_of(w, Config(config));
  if (second_w) check_alike(w, *second_w);
  const ExpertQuantizer& quantizer =
      expert_quantizer_for(key_of(w, place, config, dtype, true, second_w ? 2 : 1), place);
  const auto words = [&](size_t count) {
    const auto size = static_cast<int64_t>(count);
    return empty(std::span(&size, 1), aoti_torch_dtype_int32(), place.device);
  };
  const float8_layout& at = quantizer.layout;
  Tensor amax = words(at.amax_words), row_amax = words(at.row_amax_words);
  const Matrix rows = as_matrix(w);
  float8_expert_quantize_args args = args_of(rows);
  std::optional<Matrix> second;  // until the call has read it
  if (second_w) set(args.second_w, second.emplace(as_matrix(*second_w)));
  args.amax = words_of(amax, at.amax_words, place.device);
  args.row_amax = words_of(row_amax, at.row_amax_words, place.device);
  check(float8_expert_quantize_amax(quantizer.quantizer, &args, place.stream));
  return {amax, row_amax};
}

std::tuple<int64_t, int64_t, int64_t, int64_t, bool, int64_t, int64_t> experts_copies(
    int64_t experts, int64_t n, int64_t k, int64_t config, bool over_ranks) {
  const float8_layout at = expert_layout({.config = Config(config).of_casts(),
                                          .n = n,
                                          .k = k,
                                          .experts = static_cast<int32_t>(experts),
                                          .over_ranks = over_ranks});
  const auto transposed = static_cast<int64_t>(at.transposed_bytes);
  return {static_cast<int64_t>(at.tensor_bytes) - transposed,
          transposed,
          at.ld_q,
          static_cast<int64_t>(at.q_inverse_scale),
          at.q_scale_apart != 0,
          at.ld_qt,
          static_cast<int64_t>(at.qt_inverse_scale)};
}

}  // namespace float8_torch
