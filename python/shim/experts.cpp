// The ops of expert linears.
#include "python/shim/experts.hpp"

#include <torch/csrc/stable/ops.h>

#include <array>
#include <stdexcept>
#include <string>

#include "python/shim/errors.hpp"
#include "python/shim/expert_weights.hpp"
#include "python/shim/plans.hpp"
#include "python/shim/routing_errors.hpp"
#include "python/shim/scales.hpp"
#include "python/shim/workspace.hpp"

namespace float8_torch {
namespace {

int64_t bytes_of(const GroupLayoutPlan& plan) {
  return static_cast<int64_t>(plan.bytes);
}

int32_t checked_experts(int64_t experts) {
  if (experts >= 1 && experts <= FLOAT8_MAX_EXPERTS) return static_cast<int32_t>(experts);
  throw std::invalid_argument("float8: " + std::to_string(experts) + " experts; they are 1 to " +
                              std::to_string(FLOAT8_MAX_EXPERTS));
}

const GroupLayoutPlan& layout_plan(int64_t m, int64_t experts, const Place& place) {
  const GroupLayoutKey key{.m_max = kExpertRows * expert_row_blocks(m),
                           .experts = checked_experts(experts),
                           .device = place.key()};
  return group_layout_for(key, place);
}

// What forward and backward of an expert linear have in common.
struct ExpertsCall {
  Config config;
  Place place;
  int32_t dtype;  // of x, y and their gradients
  int64_t experts, n, k;

  ExpertsCall(const Tensor& rows, int64_t config_bits, int64_t count, int64_t out, int64_t in)
      : config(config_bits),
        place(place_of(rows, config)),
        dtype(dtype_of(rows)),
        experts(checked_experts(count)),
        n(out),
        k(in) {}

  [[nodiscard]] ExpertsKey key(int64_t m, float8_dtype grad_dtype) const {
    return {.config = config.of_experts(),
            .m_max = kExpertRows * expert_row_blocks(m),
            .n = n,
            .k = k,
            .experts = static_cast<int32_t>(experts),
            .device = place.key(),
            .tensor_dtype = static_cast<int8_t>(element_type(dtype, "x")),
            .grad_dtype = static_cast<int8_t>(grad_dtype)};
  }
  [[nodiscard]] const ExpertsPlan& plan(int64_t m, float8_dtype grad_dtype) const {
    return experts_for(key(m, grad_dtype), place);
  }

  [[nodiscard]] const MoePlan& moe_plan(int64_t m, float8_dtype grad_dtype, bool in_place,
                                        bool w3_apart) const {
    return moe_for({.linear = key(m, grad_dtype), .rows_in_place = in_place, .w3_apart = w3_apart},
                   place);
  }

  // A layout has the bytes that its experts and the plan's largest m give it, no more and no fewer.
  [[nodiscard]] float8_buffer layout_of(const Tensor& layout, int64_t m) const {
    check_dense(layout, 1, place.device, "the layout of a routing");
    const int64_t bytes = bytes_of(layout_plan(m, experts, place));
    if (layout.numel() != bytes) {
      throw std::invalid_argument(
          "float8: the layout of a routing has " + std::to_string(layout.numel()) + " bytes, and " +
          std::to_string(m) + " rows of " + std::to_string(experts) + " experts have " +
          std::to_string(bytes) + "; it was made for another number of rows or experts");
    }
    return {layout.mutable_data_ptr(), static_cast<size_t>(bytes)};
  }

  // grad_weight is in high precision.
  [[nodiscard]] bool reads_x() const {
    return config.recipe().grad_weight.a.scaling == FLOAT8_HIGH_PRECISION;
  }
  // grad_input reads the weight: it casts it again, or is in high precision.
  [[nodiscard]] bool reads_weight() const {
    return config.recompute() || config.recipe().grad_input.a.scaling == FLOAT8_HIGH_PRECISION;
  }
  // The type in which the plan gives dw, as in linear_backward.
  [[nodiscard]] float8_dtype grad_type(float8_dtype weight) const {
    const bool same = weight == FLOAT8_F32 || weight == element_type(dtype, "x");
    return same || !reads_x() ? weight : FLOAT8_F32;
  }
  // The x of a forward, where grad_weight is computed from it.
  [[nodiscard]] Matrix input_again(const std::optional<Tensor>& x, int64_t m) const {
    if (!x || device_of(*x) != place.device || x->dim() != 2 || x->size(0) != m) {
      throw std::invalid_argument(
          "float8: backward of this recipe reads the rows of experts: give it those of forward");
    }
    return rows_of(to_dtype(*x, dtype), k, "x");
  }
  // Sets the part of a scale state that a call reads and raises; `plan` is one of the recipe.
  void set_scales(float8_scale_slots& slots, float8_step& step, const Tensor& tensor,
                  int64_t layout, const float8_experts* plan) const {
    if (device_of(tensor) != place.device) {
      throw std::invalid_argument("float8: a scale state is on another device than the rows");
    }
    const Scales scales(tensor, layout, config, place);
    slots = scales.slots({.experts = plan});
    step.first_step = step.first_step != 0 || scales.first_step() ? 1 : 0;
  }
  // Those of both linears of an MLP. Where one of them has no scales yet, both are scaled by their tensors.
  template <class Args>
  void set_scales(Args& args, float8_step& step, const std::optional<Tensor>& of_w13,
                  const std::optional<Tensor>& of_w2, int64_t layout, const MoePlan& plan) const {
    if (!of_w13 || !of_w2) return;
    const float8_experts* const any = float8_moe_linear(plan.moe, 0);
    set_scales(args.w13_scales, step, *of_w13, layout, any);
    set_scales(args.w2_scales, step, *of_w2, layout, any);
  }

  // A weight of these sizes, or its q or qt in fp8.
  [[nodiscard]] ExpertWeight weight_of(const std::optional<Tensor>& weight,
                                       const std::optional<Tensor>& copy,
                                       const std::optional<Tensor>& scales, int64_t out, int64_t in,
                                       bool q) const {
    return {weight, copy, scales, {experts, out, in}, config, dtype, place.device, q};
  }

  [[nodiscard]] Matrix rows_of(const Tensor& tensor, int64_t cols, const char* name) const {
    if (tensor.dim() != 2) {
      throw std::invalid_argument(std::string("float8: ") + name + " has " +
                                  std::to_string(tensor.dim()) +
                                  " dimensions; rows of experts have 2");
    }
    Matrix rows = as_matrix(tensor);
    if (rows.cols == cols) return rows;
    throw std::invalid_argument(std::string("float8: ") + name + " has rows of " +
                                std::to_string(rows.cols) + " elements, and the experts' weights " +
                                std::to_string(cols));
  }
};

Tensor empty_matrix(int64_t rows, int64_t cols, int32_t dtype, const Device& device) {
  const std::array<int64_t, 2> sizes = {rows, cols};
  return empty(sizes, dtype, device);
}

int32_t code_of(float8_dtype dtype) {
  switch (dtype) {
    case FLOAT8_F32:
      return aoti_torch_dtype_float32();
    case FLOAT8_F16:
      return aoti_torch_dtype_float16();
    default:
      return aoti_torch_dtype_bfloat16();
  }
}

float8_dtype checked_grad_dtype(int64_t dtype) {
  if (dtype >= FLOAT8_BF16 && dtype <= FLOAT8_F16) return static_cast<float8_dtype>(dtype);
  throw std::invalid_argument("float8: grad_dtype is " + std::to_string(dtype) +
                              "; it is 0 (bfloat16), 1 (float32) or 2 (float16)");
}

// [experts][n][k], or nothing where it is not wanted.
Tensor grad_of_weight(bool wanted, int64_t experts, int64_t n, int64_t k, float8_dtype type,
                      const Device& device) {
  const std::array<int64_t, 3> size = {wanted ? experts : 0, n, k};
  return empty(size, code_of(type), device);
}

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

std::tuple<Tensor, Tensor> experts_forward(const Tensor& x, const Tensor& weight,
                                           const Tensor& layout, int64_t config, bool save,
                                           const std::optional<Tensor>& scales,
                                           int64_t scale_layout, const std::optional<Tensor>& w_q,
                                           const std::optional<Tensor>& w_scales) {
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
  const ExpertsPlan& plan =
      call.plan(rows.rows, call.grad_type(element_type(dtype_of(weight), "weight")));
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
    const std::optional<Tensor>& w_scales) {
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
  const ExpertsPlan& plan = call.plan(rows.rows, grad_type);
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
