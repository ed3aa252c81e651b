#include "runtime/experts/experts.hpp"

#include <algorithm>

#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/experts/first_scale.hpp"
#include "runtime/linear/plan/call_arguments.hpp"

namespace f8::runtime {
namespace {

// The copies of dy that a whole backward makes.
unsigned made_of(const ExpertsBackwardCall& call) {
  return (call.dx.data != nullptr ? Experts::kQ : 0) | (call.dw.data != nullptr ? Experts::kQt : 0);
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

Status Experts::cast(runtime::Tensor which, unsigned made, const kernels::GroupsOf& groups,
                     const Elements& from, int64_t rows, const Buffers& to, Stream stream) const {
  const Tensor& tensor = at(which);
  for (const Cast& one : tensor.casts[made]) {
    const GroupCastPlan& plan = one.plan;
    GroupCastCall call{.groups = groups,
                       .x = from.matrix.data,
                       .rows = rows,
                       .ld = from.matrix.ld,
                       .source = from.source};
    if (one.slot < 0 && is_over_ranks(which)) {
      call.group_maxima = from.amax;
      call.row_maxima = from.row_amax;
    }
    call.words = to.at<uint32_t>(which, CopyBlock::kScratch, tensor.words);
    const codegen::CastSpec& spec = plan.spec();
    if (spec.q) {
      call.q = to.at<uint8_t>(which, CopyBlock::kQ, tensor.q);
      call.inv_row = to.at<float>(which, CopyBlock::kQ, tensor.row_inverse);
      call.scale_rows = scale_rows_of_groups(desc_.shape.m, desc_.experts);
    }
    if (spec.qt) {
      call.qt = to.at<uint8_t>(which, CopyBlock::kQt, tensor.qt);
      call.inv_col = to.at<float>(which, CopyBlock::kQt, tensor.column_inverse);
      call.ld_qt = columns_of_groups(desc_.shape.m, desc_.experts);
    }
    call.scale = spec.qt ? to.at<float>(which, CopyBlock::kQt, tensor.qt_scale)
                         : to.at<float>(which, CopyBlock::kQ, tensor.q_scale);
    if (one.slot >= 0) {
      call.delayed = to.scales.scale + one.slot * kernels::kScaleStride;
      if (to.first_step) {
        auto* const words = to.at<uint32_t>(which, CopyBlock::kScratch, tensor.first);
        call.delayed = F8_TRY(first_scale(one, call, words, to, from.amax, stream));
      }
      if (to.scales.amax != nullptr) call.amax = to.scales.amax + one.slot;
    }
    F8_TRY(plan.run(call, stream));
  }
  return {};
}

Result<const float*> Experts::first_scale(const Cast& cast, GroupCastCall call, uint32_t* words,
                                          const Buffers& to, const uint32_t* over_ranks,
                                          Stream stream) const {
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const FirstScale first(words);
  F8_TRY(first.begin(state.driver, over_ranks, stream));
  // The cast records the amax, by any scale.
  call.delayed = first.scale();
  call.amax = first.amax();
  F8_TRY(cast.plan.run(call, stream));
  F8_TRY(first.update(state, *scale_update_, to.scales.format + cast.slot,
                      desc_.non_finite == NonFinite::kSaturate, stream));
  return first.scale();
}

// A scale that q has in common with qt lies with qt, where a cast made both.
Experts::Operand Experts::q_of(runtime::Tensor which, unsigned made, const Buffers& in) const {
  const Tensor& tensor = at(which);
  const bool with_qt = std::ranges::any_of(tensor.casts[made], [](const Cast& cast) {
    return cast.plan.spec().q && cast.plan.spec().qt;
  });
  float* const scale = with_qt ? in.at<float>(which, CopyBlock::kQt, tensor.qt_scale)
                               : in.at<float>(which, CopyBlock::kQ, tensor.q_scale);
  return {in.at<uint8_t>(which, CopyBlock::kQ, tensor.q),
          tensor.copies.q->granularity == Granularity::kTensor
              ? scale + kernels::kInverse
              : in.at<float>(which, CopyBlock::kQ, tensor.row_inverse)};
}

Experts::Operand Experts::itself(const float8_matrix& tensor) {
  return {tensor.data, nullptr, tensor.ld};
}

Experts::Elements Experts::elements_of_weight(const float8_matrix& w,
                                              const ExpertsOperands& operands,
                                              const uint32_t* amax) const {
  Elements out;
  out.matrix = w;
  out.amax = amax;
  if (desc_.weight_pair) {
    out.source.up = operands.second_w.data;
    out.source.ld_up = operands.second_w.ld == 0 ? desc_.shape.k : operands.second_w.ld;
    out.source.half_rows = static_cast<int32_t>(weight_rows());
  }
  return out;
}

Experts::Operand Experts::qt_of(runtime::Tensor which, const Buffers& in) const {
  const Tensor& tensor = at(which);
  return {in.at<uint8_t>(which, CopyBlock::kQt, tensor.qt),
          tensor.copies.qt->granularity == Granularity::kTensor
              ? in.at<float>(which, CopyBlock::kQt, tensor.qt_scale) + kernels::kInverse
              : in.at<float>(which, CopyBlock::kQt, tensor.column_inverse)};
}

template <class Call>
Experts::Buffers Experts::buffers_of(const Call& call, const BlockPlaces& places,
                                     bool records) const {
  Buffers out{.places = places,
              .scales = ScaleSlots::of(call.scales),
              .first_step = !slots_.empty() && step_of(call).first_step != 0};
  if (!records) out.scales.amax = nullptr;
  return out;
}

Status Experts::forward(const ExpertsForwardCall& call, Stream stream) const {
  F8_TRY(check(call, stream));
  return call.m == 0 ? Status() : run_forward(call, {}, forward_places(call), stream);
}

Status Experts::run_forward(const ExpertsForwardCall& call, const ExpertsOperands& operands,
                            const BlockPlaces& places, Stream stream, unsigned parts) const {
  const Buffers buffers = buffers_of(call, places, step_of(call).evaluate == 0);
  constexpr auto kInput = runtime::Tensor::kInput, kWeight = runtime::Tensor::kWeight;
  const auto made = [&](runtime::Tensor tensor) {
    const bool is_saved = saves(tensor) && places.at(tensor, CopyBlock::kQt) != nullptr;
    return is_saved ? kQ | kQt : kQ;
  };
  const unsigned of_input = made(kInput), of_weight = made(kWeight);
  if ((parts & kCastX) != 0) {
    F8_TRY(cast(kInput, of_input, groups_of(call.layout),
                {call.x, operands.input, call.x_amax, call.x_row_amax}, call.m, buffers, stream));
  }
  if ((parts & kCastW) != 0 && call.w.fp8 == nullptr) {
    F8_TRY(cast(kWeight, of_weight, weights(), elements_of_weight(call.w, operands, call.w_amax),
                at(kWeight).rows, buffers, stream));
  }
  if ((parts & part_of(Gemm::kOutput)) == 0) return {};
  const bool as_they_are = reads_tensors(Gemm::kOutput);
  const Operand a = as_they_are ? itself(call.x) : q_of(kInput, of_input, buffers);
  const Operand b = as_they_are             ? itself(call.w)
                    : call.w.fp8 != nullptr ? Operand{call.w.fp8->q, call.w.fp8->q_inverse_scale}
                                            : q_of(kWeight, of_weight, buffers);
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
                           const Buffers& buffers, unsigned made, Stream stream) const {
  constexpr auto kWeight = runtime::Tensor::kWeight;
  const bool given = recomputes(kWeight) && call.w.fp8 != nullptr;
  if (recomputes(kWeight) && !given) {
    F8_TRY(cast(kWeight, kQt, weights(), elements_of_weight(call.w, operands, call.w_amax),
                at(kWeight).rows, buffers, stream));
  }
  const bool as_they_are = reads_tensors(Gemm::kGradInput);
  const Operand a =
      as_they_are ? itself(call.dy) : q_of(runtime::Tensor::kGradOutput, made, buffers);
  const Operand b = as_they_are ? itself(call.w)
                    : given     ? Operand{call.w.fp8->qt, call.w.fp8->qt_inverse_scale}
                                : qt_of(kWeight, buffers);
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
                            const Buffers& buffers, Stream stream) const {
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
  constexpr auto kInput = runtime::Tensor::kInput, kDy = runtime::Tensor::kGradOutput;
  if (recomputes(kInput)) {
    F8_TRY(cast(kInput, kQt, groups_of(call.layout),
                {.matrix = operands.x, .source = operands.input}, call.m, buffers, stream));
  }
  const Operand a = qt_of(kDy, buffers);
  const Operand b = qt_of(kInput, buffers);
  const bool one_scale = at(kDy).copies.qt->granularity == Granularity::kTensor;
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
  return run_backward(call, {}, backward_places(call), made_of(call), stream);
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
                             const BlockPlaces& places, unsigned made, Stream stream,
                             unsigned parts) const {
  const Buffers buffers = buffers_of(call, places, true);
  if ((parts & kCastDy) != 0) {
    F8_TRY(cast(runtime::Tensor::kGradOutput, made, groups_of(call.layout),
                {call.dy, operands.grad_output, call.dy_amax, call.dy_row_amax}, call.m, buffers,
                stream));
  }
  if (call.dx.data != nullptr && (parts & part_of(Gemm::kGradInput)) != 0) {
    F8_TRY(grad_input(call, operands, buffers, made, stream));
  }
  const bool dw = call.dw.data != nullptr || operands.second_dw.data != nullptr;
  if (!dw || (parts & part_of(Gemm::kGradWeight)) == 0) return {};
  return grad_weight(call, operands, buffers, stream);
}

// The tensor is read at least once, and each copy written.
double Experts::cast_bytes(runtime::Tensor tensor, int64_t rows) const {
  const Copies& copies = at(tensor).copies;
  const bool qt = tensor == runtime::Tensor::kGradOutput ? copies.qt.has_value() : saves(tensor);
  const auto made = static_cast<size_t>(copies.q.has_value()) + (qt ? 1 : 0);
  return static_cast<double>(rows) * static_cast<double>(at(tensor).cols) *
         static_cast<double>(size_bytes(desc_.tensor_dtype) + made);
}

std::vector<Step> Experts::forward_steps(const ExpertsForwardCall& call) const {
  PartSteps steps([this, call](Stream stream, unsigned parts) {
    return run_forward(call, {}, forward_places(call), stream, parts);
  });
  const auto add_cast = [&](const char* name, unsigned part, runtime::Tensor tensor, int64_t rows) {
    if (at(tensor).copies.q || saves(tensor)) steps.add(name, part, cast_bytes(tensor, rows));
  };
  add_cast("cast x", kCastX, runtime::Tensor::kInput, call.m);
  add_cast("cast w", kCastW, runtime::Tensor::kWeight, desc_.experts * desc_.shape.n);
  steps.add("gemm output", part_of(Gemm::kOutput));
  return steps.take();
}

std::vector<Step> Experts::backward_steps(const ExpertsBackwardCall& call) const {
  PartSteps steps([this, call](Stream stream, unsigned parts) {
    return run_backward(call, {}, backward_places(call), made_of(call), stream, parts);
  });
  constexpr auto kDy = runtime::Tensor::kGradOutput;
  if (!at(kDy).copies.empty()) steps.add("cast dy", kCastDy, cast_bytes(kDy, call.m));
  steps.add("gemm grad_input", part_of(Gemm::kGradInput));
  steps.add("gemm grad_weight", part_of(Gemm::kGradWeight));
  return steps.take();
}

}  // namespace f8::runtime
