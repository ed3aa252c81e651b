#include "runtime/moe/moe.hpp"

#include <algorithm>
#include <tuple>
#include <type_traits>
#include <utility>

#include "runtime/device/memory.hpp"
#include "runtime/linear/call_arguments.hpp"

namespace f8::runtime {
namespace {

using kernels::RowSource;

constexpr const char* kForward = "float8_moe_forward";
constexpr const char* kForwardArgs = "float8_moe_forward_args";
constexpr const char* kBackward = "float8_moe_backward";
constexpr const char* kBackwardArgs = "float8_moe_backward_args";

// What both linears have in common.
ExpertsDesc of_linear(const MoeDesc& desc, int64_t n, int64_t k) {
  ExpertsDesc out;
  out.shape = {desc.m_max, n, k};
  out.experts = desc.experts;
  out.recipe = desc.recipe;
  out.tensor_dtype = desc.tensor_dtype;
  out.grad_weight_dtype = desc.grad_weight_dtype;
  out.accumulate_grad_weight = desc.accumulate_grad_weight;
  out.recompute_weight = desc.recompute_weight;
  out.non_finite = desc.non_finite;
  out.sm_limit = desc.sm_limit;
  return out;
}

float8_buffer part(const float8_buffer& whole, size_t at, size_t bytes) {
  if (whole.data == nullptr) return {};
  return {static_cast<uint8_t*>(whole.data) + at, bytes};
}

}  // namespace

Moe::Moe(std::shared_ptr<Context> context, MoeDesc desc, std::shared_ptr<const Experts> w13,
         std::shared_ptr<const Experts> w2)
    : context_(std::move(context)),
      desc_(std::move(desc)),
      w13_(std::move(w13)),
      w2_(std::move(w2)) {
  const auto rows = [&](int64_t cols) {
    return static_cast<size_t>(desc_.m_max * cols) * size_bytes(desc_.tensor_dtype);
  };
  Arena saved;
  saved.take(rows(2 * desc_.hidden));  // gate and up
  saved_of_w13_ = saved.take(w13_->saved_bytes());
  saved_of_w2_ = saved.take(w2_->saved_bytes());
  saved_bytes_ = saved.size();
  Arena forward;
  forward.take(rows(2 * desc_.hidden));  // gate and up, where there is no backward
  forward_scratch_ = forward.take(std::max(w13_->forward_bytes(), w2_->forward_bytes()));
  Arena backward;
  backward.take(rows(desc_.hidden));  // the gradient of silu(gate) up
  backward_scratch_ = backward.take(std::max(w13_->backward_bytes(), w2_->backward_bytes()));
  workspace_bytes_ = std::max(forward.size(), backward.size());
}

Result<std::shared_ptr<const Moe>> Moe::plan(const std::shared_ptr<Context>& context,
                                             const MoeDesc& desc) {
  for (const Gemm gemm : kGemms) {
    if (!desc.recipe.at(gemm).is_fp8()) {
      return fail(
          ErrorCode::kUnsupported,
          "recipe {}, GEMM {}: the MLP of experts has operands in fp8; two float8_experts have it",
          desc.recipe.name, to_string(gemm));
    }
  }
  ExpertsDesc first = of_linear(desc, 2 * desc.hidden, desc.dim);
  first.recompute_input = true;  // x is there still
  first.input = desc.rows_in_place ? RowSource::kMatrix : RowSource::kGather;
  first.grad_output = RowSource::kSwigluBackward;
  first.weight_pair = desc.w3_apart;
  ExpertsDesc second = of_linear(desc, desc.dim, desc.hidden);
  second.input = RowSource::kSwiglu;
  second.grad_output = desc.rows_in_place ? RowSource::kMatrix : RowSource::kGatherScore;
  auto w13 = F8_TRY(Experts::plan(context, first));
  auto w2 = F8_TRY(Experts::plan(context, second));
  return std::shared_ptr<const Moe>(new Moe(context, desc, std::move(w13), std::move(w2)));
}

template <class Call>
Status Moe::check_common(const char* args, const Call& call, bool reads_weights) const {
  constexpr bool forward = std::is_same_v<Call, MoeForwardCall>;
  if (call.m < 0 || call.m > desc_.m_max) {
    return fail(ErrorCode::kInvalidArgument, "{}.m is {}, the plan was made for 0 to {}", args,
                call.m, desc_.m_max);
  }
  if (desc_.rows_in_place ? call.tokens != call.m : call.tokens <= 0 && call.m > 0) {
    return fail(ErrorCode::kInvalidArgument, "{}.tokens is {}; it is {}", args, call.tokens,
                desc_.rows_in_place ? "m with float8_moe_desc.rows_in_place" : "the rows of x");
  }
  if (call.m == 0) return {};
  F8_TRY(need(args, "x.data", call.x.data));
  if (!desc_.rows_in_place) F8_TRY(need(args, "index", call.index));
  if (reads_weights) {
    for (const auto& [weight, data, fp8, linear] :
         {std::tuple(&call.w13, "w13.data", "w13.fp8", w13_.get()),
          {&call.w2, "w2.data", "w2.fp8", w2_.get()}}) {
      F8_TRY(weight->fp8 == nullptr ? need(args, data, weight->data)
                                    : linear->check_given(args, fp8, *weight->fp8, forward,
                                                          call.saved.data != nullptr));
    }
    if (desc_.w3_apart && call.w13.fp8 == nullptr) F8_TRY(need(args, "w3.data", call.w3.data));
  }
  F8_TRY(w13_->check_scales(args, "w13_scales", call.w13_scales, step_of(call)));
  F8_TRY(w2_->check_scales(args, "w2_scales", call.w2_scales, step_of(call)));
  F8_TRY(need(args, "layout.data", call.layout.data));
  return need(args, "workspace.data", call.workspace.data);
}

template <class Call>
void Moe::add_common(CallMemory& memory, const Call& call) const {
  const auto [dim, hidden, experts] = std::tuple(desc_.dim, desc_.hidden, desc_.experts);
  const int64_t rows_of_w13 = experts * w13_->weight_rows();
  const auto read = [&](const char* name, const float8_matrix& of, int64_t rows, int64_t cols) {
    memory.add_rows(name, of.data, rows, cols, of.ld, desc_.tensor_dtype, Access::kRead);
  };
  read("x", call.x, call.tokens, dim);
  if (call.w13.fp8 == nullptr) read("w13", call.w13, rows_of_w13, dim);
  if (call.w13.fp8 == nullptr && desc_.w3_apart) read("w3", call.w3, rows_of_w13, dim);
  if (call.w2.fp8 == nullptr) read("w2", call.w2, experts * dim, hidden);
  if (std::is_same_v<Call, MoeForwardCall> || desc_.recompute_weight) {
    constexpr bool forward = std::is_same_v<Call, MoeForwardCall>;
    if (call.w13.fp8 != nullptr) w13_->add_given(memory, "w13.fp8", *call.w13.fp8, forward);
    if (call.w2.fp8 != nullptr) w2_->add_given(memory, "w2.fp8", *call.w2.fp8, forward);
  }
  w13_->add_scales(memory, call.w13_scales);
  w2_->add_scales(memory, call.w2_scales);
  memory.add("index", call.index, static_cast<size_t>(call.m) * sizeof(int32_t), Access::kRead,
             alignof(int32_t));
  memory.add("layout", call.layout.data, layout_bytes(), Access::kRead);
  memory.add("workspace", call.workspace.data, workspace_bytes_, Access::kWrite);
}

Status Moe::check(const MoeForwardCall& call, Stream stream) const {
  F8_TRY(check_common(kForwardArgs, call, true));
  if (call.m == 0) return {};
  F8_TRY(need(kForwardArgs, "y.data", call.y.data));
  CallMemory memory(kForwardArgs);
  add_common(memory, call);
  memory.add_rows("y", call.y.data, call.m, desc_.dim, call.y.ld, desc_.tensor_dtype,
                  Access::kWrite);
  memory.add("saved", call.saved.data, saved_bytes_, Access::kWrite);
  return memory.check(kForward, *context_, stream);
}

Status Moe::check(const MoeBackwardCall& call, Stream stream) const {
  F8_TRY(check_common(kBackwardArgs, call, desc_.recompute_weight));
  if (call.dw3.data != nullptr && !desc_.w3_apart) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.dw3 is given, and dw13 has the rows of both; set float8_moe_desc.w3_apart, or "
                "leave dw3 "
                "empty",
                kBackwardArgs);
  }
  for (const auto& [name, result] :
       {std::pair("dw13", call.dw13), std::pair("dw3", call.dw3), std::pair("dw2", call.dw2)}) {
    if (result.data != nullptr && result.accumulate != 0 && !desc_.accumulate_grad_weight) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}.{}.accumulate is set, the plan has no GEMM that adds; set "
                  "float8_moe_desc.accumulate_grad_weight",
                  kBackwardArgs, name);
    }
  }
  CallMemory memory(kBackwardArgs);
  const auto [dim, hidden, experts] = std::tuple(desc_.dim, desc_.hidden, desc_.experts);
  memory.add_rows("dx", call.dx.data, call.m, dim, call.dx.ld, desc_.tensor_dtype, Access::kWrite);
  for (const auto& [name, result] : {std::pair("dw13", call.dw13), std::pair("dw3", call.dw3)}) {
    memory.add_rows(name, result.data, experts * w13_->weight_rows(), dim, result.ld,
                    desc_.grad_weight_dtype, Access::kWrite);
  }
  memory.add_rows("dw2", call.dw2.data, experts * dim, hidden, call.dw2.ld, desc_.grad_weight_dtype,
                  Access::kWrite);
  if (call.m == 0) return memory.check_alignment(kBackward);
  F8_TRY(need(kBackwardArgs, "dy.data", call.dy.data));
  if (!desc_.rows_in_place) F8_TRY(need(kBackwardArgs, "score", call.score));
  F8_TRY(need(kBackwardArgs, "saved.data", call.saved.data));
  add_common(memory, call);
  memory.add_rows("dy", call.dy.data, call.tokens, dim, call.dy.ld, desc_.tensor_dtype,
                  Access::kRead);
  memory.add("score", call.score, static_cast<size_t>(call.m) * sizeof(float), Access::kRead,
             alignof(float));
  memory.add("saved", call.saved.data, saved_bytes_, Access::kRead);
  return memory.check(kBackward, *context_, stream);
}

float8_matrix Moe::gate_up(const float8_buffer& saved) const {
  float8_matrix out;
  out.data = saved.data;
  out.ld = 2 * desc_.hidden;
  return out;
}

kernels::RowOperands Moe::swiglu_of(const float8_matrix& gate_up) const {
  kernels::RowOperands out{};
  out.up = static_cast<const uint8_t*>(gate_up.data) +
           static_cast<size_t>(desc_.hidden) * size_bytes(desc_.tensor_dtype);
  out.ld_up = gate_up.ld;
  return out;
}

Status Moe::forward(const MoeForwardCall& call, Stream stream) const {
  F8_TRY(check(call, stream));
  if (call.m == 0) return {};
  const bool saves = call.saved.data != nullptr;
  const float8_matrix hidden = gate_up(saves ? call.saved : call.workspace);
  const size_t before = saves ? 0 : forward_scratch_;
  const float8_buffer scratch = part(call.workspace, before, workspace_bytes_ - before);
  ExpertsForwardCall first;
  first.m = call.m;
  first.x = call.x;
  first.w = call.w13;
  first.y.data = const_cast<void*>(hidden.data);
  first.layout = call.layout;
  first.saved = part(call.saved, saved_of_w13_, w13_->saved_bytes());
  first.workspace = scratch;
  first.step = call.step;
  first.scales = call.w13_scales;
  ExpertsOperands tokens;
  tokens.input.index = call.index;
  tokens.second_w = call.w3;
  F8_TRY(w13_->run_forward(first, tokens, stream));
  ExpertsForwardCall second = first;
  second.x = hidden;
  second.w = call.w2;
  second.y = call.y;
  second.saved = part(call.saved, saved_of_w2_, w2_->saved_bytes());
  second.zero_tail = call.zero_tail;
  second.scales = call.w2_scales;
  ExpertsOperands swiglu;
  swiglu.input = swiglu_of(hidden);
  return w2_->run_forward(second, swiglu, stream);
}

Status Moe::backward(const MoeBackwardCall& call, Stream stream) const {
  F8_TRY(check(call, stream));
  if (call.m == 0) {
    F8_TRY(w13_->zero_grad_weight(call.dw13, stream));
    F8_TRY(w13_->zero_grad_weight(call.dw3, stream));
    return w2_->zero_grad_weight(call.dw2, stream);
  }
  const float8_matrix hidden = gate_up(call.saved);
  const bool wants_first =
      call.dx.data != nullptr || call.dw13.data != nullptr || call.dw3.data != nullptr;
  ExpertsBackwardCall second;
  second.m = call.m;
  second.dy = call.dy;
  if (wants_first) second.dx.data = call.workspace.data;  // the gradient of silu(gate) up
  second.dw = call.dw2;
  second.layout = call.layout;
  second.saved = part(call.saved, saved_of_w2_, w2_->saved_bytes());
  second.workspace = part(call.workspace, backward_scratch_, workspace_bytes_ - backward_scratch_);
  second.w = call.w2;
  second.step = call.step;
  second.scales = call.w2_scales;
  ExpertsOperands swiglu;
  swiglu.x = hidden;
  swiglu.input = swiglu_of(hidden);
  swiglu.grad_output.index = call.index;
  swiglu.grad_output.score = call.score;
  if (wants_first || call.dw2.data != nullptr) {
    F8_TRY(w2_->run_backward(second, swiglu, stream));
  }
  if (!wants_first) return {};
  ExpertsBackwardCall first = second;
  first.dy = hidden;
  first.dx = call.dx;
  first.dw = call.dw13;
  first.saved = part(call.saved, saved_of_w13_, w13_->saved_bytes());
  first.w = call.w13;
  first.zero_tail = call.zero_tail;
  first.scales = call.w13_scales;
  ExpertsOperands gradients;
  gradients.x = call.x;
  gradients.second_w = call.w3;
  gradients.second_dw = call.dw3;
  gradients.input.index = call.index;
  gradients.grad_output = swiglu_of(hidden);
  gradients.grad_output.grad = second.dx.data;
  gradients.grad_output.ld_grad = desc_.hidden;
  return w13_->run_backward(first, gradients, stream);
}

}  // namespace f8::runtime
