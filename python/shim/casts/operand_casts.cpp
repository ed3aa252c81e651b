// The casts of an operand, and of an input or a gradient that is computed as it is cast.
#include <stdexcept>
#include <string>
#include <tuple>

#include "python/shim/casts/cast.hpp"
#include "python/shim/errors.hpp"

namespace float8_torch {
namespace {

// The bytes of copies of 0 rows. Each block of rows adds as many bytes as the one before, so a tensor
// without rows has as much less than one block as one block has less than two.
QuantizedBytes bytes_without_rows(int64_t cols, Config config, int64_t operand, bool backward) {
  const QuantizedBytes one = quantized_bytes(kRows, cols, config, operand, backward);
  const QuantizedBytes two = quantized_bytes(2 * kRows, cols, config, operand, backward);
  return {2 * one.q - two.q, 2 * one.qt - two.qt};
}

// A call casts silu(x) up, what an RMSNorm makes of x, or x itself.
struct ComputedOf {
  int8_t source = FLOAT8_PLAIN;
  Matrix up{};
  const void* weight = nullptr;
  const float* rstd = nullptr;

  void set(float8_quantize_args& args) const {
    args.up.data = up.data;
    args.up.ld = up.stride;
    args.norm_weight = weight;
    args.rstd = rstd;
  }
};

std::tuple<Tensor, Tensor> quantize_one(const Tensor& x, const ComputedOf& of, int64_t config,
                                        int64_t operand, bool backward,
                                        const std::optional<Tensor>& scales, int64_t layout,
                                        bool evaluate) {
  Cast cast(x, config, operand, copies_of(Config(config), operand_of(operand), backward));
  const Device device = cast.place.device;
  if (cast.rows.rows == 0) {
    const QuantizedBytes none =
        bytes_without_rows(cast.rows.cols, Config(config), operand, backward);
    return {empty_bytes(none.q, device), empty_bytes(none.qt, device)};
  }
  cast.key.source = of.source;
  const Quantizer& quantizer = quantizer_for(cast.key, cast.place);
  Tensor q = empty_bytes(static_cast<int64_t>(quantizer.q_bytes), device);
  Tensor qt = empty_bytes(static_cast<int64_t>(quantizer.qt_bytes), device);
  float8_quantize_args args = cast.args();
  of.set(args);
  float8_step step;
  args.step = &step;
  if (scales) cast.set_scales(args.scales, step, *scales, layout, evaluate);
  run_quantizer(quantizer, cast.place, q, qt, args);
  return {q, qt};
}

Tensor quantize_one_again(const Tensor& x, const ComputedOf& of, const Tensor& x_qt,
                          int64_t config) {
  if (!Config(config).recompute()) {
    throw std::invalid_argument(
        "float8: quantize_again is for linears that recompute, whose config says so");
  }
  Cast cast(x, config, FLOAT8_INPUT, FLOAT8_QT_FOR_RECOMPUTE);
  if (cast.rows.rows == 0) {
    const Config casts(Config(config).of_casts());
    return empty_bytes(bytes_without_rows(cast.rows.cols, casts, FLOAT8_INPUT, true).qt,
                       cast.place.device);
  }
  cast.key.source = of.source;
  const Quantizer& quantizer = quantizer_for(cast.key, cast.place);
  QuantizerKey key = cast.key;
  key.copies = FLOAT8_Q_FOR_RECOMPUTE;
  const Quantizer& before = quantizer_for(key, cast.place);
  check_copy(x_qt, before.qt_bytes, cast.place.device, "what quantize left of x");
  Tensor qt = empty_bytes(static_cast<int64_t>(quantizer.qt_bytes), cast.place.device);
  float8_quantize_args args = cast.args();
  of.set(args);
  float8_tensor view{};
  view.struct_size = sizeof view;
  if (before.qt_bytes > 0) {
    check(float8_quantizer_view(before.quantizer, nullptr, x_qt.mutable_data_ptr(), cast.rows.rows,
                                &view));
    args.x.fp8 = &view;
  }
  run_quantizer(quantizer, cast.place, qt, qt, args);
  return qt;
}

// Checks what an RMSNorm multiplies x by.
ComputedOf norm_of(const Tensor& x, const Tensor& weight, const Tensor& rstd) {
  const Matrix rows = as_matrix(x);
  const Device device = device_of(x);
  check_dense(weight, aoti_torch_dtype_element_size(dtype_of(x)), device,
              "the weight of an RMSNorm");
  check_dense(rstd, sizeof(float), device, "rstd of an RMSNorm");
  if (weight.numel() != rows.cols || dtype_of(weight) != dtype_of(x) || rstd.numel() != rows.rows ||
      dtype_of(rstd) != aoti_torch_dtype_float32()) {
    throw std::invalid_argument(
        "float8: an RMSNorm of x [..., K] has a weight [K] of x's type, and rstd in float32 for "
        "each "
        "row");
  }
  return {.source = FLOAT8_RMS_NORM,
          .weight = weight.data_ptr(),
          .rstd = static_cast<const float*>(rstd.data_ptr())};
}

void check_alike(const Tensor& gate, const Tensor& other, const char* names) {
  const Matrix one = as_matrix(gate);
  const Matrix two = as_matrix(other);
  if (one.rows != two.rows || one.cols != two.cols || dtype_of(gate) != dtype_of(other) ||
      device_of(gate) != device_of(other)) {
    throw std::invalid_argument(std::string("float8: ") + names +
                                " have one shape, one type and one device");
  }
}

}  // namespace

std::tuple<Tensor, Tensor> quantize(const Tensor& x, int64_t config, int64_t operand, bool backward,
                                    const std::optional<Tensor>& scales, int64_t layout,
                                    bool evaluate) {
  return quantize_one(x, {}, config, operand, backward, scales, layout, evaluate);
}

Tensor quantize_again(const Tensor& x, const Tensor& x_qt, int64_t config) {
  return quantize_one_again(x, {}, x_qt, config);
}

std::tuple<Tensor, Tensor> quantize_rms_norm(const Tensor& x, const Tensor& weight,
                                             const Tensor& rstd, int64_t config, bool backward,
                                             const std::optional<Tensor>& scales, int64_t layout,
                                             bool evaluate) {
  return quantize_one(x, norm_of(x, weight, rstd), config, FLOAT8_INPUT, backward, scales, layout,
                      evaluate);
}

Tensor quantize_rms_norm_again(const Tensor& x, const Tensor& weight, const Tensor& rstd,
                               const Tensor& x_qt, int64_t config) {
  return quantize_one_again(x, norm_of(x, weight, rstd), x_qt, config);
}

std::tuple<Tensor, Tensor> quantize_swiglu(const Tensor& gate, const Tensor& up, int64_t config,
                                           bool backward, const std::optional<Tensor>& scales,
                                           int64_t layout, bool evaluate) {
  check_alike(gate, up, "gate and up of quantize_swiglu");
  const ComputedOf product{.source = FLOAT8_SWIGLU, .up = as_matrix(up)};
  return quantize_one(gate, product, config, FLOAT8_INPUT, backward, scales, layout, evaluate);
}

std::tuple<Tensor, Tensor, Tensor, Tensor> quantize_swiglu_backward(
    const Tensor& grad, const Tensor& gate, const Tensor& up, int64_t config,
    std::vector<Tensor> scales, int64_t layout) {
  constexpr const char* kNames = "grad, gate and up of quantize_swiglu_backward";
  check_alike(gate, up, kNames);
  check_alike(gate, grad, kNames);
  if (!scales.empty() && scales.size() != 2) {
    throw std::invalid_argument(
        "float8: quantize_swiglu_backward takes the parts of a scale state of two linears, or "
        "none");
  }
  Cast cast(gate, config, FLOAT8_GRAD_OUTPUT, FLOAT8_BOTH_COPIES);
  cast.key.source = FLOAT8_SWIGLU_BACKWARD;
  const Device device = cast.place.device;
  if (cast.rows.rows == 0) {
    const QuantizedBytes none =
        bytes_without_rows(cast.rows.cols, Config(config), FLOAT8_GRAD_OUTPUT, true);
    return {empty_bytes(none.q, device), empty_bytes(none.qt, device), empty_bytes(none.q, device),
            empty_bytes(none.qt, device)};
  }
  const Quantizer& quantizer = quantizer_for(cast.key, cast.place);
  const auto copy = [&](size_t bytes) { return empty_bytes(static_cast<int64_t>(bytes), device); };
  Tensor gate_q = copy(quantizer.q_bytes), gate_qt = copy(quantizer.qt_bytes);
  Tensor up_q = copy(quantizer.q_bytes), up_qt = copy(quantizer.qt_bytes);
  if (quantizer.q_bytes == 0 || quantizer.qt_bytes == 0) {
    throw std::invalid_argument(
        "float8: quantize_swiglu_backward is for a recipe whose grad_input and grad_weight read "
        "fp8");
  }
  const Matrix of_up = as_matrix(up);
  const Matrix of_grad = as_matrix(grad);
  float8_quantize_args args = cast.args();
  args.up = {of_up.data, of_up.stride};
  args.grad = {of_grad.data, of_grad.stride};
  args.up_tensor.data = up_q.mutable_data_ptr();
  args.up_transposed.data = up_qt.mutable_data_ptr();
  float8_step step;
  args.step = &step;
  if (!scales.empty()) {
    cast.set_scales(args.scales, step, scales[0], layout, false);
    cast.set_scales(args.up_scales, step, scales[1], layout, false);
  }
  run_quantizer(quantizer, cast.place, gate_q, gate_qt, args);
  return {gate_q, gate_qt, up_q, up_qt};
}

}  // namespace float8_torch
