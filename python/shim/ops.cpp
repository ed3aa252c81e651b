// The ops of torch.ops.float8, registered with PyTorch's stable ABI. They are functional: every
// tensor that they return is new. python/float8/torch/_ops.py has their fake kernels and gradients.
//
//   linear_forward(x, weight, bias?, scales?, config, layout, save) -> (y, saved)
//     y = x weight^T + bias. x has any rank, weight is [N][K] and may be in another type than x,
//     which y has. `saved` is what backward needs, or empty where save is false. With delayed
//     scaling, `scales` names the linear in a scale state (scales.hpp) of that layout, whose
//     amaxes a call with `save` raises. It is not declared as written: nothing reads the amaxes but
//     scales_sync, and raising them twice changes nothing.
//   linear_backward(dy, saved, x?, weight, scales?, config, layout, wanted) -> (dx, dw, db)
//     `wanted` has bit 0 for dx, 1 for dw, 2 for db; the others are empty. dx has dy's type, dw and
//     db have the weight's. x is read where the config says so.
//   saved_bytes(n, k, config) -> (base, per_block)
//     The size of `saved` is base + per_block * ceil(M / 512).
//   prepare(x, weight, n, k, m, config)
//     Makes the plans of linears of these sizes for calls of up to M rows, whose x has x's type and
//     device, and whose weight has the weight's type.
//   scales_bytes(config, layout), scales_init(state), scales_set_first(state, first),
//   scales_is_first(state), scales_sync(state)
//     The size of a scale state and its first contents, which an emulated config gives on the CPU;
//     whether its next step is the first one; and the end of a step.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <array>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "python/shim/errors.hpp"
#include "python/shim/plans.hpp"
#include "python/shim/scales.hpp"
#include "python/shim/tensors.hpp"
#include "python/shim/workspace.hpp"

namespace float8_torch {
namespace {

std::string shape_text(int64_t rows, int64_t cols) {
  return "[" + std::to_string(rows) + ", " + std::to_string(cols) + "]";
}

// A tensor like `of` in all dimensions but the last.
Tensor empty_rows(const Tensor& of, int64_t cols, int32_t dtype, Device device) {
  int64_t* sizes = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_sizes(of.get(), &sizes));
  std::vector<int64_t> wanted(sizes, sizes + of.dim());
  wanted.back() = cols;
  return empty(wanted, dtype, device);
}

// What forward and backward of a linear have in common.
struct Call {
  Config config;
  Place place;
  int32_t dtype;  // of x, y and their gradients
  int64_t n, k;

  Call(const Tensor& rows, const Tensor& weight, int64_t config_bits)
      : config(config_bits), place(place_of(rows, config)), dtype(dtype_of(rows)) {
    if (weight.dim() != 2) throw std::invalid_argument("float8: a weight has two dimensions");
    check_device(weight, "the weight");
    n = weight.size(0);
    k = weight.size(1);
  }

  [[nodiscard]] const Plan& plan(int64_t m, const Tensor& weight) const {
    const PlanKey key{.config = config.bits(),
                      .m_max = kRows * row_blocks(m),
                      .n = n,
                      .k = k,
                      .device = place.key(),
                      .tensor_dtype = static_cast<int8_t>(element_type(dtype, "x")),
                      .grad_dtype = static_cast<int8_t>(element_type(dtype_of(weight), "weight"))};
    return plan_for(key, place);
  }

  void check_device(const Tensor& tensor, const char* name) const {
    const Device device = device_of(tensor);
    if (device.type != place.device.type || device.index != place.device.index) {
      throw std::invalid_argument(std::string("float8: ") + name +
                                  " is on another device than the rows that it meets");
    }
  }

  template <class Args>
  void set_scales(Args& args, const Tensor& tensor, int64_t layout, const Plan& plan) const {
    check_device(tensor, "the scale state");
    const Scales scales(tensor, layout, config, place);
    args.scales = scales.slots(plan.linear);
    args.first_step = scales.first_step();
  }
};

std::tuple<Tensor, Tensor> linear_forward(const Tensor& x, const Tensor& weight,
                                          const std::optional<Tensor>& bias,
                                          const std::optional<Tensor>& scales, int64_t config,
                                          int64_t layout, bool save) {
  const Call call(x, weight, config);
  const Matrix rows = as_matrix(x);
  if (rows.cols != call.k) {
    throw std::invalid_argument("float8: x has rows of " + std::to_string(rows.cols) +
                                " elements, and the weight is " + shape_text(call.n, call.k));
  }
  if (bias.has_value() != call.config.bias()) {
    throw std::invalid_argument("float8: a bias is given, or missing, against the config");
  }
  Tensor y = empty_rows(x, call.n, call.dtype, call.place.device);
  if (rows.rows == 0) {
    const SavedBytes bytes = save ? saved_bytes(call.n, call.k, call.config) : SavedBytes{};
    return {y, empty_bytes(bytes.base, call.place.device)};
  }
  const Plan& plan = call.plan(rows.rows, weight);
  Tensor saved = empty_bytes(save ? static_cast<int64_t>(plan.saved_bytes) : 0, call.place.device);
  const Matrix w = as_matrix(to_dtype(weight, call.dtype));
  float8_forward_args args;
  args.x = rows.data;
  args.ld_x = rows.stride;
  args.w = w.data;
  args.ld_w = w.stride;
  args.y = y.mutable_data_ptr();
  args.m = rows.rows;
  Tensor typed_bias;
  if (bias) {
    call.check_device(*bias, "the bias");
    if (bias->dim() != 1 || bias->size(0) != call.n) {
      throw std::invalid_argument("float8: the bias has not the weight's " +
                                  std::to_string(call.n) + " rows");
    }
    typed_bias = to_dtype(*bias, call.dtype);
    args.bias = typed_bias.mutable_data_ptr();
  }
  if (save && plan.saved_bytes > 0) {
    args.saved = saved.mutable_data_ptr();
    args.saved_bytes = plan.saved_bytes;
  }
  args.evaluate = !save;
  if (scales) call.set_scales(args, *scales, layout, plan);
  const Workspace workspace(call.place, plan.workspace_bytes);
  check(float8_linear_forward(plan.linear, &args, workspace.data(), call.place.stream));
  return {y, saved};
}

std::tuple<Tensor, Tensor, Tensor> linear_backward(const Tensor& dy, const Tensor& saved,
                                                   const std::optional<Tensor>& x,
                                                   const Tensor& weight,
                                                   const std::optional<Tensor>& scales,
                                                   int64_t config, int64_t layout, int64_t wanted) {
  const Call call(dy, weight, config);
  const Device device = call.place.device;
  const bool want_dx = (wanted & 1) != 0;
  const bool want_dw = (wanted & 2) != 0;
  const bool want_db = (wanted & 4) != 0;
  const Matrix rows = as_matrix(dy);
  if (rows.cols != call.n) {
    throw std::invalid_argument("float8: dy has rows of " + std::to_string(rows.cols) +
                                " elements, and the weight is " + shape_text(call.n, call.k));
  }
  const std::array<int64_t, 2> weight_size = {want_dw ? call.n : 0, want_dw ? call.k : 0};
  const int64_t bias_size = want_db ? call.n : 0;
  const int32_t grad_dtype = dtype_of(weight);
  const int64_t none = 0;
  Tensor dx = want_dx ? empty_rows(dy, call.k, call.dtype, device)
                      : empty(std::span(&none, 1), call.dtype, device);
  Tensor dw = empty(weight_size, grad_dtype, device);
  Tensor db = empty(std::span(&bias_size, 1), grad_dtype, device);
  if (rows.rows == 0) {
    torch::stable::zero_(dw);
    torch::stable::zero_(db);
    return {dx, dw, db};
  }
  const Plan& plan = call.plan(rows.rows, weight);
  float8_backward_args args;
  args.dy = rows.data;
  args.ld_dy = rows.stride;
  args.m = rows.rows;
  if (want_dx) args.dx = dx.mutable_data_ptr();
  if (want_dw) args.dw = dw.mutable_data_ptr();
  if (want_db) args.db = db.mutable_data_ptr();
  if (plan.saved_bytes > 0) {
    args.saved = saved.mutable_data_ptr();
    args.saved_bytes = static_cast<size_t>(saved.numel());
  }
  Matrix inputs, w;
  if (call.config.reads_x()) {
    if (!x) throw std::invalid_argument("float8: this recipe's backward reads x");
    call.check_device(*x, "x");
    inputs = as_matrix(to_dtype(*x, call.dtype));
    if (inputs.rows != rows.rows || inputs.cols != call.k) {
      throw std::invalid_argument("float8: x is " + shape_text(inputs.rows, inputs.cols) +
                                  ", and dy and the weight ask for " +
                                  shape_text(rows.rows, call.k));
    }
    args.x = inputs.data;
    args.ld_x = inputs.stride;
  }
  if (call.config.reads_weight()) {
    w = as_matrix(to_dtype(weight, call.dtype));
    args.w = w.data;
    args.ld_w = w.stride;
  }
  if (scales) call.set_scales(args, *scales, layout, plan);
  const Workspace workspace(call.place, plan.workspace_bytes);
  check(float8_linear_backward(plan.linear, &args, workspace.data(), call.place.stream));
  return {dx, dw, db};
}

std::tuple<int64_t, int64_t> saved_bytes_op(int64_t n, int64_t k, int64_t config) {
  const SavedBytes bytes = saved_bytes(n, k, Config(config));
  return {bytes.base, bytes.per_block};
}

void prepare(const Tensor& x, const Tensor& weight, std::vector<int64_t> n, std::vector<int64_t> k,
             int64_t m, int64_t config) {
  if (n.size() != k.size() || m < 1) {
    throw std::invalid_argument("float8: prepare needs as many n as k, and at least one row");
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
                    .grad_dtype = static_cast<int8_t>(element_type(dtype_of(weight), "weight"))});
  }
  plan_all(keys, place);
}

Scales scales_of(const Tensor& state, int64_t config, int64_t layout) {
  return Scales(state, layout, Config(config), place_of(state, Config(config)));
}

int64_t scales_bytes(int64_t config, int64_t layout) {
  (void)saved_bytes(128, 128, Config(config));  // there is a plan now
  Place place;
  place.emulated = true;
  return Scales(empty_bytes(1, {}), layout, Config(config), place).bytes();
}

void scales_init(const Tensor& state, int64_t config, int64_t layout) {
  scales_of(state, config, layout).init();
}

void scales_set_first(const Tensor& state, int64_t config, int64_t layout, bool first) {
  scales_of(state, config, layout).set_first_step(first);
}

bool scales_is_first(const Tensor& state, int64_t config, int64_t layout) {
  return scales_of(state, config, layout).first_step();
}

void scales_sync(const Tensor& state, int64_t config, int64_t layout) {
  scales_of(state, config, layout).sync();
}

void add_kernels(torch::stable::detail::StableLibrary& library) {
  library.impl("linear_forward", TORCH_BOX(&linear_forward));
  library.impl("linear_backward", TORCH_BOX(&linear_backward));
  library.impl("prepare", TORCH_BOX(&prepare));
  library.impl("scales_init", TORCH_BOX(&scales_init));
  library.impl("scales_set_first", TORCH_BOX(&scales_set_first));
  library.impl("scales_is_first", TORCH_BOX(&scales_is_first));
  library.impl("scales_sync", TORCH_BOX(&scales_sync));
}

}  // namespace
}  // namespace float8_torch

STABLE_TORCH_LIBRARY(float8, library) {
  library.def(
      "linear_forward(Tensor x, Tensor weight, Tensor? bias, Tensor? scales, int config, int "
      "layout, bool save) -> (Tensor, Tensor)");
  library.def(
      "linear_backward(Tensor dy, Tensor saved, Tensor? x, Tensor weight, Tensor? scales, int "
      "config, int layout, int wanted) -> (Tensor, Tensor, Tensor)");
  library.def("saved_bytes(int n, int k, int config) -> (int, int)");
  library.def("prepare(Tensor x, Tensor weight, int[] n, int[] k, int m, int config) -> ()");
  library.def("scales_bytes(int config, int layout) -> int");
  library.def("scales_init(Tensor(a!) state, int config, int layout) -> ()");
  library.def("scales_set_first(Tensor(a!) state, int config, int layout, bool first) -> ()");
  library.def("scales_is_first(Tensor state, int config, int layout) -> bool");
  library.def("scales_sync(Tensor(a!) state, int config, int layout) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(float8, CPU, library) {
  float8_torch::add_kernels(library);
}

STABLE_TORCH_LIBRARY_IMPL(float8, CUDA, library) {
  float8_torch::add_kernels(library);
}

STABLE_TORCH_LIBRARY_IMPL(float8, CompositeExplicitAutograd, library) {
  library.impl("saved_bytes", TORCH_BOX(&float8_torch::saved_bytes_op));
  library.impl("scales_bytes", TORCH_BOX(&float8_torch::scales_bytes));
}
