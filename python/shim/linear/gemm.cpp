#include "python/shim/linear/gemm.hpp"

#include <stdexcept>
#include <string>

#include "python/shim/base/errors.hpp"
#include "python/shim/plans/plans.hpp"
#include "python/shim/plans/workspace.hpp"

namespace float8_torch {
namespace {

constexpr int64_t kBlock = 128;  // the elements of a block with one scale, and of a row's pitch

[[nodiscard]] int64_t blocks(int64_t extent) {
  return (extent + kBlock - 1) / kBlock;
}
[[nodiscard]] int64_t in_whole_4s(int64_t scales) {
  return (scales + 3) / 4 * 4;
}

// One operand of a GEMM: `lines` rows, each `length` elements that the GEMM sums over.
struct Operand {
  const char* name;
  const Tensor& data;
  const Tensor& scales;
  int64_t lines;
  int64_t length;
  const float8_cast_setting& setting;

  void check(Device device) const {
    const int64_t pitch = kBlock * blocks(length);
    if (data.dim() != 2 || data.size(0) != lines || data.size(1) != pitch ||
        !data.is_contiguous() || dtype_of(data) != aoti_torch_dtype_uint8() ||
        device_of(data) != device) {
      throw std::invalid_argument(std::string("float8: ") + name + " of the GEMM is not " +
                                  std::to_string(lines) + " rows of " + std::to_string(pitch) +
                                  " bytes on d's device");
    }
    const int64_t count = scale_count(setting.granularity, lines, length);
    if (scales.numel() < count || !scales.is_contiguous() ||
        dtype_of(scales) != aoti_torch_dtype_float32() || device_of(scales) != device) {
      throw std::invalid_argument(std::string("float8: ") + name + " of the GEMM has not the " +
                                  std::to_string(count) + " scales of its recipe on d's device");
    }
    check_memory(data, name);
    check_memory(scales, name);
  }

  // The view whose q, or qt, this is.
  [[nodiscard]] float8_tensor view(bool transposed) const {
    float8_tensor view = {};
    view.struct_size = sizeof view;
    view.rows = transposed ? length : lines;
    view.cols = transposed ? lines : length;
    const auto* const inverse = static_cast<const float*>(scales.mutable_data_ptr());
    (transposed ? view.qt : view.q) = data.mutable_data_ptr();
    (transposed ? view.qt_inverse_scale : view.q_inverse_scale) = inverse;
    (transposed ? view.ld_qt : view.ld_q) = data.size(1);
    (transposed ? view.qt_setting : view.q_setting) = setting;
    return view;
  }
};

}  // namespace

int64_t scale_count(int32_t granularity, int64_t lines, int64_t length) {
  switch (granularity) {
    case FLOAT8_TENSOR:
      return 1;
    case FLOAT8_AXIS:
      return lines;
    case FLOAT8_BLOCK_1X128:
      return blocks(length) * in_whole_4s(lines);
    default:
      return blocks(lines) * in_whole_4s(blocks(length));
  }
}

void gemm_into(const Tensor& a, const Tensor& a_scales, const Tensor& b, const Tensor& b_scales,
               const Tensor& d, const std::optional<Tensor>& bias, int64_t contracted,
               int64_t config, int64_t kind, bool accumulate, int64_t sm_limit) {
  if (kind < FLOAT8_OUTPUT || kind > FLOAT8_GRAD_WEIGHT || d.dim() != 2 || !d.is_contiguous()) {
    throw std::invalid_argument(
        "float8: gemm_into needs a contiguous d of two dimensions, and 0 (output), 1 (grad_input) "
        "or 2 (grad_weight) for the GEMM");
  }
  const Config bits(config);
  const Place place = place_of(d, bits);
  const float8_recipe recipe = bits.recipe();
  const float8_gemm_setting& setting = kind == FLOAT8_OUTPUT       ? recipe.output
                                       : kind == FLOAT8_GRAD_INPUT ? recipe.grad_input
                                                                   : recipe.grad_weight;
  const Operand left{"a", a, a_scales, d.size(0), contracted, setting.a};
  const Operand right{"b", b, b_scales, d.size(1), contracted, setting.b};
  left.check(place.device);
  right.check(place.device);
  check_memory(d, "d of the GEMM");
  if (bias && (bias->dim() != 1 || bias->size(0) != d.size(1) || dtype_of(*bias) != dtype_of(d) ||
               !bias->is_contiguous() || device_of(*bias) != place.device)) {
    throw std::invalid_argument(
        "float8: the bias of a GEMM has a value for each column of d, in d's type and contiguous");
  }
  if (bias) check_memory(*bias, "the bias of the GEMM");
  if (d.size(0) == 0) return;
  const bool weight = kind == FLOAT8_GRAD_WEIGHT;
  const int64_t m = weight ? contracted : d.size(0);
  const GemmKey key{.config = bits.of_casts(),
                    .m_max = kRows * std::max<int64_t>(row_blocks(m), 1),
                    .n = kind == FLOAT8_OUTPUT       ? d.size(1)
                         : kind == FLOAT8_GRAD_INPUT ? contracted
                                                     : d.size(0),
                    .k = kind == FLOAT8_OUTPUT ? contracted : d.size(1),
                    .device = place.key(),
                    .kind = static_cast<int8_t>(kind),
                    .dtype = static_cast<int8_t>(element_type(dtype_of(d), "d")),
                    .bias = bias.has_value(),
                    .accumulate = accumulate,
                    .sm_limit = static_cast<int16_t>(std::clamp<int64_t>(sm_limit, 0, INT16_MAX))};
  const GemmPlan& plan = gemm_for(key, place);
  const float8_tensor a_view = left.view(weight);
  const float8_tensor b_view = right.view(kind != FLOAT8_OUTPUT);
  float8_gemm_args args;
  args.a = &a_view;
  args.b = &b_view;
  args.d.data = d.mutable_data_ptr();
  args.d.accumulate = accumulate;
  if (bias) args.bias = bias->mutable_data_ptr();
  const Workspace workspace(place, plan.workspace_bytes);
  args.workspace.data = workspace.data();
  check(float8_gemm(plan.plan, &args, place.stream));
}

}  // namespace float8_torch
