#include "runtime/experts/experts.hpp"

#include <algorithm>
#include <bit>

#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/linear/call_arguments.hpp"

namespace f8::runtime {
namespace {

template <class T>
T* at_byte(uint8_t* base, size_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

}  // namespace

kernels::GroupsOf Experts::groups_of(const float8_buffer& layout) const {
  return {
      .words = static_cast<const int32_t*>(layout.data), .layout = layout_, .count = 0, .rows = 0};
}

kernels::GroupsOf Experts::weights() const {
  return {.words = nullptr,
          .layout = {},
          .count = layout_.experts,
          .rows = static_cast<int32_t>(desc_.shape.n)};
}
Status Experts::cast(const Tensor& tensor, unsigned made, const kernels::GroupsOf& groups,
                     const Elements& from, int64_t rows, const Buffers& to, Stream stream) const {
  for (const Cast& one : tensor.casts[made]) {
    const GroupCastPlan& plan = one.plan;
    GroupCastCall call{.groups = groups,
                       .x = from.matrix.data,
                       .rows = rows,
                       .ld = from.matrix.ld,
                       .source = from.source};
    call.words = at_byte<uint32_t>(to.workspace, tensor.words);
    const codegen::CastSpec& spec = plan.spec();
    if (spec.q) {
      call.q = at_byte<uint8_t>(to.workspace, tensor.q);
      call.inv_row = at_byte<float>(to.workspace, tensor.row_inverse);
      call.scale_rows = scale_rows_of_groups(desc_.shape.m, desc_.experts);
    }
    if (spec.qt) {
      call.qt = at_byte<uint8_t>(to.kept, tensor.qt);
      call.inv_col = at_byte<float>(to.kept, tensor.column_inverse);
      call.ld_qt = columns_of_groups(desc_.shape.m, desc_.experts);
    }
    call.scale = spec.qt ? at_byte<float>(to.kept, tensor.qt_scale)
                         : at_byte<float>(to.workspace, tensor.q_scale);
    if (one.slot >= 0) {
      call.delayed = to.scales.scale + one.slot * kernels::kScaleStride;
      if (to.first_step) {
        auto* const words = at_byte<uint32_t>(to.workspace, tensor.first);
        call.delayed = F8_TRY(first_scale(one, call, words, to, stream));
      }
      if (to.scales.amax != nullptr) call.amax = to.scales.amax + one.slot;
    }
    F8_TRY(plan.run(call, stream));
  }
  return {};
}

Result<const float*> Experts::first_scale(const Cast& cast, GroupCastCall call, uint32_t* words,
                                          const Buffers& to, Stream stream) const {
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  auto* const scale = reinterpret_cast<float*>(words + kFirstWords);
  F8_TRY(set_words(state.driver, words, 0, kFirstWords, stream));
  // The cast records the amax, by any scale; a scale of 1 stays where there is no other.
  F8_TRY(set_words(state.driver, words + kFirstWords, std::bit_cast<uint32_t>(1.0F),
                   kernels::kScaleStride, stream));
  call.delayed = scale;
  call.amax = words;
  F8_TRY(cast.plan.run(call, stream));
  const ScaleSlots slot{.amax = nullptr, .scale = scale, .format = to.scales.format + cast.slot};
  const auto args =
      first_scale_args(words, words + 1, 1, slot, desc_.non_finite == NonFinite::kSaturate);
  F8_TRY(launch_scale_update(state, *scale_update_, args, stream));
  return scale;
}

// A scale that q has in common with qt lies with qt, where a cast made both.
Experts::Operand Experts::q_of(const Tensor& tensor, unsigned made, const Buffers& in) {
  const bool with_qt = std::ranges::any_of(tensor.casts[made], [](const Cast& cast) {
    return cast.plan.spec().q && cast.plan.spec().qt;
  });
  float* const scale = with_qt ? at_byte<float>(in.kept, tensor.qt_scale)
                               : at_byte<float>(in.workspace, tensor.q_scale);
  return {at_byte<uint8_t>(in.workspace, tensor.q),
          tensor.copies.q->granularity == Granularity::kTensor
              ? scale + kernels::kInverse
              : at_byte<float>(in.workspace, tensor.row_inverse)};
}

Experts::Operand Experts::itself(const float8_matrix& tensor) {
  return {tensor.data, nullptr, tensor.ld};
}

Experts::Elements Experts::elements_of_weight(const float8_matrix& w,
                                              const ExpertsOperands& operands) const {
  Elements out{.matrix = w, .source = {}};
  if (desc_.weight_pair) {
    out.source.up = operands.second_w.data;
    out.source.ld_up = operands.second_w.ld == 0 ? desc_.shape.k : operands.second_w.ld;
    out.source.half_rows = static_cast<int32_t>(weight_rows());
  }
  return out;
}

Experts::Operand Experts::qt_of(const Tensor& tensor, const Buffers& in) {
  return {at_byte<uint8_t>(in.kept, tensor.qt),
          tensor.copies.qt->granularity == Granularity::kTensor
              ? at_byte<float>(in.kept, tensor.qt_scale) + kernels::kInverse
              : at_byte<float>(in.kept, tensor.column_inverse)};
}

template <class Call>
Experts::Buffers Experts::buffers_of(const Call& call, void* kept, bool records) const {
  Buffers out{.workspace = static_cast<uint8_t*>(call.workspace.data),
              .kept = static_cast<uint8_t*>(kept),
              .scales = ScaleSlots::of(call.scales),
              .first_step = !slots_.empty() && step_of(call).first_step != 0};
  if (!records) out.scales.amax = nullptr;
  return out;
}
Status Experts::forward(const ExpertsForwardCall& call, Stream stream) const {
  F8_TRY(check(call, stream));
  return call.m == 0 ? Status() : run_forward(call, {}, stream);
}

Status Experts::run_forward(const ExpertsForwardCall& call, const ExpertsOperands& operands,
                            Stream stream) const {
  return run_forward(call, operands, stream, kAllParts);
}

Status Experts::run_forward(const ExpertsForwardCall& call, const ExpertsOperands& operands,
                            Stream stream, unsigned parts) const {
  const Buffers buffers = buffers_of(call, call.saved.data, step_of(call).evaluate == 0);
  const Tensor& x = at(runtime::Tensor::kInput);
  const Tensor& w = at(runtime::Tensor::kWeight);
  const unsigned made = call.saved.data != nullptr ? kQ | kQt : kQ;
  const unsigned of_input = x.copies.qt ? made : kQ;
  const unsigned of_weight = w.copies.qt ? made : kQ;
  if ((parts & kCastX) != 0) {
    F8_TRY(cast(x, of_input, groups_of(call.layout), {call.x, operands.input}, call.m, buffers,
                stream));
  }
  if ((parts & kCastW) != 0 && call.w.fp8 == nullptr) {
    F8_TRY(cast(w, of_weight, weights(), elements_of_weight(call.w, operands), w.rows, buffers,
                stream));
  }
  if ((parts & part_of(Gemm::kOutput)) == 0) return {};
  const bool as_they_are = reads_tensors(Gemm::kOutput);
  const Operand a = as_they_are ? itself(call.x) : q_of(x, of_input, buffers);
  const Operand b = as_they_are             ? itself(call.w)
                    : call.w.fp8 != nullptr ? Operand{call.w.fp8->q, call.w.fp8->q_inverse_scale}
                                            : q_of(w, of_weight, buffers);
  return gemms_[static_cast<size_t>(Gemm::kOutput)]->run(
      {.a = a.elements,
       .b = b.elements,
       .d = call.y.data,
       .inv_scale_a = a.inverse_scale,
       .inv_scale_b = b.inverse_scale,
       .layout = call.layout.data,
       .m = call.m,
       .ld_d = call.y.ld,
       .scale_rows = scale_rows_of_groups(desc_.shape.m, desc_.experts),
       .ld_a = a.ld,
       .ld_b = b.ld,
       .zero_tail = call.zero_tail != 0},
      stream);
}

Status Experts::grad_input(const ExpertsBackwardCall& call, const ExpertsOperands& operands,
                           const Buffers& own, const Buffers& saved, unsigned made,
                           Stream stream) const {
  const Tensor& w = at(runtime::Tensor::kWeight);
  const bool given = recomputes_weight() && call.w.fp8 != nullptr;
  if (recomputes_weight() && !given) {
    F8_TRY(cast(weight_again_, kQt, weights(), elements_of_weight(call.w, operands), w.rows, own,
                stream));
  }
  const bool as_they_are = reads_tensors(Gemm::kGradInput);
  const Operand a =
      as_they_are ? itself(call.dy) : q_of(at(runtime::Tensor::kGradOutput), made, own);
  const Operand b = as_they_are           ? itself(call.w)
                    : given               ? Operand{call.w.fp8->qt, call.w.fp8->qt_inverse_scale}
                    : recomputes_weight() ? qt_of(weight_again_, own)
                                          : qt_of(w, saved);
  return gemms_[static_cast<size_t>(Gemm::kGradInput)]->run(
      {.a = a.elements,
       .b = b.elements,
       .d = call.dx.data,
       .inv_scale_a = a.inverse_scale,
       .inv_scale_b = b.inverse_scale,
       .layout = call.layout.data,
       .m = call.m,
       .ld_d = call.dx.ld,
       .scale_rows = scale_rows_of_groups(desc_.shape.m, desc_.experts),
       .ld_a = a.ld,
       .ld_b = b.ld,
       .zero_tail = call.zero_tail != 0},
      stream);
}

Status Experts::grad_weight(const ExpertsBackwardCall& call, const ExpertsOperands& operands,
                            const Buffers& own, const Buffers& saved, Stream stream) const {
  if (reads_tensors(Gemm::kGradWeight)) {
    return grad_weight_[call.dw.accumulate != 0 ? 1 : 0]->run({.a = call.dy.data,
                                                               .b = call.x.data,
                                                               .d = call.dw.data,
                                                               .layout = call.layout.data,
                                                               .ld_d = call.dw.ld,
                                                               .m = call.m,
                                                               .ld_a = call.dy.ld,
                                                               .ld_b = call.x.ld},
                                                              stream);
  }
  if (recomputes_input()) {
    F8_TRY(cast(input_again_, kQt, groups_of(call.layout), {operands.x, operands.input}, call.m,
                own, stream));
  }
  const Tensor& dy = at(runtime::Tensor::kGradOutput);
  const Operand a = qt_of(dy, own);
  const Operand b =
      recomputes_input() ? qt_of(input_again_, own) : qt_of(at(runtime::Tensor::kInput), saved);
  const bool one_scale = dy.copies.qt->granularity == Granularity::kTensor;
  int64_t row = 0;  // of dy's copy, where a tensor of the gradient begins
  for (const float8_result& dw : {call.dw, operands.second_dw}) {
    if (dw.data != nullptr) {
      F8_TRY(grad_weight_[dw.accumulate != 0 ? 1 : 0]->run(
          {.a = static_cast<const uint8_t*>(a.elements) +
                row * columns_of_groups(desc_.shape.m, desc_.experts),
           .b = b.elements,
           .d = dw.data,
           .inv_scale_a = a.inverse_scale + (one_scale ? 0 : row),
           .inv_scale_b = b.inverse_scale,
           .scale_rows_a = desc_.shape.n,
           .layout = call.layout.data,
           .ld_d = dw.ld},
          stream));
    }
    row += weight_rows();
  }
  return {};
}

Status Experts::backward(const ExpertsBackwardCall& call, Stream stream) const {
  F8_TRY(check(call, stream));
  if (call.m == 0) return zero_grad_weight(call.dw, stream);
  if (call.dx.data == nullptr && call.dw.data == nullptr) return {};
  return run_backward(call, {}, stream);
}

Status Experts::zero_grad_weight(const float8_result& dw, Stream stream) const {
  if (dw.data == nullptr || dw.accumulate != 0) return {};
  const auto [m, n, k] = desc_.shape;
  const size_t element = size_bytes(desc_.grad_weight_dtype);
  const Context::State& state = context_->state();
  return zero(state.driver, state.primary, dw.data, desc_.experts * weight_rows(),
              static_cast<size_t>(k) * element,
              static_cast<size_t>(dw.ld == 0 ? k : dw.ld) * element, stream);
}

Status Experts::run_backward(const ExpertsBackwardCall& call, const ExpertsOperands& operands,
                             Stream stream) const {
  return run_backward(call, operands, stream, kAllParts);
}

Status Experts::run_backward(const ExpertsBackwardCall& call, const ExpertsOperands& operands,
                             Stream stream, unsigned parts) const {
  const bool dx = call.dx.data != nullptr;
  const bool dw = call.dw.data != nullptr || operands.second_dw.data != nullptr;
  const Buffers own = buffers_of(call, call.workspace.data, true);
  const Buffers saved = buffers_of(call, call.saved.data, true);
  const unsigned made = (dx ? kQ : 0) | (dw ? kQt : 0);
  if ((parts & kCastDy) != 0) {
    F8_TRY(cast(at(runtime::Tensor::kGradOutput), made, groups_of(call.layout),
                {call.dy, operands.grad_output}, call.m, own, stream));
  }
  if (dx && (parts & part_of(Gemm::kGradInput)) != 0) {
    F8_TRY(grad_input(call, operands, own, saved, made, stream));
  }
  if (!dw || (parts & part_of(Gemm::kGradWeight)) == 0) return {};
  return grad_weight(call, operands, own, saved, stream);
}

// The tensor is read at least once, and each copy written.
double Experts::cast_bytes(runtime::Tensor tensor, int64_t rows) const {
  const Copies& copies = at(tensor).copies;
  const auto made = static_cast<size_t>(copies.q.has_value()) + (copies.qt.has_value() ? 1 : 0);
  return static_cast<double>(rows) * static_cast<double>(at(tensor).cols) *
         static_cast<double>(size_bytes(desc_.tensor_dtype) + made);
}

std::vector<Step> Experts::forward_steps(const ExpertsForwardCall& call) const {
  std::vector<Step> steps;
  const auto add = [&](std::string name, unsigned parts, double bytes) {
    steps.push_back(
        {std::move(name),
         [this, call, parts](Stream stream) { return run_forward(call, {}, stream, parts); },
         bytes});
  };
  const auto add_cast = [&](const char* name, unsigned part, runtime::Tensor tensor, int64_t rows) {
    if (!at(tensor).copies.empty()) add(name, part, cast_bytes(tensor, rows));
  };
  add_cast("cast x", kCastX, runtime::Tensor::kInput, call.m);
  add_cast("cast w", kCastW, runtime::Tensor::kWeight, desc_.experts * desc_.shape.n);
  add("gemm output", part_of(Gemm::kOutput), 0);
  return steps;
}

std::vector<Step> Experts::backward_steps(const ExpertsBackwardCall& call) const {
  std::vector<Step> steps;
  const auto add = [&](std::string name, unsigned parts, double bytes) {
    steps.push_back(
        {std::move(name),
         [this, call, parts](Stream stream) { return run_backward(call, {}, stream, parts); },
         bytes});
  };
  constexpr auto kDy = runtime::Tensor::kGradOutput;
  if (!at(kDy).copies.empty()) add("cast dy", kCastDy, cast_bytes(kDy, call.m));
  add("gemm grad_input", part_of(Gemm::kGradInput), 0);
  add("gemm grad_weight", part_of(Gemm::kGradWeight), 0);
  return steps;
}

}  // namespace f8::runtime
