#include "python/shim/linear/linear.hpp"

#include <torch/csrc/stable/ops.h>

#include <array>
#include <span>
#include <stdexcept>
#include <string>

#include "python/shim/base/errors.hpp"
#include "python/shim/casts/casts.hpp"
#include "python/shim/linear/gemm.hpp"
#include "python/shim/plans/workspace.hpp"
#include "python/shim/scales/scales.hpp"

namespace float8_torch {
namespace {

constexpr int64_t kMostRows = int64_t{1} << 40;  // that prepare plans for

std::string shape_text(int64_t rows, int64_t cols) {
  return "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

// A tensor like `of` in all dimensions but the last.
Tensor empty_rows(const Tensor& of, int64_t cols, int32_t dtype, Device device) {
  const std::span<const int64_t> sizes = sizes_of(of);
  std::vector<int64_t> wanted(sizes.begin(), sizes.end());
  wanted.back() = cols;
  return empty(wanted, dtype, device);
}

// The type in which a plan gives dw and db: the weight's. A GEMM of operands in 16 bits as they are gives
// their type or f32, which backward then rounds.
float8_dtype grad_type(Config config, int32_t dtype, int32_t weight_dtype) {
  const float8_dtype weight = element_type(weight_dtype, "weight");
  if (dtype == weight_dtype || weight == FLOAT8_F32) return weight;
  const bool high_precision = config.recipe().grad_weight.a.scaling == FLOAT8_HIGH_PRECISION;
  return high_precision ? FLOAT8_F32 : weight;
}

// A LinearCall has what forward and backward of a linear have in common.
struct LinearCall {
  Config config;
  Place place;
  int32_t dtype;  // of x, y and their gradients
  int32_t weight_dtype;
  int64_t n, k;

  LinearCall(const Tensor& rows, const Tensor& weight, int64_t config_bits)
      : config(config_bits),
        place(place_of(rows, config)),
        dtype(dtype_of(rows)),
        weight_dtype(dtype_of(weight)) {
    if (weight.dim() != 2) throw std::invalid_argument("float8: a weight has two dimensions");
    check_device(weight, "the weight");
    n = weight.size(0);
    k = weight.size(1);
  }

  [[nodiscard]] const Plan& plan(int64_t m, bool weight_shards = false) const {
    const PlanKey key{.config = config.bits(),
                      .m_max = kRows * row_blocks(m),
                      .n = n,
                      .k = k,
                      .device = place.key(),
                      .tensor_dtype = static_cast<int8_t>(element_type(dtype, "x")),
                      .grad_dtype = static_cast<int8_t>(grad_type(config, dtype, weight_dtype)),
                      .weight_shards = weight_shards};
    return plan_for(key, place);
  }

  void check_device(const Tensor& tensor, const char* name) const {
    if (device_of(tensor) != place.device) {
      throw std::invalid_argument(std::string("float8: ") + name +
                                  " is on another device than the rows that it meets");
    }
  }

  // The view of an operand that quantize cast; null where it is not given. `recast`: quantize_again did.
  [[nodiscard]] const float8_tensor* given(float8_operand operand, const std::optional<Tensor>& q,
                                           const std::optional<Tensor>& qt, int64_t rows,
                                           float8_tensor& view, bool recast = false) const {
    if (!q && !qt) return nullptr;
    QuantizerKey key = quantizer_key(operand, rows, qt.has_value());
    if (recast) key.copies = FLOAT8_QT_FOR_RECOMPUTE;
    const Quantizer& quantizer = quantizer_for(key, place);
    const void* const at_q = bytes_of(q, quantizer.q_bytes);
    const void* const at_qt = bytes_of(qt, quantizer.qt_bytes);
    view = {};
    view.struct_size = sizeof view;
    check(float8_quantizer_view(quantizer.quantizer, at_q, at_qt, rows, &view));
    return &view;
  }

  // The same for dy, whose elements nothing reads then.
  [[nodiscard]] const float8_tensor* given_grad(const std::optional<Tensor>& q,
                                                const std::optional<Tensor>& qt, int64_t rows,
                                                bool want_db, float8_tensor& view) const {
    if (!q || !qt || want_db) {
      throw std::invalid_argument(
          "float8: a dy in fp8 has q and qt, and gives no gradient of a bias");
    }
    return given(FLOAT8_GRAD_OUTPUT, q, qt, rows, view);
  }

  // The x that a backward reads.
  [[nodiscard]] Matrix input_of(const std::optional<Tensor>& x, int64_t rows) const {
    if (!x) throw std::invalid_argument("float8: this recipe's backward reads x");
    check_device(*x, "x");
    const Matrix inputs = as_matrix(to_dtype(*x, dtype));
    if (inputs.rows == rows && inputs.cols == k) return inputs;
    throw std::invalid_argument("float8: x is " + shape_text(inputs.rows, inputs.cols) +
                                ", and dy and the weight ask for " + shape_text(rows, k));
  }

  // The view of the weight's copy whose elements follow each other in `data`, in so many shards, and
  // whose inverse scales lie apart.
  [[nodiscard]] const float8_tensor* gathered(bool q, const Tensor& data, const Tensor& scales,
                                              int64_t shards, float8_tensor& view) const {
    check_dense(data, 1, place.device, "the weight in fp8");
    check_dense(scales, sizeof(float), place.device, "the weight's scales in fp8");
    if (data.numel() != n * k || shards < 1 || n % shards != 0) {
      throw std::invalid_argument("float8: a gathered copy of a weight " + shape_text(n, k) +
                                  " has " + std::to_string(data.numel()) + " bytes in " +
                                  std::to_string(shards) + " shards");
    }
    const Quantizer& quantizer = quantizer_for(quantizer_key(FLOAT8_WEIGHT, n, true), place);
    view = {};
    view.struct_size = sizeof view;
    const void* const at = data.mutable_data_ptr();
    check(float8_quantizer_view(quantizer.quantizer, at, at, n, &view));
    const auto* const inverse = static_cast<const float*>(scales.mutable_data_ptr());
    view.q = q ? at : nullptr;
    view.qt = q ? nullptr : at;
    (q ? view.q_inverse_scale : view.qt_inverse_scale) = inverse;
    const int32_t granularity = (q ? view.q_setting : view.qt_setting).granularity;
    const int64_t count = scale_count(granularity, q ? n : k, q ? k : n);
    if (scales.numel() < count || dtype_of(scales) != aoti_torch_dtype_float32()) {
      throw std::invalid_argument("float8: a gathered copy of a weight " + shape_text(n, k) +
                                  " has not its " + std::to_string(count) + " scales in float32");
    }
    view.ld_q = k;
    view.ld_qt = n / shards;
    view.qt_shards = shards;
    return &view;
  }

  [[nodiscard]] QuantizerKey quantizer_key(float8_operand operand, int64_t rows,
                                           bool backward) const {
    return cast_key(config, place, operand, rows, operand == FLOAT8_GRAD_OUTPUT ? n : k, dtype,
                    copies_of(config, operand, backward));
  }

  [[nodiscard]] const void* bytes_of(const std::optional<Tensor>& copy, size_t bytes) const {
    if (!copy || bytes == 0) return nullptr;
    check_dense(*copy, 1, place.device, "an operand in fp8");
    if (static_cast<size_t>(copy->numel()) < bytes) {
      throw std::invalid_argument("float8: an operand in fp8 has " + std::to_string(copy->numel()) +
                                  " bytes of " + std::to_string(bytes) +
                                  "; it was quantised with another shape or recipe");
    }
    return copy->mutable_data_ptr();
  }

  template <class Args>
  void set_scales(Args& args, float8_step& step, const Tensor& tensor, int64_t layout,
                  const Plan& plan) const {
    check_device(tensor, "the scale state");
    const Scales scales(tensor, layout, config, place);
    args.scales = scales.slots({.linear = plan.linear});
    step.first_step = scales.first_step();
  }
};

// `saved` of no rows: what is not proportional to M.
int64_t empty_saved_bytes(const LinearCall& call, bool x_given, bool w_given) {
  const auto of = [&](int64_t m) {
    return saved_bytes(m, call.n, call.k, call.config, x_given, w_given);
  };
  return 2 * of(kRows) - of(2 * kRows);
}

}  // namespace

std::tuple<Tensor, Tensor> linear_forward(
    const Tensor& x, const std::optional<Tensor>& x_q, const std::optional<Tensor>& x_qt,
    const Tensor& weight, const std::optional<Tensor>& w_q, const std::optional<Tensor>& w_qt,
    const std::optional<Tensor>& bias, const std::optional<Tensor>& scales, int64_t config,
    int64_t layout, bool save, const std::optional<Tensor>& w_scales,
    const std::optional<Tensor>& w_state) {
  const LinearCall call(x, weight, config);
  const Matrix rows = as_matrix(x);
  if (rows.cols != call.k) {
    throw std::invalid_argument("float8: x has rows of " + std::to_string(rows.cols) +
                                " elements, and the weight is " + shape_text(call.n, call.k));
  }
  if (bias.has_value() != call.config.bias()) {
    throw std::invalid_argument("float8: a bias is given, or missing, against the config");
  }
  Tensor y = empty_rows(x, call.n, call.dtype, call.place.device);
  const bool x_given = x_q || x_qt;
  const bool w_given = w_q || w_qt;
  if (rows.rows == 0) {
    return {y,
            empty_bytes(save ? empty_saved_bytes(call, x_given, w_given) : 0, call.place.device)};
  }
  const Plan& plan = call.plan(rows.rows);
  if ((w_state && (!w_q || !w_qt)) || (w_scales && !w_q)) {
    throw std::invalid_argument(
        "float8: a state or scales of a weight in fp8 are given without its copies");
  }
  if (w_state) {
    refresh_weight(weight, *w_q, *w_qt, *w_state, static_cast<int64_t>(call.config.bits()),
                   call.dtype);
  }
  const size_t saved_bytes = save ? plan.saved_bytes(x_given, w_given) : 0;
  Tensor saved = empty_bytes(static_cast<int64_t>(saved_bytes), call.place.device);
  float8_forward_args args;
  args.x = {rows.data, rows.stride};
  Matrix w;
  if (!w_q || w_q->numel() == 0) {
    w = as_matrix(to_dtype(weight, call.dtype));
    args.w.data = w.data;
    args.w.ld = w.stride;
  }
  args.y.data = y.mutable_data_ptr();
  args.m = rows.rows;
  Tensor typed_bias;
  if (bias) {
    call.check_device(*bias, "the bias");
    if (bias->dim() != 1 || bias->size(0) != call.n) {
      throw std::invalid_argument("float8: the bias has not the weight's " +
                                  std::to_string(call.n) + " rows");
    }
    check_memory(*bias, "the bias");
    typed_bias = to_dtype(*bias, call.dtype);
    if (!typed_bias.is_contiguous()) typed_bias = torch::stable::contiguous(typed_bias);
    // Files that are mapped to memory, as those of safetensors, have tensors at any place.
    if (reinterpret_cast<uintptr_t>(typed_bias.mutable_data_ptr()) % 16 != 0) {
      typed_bias = torch::stable::clone(typed_bias);
    }
    args.bias = typed_bias.mutable_data_ptr();
  }
  if (saved_bytes > 0) {
    args.saved = {saved.mutable_data_ptr(), saved_bytes};
  }
  float8_tensor x_view, w_view;
  args.x.fp8 = call.given(FLOAT8_INPUT, x_q, x_qt, rows.rows, x_view);
  args.w.fp8 = w_scales ? call.gathered(true, *w_q, *w_scales, 1, w_view)
                        : call.given(FLOAT8_WEIGHT, w_q, w_qt, call.n, w_view);
  float8_step step{.evaluate = !save};
  args.step = &step;
  if (scales) call.set_scales(args, step, *scales, layout, plan);
  const Workspace workspace(call.place, plan.workspace_bytes(args));
  step.launch_counts.data = workspace.launch_counts();
  args.workspace.data = workspace.data();
  check(float8_linear_forward(plan.linear, &args, call.place.stream));
  return {y, saved};
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(
    const Tensor& dy, const Tensor& saved, const std::optional<Tensor>& x,
    const std::optional<Tensor>& x_qt, const Tensor& weight, const std::optional<Tensor>& w_qt,
    const std::optional<Tensor>& scales, int64_t config, int64_t layout, int64_t wanted,
    const std::optional<Tensor>& w_scales, int64_t w_shards, const std::optional<Tensor>& dy_q,
    const std::optional<Tensor>& dy_qt) {
  const LinearCall call(dy, weight, config);
  const Device device = call.place.device;
  const bool want_dx = (wanted & 1) != 0;
  const bool want_dw = (wanted & 2) != 0;
  const bool want_db = (wanted & 4) != 0;
  const Matrix rows = as_matrix(dy);
  const bool in_fp8 = dy_q || dy_qt;
  if (rows.cols != call.n && !(in_fp8 && rows.cols == 0)) {
    throw std::invalid_argument("float8: dy has rows of " + std::to_string(rows.cols) +
                                " elements, and the weight is " + shape_text(call.n, call.k));
  }
  const std::array<int64_t, 2> weight_size = {want_dw ? call.n : 0, want_dw ? call.k : 0};
  const int64_t bias_size = want_db ? call.n : 0;
  const bool in_f32 = grad_type(call.config, call.dtype, call.weight_dtype) == FLOAT8_F32;
  const int32_t grad_dtype = in_f32 ? aoti_torch_dtype_float32() : call.weight_dtype;
  const int64_t none = 0;
  Tensor dx = want_dx ? empty_rows(dy, call.k, call.dtype, device)
                      : empty(std::span(&none, 1), call.dtype, device);
  Tensor dw = empty(weight_size, grad_dtype, device);
  Tensor db = empty(std::span(&bias_size, 1), grad_dtype, device);
  if (rows.rows == 0) {
    torch::stable::zero_(dw);
    torch::stable::zero_(db);
    return {dx, to_dtype(dw, call.weight_dtype), to_dtype(db, call.weight_dtype)};
  }
  const Plan& plan = call.plan(rows.rows, w_shards > 1);
  if (plan.linear == nullptr) {
    throw std::invalid_argument("float8: the kernel of this linear's grad_input reads no shards");
  }
  float8_backward_args args;
  args.dy = {rows.data, rows.stride};
  args.m = rows.rows;
  if (want_dx) args.dx.data = dx.mutable_data_ptr();
  if (want_dw) args.dw.data = dw.mutable_data_ptr();
  if (want_db) args.db.data = db.mutable_data_ptr();
  if (w_scales && !w_qt) {
    throw std::invalid_argument("float8: scales of a weight in fp8 are given without its copy");
  }
  const size_t saved_bytes = plan.saved_bytes(x_qt.has_value(), w_qt.has_value());
  if (saved_bytes > 0) {
    check_dense(saved, 1, device, "what forward saved");
    args.saved = {saved.mutable_data_ptr(), static_cast<size_t>(saved.numel())};
  }
  float8_tensor x_view, w_view, dy_view;
  if (in_fp8) {
    args.dy.data = nullptr;
    args.dy.fp8 = call.given_grad(dy_q, dy_qt, rows.rows, want_db, dy_view);
  }
  const bool recast = call.config.recompute() && !x;
  args.x.fp8 = call.given(FLOAT8_INPUT, {}, x_qt, rows.rows, x_view, recast);
  args.w.fp8 = w_scales ? call.gathered(false, *w_qt, *w_scales, w_shards, w_view)
                        : call.given(FLOAT8_WEIGHT, {}, w_qt, call.n, w_view);
  Matrix inputs, w;
  const bool casts_x = !x_qt || (call.config.recompute() ? !recast : x_qt->numel() == 0);
  if (call.config.reads_x() && want_dw && casts_x) {
    inputs = call.input_of(x, rows.rows);
    args.x.data = inputs.data;
    args.x.ld = inputs.stride;
  }
  if (call.config.reads_weight() && (!w_qt || w_qt->numel() == 0)) {
    w = as_matrix(to_dtype(weight, call.dtype));
    args.w.data = w.data;
    args.w.ld = w.stride;
  }
  float8_step step;
  args.step = &step;
  if (scales) call.set_scales(args, step, *scales, layout, plan);
  const Workspace workspace(call.place, plan.workspace_bytes(args));
  step.launch_counts.data = workspace.launch_counts();
  args.workspace.data = workspace.data();
  check(float8_linear_backward(plan.linear, &args, call.place.stream));
  return {dx, to_dtype(dw, call.weight_dtype), to_dtype(db, call.weight_dtype)};
}

bool reads_shards(const Tensor& dy, const Tensor& weight, int64_t config) {
  const LinearCall call(dy, weight, config);
  const int64_t rows = as_matrix(dy).rows;
  return rows > 0 && call.plan(rows, true).linear != nullptr;
}

int64_t saved_bytes_op(int64_t m, int64_t n, int64_t k, int64_t config, bool x_given,
                       bool w_given) {
  return saved_bytes(m, n, k, Config(config), x_given, w_given);
}

std::tuple<int64_t, int64_t> quantized_bytes_op(int64_t rows, int64_t cols, int64_t config,
                                                int64_t operand, bool backward, int64_t whole_rows,
                                                bool of_activation) {
  const QuantizedBytes bytes =
      quantized_bytes(rows, cols, Config(config), operand, backward, whole_rows, of_activation);
  return {bytes.q, bytes.qt};
}

void prepare(const Tensor& x, const Tensor& weight, std::vector<int64_t> n, std::vector<int64_t> k,
             int64_t m, int64_t config, bool apart) {
  if (n.size() != k.size() || m < 1 || m > kMostRows) {
    throw std::invalid_argument(
        "float8: prepare needs as many n as k, and from 1 to 2^40 rows; got " + std::to_string(m));
  }
  const Place place = place_of(x, Config(config));
  std::vector<PlanKey> keys;
  for (size_t i = 0; i < n.size(); ++i) {
    keys.push_back({.config = Config(config).bits(),
                    .m_max = kRows * row_blocks(m),
                    .n = n[i],
                    .k = k[i],
                    .device = place.key(),
                    .tensor_dtype = static_cast<int8_t>(element_type(dtype_of(x), "x")),
                    .grad_dtype = static_cast<int8_t>(
                        grad_type(Config(config), dtype_of(x), dtype_of(weight)))});
  }
  plan_all(keys, place);
  if (!apart) return;
  for (const int64_t cols : k) {
    for (const bool backward : {false, true}) {
      const float8_copies copies = copies_of(Config(config), FLOAT8_INPUT, backward);
      (void)quantizer_for(
          cast_key(Config(config), place, FLOAT8_INPUT, m, cols, dtype_of(x), copies), place);
    }
  }
}

}  // namespace float8_torch
