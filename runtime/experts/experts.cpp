#include "runtime/experts/experts.hpp"

#include <algorithm>
#include <bit>
#include <limits>

#include "recipes/fp8_layout.hpp"
#include "runtime/device/call_memory.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/experts/group_layout.hpp"
#include "runtime/gemm/choose.hpp"
#include "runtime/linear/call_arguments.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kForward = "float8_experts_forward";
constexpr const char* kForwardArgs = "float8_experts_forward_args";
constexpr const char* kBackward = "float8_experts_backward";
constexpr const char* kBackwardArgs = "float8_experts_backward_args";

// The copies that a linear makes of each tensor: q and qt.
constexpr CopySet kCopySets[3][2] = {{kXq, kXqt}, {kWq, kWqt}, {kDyq, kDyqt}};

Status check_recipe(const Recipe& recipe, Dtype tensor_dtype) {
  F8_TRY(recipe.validate());
  for (const Gemm gemm : kGemms) {
    const GemmSetting& setting = recipe.at(gemm);
    if (!setting.is_fp8() && tensor_dtype != Dtype::kF32) continue;
    if (!setting.is_fp8()) {
      return fail(
          ErrorCode::kUnsupported,
          "recipe {}, GEMM {}, f32 tensors: expert linears multiply tensors of bf16 and f16 "
          "in high precision; cast them, or use another recipe",
          recipe.name, to_string(gemm));
    }
    const Granularity blocks =
        gemm == Gemm::kGradWeight ? Granularity::kBlock1x128 : Granularity::kBlock128x128;
    if (is_block(setting.b.granularity) && setting.b.granularity != blocks) {
      return fail(ErrorCode::kUnsupported,
                  "recipe {}, GEMM {}: b has scales of {}; expert linears have those of {} there",
                  recipe.name, to_string(gemm), to_string(setting.b.granularity),
                  to_string(blocks));
    }
  }
  return {};
}

// Rows of all experts' weights, and tiles of a launch, are counted in 32 bits.
Status check_size(const ExpertsDesc& desc) {
  const auto [m, n, k] = desc.shape;
  const auto tiles = [](int64_t extent) { return ceil_div(extent, kernels::kCastTile); };
  const int64_t limit = std::numeric_limits<int32_t>::max();
  if (desc.experts * n <= limit && desc.experts * tiles(n) * tiles(k) <= limit &&
      (tiles(m) + desc.experts) * tiles(std::max(n, k)) <= limit) {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              "{} experts of shape {}: more than 2^31 rows of weights or tiles of 128 by 128",
              desc.experts, to_string(desc.shape));
}

// The words of a scale of a first step, and that scale.
constexpr size_t kFirstBytes = (kFirstWords + kernels::kScaleStride) * sizeof(uint32_t);

template <class T>
T* at_byte(uint8_t* base, size_t offset) {
  return reinterpret_cast<T*>(base + offset);
}

}  // namespace

size_t Experts::layout_bytes() const {
  return GroupLayoutPlan::bytes_of(layout_);
}

const GemmConfig& Experts::config(Gemm gemm) const {
  if (gemm == Gemm::kGradWeight) return grad_weight_[0]->config();
  return gemms_[static_cast<size_t>(gemm)]->config();
}

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

Result<std::shared_ptr<const Experts>> Experts::plan(const std::shared_ptr<Context>& context,
                                                     const ExpertsDesc& desc) {
  F8_TRY(check_recipe(desc.recipe, desc.tensor_dtype));
  const kernels::GroupLayout layout = F8_TRY(group_layout_of(desc.shape.m, desc.experts));
  LinearDesc of_expert;
  of_expert.shape = desc.shape;
  of_expert.recipe = desc.recipe;
  of_expert.tensor_dtype = desc.tensor_dtype;
  of_expert.grad_weight_dtype = desc.grad_weight_dtype;
  of_expert.accumulate_grad_weight = desc.accumulate_grad_weight;
  of_expert.needs_grad_input = desc.needs_grad_input;
  of_expert.non_finite = desc.non_finite;
  of_expert.sm_limit = desc.sm_limit;
  const LinearKernels linear = F8_TRY(linear_kernels(of_expert));
  F8_TRY(check_size(desc));
  std::shared_ptr<Experts> experts(new Experts(context, desc, layout));
  experts->slots_ = linear.slots;
  if (!linear.slots.empty()) {
    experts->scale_update_ = F8_TRY(context->kernel(codegen::ScaleUpdateSpec{}));
  }
  F8_TRY(experts->plan_casts(linear));
  F8_TRY(experts->plan_gemms(linear));
  experts->lay_out();
  return experts;
}

Status Experts::plan_casts(const LinearKernels& linear) {
  const auto [m, n, k] = desc_.shape;
  const int64_t rows[] = {m, desc_.experts * n, m};
  const int64_t cols[] = {k, k, n};
  constexpr kernels::RowSource kMatrix = kernels::RowSource::kMatrix;
  const kernels::RowSource sources[] = {desc_.input, kMatrix, desc_.grad_output};
  std::vector<codegen::KernelSpec> specs;
  const auto each = [&](const auto& work) -> Status {
    for (size_t i = 0; i < tensors_.size(); ++i) {
      for (unsigned made = 1; made <= (kQ | kQt); ++made) {
        if (made == (kQ | kQt) && is_recomputed(static_cast<runtime::Tensor>(i))) continue;
        const CopySet copies =
            ((made & kQ) != 0 ? kCopySets[i][0] : 0U) | ((made & kQt) != 0 ? kCopySets[i][1] : 0U);
        for (const KernelPass& pass : linear.passes(copies, false)) {
          codegen::CastSpec spec = pass.cast;
          spec.group = true;
          spec.source = sources[i];
          F8_TRY(work(i, made, spec, pass.casts.front().slot));
        }
      }
    }
    return {};
  };
  F8_TRY(each([&](size_t i, unsigned, const codegen::CastSpec& spec, int) -> Status {
    std::ranges::move(GroupCastPlan::specs(spec, rows[i] / desc_.experts, cols[i]),
                      std::back_inserter(specs));
    return {};
  }));
  F8_TRY(context_->compile(specs));  // side by side
  for (size_t i = 0; i < tensors_.size(); ++i) {
    tensors_[i].copies = linear.copies[i];
    tensors_[i].rows = rows[i];
    tensors_[i].cols = cols[i];
  }
  const Status planned = each([&](size_t i, unsigned made, const codegen::CastSpec& spec,
                                  int slot) -> Status {
    tensors_[i].casts[made].push_back(
        {F8_TRY(GroupCastPlan::create(context_, spec, rows[i] / desc_.experts, cols[i])), slot});
    return {};
  });
  F8_TRY(planned);
  for (const auto tensor : {runtime::Tensor::kInput, runtime::Tensor::kWeight}) {
    if (!is_recomputed(tensor)) continue;
    Tensor& again = tensor == runtime::Tensor::kInput ? input_again_ : weight_again_;
    again = at(tensor);
    again.copies.q.reset();
    at(tensor).copies.qt.reset();
  }
  return {};
}

GroupedDesc Experts::grouped(const GemmDesc& gemm) const {
  const GemmSetting& setting = desc_.recipe.at(gemm.gemm);
  return {.gemm = gemm,
          .layout = layout_,
          .one_scale_a = setting.a.scaling == Scaling::kDelayed,
          .one_scale_b = setting.b.scaling == Scaling::kDelayed};
}

bool Experts::is_recomputed(runtime::Tensor tensor) const {
  return tensor == runtime::Tensor::kInput ? desc_.recompute_input
                                           : tensor == runtime::Tensor::kWeight &&
                                                 desc_.recompute_weight && desc_.needs_grad_input;
}

Result<GemmConfig> Experts::choose(const GroupedDesc& desc) const {
  if (const auto& config = desc_.configs[static_cast<size_t>(desc.gemm.gemm)]) return *config;
  const auto table = context_->table();
  return F8_TRY(choose_grouped(table.get(), desc, context_->device().sm_count)).config;
}

Status Experts::plan_gemms(const LinearKernels& linear) {
  for (size_t i = 0; i < gemms_.size(); ++i) {
    if (!linear.gemms[i]) continue;
    const GroupedDesc desc = grouped(*linear.gemms[i]);
    const GemmConfig config = F8_TRY(choose(desc));
    gemms_[i] = F8_TRY(MGroupedGemm::create(context_, desc, config));
  }
  constexpr auto kGradWeight = static_cast<size_t>(Gemm::kGradWeight);
  for (const bool add : {false, true}) {
    const auto& gemm = add ? linear.adding[kGradWeight] : linear.gemms[kGradWeight];
    if (!gemm) continue;
    const GroupedDesc desc = grouped(*gemm);
    const GemmConfig config = F8_TRY(choose(desc));
    grad_weight_[add ? 1 : 0] = F8_TRY(KGroupedGemm::create(context_, desc, config));
  }
  return {};
}

int64_t Experts::row_scales(const Tensor& tensor) const {
  switch (tensor.copies.q->granularity) {
    case Granularity::kBlock1x128:
      return ceil_div(tensor.cols, kernels::kCastTile) *
             scale_rows_of_groups(desc_.shape.m, desc_.experts);
    case Granularity::kBlock128x128:
      return desc_.experts * kernels::scales_2d(desc_.shape.n, tensor.cols);
    default:
      return tensor.rows;
  }
}

int64_t Experts::column_scales(const Tensor& tensor) const {
  switch (tensor.copies.qt->granularity) {
    case Granularity::kBlock1x128:
      return columns_of_groups(desc_.shape.m, desc_.experts) / kernels::kCastTile *
             kernels::padded_scales(tensor.cols);
    case Granularity::kBlock128x128:
      return desc_.experts * kernels::scales_2d(tensor.cols, desc_.shape.n);
    default:
      return desc_.experts * tensor.cols;
  }
}

void Experts::lay_out() {
  Arena forward, backward, saved;
  const int64_t experts = desc_.experts;
  const auto lay_out = [&](Tensor& t, bool is_weight, Arena& workspace, Arena& kept) {
    size_t words = 0;
    for (const auto& casts : t.casts) {
      for (const Cast& cast : casts) words = std::max(words, cast.plan.words(t.rows, experts));
    }
    const auto floats = [](int64_t count) { return static_cast<size_t>(count) * sizeof(float); };
    t.words = workspace.take(words * sizeof(uint32_t));
    t.first = workspace.take(slots_.empty() ? 0 : kFirstBytes);
    t.q = workspace.take(t.copies.q ? fp8_copy_bytes(t.rows, t.cols) : 0);
    t.q_scale = workspace.take(t.copies.q ? floats(experts * kernels::kScaleStride) : 0);
    t.row_inverse = workspace.take(floats(t.copies.q ? row_scales(t) : 0));
    if (!t.copies.qt) return;
    t.qt =
        kept.take(is_weight ? static_cast<size_t>(experts) * fp8_copy_bytes(t.cols, desc_.shape.n)
                            : fp8_copy_bytes(t.cols, columns_of_groups(desc_.shape.m, experts)));
    t.qt_scale = kept.take(floats(experts * kernels::kScaleStride));
    t.column_inverse = kept.take(floats(column_scales(t)));
  };
  lay_out(at(runtime::Tensor::kInput), false, forward, saved);
  lay_out(at(runtime::Tensor::kWeight), true, forward, saved);
  lay_out(at(runtime::Tensor::kGradOutput), false, backward, backward);
  if (recomputes_weight()) lay_out(weight_again_, true, backward, backward);
  if (recomputes_input()) lay_out(input_again_, false, backward, backward);
  forward_bytes_ = forward.size();
  backward_bytes_ = backward.size();
  saved_bytes_ = saved.size();
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

Experts::Operand Experts::qt_of(const Tensor& tensor, const Buffers& in) {
  return {at_byte<uint8_t>(in.kept, tensor.qt),
          tensor.copies.qt->granularity == Granularity::kTensor
              ? at_byte<float>(in.kept, tensor.qt_scale) + kernels::kInverse
              : at_byte<float>(in.kept, tensor.column_inverse)};
}

template <class Call>
Status Experts::check_common(const char* args, const Call& call) const {
  if (call.m < 0 || call.m > desc_.shape.m) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}.m is {}, the plan was made for 0 to {}", args,
                call.m, desc_.shape.m);
  }
  if (call.m == 0) return {};
  F8_TRY(need(args, "layout.data", call.layout.data));
  return workspace_bytes() == 0 ? Status() : need(args, "workspace.data", call.workspace.data);
}

template <class Call>
Status Experts::check_scales(const char* args, const Call& call) const {
  if (slots_.empty()) return {};
  const auto [amax, scale, format] = ScaleSlots::of(call.scales);
  if (amax == nullptr || scale == nullptr || format == nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}.scales is empty; recipe {} has delayed scaling, see float8_scales_slots", args,
                desc_.recipe.name);
  }
  const float8_step& step = step_of(call);
  if (step.first_step == 0) return check_not_fresh(*context_, call.scales);
  if (step.ranks == nullptr || step.evaluate != 0) return {};
  return fail(ErrorCode::kUnsupported,
              "float8_step.ranks is given in a first step: expert linears take its scales from the "
              "call's own tensors; leave it NULL");
}

// The part of a scale state that a call reads and raises.
static void add_slots(CallMemory& memory, const float8_scale_slots& slots, size_t count) {
  const auto [amax, scale, format] = ScaleSlots::of(slots);
  memory.add_beside("float8_scale_slots (amax)", amax, count * sizeof(uint32_t), Access::kWrite,
                    alignof(uint32_t));
  memory.add_beside("float8_scale_slots (scale)", scale,
                    count * kernels::kScaleStride * sizeof(float), Access::kRead, alignof(float));
  memory.add_beside("float8_scale_slots (format)", format, count * sizeof(uint32_t), Access::kRead,
                    alignof(uint32_t));
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

Status Experts::check(const ExpertsForwardCall& call, Stream stream) const {
  F8_TRY(check_common(kForwardArgs, call));
  if (call.m == 0) return {};
  F8_TRY(need(kForwardArgs, "x.data", call.x.data));
  if (call.w.fp8 != nullptr) {
    F8_TRY(check_given(kForwardArgs, "w.fp8", *call.w.fp8, true, call.saved.data != nullptr));
  } else {
    F8_TRY(need(kForwardArgs, "w.data", call.w.data));
  }
  F8_TRY(need(kForwardArgs, "y.data", call.y.data));
  F8_TRY(check_scales(kForwardArgs, call));
  const auto [m, n, k] = desc_.shape;
  CallMemory memory(kForwardArgs);
  memory.add_rows("x", call.x.data, call.m, k, call.x.ld, desc_.tensor_dtype, Access::kRead);
  if (call.w.fp8 != nullptr) {
    add_given(memory, "w.fp8", *call.w.fp8, true);
  } else {
    memory.add_rows("w", call.w.data, desc_.experts * n, k, call.w.ld, desc_.tensor_dtype,
                    Access::kRead);
  }
  memory.add_rows("y", call.y.data, call.m, n, call.y.ld, desc_.tensor_dtype, Access::kWrite);
  memory.add("layout", call.layout.data, layout_bytes(), Access::kRead);
  memory.add("saved", call.saved.data, saved_bytes(), Access::kWrite);
  add_slots(memory, call.scales, slots_.size());
  memory.add("workspace", call.workspace.data, workspace_bytes(), Access::kWrite);
  return memory.check(kForward, *context_, stream);
}

Status Experts::check(const ExpertsBackwardCall& call, Stream stream) const {
  F8_TRY(check_common(kBackwardArgs, call));
  if (call.dx.data != nullptr && !desc_.needs_grad_input) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.dx is given, the plan was made with float8_experts_desc.no_grad_input",
                kBackwardArgs);
  }
  if (call.dw.data != nullptr && call.dw.accumulate != 0 && !desc_.accumulate_grad_weight) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.dw.accumulate is set, the plan has no GEMM that adds; set "
                "float8_experts_desc.accumulate_grad_weight",
                kBackwardArgs);
  }
  const auto [m, n, k] = desc_.shape;
  CallMemory memory(kBackwardArgs);
  memory.add_rows("dx", call.dx.data, call.m, k, call.dx.ld, desc_.tensor_dtype, Access::kWrite);
  memory.add_rows("dw", call.dw.data, desc_.experts * n, k, call.dw.ld, desc_.grad_weight_dtype,
                  Access::kWrite);
  F8_TRY(memory.check_alignment(kBackward));
  if (call.m == 0 || (call.dx.data == nullptr && call.dw.data == nullptr)) return {};
  F8_TRY(need(kBackwardArgs, "dy.data", call.dy.data));
  if (saved_bytes_ > 0) F8_TRY(need(kBackwardArgs, "saved.data", call.saved.data));
  const bool reads_x = call.dw.data != nullptr && reads_tensors(Gemm::kGradWeight);
  if (reads_x && call.x.data == nullptr) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.x.data is NULL, and recipe {} has grad_weight in high precision: give the "
                "forward's x",
                kBackwardArgs, desc_.recipe.name);
  }
  F8_TRY(check_scales(kBackwardArgs, call));
  const bool reads_weight =
      call.dx.data != nullptr && (recomputes_weight() || reads_tensors(Gemm::kGradInput));
  const bool given = reads_weight && call.w.fp8 != nullptr;
  if (given) F8_TRY(check_given(kBackwardArgs, "w.fp8", *call.w.fp8, false, false));
  if (reads_weight && !given && call.w.data == nullptr) {
    return fail(
        ErrorCode::kInvalidArgument, "{}.w.data is NULL, {}: give the forward's w", kBackwardArgs,
        recomputes_weight()
            ? "the plan was made with float8_experts_desc.recompute_weight"
            : f8::format("and recipe {} has grad_input in high precision", desc_.recipe.name));
  }
  memory.add_rows("dy", call.dy.data, call.m, n, call.dy.ld, desc_.tensor_dtype, Access::kRead);
  if (given) {
    add_given(memory, "w.fp8", *call.w.fp8, false);
  } else if (reads_weight) {
    memory.add_rows("w", call.w.data, desc_.experts * n, k, call.w.ld, desc_.tensor_dtype,
                    Access::kRead);
  }
  if (reads_x) {
    memory.add_rows("x", call.x.data, call.m, k, call.x.ld, desc_.tensor_dtype, Access::kRead);
  }
  memory.add("layout", call.layout.data, layout_bytes(), Access::kRead);
  memory.add("saved", call.saved.data, saved_bytes(), Access::kRead);
  add_slots(memory, call.scales, slots_.size());
  memory.add("workspace", call.workspace.data, workspace_bytes(), Access::kWrite);
  return memory.check(kBackward, *context_, stream);
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
    F8_TRY(cast(w, of_weight, weights(), {call.w}, w.rows, buffers, stream));
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

Status Experts::grad_input(const ExpertsBackwardCall& call, const Buffers& own,
                           const Buffers& saved, unsigned made, Stream stream) const {
  const Tensor& w = at(runtime::Tensor::kWeight);
  const bool given = recomputes_weight() && call.w.fp8 != nullptr;
  if (recomputes_weight() && !given) {
    F8_TRY(cast(weight_again_, kQt, weights(), {call.w}, w.rows, own, stream));
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
  const Operand a = qt_of(at(runtime::Tensor::kGradOutput), own);
  const Operand b =
      recomputes_input() ? qt_of(input_again_, own) : qt_of(at(runtime::Tensor::kInput), saved);
  return grad_weight_[call.dw.accumulate != 0 ? 1 : 0]->run({.a = a.elements,
                                                             .b = b.elements,
                                                             .d = call.dw.data,
                                                             .inv_scale_a = a.inverse_scale,
                                                             .inv_scale_b = b.inverse_scale,
                                                             .layout = call.layout.data,
                                                             .ld_d = call.dw.ld},
                                                            stream);
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
  return zero(state.driver, state.primary, dw.data, desc_.experts * n,
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
  const bool dw = call.dw.data != nullptr;
  const Buffers own = buffers_of(call, call.workspace.data, true);
  const Buffers saved = buffers_of(call, call.saved.data, true);
  const unsigned made = (dx ? kQ : 0) | (dw ? kQt : 0);
  if ((parts & kCastDy) != 0) {
    F8_TRY(cast(at(runtime::Tensor::kGradOutput), made, groups_of(call.layout),
                {call.dy, operands.grad_output}, call.m, own, stream));
  }
  if (dx && (parts & part_of(Gemm::kGradInput)) != 0) {
    F8_TRY(grad_input(call, own, saved, made, stream));
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
