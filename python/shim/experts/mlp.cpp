// The ops of the MLP of experts.
#include <torch/csrc/stable/ops.h>

#include <array>
#include <stdexcept>

#include "python/shim/errors.hpp"
#include "python/shim/experts.hpp"
#include "python/shim/experts/call.hpp"
#include "python/shim/workspace.hpp"

namespace float8_torch {
namespace {

// What forward and backward of an MLP of experts read of their operands.
struct MoeOperands {
  int64_t m;
  const int32_t* index = nullptr;

  // `rows`: the tokens.
  MoeOperands(const Tensor& rows, const std::optional<Tensor>& of_rows, const Device& device)
      : m(of_rows ? of_rows->numel() : rows.size(0)) {
    if (!of_rows) return;
    check_dense(*of_rows, sizeof(int32_t), device, "the index of a routing");
    if (of_rows->dim() != 1 || dtype_of(*of_rows) != aoti_torch_dtype_int32()) {
      throw std::invalid_argument(
          "float8: the index of a routing is the token of each row, int32 in one dimension");
    }
    index = static_cast<const int32_t*>(of_rows->mutable_data_ptr());
  }
};

void check_weights(const Tensor& w13, const Tensor& w2, const std::optional<Tensor>& w3,
                   const Device& device) {
  const auto has = [&](const Tensor& w, int64_t tensors) {
    return w.dim() == 3 && w.size(0) == w2.size(0) && w.size(1) == tensors * w2.size(2) &&
           w.size(2) == w2.size(1) && device_of(w) == device;
  };
  if (w2.dim() != 3 || !has(w13, w3 ? 1 : 2) || (w3 && !has(*w3, 1))) {
    throw std::invalid_argument(
        "float8: w2 is [E][D][F], and w13 [E][2 F][D], or [E][F][D] with a w3 of that size, on the "
        "device of x");
  }
  if (device_of(w2) != device || (w3 && dtype_of(*w3) != dtype_of(w13))) {
    throw std::invalid_argument(
        "float8: the weights of experts are on another device than x, or w1 and w3 in two types");
  }
}

// The weights of gate and up: w13, or a pair of w1 and w3, whose copy in fp8 has the rows of both.
class PairOfWeights {
 public:
  PairOfWeights() = default;
  PairOfWeights(const ExpertsCall& call, const std::optional<Tensor>& w13,
                const std::optional<Tensor>& w3, const std::optional<Tensor>& copy,
                const std::optional<Tensor>& scales, int64_t hidden, bool q) {
    const bool apart = w3 && !copy;
    first_ = call.weight_of(w13, copy, scales, (apart ? 1 : 2) * hidden, call.k, q);
    if (apart) second_ = call.weight_of(w3, std::nullopt, std::nullopt, hidden, call.k, q);
  }
  template <class Args>
  void set(Args& args) const {
    first_.set(args.w13);
    if (second_) second_->set(args.w3);
  }

 private:
  ExpertWeight first_;
  std::optional<ExpertWeight> second_;
};

void set(float8_matrix& field, const Matrix& matrix) {
  field.data = matrix.data;
  field.ld = matrix.stride;
}

}  // namespace

std::tuple<Tensor, Tensor> moe_forward(
    const Tensor& x, const std::optional<Tensor>& index, const Tensor& w13, const Tensor& w2,
    const Tensor& layout, int64_t config, bool save, const std::optional<Tensor>& w13_q,
    const std::optional<Tensor>& w13_scales, const std::optional<Tensor>& w2_q,
    const std::optional<Tensor>& w2_scales, const std::optional<Tensor>& w3,
    const std::optional<Tensor>& w13_state, const std::optional<Tensor>& w2_state,
    int64_t scale_layout) {
  const Device device = device_of(x);
  check_weights(w13, w2, w3, device);
  const ExpertsCall call(x, config, w2.size(0), w2.size(2), w2.size(1));
  const Matrix tokens = call.rows_of(x, call.k, "x");
  const MoeOperands operands(x, index, device);
  Tensor y = empty_matrix(operands.m, call.k, call.dtype, device);
  if (operands.m == 0) return {y, empty_bytes(0, device)};
  const MoePlan& plan = call.moe_plan(operands.m, element_type(dtype_of(w13), "w13"),
                                      !index.has_value(), w3.has_value());
  Tensor saved = empty_bytes(save ? static_cast<int64_t>(plan.saved_bytes) : 0, device);
  const PairOfWeights first(call, w13, w3, w13_q, w13_scales, call.n, true);
  const ExpertWeight last = call.weight_of(w2, w2_q, w2_scales, call.k, call.n, true);
  float8_moe_forward_args args;
  args.m = operands.m;
  args.tokens = tokens.rows;
  set(args.x, tokens);
  args.index = operands.index;
  first.set(args);
  last.set(args.w2);
  float8_step step{.evaluate = !save};
  args.step = &step;
  call.set_scales(args, step, w13_state, w2_state, scale_layout, plan);
  args.y.data = y.mutable_data_ptr();
  args.layout = call.layout_of(layout, operands.m);
  if (save) args.saved = {saved.mutable_data_ptr(), plan.saved_bytes};
  args.zero_tail = 1;
  const Workspace workspace(call.place, plan.workspace_bytes, Counts::kNone);
  args.workspace = {workspace.data(), plan.workspace_bytes};
  check(float8_moe_forward(plan.moe, &args, call.place.stream));
  return {y, saved};
}

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_backward(
    const Tensor& dy, const Tensor& x, const std::optional<Tensor>& index,
    const std::optional<Tensor>& score, const std::optional<Tensor>& w13,
    const std::optional<Tensor>& w2, const Tensor& saved, const Tensor& layout, int64_t experts,
    int64_t hidden, int64_t grad_dtype, int64_t config, int64_t wanted,
    const std::optional<Tensor>& w13_qt, const std::optional<Tensor>& w13_scales,
    const std::optional<Tensor>& w2_qt, const std::optional<Tensor>& w2_scales,
    const std::optional<Tensor>& w3, const std::optional<Tensor>& w13_state,
    const std::optional<Tensor>& w2_state, int64_t scale_layout) {
  const Device device = device_of(x);
  const ExpertsCall call(x, config, experts, hidden, x.size(1));
  const float8_dtype grad_type = checked_grad_dtype(grad_dtype);
  const Matrix tokens = call.rows_of(x, call.k, "x");
  const Matrix grads = call.rows_of(to_dtype(dy, call.dtype), call.k, "dy");
  const MoeOperands operands(x, index, device);
  const bool want_dx = (wanted & 1) != 0, want_w13 = (wanted & 2) != 0, want_w2 = (wanted & 4) != 0;
  const bool want_w3 = (wanted & 8) != 0, w3_apart = (wanted & 16) != 0;
  Tensor dx = empty_matrix(want_dx ? operands.m : 0, call.k, call.dtype, device);
  const int64_t rows = (w3_apart ? 1 : 2) * hidden;
  Tensor dw13 = grad_of_weight(want_w13, experts, rows, call.k, grad_type, device);
  Tensor dw3 = grad_of_weight(want_w3, experts, rows, call.k, grad_type, device);
  Tensor dw2 = grad_of_weight(want_w2, experts, call.k, hidden, grad_type, device);
  if (operands.m == 0) {
    torch::stable::zero_(dw13);
    torch::stable::zero_(dw2);
    torch::stable::zero_(dw3);
    return {dx, dw13, dw2, dw3};
  }
  const MoePlan& plan = call.moe_plan(operands.m, grad_type, !index.has_value(), w3_apart);
  check_dense(saved, 1, device, "what forward saved");
  float8_moe_backward_args args;
  args.m = operands.m;
  args.tokens = tokens.rows;
  set(args.x, tokens);
  set(args.dy, grads);
  args.index = operands.index;
  if (score) {
    check_dense(*score, sizeof(float), device, "the scores of rows");
    if (score->numel() != operands.m || dtype_of(*score) != aoti_torch_dtype_float32()) {
      throw std::invalid_argument("float8: the scores of rows are float32, one of each row");
    }
    args.score = static_cast<const float*>(score->mutable_data_ptr());
  }
  PairOfWeights first;  // until the call has read it, as the last one
  ExpertWeight last;
  if (call.config.recompute()) {
    const std::optional<Tensor>& second = w3_apart ? w3 : std::nullopt;
    first = PairOfWeights(call, w13, second, w13_qt, w13_scales, hidden, false);
    last = call.weight_of(w2, w2_qt, w2_scales, call.k, hidden, false);
    first.set(args);
    last.set(args.w2);
  }
  float8_step step{};
  args.step = &step;
  call.set_scales(args, step, w13_state, w2_state, scale_layout, plan);
  if (want_dx) args.dx.data = dx.mutable_data_ptr();
  if (want_w13) args.dw13.data = dw13.mutable_data_ptr();
  if (want_w2) args.dw2.data = dw2.mutable_data_ptr();
  if (want_w3) args.dw3.data = dw3.mutable_data_ptr();
  args.layout = call.layout_of(layout, operands.m);
  args.saved = {saved.mutable_data_ptr(), static_cast<size_t>(saved.numel())};
  args.zero_tail = 1;
  const Workspace workspace(call.place, plan.workspace_bytes, Counts::kNone);
  args.workspace = {workspace.data(), plan.workspace_bytes};
  check(float8_moe_backward(plan.moe, &args, call.place.stream));
  return {dx, dw13, dw2, dw3};
}

int64_t moe_bytes(int64_t m, int64_t experts, int64_t hidden, int64_t dim, int64_t dtype,
                  int64_t config) {
  if (m <= 0) return 0;
  const Place place{.emulated = true};
  const ExpertsKey linear{.config = Config(config).of_experts() | 1U << 4,
                          .m_max = kExpertRows * expert_row_blocks(m),
                          .n = hidden,
                          .k = dim,
                          .experts = checked_experts(experts),
                          .device = place.key(),
                          .tensor_dtype = static_cast<int8_t>(checked_grad_dtype(dtype))};
  return static_cast<int64_t>(moe_for({.linear = linear}, place).saved_bytes);
}

}  // namespace float8_torch
