#include "runtime/moe/moe.hpp"

#include <algorithm>
#include <utility>

#include "runtime/device/interval_arena.hpp"
#include "runtime/device/memory.hpp"

namespace f8::runtime {
namespace {

using kernels::RowSource;

// What a backward computes of the linear of w13, by its part.
constexpr unsigned kPartsOfW13[] = {Experts::kAllParts, 0, Experts::kCastDy,
                                    Experts::part_of(Gemm::kGradInput),
                                    Experts::part_of(Gemm::kGradWeight)};

// The linears would name a size n and k, which a description of the MLP does not have.
Status check_size(const char* name, int64_t size) {
  if (size >= 16 && size % 16 == 0 && size <= kMaxDim / 2) return {};
  return fail(ErrorCode::kInvalidArgument,
              "float8_moe_desc.{} is {}; it is a multiple of 16, from 16 to {}", name, size,
              kMaxDim / 2);
}

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

uint8_t* at_byte(const float8_buffer& whole, size_t at) {
  return static_cast<uint8_t*>(whole.data) + at;
}

}  // namespace

Moe::Moe(std::shared_ptr<Context> context, MoeDesc desc, std::shared_ptr<const Experts> w13,
         std::shared_ptr<const Experts> w2)
    : context_(std::move(context)),
      desc_(std::move(desc)),
      w13_(std::move(w13)),
      w2_(std::move(w2)) {
  Arena saved;
  for (size_t i = 0; i < saved_at_.size(); ++i) {
    saved_at_[i] = saved.take(buffer_bytes(static_cast<int32_t>(i)));
  }
  saved_bytes_ = saved.size();
  for (size_t call = 0; call < layouts_.size(); ++call) {
    for (const bool given : {false, true}) {
      Layout& layout = layouts_[call][given ? 1 : 0];
      layout = lay_out(static_cast<int32_t>(call), given);
      workspace_bytes_ = std::max(workspace_bytes_, layout.bytes);
    }
  }
}

size_t Moe::buffer_bytes(int32_t buffer, int64_t m) const {
  const auto rows = [&](int64_t cols) {
    return static_cast<size_t>(m * cols) * size_bytes(desc_.tensor_dtype);
  };
  switch (buffer) {
    case FLOAT8_MOE_GATE_UP:
      return rows(2 * desc_.hidden);
    case FLOAT8_MOE_SAVED_OF_W13:
      return w13_->saved_bytes();
    case FLOAT8_MOE_SAVED_OF_W2:
      return w2_->saved_bytes();
    case FLOAT8_MOE_HIDDEN_GRAD:
      return rows(desc_.hidden);
    case FLOAT8_MOE_GATE_UP_GRAD_Q:
      return w13_->block_bytes(Tensor::kGradOutput, CopyBlock::kQ);
    case FLOAT8_MOE_GATE_UP_GRAD_QT:
      return w13_->block_bytes(Tensor::kGradOutput, CopyBlock::kQt);
    default:
      return 0;
  }
}

size_t Moe::call_bytes(int32_t call) const {
  const int32_t kind = call & ~FLOAT8_MOE_WEIGHTS_GIVEN;
  if (kind < 0 || static_cast<size_t>(kind) >= layouts_.size()) return 0;
  return layouts_[static_cast<size_t>(kind)][kind == call ? 0 : 1].bytes;
}

Moe::Layout Moe::lay_out(int32_t call, bool weights_given) const {
  Layout out;
  IntervalArena arena;
  // The launches of a whole call, from 0: those of one linear, then those of the other one.
  constexpr int kW2OfForward = Experts::kForwardLaunches, kGemmOfW13 = kW2OfForward - 1;
  constexpr int kW13OfBackward = Experts::kBackwardLaunches, kHiddenGrad = 2;
  if (call == FLOAT8_MOE_FORWARD || call == FLOAT8_MOE_EVALUATE) {
    out.w13 = w13_->add_forward(arena, 0, weights_given);
    out.w2 = w2_->add_forward(arena, kW2OfForward, weights_given);
    if (call == FLOAT8_MOE_EVALUATE) {
      out.gate_up = arena.add(buffer_bytes(FLOAT8_MOE_GATE_UP), kGemmOfW13, kW2OfForward);
    }
  } else {
    const unsigned of_w13 = kPartsOfW13[call];
    if (call == FLOAT8_MOE_BACKWARD || of_w13 == 0) {
      out.w2 = w2_->add_backward(arena, 0, weights_given);
    }
    if (of_w13 != 0) {
      out.w13 = w13_->add_backward(arena, kW13OfBackward, weights_given, of_w13);
    }
    if (call == FLOAT8_MOE_BACKWARD) {
      out.hidden_grad =
          arena.add(buffer_bytes(FLOAT8_MOE_HIDDEN_GRAD), kHiddenGrad, kW13OfBackward);
    }
  }
  arena.place();
  place_blocks(out.w13, arena);
  place_blocks(out.w2, arena);
  for (auto* at : {&out.gate_up, &out.hidden_grad}) {
    if (*at) *at = arena.at(**at);
  }
  out.bytes = arena.size();
  return out;
}

const Moe::Layout& Moe::layout_of(const MoeForwardCall& call) const {
  const bool saves = buffers_of(call)[FLOAT8_MOE_GATE_UP].data != nullptr;
  const bool given = call.w13.fp8 != nullptr && call.w2.fp8 != nullptr;
  return layouts_[saves ? FLOAT8_MOE_FORWARD : FLOAT8_MOE_EVALUATE][given ? 1 : 0];
}

const Moe::Layout& Moe::layout_of(const MoeBackwardCall& call) const {
  const bool given =
      (!reads_w13(call) || call.w13.fp8 != nullptr) && (!reads_w2(call) || call.w2.fp8 != nullptr);
  return layouts_[static_cast<size_t>(call.part)][given ? 1 : 0];
}

template <class Call>
Moe::Buffers Moe::buffers_of(const Call& call) const {
  Buffers out;
  for (size_t i = 0; i < out.size(); ++i) out[i] = call.buffers.*kMoeBuffers[i].at;
  if (call.saved.data == nullptr) return out;
  for (size_t i = 0; i < saved_at_.size(); ++i) {
    const size_t bytes = buffer_bytes(static_cast<int32_t>(i));
    out[i] = bytes == 0 ? float8_buffer{} : float8_buffer{at_byte(call.saved, saved_at_[i]), bytes};
  }
  return out;
}
template Moe::Buffers Moe::buffers_of(const MoeForwardCall&) const;
template Moe::Buffers Moe::buffers_of(const MoeBackwardCall&) const;

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
  F8_TRY(check_size("dim", desc.dim));
  F8_TRY(check_size("hidden", desc.hidden));
  ExpertsDesc first = of_linear(desc, 2 * desc.hidden, desc.dim);
  first.recompute_input = true;  // x is there still
  first.input = desc.rows_in_place ? RowSource::kMatrix : RowSource::kGather;
  first.grad_output = RowSource::kSwigluBackward;
  first.weight_pair = desc.w3_apart;
  first.needs_grad_weight = desc.needs_grad_w13;
  first.configs = desc.configs[0];
  ExpertsDesc second = of_linear(desc, desc.dim, desc.hidden);
  second.input = RowSource::kSwiglu;
  second.needs_grad_weight = desc.needs_grad_w2;
  second.configs = desc.configs[1];
  second.grad_output = desc.rows_in_place ? RowSource::kMatrix : RowSource::kGatherScore;
  auto w13 = F8_TRY(Experts::plan(context, first));
  auto w2 = F8_TRY(Experts::plan(context, second));
  return std::shared_ptr<const Moe>(new Moe(context, desc, std::move(w13), std::move(w2)));
}

float8_matrix Moe::gate_up(void* data) const {
  float8_matrix out;
  out.data = data;
  out.ld = 2 * desc_.hidden;
  return out;
}

kernels::RowOperands Moe::swiglu_of(const float8_matrix& gate_up) const {
  kernels::RowOperands out{};
  if (gate_up.data == nullptr) return out;
  out.up = static_cast<const uint8_t*>(gate_up.data) +
           static_cast<size_t>(desc_.hidden) * size_bytes(desc_.tensor_dtype);
  out.ld_up = gate_up.ld;
  return out;
}

Status Moe::forward(const MoeForwardCall& call, Stream stream) const {
  F8_TRY(check(call, stream));
  if (call.m == 0) return {};
  const Buffers buffers = buffers_of(call);
  const Layout& layout = layout_of(call);
  BlockPlaces of_w13, of_w2;
  add_blocks(of_w13, layout.w13, call.workspace);
  add_blocks(of_w2, layout.w2, call.workspace);
  w13_->add_saved(of_w13, buffers[FLOAT8_MOE_SAVED_OF_W13]);
  w2_->add_saved(of_w2, buffers[FLOAT8_MOE_SAVED_OF_W2]);
  void* const both =
      layout.gate_up ? at_byte(call.workspace, *layout.gate_up) : buffers[FLOAT8_MOE_GATE_UP].data;
  ExpertsForwardCall first;
  first.m = call.m;
  first.x = call.x;
  first.w = call.w13;
  first.y.data = both;
  first.layout = call.layout;
  first.step = call.step;
  first.scales = call.w13_scales;
  ExpertsOperands tokens;
  tokens.input.index = call.index;
  tokens.second_w = call.w3;
  F8_TRY(w13_->run_forward(first, tokens, of_w13, stream));
  ExpertsForwardCall second = first;
  second.x = gate_up(both);
  second.w = call.w2;
  second.y = call.y;
  second.zero_tail = call.zero_tail;
  second.scales = call.w2_scales;
  ExpertsOperands swiglu;
  swiglu.input = swiglu_of(second.x);
  return w2_->run_forward(second, swiglu, of_w2, stream);
}

Status Moe::backward(const MoeBackwardCall& call, Stream stream) const {
  F8_TRY(check(call, stream));
  if (call.m == 0) {
    F8_TRY(w13_->zero_grad_weight(call.dw13, stream));
    F8_TRY(w13_->zero_grad_weight(call.dw3, stream));
    return w2_->zero_grad_weight(call.dw2, stream);
  }
  Buffers buffers = buffers_of(call);
  const Layout& layout = layout_of(call);
  const bool dw13 = call.dw13.data != nullptr || call.dw3.data != nullptr;
  if (call.part == FLOAT8_MOE_BACKWARD) {
    // What a caller has between parts lies in the workspace.
    buffers[FLOAT8_MOE_HIDDEN_GRAD] = {};
    BlockPlaces grads;
    add_blocks(grads, layout.w13, call.workspace);
    const auto between = [&](CopyBlock block, bool wanted) {
      return float8_buffer{wanted ? grads.at(Tensor::kGradOutput, block) : nullptr, 0};
    };
    buffers[FLOAT8_MOE_GATE_UP_GRAD_Q] = between(CopyBlock::kQ, call.dx.data != nullptr);
    buffers[FLOAT8_MOE_GATE_UP_GRAD_QT] = between(CopyBlock::kQt, dw13);
    if (call.dx.data != nullptr || dw13) {
      buffers[FLOAT8_MOE_HIDDEN_GRAD].data = at_byte(call.workspace, *layout.hidden_grad);
    }
  }
  F8_TRY(backward_of_w2(call, buffers, stream));
  return backward_of_w13(call, buffers, stream);
}

Status Moe::backward_of_w2(const MoeBackwardCall& call, const Buffers& buffers,
                           Stream stream) const {
  if (call.part != FLOAT8_MOE_BACKWARD && call.part != FLOAT8_MOE_GRAD_HIDDEN) return {};
  void* const hidden_grad = buffers[FLOAT8_MOE_HIDDEN_GRAD].data;
  const unsigned made =
      (hidden_grad != nullptr ? Experts::kQ : 0) | (call.dw2.data != nullptr ? Experts::kQt : 0);
  if (made == 0) return {};
  BlockPlaces places;
  add_blocks(places, layout_of(call).w2, call.workspace);
  w2_->add_saved(places, buffers[FLOAT8_MOE_SAVED_OF_W2]);
  ExpertsBackwardCall second;
  second.m = call.m;
  second.dy = call.dy;
  second.dx.data = hidden_grad;
  second.dw = call.dw2;
  second.layout = call.layout;
  second.w = call.w2;
  second.step = call.step;
  second.scales = call.w2_scales;
  ExpertsOperands rows;
  rows.grad_output.index = call.index;
  rows.grad_output.score = call.score;
  return w2_->run_backward(second, rows, places, made, stream);
}

Status Moe::backward_of_w13(const MoeBackwardCall& call, const Buffers& buffers,
                            Stream stream) const {
  auto* const q = static_cast<uint8_t*>(buffers[FLOAT8_MOE_GATE_UP_GRAD_Q].data);
  auto* const qt = static_cast<uint8_t*>(buffers[FLOAT8_MOE_GATE_UP_GRAD_QT].data);
  const unsigned made = (q != nullptr ? Experts::kQ : 0) | (qt != nullptr ? Experts::kQt : 0);
  if (made == 0) return {};
  BlockPlaces places;
  add_blocks(places, layout_of(call).w13, call.workspace);
  w13_->add_saved(places, buffers[FLOAT8_MOE_SAVED_OF_W13]);
  places.at(Tensor::kGradOutput, CopyBlock::kQ) = q;
  places.at(Tensor::kGradOutput, CopyBlock::kQt) = qt;
  ExpertsBackwardCall first;
  first.m = call.m;
  first.dy = gate_up(buffers[FLOAT8_MOE_GATE_UP].data);
  first.dx = call.dx;
  first.dw = call.dw13;
  first.layout = call.layout;
  first.w = call.w13;
  first.zero_tail = call.zero_tail;
  first.step = call.step;
  first.scales = call.w13_scales;
  ExpertsOperands gradients;
  gradients.x = call.x;
  gradients.second_w = call.w3;
  gradients.second_dw = call.dw3;
  gradients.input.index = call.index;
  gradients.grad_output = swiglu_of(first.dy);
  gradients.grad_output.grad = buffers[FLOAT8_MOE_HIDDEN_GRAD].data;
  gradients.grad_output.ld_grad = desc_.hidden;
  return w13_->run_backward(first, gradients, places, made, stream, kPartsOfW13[call.part]);
}

}  // namespace f8::runtime
