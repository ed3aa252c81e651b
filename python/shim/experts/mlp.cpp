// The ops of the MLP of experts.
#include <torch/csrc/stable/ops.h>

#include <array>
#include <stdexcept>

#include "python/shim/base/errors.hpp"
#include "python/shim/experts/call.hpp"
#include "python/shim/experts/experts.hpp"
#include "python/shim/plans/workspace.hpp"

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

// A buffer of an MLP; nothing without a plan.
Tensor buffer(const MoePlan* plan, int32_t which, const Device& device) {
  const size_t bytes = plan == nullptr ? 0 : float8_moe_buffer_bytes(plan->moe, which);
  return empty_bytes(static_cast<int64_t>(bytes), device);
}

float8_buffer buffer_of(const Tensor& tensor) {
  if (tensor.numel() == 0) return {};
  return {tensor.mutable_data_ptr(),
          static_cast<size_t>(tensor.numel()) * static_cast<size_t>(tensor.element_size())};
}

// The scratch of a kind of calls, which is no larger than it needs.
class Scratch {
 public:
  Scratch(const Place& place, const MoePlan& plan, int32_t call, bool weights_given)
      : bytes_(
            float8_moe_call_bytes(plan.moe, call | (weights_given ? FLOAT8_MOE_WEIGHTS_GIVEN : 0))),
        workspace_(place, bytes_, Counts::kNone) {}
  [[nodiscard]] float8_buffer buffer() const { return {workspace_.data(), bytes_}; }

 private:
  size_t bytes_;
  Workspace workspace_;
};

}  // namespace

std::tuple<Tensor, Tensor, Tensor, Tensor> moe_forward(
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
  save = save && operands.m > 0;
  Tensor y = empty_matrix(operands.m, call.k, call.dtype, device);
  Tensor gate_up = empty_matrix(save ? operands.m : 0, 2 * call.n, call.dtype, device);
  if (operands.m == 0) return {y, gate_up, empty_bytes(0, device), empty_bytes(0, device)};
  const MoePlan& plan = call.moe_plan(operands.m, element_type(dtype_of(w13), "w13"),
                                      !index.has_value(), w3.has_value());
  Tensor of_w13 = buffer(save ? &plan : nullptr, FLOAT8_MOE_SAVED_OF_W13, device);
  Tensor of_w2 = buffer(save ? &plan : nullptr, FLOAT8_MOE_SAVED_OF_W2, device);
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
  args.buffers = {.gate_up = buffer_of(gate_up),
                  .saved_of_w13 = buffer_of(of_w13),
                  .saved_of_w2 = buffer_of(of_w2)};
  args.zero_tail = 1;
  const int32_t kind = save ? FLOAT8_MOE_FORWARD : FLOAT8_MOE_EVALUATE;
  const bool given = w13_q.has_value() && w2_q.has_value();
  const Scratch scratch(call.place, plan, kind, given);
  args.workspace = scratch.buffer();
  check(float8_moe_forward(plan.moe, &args, call.place.stream));
  return {y, gate_up, of_w13, of_w2};
}

namespace {

// The results of a part of a backward, and what it is given of them.
struct PartOfBackward {
  Tensor first, second;

  // `plan`: null where there are no rows.
  PartOfBackward(const ExpertsCall& call, const MoePlan* plan, int64_t m, int32_t part,
                 int64_t wanted, float8_dtype grad_type) {
    const bool one = (wanted & 1) != 0, two = (wanted & 2) != 0;
    const Device device = call.place.device;
    const int64_t rows = ((wanted & kW3Apart) != 0 ? 1 : 2) * call.n;
    const auto grad = [&](bool is_wanted, int64_t n, int64_t k) {
      return grad_of_weight(is_wanted, call.experts, n, k, grad_type, device);
    };
    switch (part) {
      case FLOAT8_MOE_GRAD_HIDDEN:
        first = empty_matrix(one ? m : 0, call.n, call.dtype, device);
        second = grad(two, call.k, call.n);
        return;
      case FLOAT8_MOE_GRAD_GATE_UP:
        first = buffer(one ? plan : nullptr, FLOAT8_MOE_GATE_UP_GRAD_Q, device);
        second = buffer(two ? plan : nullptr, FLOAT8_MOE_GATE_UP_GRAD_QT, device);
        return;
      case FLOAT8_MOE_GRAD_INPUT:
        first = empty_matrix(m, call.k, call.dtype, device);
        second = empty_bytes(0, device);
        return;
      default:
        first = grad(one, rows, call.k);
        second = grad(two, rows, call.k);
    }
  }
  // `read`: the buffers that the part reads, in the order of moe_backward in ops.cpp.
  void set(float8_moe_backward_args& args, const std::vector<Tensor>& read) const {
    const auto result = [](const Tensor& tensor) {
      float8_result out;
      out.data = buffer_of(tensor).data;
      return out;
    };
    float8_moe_buffers& buffers = args.buffers;
    switch (args.part) {
      case FLOAT8_MOE_GRAD_HIDDEN:
        buffers.saved_of_w2 = buffer_of(read[0]);
        buffers.hidden_grad = buffer_of(first);
        args.dw2 = result(second);
        return;
      case FLOAT8_MOE_GRAD_GATE_UP:
        buffers.gate_up = buffer_of(read[0]);
        buffers.hidden_grad = buffer_of(read[1]);
        buffers.gate_up_grad_q = buffer_of(first);
        buffers.gate_up_grad_qt = buffer_of(second);
        return;
      case FLOAT8_MOE_GRAD_INPUT:
        buffers.saved_of_w13 = buffer_of(read[0]);
        buffers.gate_up_grad_q = buffer_of(read[1]);
        buffers.gate_up_grad_qt = buffer_of(read[2]);
        args.dx = result(first);
        return;
      default:
        buffers.gate_up_grad_qt = buffer_of(read[0]);
        args.dw13 = result(first);
        args.dw3 = result(second);
    }
  }
  static constexpr int64_t kW3Apart = 1 << 4;
};

// Checks what the part of a backward is given.
int32_t checked_part(int64_t part, const std::vector<Tensor>& read, const Device& device) {
  constexpr std::array<size_t, 4> kRead = {1, 2, 3, 1};
  if (part < FLOAT8_MOE_GRAD_HIDDEN || part > FLOAT8_MOE_GRAD_WEIGHT ||
      read.size() != kRead[static_cast<size_t>(part) - 1]) {
    throw std::invalid_argument(
        "float8: moe_backward has parts 1 to 4, which read 1, 2, 3 and 1 buffers of the parts "
        "before");
  }
  for (const Tensor& each : read) {
    check_dense(each, aoti_torch_dtype_element_size(dtype_of(each)), device,
                "a buffer of moe_backward");
  }
  return static_cast<int32_t>(part);
}

const float* checked_score(const std::optional<Tensor>& score, int64_t m, const Device& device) {
  if (!score) return nullptr;
  check_dense(*score, sizeof(float), device, "the scores of rows");
  if (score->numel() != m || dtype_of(*score) != aoti_torch_dtype_float32()) {
    throw std::invalid_argument("float8: the scores of rows are float32, one of each row");
  }
  return static_cast<const float*>(score->mutable_data_ptr());
}

}  // namespace

std::tuple<Tensor, Tensor> moe_backward(
    const Tensor& x, const std::optional<Tensor>& dy, const std::optional<Tensor>& index,
    const std::optional<Tensor>& score, const std::optional<Tensor>& w13,
    const std::optional<Tensor>& w2, const std::vector<Tensor>& read, const Tensor& layout,
    int64_t experts, int64_t hidden, int64_t grad_dtype, int64_t config, int64_t part,
    int64_t wanted, const std::optional<Tensor>& w13_qt, const std::optional<Tensor>& w13_scales,
    const std::optional<Tensor>& w2_qt, const std::optional<Tensor>& w2_scales,
    const std::optional<Tensor>& w3, const std::optional<Tensor>& w13_state,
    const std::optional<Tensor>& w2_state, int64_t scale_layout) {
  const Device device = device_of(x);
  const ExpertsCall call(x, config, experts, hidden, ExpertsCall::cols_of(x, "x"));
  const float8_dtype grad_type = checked_grad_dtype(grad_dtype);
  const MoeOperands operands(x, index, device);
  const bool w3_apart = (wanted & PartOfBackward::kW3Apart) != 0;
  float8_moe_backward_args args;
  args.part = checked_part(part, read, device);
  const MoePlan* const plan =
      operands.m == 0 ? nullptr
                      : &call.moe_plan(operands.m, grad_type, !index.has_value(), w3_apart);
  const PartOfBackward results(call, plan, operands.m, args.part, wanted, grad_type);
  if (operands.m == 0) {
    for (Tensor each : {results.first, results.second}) torch::stable::zero_(each);
    return {results.first, results.second};
  }
  results.set(args, read);
  args.m = operands.m;
  args.tokens = x.size(0);
  std::optional<Matrix> inputs, grads;        // until the call has read them
  if (args.part == FLOAT8_MOE_GRAD_WEIGHT) {  // others have the sizes of x alone
    inputs = call.rows_of(x, call.k, "x");
    set(args.x, *inputs);
  }
  if (dy) {
    grads = call.rows_of(to_dtype(*dy, call.dtype), call.k, "dy");
    set(args.dy, *grads);
  }
  args.index = operands.index;
  args.score = checked_score(score, operands.m, device);
  PairOfWeights first;  // until the call has read it, as the last one
  ExpertWeight last;
  const bool of_w13 = args.part == FLOAT8_MOE_GRAD_INPUT;
  const bool of_w2 = args.part == FLOAT8_MOE_GRAD_HIDDEN;
  if (call.config.recompute() && of_w13) {
    const std::optional<Tensor>& second = w3_apart ? w3 : std::nullopt;
    first = PairOfWeights(call, w13, second, w13_qt, w13_scales, hidden, false);
    first.set(args);
  }
  if (call.config.recompute() && of_w2) {
    last = call.weight_of(w2, w2_qt, w2_scales, call.k, hidden, false);
    last.set(args.w2);
  }
  float8_step step{};
  args.step = &step;
  call.set_scales(args, step, w13_state, w2_state, scale_layout, *plan);
  args.layout = call.layout_of(layout, operands.m);
  args.zero_tail = 1;
  const bool given = of_w13 ? w13_qt.has_value() : w2_qt.has_value();
  const Scratch scratch(call.place, *plan, args.part, given);
  args.workspace = scratch.buffer();
  check(float8_moe_backward(plan->moe, &args, call.place.stream));
  return {results.first, results.second};
}

std::tuple<int64_t, int64_t, int64_t, int64_t> moe_bytes(int64_t m, int64_t experts, int64_t hidden,
                                                         int64_t dim, int64_t dtype,
                                                         int64_t config) {
  if (m <= 0) return {0, 0, 0, 0};
  const Place place{.emulated = true};
  const ExpertsKey linear{.config = Config(config).of_experts() | 1U << 4,
                          .m_max = kExpertRows * expert_row_blocks(m),
                          .n = hidden,
                          .k = dim,
                          .experts = checked_experts(experts),
                          .device = place.key(),
                          .tensor_dtype = static_cast<int8_t>(checked_grad_dtype(dtype))};
  const float8_moe* const moe = moe_for({.linear = linear}, place).moe;
  const auto bytes = [&](int32_t buffer) {
    return static_cast<int64_t>(float8_moe_buffer_bytes(moe, buffer));
  };
  return {bytes(FLOAT8_MOE_SAVED_OF_W13), bytes(FLOAT8_MOE_SAVED_OF_W2),
          bytes(FLOAT8_MOE_GATE_UP_GRAD_Q), bytes(FLOAT8_MOE_GATE_UP_GRAD_QT)};
}

}  // namespace float8_torch
