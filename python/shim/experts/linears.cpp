// The ops of expert linears.
#include <torch/csrc/stable/ops.h>

#include <array>

#include "python/shim/base/errors.hpp"
#include "python/shim/experts/call.hpp"
#include "python/shim/experts/experts.hpp"
#include "python/shim/experts/routing_errors.hpp"
#include "python/shim/plans/workspace.hpp"

namespace float8_torch {

Tensor experts_layout(const Tensor& offsets, int64_t m, int64_t config) {
  const Place place = place_of(offsets, Config(config));
  check_dense(offsets, sizeof(int32_t), place.device, "offs");
  if (offsets.dim() != 1 || dtype_of(offsets) != aoti_torch_dtype_int32()) {
    throw std::invalid_argument(
        "float8: offs is the end of each expert's rows, int32 in one dimension");
  }
  const int64_t experts = checked_experts(offsets.numel());
  if (m <= 0) {
    const auto [bytes, saved] = experts_bytes(0, experts, 16, 16, config);
    Tensor layout = empty_bytes(bytes, place.device);
    return torch::stable::zero_(layout);
  }
  const GroupLayoutPlan& plan = layout_plan(m, experts, place);
  const Tensor error = kept_routing_error(place, plan);
  Tensor layout = empty_bytes(bytes_of(plan), place.device);
  Tensor front = torch::stable::narrow(layout, 0, 0, static_cast<int64_t>(kRoutingErrorBytes));
  copy_routing_error(front, error, place);
  float8_group_layout_args args;
  args.offsets = static_cast<const int32_t*>(offsets.mutable_data_ptr());
  args.m = m;
  args.layout = {layout.mutable_data_ptr(), plan.bytes};
  check(float8_group_layout(plan.plan, &args, place.stream));
  copy_routing_error(error, front, place);
  return layout;
}

std::tuple<Tensor, Tensor> experts_forward(
    const Tensor& x, const Tensor& weight, const Tensor& layout, int64_t config, bool save,
    const std::optional<Tensor>& scales, int64_t scale_layout, const std::optional<Tensor>& w_q,
    const std::optional<Tensor>& w_scales, const std::optional<Tensor>& x_amax,
    const std::optional<Tensor>& x_row_amax, const std::optional<Tensor>& w_amax) {
  if (weight.dim() != 3) {
    throw std::invalid_argument("float8: the weights of experts have three dimensions");
  }
  const ExpertsCall call(x, config, weight.size(0), weight.size(1), weight.size(2));
  const Device device = call.place.device;
  if (device_of(weight) != device) {
    throw std::invalid_argument("float8: the weights of experts are on another device than x");
  }
  const Matrix rows = call.rows_of(x, call.k, "x");
  Tensor y = empty_matrix(rows.rows, call.n, call.dtype, device);
  if (rows.rows == 0) {
    const int64_t bytes =
        save ? std::get<1>(experts_bytes(0, call.experts, call.n, call.k, config)) : 0;
    return {y, empty_bytes(bytes, device)};
  }
  ExpertsKey key = call.key(rows.rows, call.grad_type(element_type(dtype_of(weight), "weight")));
  key.x_over_ranks = x_amax || x_row_amax;
  const ExpertsPlan& plan = experts_for(key, call.place);
  Tensor saved = empty_bytes(save ? static_cast<int64_t>(plan.saved_bytes) : 0, device);
  const ExpertWeight w = call.weight_of(weight, w_q, w_scales, call.n, call.k, true);
  float8_experts_forward_args args;
  args.m = rows.rows;
  args.x.data = rows.data;
  args.x.ld = rows.stride;
  w.set(args.w);
  args.y.data = y.mutable_data_ptr();
  args.layout = call.layout_of(layout, rows.rows);
  if (save) args.saved = {saved.mutable_data_ptr(), plan.saved_bytes};
  args.x_amax = call.maxima_of(x_amax, scales ? 1 : call.experts);
  args.w_amax = call.maxima_of(w_amax, 1);
  args.x_row_amax = call.maxima_of(x_row_amax, rows.rows);
  args.zero_tail = 1;
  float8_step step{.evaluate = !save};
  args.step = &step;
  if (scales) call.set_scales(args.scales, step, *scales, scale_layout, plan.experts);
  const Workspace workspace(call.place, plan.workspace_bytes, Counts::kNone);
  args.workspace = {workspace.data(), plan.workspace_bytes};
  check(float8_experts_forward(plan.experts, &args, call.place.stream));
  return {y, saved};
}

std::tuple<Tensor, Tensor> experts_backward(
    const Tensor& dy, const Tensor& saved, const Tensor& layout,
    const std::optional<Tensor>& weight, int64_t experts, int64_t n, int64_t k, int64_t grad_dtype,
    int64_t config, int64_t wanted, const std::optional<Tensor>& x,
    const std::optional<Tensor>& scales, int64_t scale_layout, const std::optional<Tensor>& w_qt,
    const std::optional<Tensor>& w_scales, const std::optional<Tensor>& dy_amax,
    const std::optional<Tensor>& dy_row_amax, const std::optional<Tensor>& w_amax) {
  const ExpertsCall call(dy, config, experts, n, k);
  const Device device = call.place.device;
  const bool want_dx = (wanted & 1) != 0;
  const bool want_dw = (wanted & 2) != 0;
  const float8_dtype wanted_type = checked_grad_dtype(grad_dtype);
  const float8_dtype grad_type = call.grad_type(wanted_type);
  const Matrix rows = call.rows_of(dy, n, "dy");
  Tensor dx = empty_matrix(want_dx ? rows.rows : 0, k, call.dtype, device);
  Tensor dw = grad_of_weight(want_dw, experts, n, k, grad_type, device);
  if (rows.rows == 0) {
    torch::stable::zero_(dw);
    return {dx, to_dtype(dw, code_of(wanted_type))};
  }
  ExpertsKey key = call.key(rows.rows, grad_type);
  key.dy_over_ranks = dy_amax || dy_row_amax;
  const ExpertsPlan& plan = experts_for(key, call.place);
  check_dense(saved, 1, device, "what forward saved");
  float8_experts_backward_args args;
  args.m = rows.rows;
  args.dy.data = rows.data;
  args.dy.ld = rows.stride;
  if (want_dx) args.dx.data = dx.mutable_data_ptr();
  if (want_dw) args.dw.data = dw.mutable_data_ptr();
  args.layout = call.layout_of(layout, rows.rows);
  args.saved = {saved.mutable_data_ptr(), static_cast<size_t>(saved.numel())};
  ExpertWeight w;  // until the call has read it
  if (want_dx && call.reads_weight()) {
    w = call.weight_of(weight, w_qt, w_scales, n, k, false);
    w.set(args.w);
  }
  std::optional<Matrix> inputs;
  if (want_dw && call.reads_x()) {
    inputs = call.input_again(x, rows.rows);
    args.x.data = inputs->data;
    args.x.ld = inputs->stride;
  }
  args.dy_amax = call.maxima_of(dy_amax, scales ? 1 : call.experts);
  args.w_amax = call.maxima_of(w_amax, 1);
  args.dy_row_amax = call.maxima_of(dy_row_amax, rows.rows);
  args.zero_tail = 1;
  float8_step step{};
  args.step = &step;
  if (scales) call.set_scales(args.scales, step, *scales, scale_layout, plan.experts);
  const Workspace workspace(call.place, plan.workspace_bytes, Counts::kNone);
  args.workspace = {workspace.data(), plan.workspace_bytes};
  check(float8_experts_backward(plan.experts, &args, call.place.stream));
  return {dx, to_dtype(dw, code_of(wanted_type))};
}

std::tuple<int64_t, int64_t> experts_bytes(int64_t m, int64_t experts, int64_t n, int64_t k,
                                           int64_t config) {
  // The sizes follow from these numbers alone, so the emulated device's plans have them, for which
  // nothing is compiled.
  const Place place{.emulated = true};
  const auto of = [&](int64_t blocks) {
    const GroupLayoutKey layout{
        .m_max = kExpertRows * blocks, .experts = checked_experts(experts), .device = place.key()};
    const ExpertsKey key{.config = Config(config).of_experts() | 1U << 4,
                         .m_max = kExpertRows * blocks,
                         .n = n,
                         .k = k,
                         .experts = layout.experts,
                         .device = place.key()};
    return std::array{bytes_of(group_layout_for(layout, place)),
                      static_cast<int64_t>(experts_for(key, place).saved_bytes)};
  };
  const auto [layout, saved] = of(1);
  const auto [layout_of_two, saved_of_two] = of(2);
  const int64_t more = expert_row_blocks(m) - 1;  // -1: what is not proportional to M
  return {layout + more * (layout_of_two - layout), saved + more * (saved_of_two - saved)};
}

}  // namespace float8_torch
