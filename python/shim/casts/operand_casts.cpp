// The casts of an operand, and of an input or a gradient that is computed as it is cast.
#include <torch/csrc/stable/ops.h>

#include <algorithm>
#include <span>
#include <stdexcept>
#include <string>
#include <tuple>

#include "python/shim/base/errors.hpp"
#include "python/shim/casts/cast.hpp"

namespace float8_torch {
namespace {

// The bytes of copies of 0 rows. Each block of rows adds as many bytes as the one before, so a tensor
// without rows has as much less than one block as one block has less than two.
QuantizedBytes bytes_without_rows(int64_t cols, Config config, int64_t operand, bool backward,
                                  bool of_activation = false) {
  const auto bytes = [&](int64_t rows) {
    return quantized_bytes(rows, cols, config, operand, backward, 0, of_activation);
  };
  const QuantizedBytes one = bytes(kRows), two = bytes(2 * kRows);
  return {2 * one.q - two.q, 2 * one.qt - two.qt};
}

// A call casts an activation of x, its product with up, what a norm makes of x, or x itself.
struct ComputedOf {
  int8_t source = FLOAT8_PLAIN;
  int8_t activation = FLOAT8_SILU;
  Matrix up{};
  const void* weight = nullptr;
  const void* bias = nullptr;
  const float* rstd = nullptr;
  const float* mean = nullptr;

  void set(QuantizerKey& key) const {
    key.source = source;
    key.activation = activation;
  }
  void set(float8_quantize_args& args) const {
    args.up.data = up.data;
    args.up.ld = up.stride;
    args.norm_weight = weight;
    args.norm_bias = bias;
    args.rstd = rstd;
    args.mean = mean;
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
        bytes_without_rows(cast.rows.cols, Config(config), operand, backward,
                           of.source == FLOAT8_GLU || of.source == FLOAT8_ACTIVATION);
    return {empty_bytes(none.q, device), empty_bytes(none.qt, device)};
  }
  of.set(cast.key);
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

Tensor quantize_one_again(const Tensor& x, const ComputedOf& of, const Tensor& x_qt, int64_t config,
                          const std::optional<Tensor>& scales = {}, int64_t layout = 0) {
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
  of.set(cast.key);
  const Quantizer& quantizer = quantizer_for(cast.key, cast.place);
  QuantizerKey key = cast.key;
  key.copies = FLOAT8_Q_FOR_RECOMPUTE;
  const Quantizer& before = quantizer_for(key, cast.place);
  check_copy(x_qt, before.qt_bytes, cast.place.device, "what quantize left of x");
  Tensor qt = empty_bytes(static_cast<int64_t>(quantizer.qt_bytes), cast.place.device);
  float8_quantize_args args = cast.args();
  of.set(args);
  float8_step step;
  args.step = &step;
  // The amax was recorded by the cast in forward.
  if (scales) cast.set_scales(args.scales, step, *scales, layout, true);
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

// What a norm computes of x by.
struct Norm {
  const Tensor& weight;
  const Tensor& rstd;
  const Tensor* mean = nullptr;  // of a LayerNorm, as its bias, which it may lack
  const Tensor* bias = nullptr;
};

ComputedOf norm_of(const Tensor& x, const Norm& norm) {
  const Matrix rows = as_matrix(x);
  const Device device = device_of(x);
  const bool layer = norm.mean != nullptr;
  const char* const what = layer ? "a factor of a LayerNorm" : "a factor of an RMSNorm";
  const auto data = [&](const Tensor* of, int64_t count, int32_t dtype) -> const void* {
    if (of == nullptr) return nullptr;
    check_dense(*of, aoti_torch_dtype_element_size(dtype), device, what);
    if (of->numel() == count && dtype_of(*of) == dtype) return of->data_ptr();
    throw std::invalid_argument(
        layer
            ? "float8: a LayerNorm of x [..., K] has a weight [K] and, if any, a bias [K] of x's "
              "type, and mean and rstd in float32 for each row"
            : "float8: an RMSNorm of x [..., K] has a weight [K] of x's type, and rstd in float32 "
              "for each row");
  };
  const auto of_columns = [&](const Tensor* of) { return data(of, rows.cols, dtype_of(x)); };
  const auto of_rows = [&](const Tensor* of) {
    return static_cast<const float*>(data(of, rows.rows, aoti_torch_dtype_float32()));
  };
  return {.source = static_cast<int8_t>(layer ? FLOAT8_LAYER_NORM : FLOAT8_RMS_NORM),
          .weight = of_columns(&norm.weight),
          .bias = of_columns(norm.bias),
          .rstd = of_rows(&norm.rstd),
          .mean = of_rows(norm.mean)};
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

int8_t activation_of(int64_t activation) {
  if (activation < FLOAT8_SILU || activation > FLOAT8_RELU2) {
    throw std::invalid_argument("float8: activation is " + std::to_string(activation) +
                                "; it is 0 (silu), 1 (gelu), 2 (gelu_tanh) or 3 (relu2)");
  }
  return static_cast<int8_t>(activation);
}

ComputedOf activated(const Tensor& x, const std::optional<Tensor>& up, int64_t activation) {
  ComputedOf of{.source = FLOAT8_ACTIVATION, .activation = activation_of(activation)};
  if (up) {
    check_alike(x, *up, "x and up of quantize_activation");
    of.source = FLOAT8_GLU;
    of.up = as_matrix(*up);
  }
  return of;
}

// What the casts of gradients are given, the copies that they leave, and the quantizer.
struct GradientCast {
  Cast cast;
  const Quantizer* quantizer = nullptr;  // null: there are no rows
  QuantizedBytes bytes;

  // The key is that of x's cast in all but the source.
  GradientCast(const Tensor& x, int64_t config, const ComputedOf& of, bool sums)
      : cast(x, config, FLOAT8_GRAD_OUTPUT, FLOAT8_BOTH_COPIES) {
    of.set(cast.key);
    cast.key.column_sums = sums;
    // Who recomputes would rather have the memory.
    cast.key.less_workspace = of.source == FLOAT8_GLU_BACKWARD && Config(config).recompute();
    if (cast.rows.rows == 0) {
      bytes = bytes_without_rows(cast.rows.cols, Config(config), FLOAT8_GRAD_OUTPUT, true);
      return;
    }
    quantizer = &quantizer_for(cast.key, cast.place);
    bytes = {static_cast<int64_t>(quantizer->q_bytes), static_cast<int64_t>(quantizer->qt_bytes)};
    if (bytes.q == 0 || bytes.qt == 0) {
      throw std::invalid_argument(
          "float8: the gradients of an activation are cast for a recipe whose grad_input and "
          "grad_weight read fp8");
    }
  }
  [[nodiscard]] Tensor q() const { return empty_bytes(bytes.q, cast.place.device); }
  [[nodiscard]] Tensor qt() const { return empty_bytes(bytes.qt, cast.place.device); }
  // The sums of columns of so many tensors, of none where they are not asked for. Without rows they are 0.
  [[nodiscard]] Tensor sums(int64_t tensors) const {
    const int64_t columns = cast.key.column_sums ? tensors * cast.rows.cols : 0;
    Tensor made = empty(std::span(&columns, 1), aoti_torch_dtype_float32(), cast.place.device);
    if (quantizer == nullptr) torch::stable::zero_(made);
    return made;
  }
};

// The copies of a gradient that is one tensor like x, and the sums of its columns where they are asked for.
std::tuple<Tensor, Tensor, Tensor> quantize_gradient(const Tensor& grad, const Tensor& x,
                                                     int64_t config, const ComputedOf& source,
                                                     bool sums, const std::optional<Tensor>& scales,
                                                     int64_t layout) {
  const GradientCast of(x, config, source, sums);
  const Tensor q = of.q(), qt = of.qt();
  Tensor of_columns = of.sums(1);
  if (of.quantizer == nullptr) return {q, qt, of_columns};
  const Matrix of_grad = as_matrix(grad);
  float8_quantize_args args = of.cast.args();
  args.grad = {of_grad.data, of_grad.stride};
  if (sums) args.column_sums = static_cast<float*>(of_columns.mutable_data_ptr());
  float8_step step;
  args.step = &step;
  if (scales) of.cast.set_scales(args.scales, step, *scales, layout, false);
  run_quantizer(*of.quantizer, of.cast.place, q, qt, args);
  return {q, qt, of_columns};
}

// The cast of what an activation makes of x, or of its gradients, of which ranks have other columns.
struct CastOverRanks {
  Cast cast;
  bool both;  // of the gradients of gate and up
  const Quantizer& quantizer;
  float8_quantize_args args;

  CastOverRanks(const Tensor& x, const std::optional<Tensor>& up, const std::optional<Tensor>& grad,
                int64_t activation, int64_t config)
      : cast(x, config, grad ? FLOAT8_GRAD_OUTPUT : FLOAT8_INPUT, FLOAT8_BOTH_COPIES,
             {.most = std::max<int64_t>(as_matrix(x).rows, 1)}),
        both(up && grad),
        quantizer(planned(up, grad, activation)),
        args(cast.args()) {
    constexpr const char* kNames = "x, up and grad of an activation over ranks";
    if (up) {
      check_alike(x, *up, kNames);
      args.up = rows_of(*up, of_up);
    }
    if (grad) {
      check_alike(x, *grad, kNames);
      args.grad = rows_of(*grad, of_grad);
    }
  }
  [[nodiscard]] int64_t amax_words() const { return quantizer.amax_words * (both ? 2 : 1); }
  [[nodiscard]] int64_t row_amax_words() const { return quantizer.row_amax_words * (both ? 2 : 1); }
  // `left`: of both calls.
  void set_words(const Tensor& left, const Tensor& amax, const Tensor& row_amax) {
    args.workspace = {left.mutable_data_ptr(), quantizer.workspace_bytes};
    const auto set = [](const Tensor& words, int64_t count, uint32_t*& first, uint32_t*& second) {
      if (count == 0) return;
      first = static_cast<uint32_t*>(words.mutable_data_ptr());
      if (words.numel() > count) second = first + count;
    };
    set(amax, quantizer.amax_words, args.amax, args.up_amax);
    set(row_amax, quantizer.row_amax_words, args.row_amax, args.up_row_amax);
  }

 private:
  Matrix of_up, of_grad;  // they keep copies that are made of tensors

  static float8_matrix rows_of(const Tensor& tensor, Matrix& keep) {
    keep = as_matrix(tensor);
    float8_matrix rows;
    rows.data = keep.data;
    rows.ld = keep.stride;
    return rows;
  }
  const Quantizer& planned(const std::optional<Tensor>& up, const std::optional<Tensor>& grad,
                           int64_t activation) {
    constexpr int8_t kSources[] = {FLOAT8_ACTIVATION, FLOAT8_GLU, FLOAT8_ACTIVATION_BACKWARD,
                                   FLOAT8_GLU_BACKWARD};
    ComputedOf{.source = kSources[(up ? 1 : 0) + (grad ? 2 : 0)],
               .activation = activation_of(activation)}
        .set(cast.key);
    return quantizer_for(cast.key, cast.place);
  }
};

}  // namespace

std::tuple<Tensor, Tensor> quantize(const Tensor& x, int64_t config, int64_t operand, bool backward,
                                    const std::optional<Tensor>& scales, int64_t layout,
                                    bool evaluate) {
  return quantize_one(x, {}, config, operand, backward, scales, layout, evaluate);
}

Tensor quantize_again(const Tensor& x, const Tensor& x_qt, int64_t config,
                      const std::optional<Tensor>& scales, int64_t layout,
                      const std::optional<Tensor>& /*behind*/) {
  return quantize_one_again(x, {}, x_qt, config, scales, layout);
}

std::tuple<Tensor, Tensor> quantize_rms_norm(const Tensor& x, const Tensor& weight,
                                             const Tensor& rstd, int64_t config, bool backward,
                                             const std::optional<Tensor>& scales, int64_t layout,
                                             bool evaluate) {
  return quantize_one(x, norm_of(x, {weight, rstd}), config, FLOAT8_INPUT, backward, scales, layout,
                      evaluate);
}

Tensor quantize_rms_norm_again(const Tensor& x, const Tensor& weight, const Tensor& rstd,
                               const Tensor& x_qt, int64_t config) {
  return quantize_one_again(x, norm_of(x, {weight, rstd}), x_qt, config);
}

std::tuple<Tensor, Tensor> quantize_layer_norm(const Tensor& x, const Tensor& weight,
                                               const std::optional<Tensor>& bias,
                                               const Tensor& mean, const Tensor& rstd,
                                               int64_t config, bool backward,
                                               const std::optional<Tensor>& scales, int64_t layout,
                                               bool evaluate) {
  return quantize_one(x, norm_of(x, {weight, rstd, &mean, bias ? &*bias : nullptr}), config,
                      FLOAT8_INPUT, backward, scales, layout, evaluate);
}

Tensor quantize_layer_norm_again(const Tensor& x, const Tensor& weight,
                                 const std::optional<Tensor>& bias, const Tensor& mean,
                                 const Tensor& rstd, const Tensor& x_qt, int64_t config) {
  return quantize_one_again(x, norm_of(x, {weight, rstd, &mean, bias ? &*bias : nullptr}), x_qt,
                            config);
}

std::tuple<Tensor, Tensor> quantize_activation(const Tensor& x, const std::optional<Tensor>& up,
                                               int64_t activation, int64_t config, bool backward,
                                               const std::optional<Tensor>& scales, int64_t layout,
                                               bool evaluate) {
  return quantize_one(x, activated(x, up, activation), config, FLOAT8_INPUT, backward, scales,
                      layout, evaluate);
}

Tensor quantize_activation_again(const Tensor& x, const std::optional<Tensor>& up,
                                 int64_t activation, const Tensor& x_qt, int64_t config,
                                 const std::optional<Tensor>& scales, int64_t layout,
                                 const Tensor& /*behind*/) {
  return quantize_one_again(x, activated(x, up, activation), x_qt, config, scales, layout);
}

std::tuple<Tensor, Tensor, Tensor> quantize_activation_backward(const Tensor& grad, const Tensor& x,
                                                                int64_t activation, int64_t config,
                                                                bool sums,
                                                                const std::optional<Tensor>& scales,
                                                                int64_t layout) {
  check_alike(x, grad, "grad and x of quantize_activation_backward");
  return quantize_gradient(
      grad, x, config,
      {.source = FLOAT8_ACTIVATION_BACKWARD, .activation = activation_of(activation)}, sums, scales,
      layout);
}

std::tuple<Tensor, Tensor, Tensor> quantize_merged_glu_backward(
    const Tensor& grad, const Tensor& gate_up, bool up_first, int64_t activation, int64_t config,
    bool sums, const std::optional<Tensor>& scales, int64_t layout) {
  const Matrix of_grad = as_matrix(grad);
  const Matrix both = as_matrix(gate_up);
  if (both.rows != of_grad.rows || both.cols != 2 * of_grad.cols ||
      dtype_of(gate_up) != dtype_of(grad) || device_of(gate_up) != device_of(grad)) {
    throw std::invalid_argument(
        "float8: gate_up of quantize_merged_glu_backward has twice grad's columns, and its rows, "
        "type and device");
  }
  const float8_source source =
      up_first ? FLOAT8_MERGED_GLU_BACKWARD_UP_FIRST : FLOAT8_MERGED_GLU_BACKWARD;
  return quantize_gradient(grad, gate_up, config,
                           {.source = source, .activation = activation_of(activation)}, sums,
                           scales, layout);
}

std::tuple<Tensor, Tensor, Tensor, Tensor, Tensor> quantize_glu_backward(
    const Tensor& grad, const Tensor& gate, const Tensor& up, int64_t activation, int64_t config,
    bool sums, std::vector<Tensor> scales, int64_t layout) {
  constexpr const char* kNames = "grad, gate and up of quantize_glu_backward";
  check_alike(gate, up, kNames);
  check_alike(gate, grad, kNames);
  if (!scales.empty() && scales.size() != 2) {
    throw std::invalid_argument(
        "float8: quantize_glu_backward takes the parts of a scale state of two linears, or none");
  }
  const GradientCast of(
      gate, config, {.source = FLOAT8_GLU_BACKWARD, .activation = activation_of(activation)}, sums);
  const Tensor gate_q = of.q(), gate_qt = of.qt(), up_q = of.q(), up_qt = of.qt();
  Tensor of_columns = of.sums(2);
  if (of.quantizer == nullptr) return {gate_q, gate_qt, up_q, up_qt, of_columns};
  const Matrix of_up = as_matrix(up);
  const Matrix of_grad = as_matrix(grad);
  float8_quantize_args args = of.cast.args();
  args.up = {of_up.data, of_up.stride};
  args.grad = {of_grad.data, of_grad.stride};
  args.up_tensor.data = up_q.mutable_data_ptr();
  args.up_transposed.data = up_qt.mutable_data_ptr();
  if (sums) args.column_sums = static_cast<float*>(of_columns.mutable_data_ptr());
  float8_step step;
  args.step = &step;
  if (!scales.empty()) {
    of.cast.set_scales(args.scales, step, scales[0], layout, false);
    of.cast.set_scales(args.up_scales, step, scales[1], layout, false);
  }
  run_quantizer(*of.quantizer, of.cast.place, gate_q, gate_qt, args);
  return {gate_q, gate_qt, up_q, up_qt, of_columns};
}

std::tuple<Tensor, Tensor, Tensor> quantize_activation_amax(const Tensor& x,
                                                            const std::optional<Tensor>& up,
                                                            const std::optional<Tensor>& grad,
                                                            int64_t activation, int64_t config) {
  CastOverRanks of(x, up, grad, activation, config);
  const Device device = of.cast.place.device;
  Tensor left = empty_bytes(static_cast<int64_t>(of.quantizer.workspace_bytes), device);
  Tensor amax = empty_words(of.amax_words(), device);
  Tensor row_amax = empty_words(of.row_amax_words(), device);
  of.set_words(left, amax, row_amax);
  check(float8_quantize_amax(of.quantizer.quantizer, &of.args, of.cast.place.stream));
  return {left, amax, row_amax};
}

std::vector<Tensor> quantize_activation_shard(const Tensor& x, const std::optional<Tensor>& up,
                                              const std::optional<Tensor>& grad, const Tensor& left,
                                              const Tensor& amax, const Tensor& row_amax,
                                              int64_t activation, int64_t config) {
  CastOverRanks of(x, up, grad, activation, config);
  const Device device = of.cast.place.device;
  check_copy(left, of.quantizer.workspace_bytes, device, "what quantize_activation_amax left");
  check_words(amax, of.amax_words(), device);
  check_words(row_amax, of.row_amax_words(), device);
  of.set_words(left, amax, row_amax);
  std::vector<Tensor> copies;
  for (int i = 0; i < (of.both ? 2 : 1); ++i) {
    copies.push_back(empty_bytes(static_cast<int64_t>(of.quantizer.q_bytes), device));
    copies.push_back(empty_bytes(static_cast<int64_t>(of.quantizer.qt_bytes), device));
  }
  of.args.tensor.data = copies[0].mutable_data_ptr();
  of.args.transposed.data = copies[1].mutable_data_ptr();
  if (of.both) {
    of.args.up_tensor.data = copies[2].mutable_data_ptr();
    of.args.up_transposed.data = copies[3].mutable_data_ptr();
  }
  check(float8_quantize(of.quantizer.quantizer, &of.args, of.cast.place.stream));
  return copies;
}

}  // namespace float8_torch
