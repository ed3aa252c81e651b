#include "runtime/linear/quantizer.hpp"

#include <algorithm>
#include <utility>

#include "recipes/fp8_layout.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/linear/plan_casts.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kArgs = "float8_quantize_args";

// Of a source that is no kPlain.
codegen::Computed computed_of(CastSource source) {
  return static_cast<codegen::Computed>(static_cast<int>(source) - 1);
}
static_assert(static_cast<int>(CastSource::kRmsNorm) - 1 ==
              static_cast<int>(codegen::Computed::kRmsNorm));

// A linear that has the operand, with a second dimension of its weight that does not matter.
LinearDesc linear_of(const QuantizerDesc& desc) {
  constexpr int64_t kAny = 16;
  LinearDesc linear;
  const int64_t weight_rows = desc.over_ranks ? padded(desc.rows) : desc.rows;
  linear.recipe = desc.recipe;
  linear.tensor_dtype = desc.dtype;
  linear.grad_weight_dtype = desc.dtype;
  linear.non_finite = desc.non_finite;
  linear.count = desc.count;
  linear.recompute = desc.recast;
  switch (desc.operand) {
    case Tensor::kInput:
      linear.shape = {desc.rows, kAny, desc.cols};
      break;
    case Tensor::kWeight:
      linear.shape = {1, weight_rows, desc.cols};
      break;
    case Tensor::kGradOutput:
      linear.shape = {desc.rows, desc.cols, kAny};
      break;
  }
  return linear;
}

bool has_square_blocks(const Copies& copies) {
  constexpr Granularity kSquare = Granularity::kBlock128x128;
  return (copies.q && copies.q->granularity == kSquare) ||
         (copies.qt && copies.qt->granularity == kSquare);
}

bool has_blocks_of_rows(const codegen::CastSpec& cast) {
  return (cast.q && cast.scale_q == codegen::ScaleMode::kBlock128x128) ||
         (cast.qt && is_block(cast.scale_qt));
}

// The call takes its first scales from all ranks' tensors, and so writes them.
bool over_ranks(const QuantizeCall& call) {
  return step_of(call).first_step != 0 && step_of(call).ranks != nullptr &&
         step_of(call).evaluate == 0;
}

CopySet copies_of(const QuantizerDesc& desc) {
  switch (desc.operand) {
    case Tensor::kInput:
      return (desc.q ? kXq : 0) | (desc.qt ? kXqt : 0);
    case Tensor::kWeight:
      return (desc.q ? kWq : 0) | (desc.qt ? kWqt : 0);
    case Tensor::kGradOutput:
      return (desc.q ? kDyq : 0) | (desc.qt ? kDyqt : 0);
  }
  return 0;
}

}  // namespace

const char* name_of(CastSource source) {
  switch (source) {
    case CastSource::kSwiglu:
      return "FLOAT8_SWIGLU";
    case CastSource::kSwigluBackward:
      return "FLOAT8_SWIGLU_BACKWARD";
    case CastSource::kRmsNorm:
      return "FLOAT8_RMS_NORM";
    case CastSource::kPlain:
      break;
  }
  return "FLOAT8_PLAIN";
}

Status Quantizer::lay_out(int sm_count) {
  const LinearDesc linear = linear_of(desc_);
  kernels_ = F8_TRY(linear_kernels(linear));
  F8_TRY(check_source());
  kernels_.noop_flag = desc_.noop_flag;
  kernels_.from_f32 = desc_.f32_source;
  Copies& copies = kernels_.copies[static_cast<size_t>(desc_.operand)];
  const bool scale_apart = desc_.scale_apart && copies.share_dynamic_scale();
  if (!desc_.q) copies.q.reset();
  if (!desc_.qt) copies.qt.reset();
  if (!copies.q && !copies.qt) {
    return fail(ErrorCode::kUnsupported,
                "recipe {} makes no fp8 copy of this operand, or not the one that is asked for",
                desc_.recipe.name);
  }
  F8_TRY(check_whole());
  F8_TRY(check_flag());
  F8_TRY(check_scale_apart());
  F8_TRY(check_computed());
  const bool cuts_blocks = desc_.whole_rows > desc_.rows && desc_.rows % kernels::kCastTile != 0 &&
                           has_square_blocks(copies);
  if (cuts_blocks) whole_rows_ = desc_.whole_rows;
  layout_ = quantizer_layout(linear.shape, kernels_, sm_count, desc_.operand, desc_.qt, whole_rows_,
                             scale_apart);
  return desc_.over_ranks ? lay_out_shards() : Status{};
}

Result<std::shared_ptr<const Quantizer>> Quantizer::plan(const std::shared_ptr<Context>& context,
                                                         const QuantizerDesc& desc) {
  std::shared_ptr<Quantizer> quantizer(new Quantizer(context, desc));
  F8_TRY(quantizer->lay_out(context->device().sm_count));
  F8_TRY(desc.over_ranks                     ? quantizer->plan_shards()
         : desc.source != CastSource::kPlain ? quantizer->plan_computed()
                                             : quantizer->plan_launches());
  return std::shared_ptr<const Quantizer>(std::move(quantizer));
}

Result<float8_layout> Quantizer::layout_of(const QuantizerDesc& desc, int64_t rows) {
  constexpr int kAnySmCount = 132;  // copies do not depend on it
  Quantizer quantizer(nullptr, desc);
  F8_TRY(quantizer.lay_out(kAnySmCount));
  const float8_tensor view = F8_TRY(quantizer.view(nullptr, nullptr, rows));
  const Fp8Refs& at = quantizer.layout_.refs;
  float8_layout layout{};
  layout.tensor_bytes = quantizer.tensor_bytes();
  layout.transposed_bytes = quantizer.transposed_bytes();
  layout.ld_q = view.ld_q;
  layout.ld_qt = view.ld_qt;
  layout.q_inverse_scale = at.q_inverse.offset();
  layout.qt_inverse_scale = at.qt_inverse.offset();
  layout.q_scale_apart = at.q_inverse.slot() == Ref(Slot::kTransposed).slot() ? 1 : 0;
  layout.amax_words = static_cast<size_t>(quantizer.amax_words());
  layout.row_amax_words = static_cast<size_t>(quantizer.row_amax_words());
  return layout;
}

Status Quantizer::check_whole() const {
  const int64_t most = desc_.over_ranks ? kMaxDim : 0;
  if (desc_.whole_rows >= 0 && desc_.whole_rows <= most) return {};
  return fail(ErrorCode::kInvalidArgument,
              "float8_quantizer_desc.whole_rows is {}; it is 0 to {} with over_ranks, else 0",
              desc_.whole_rows, kMaxDim);
}

Status Quantizer::check_source() const {
  if (!desc_.f32_source || desc_.dtype != Dtype::kF32) return {};
  return fail(ErrorCode::kInvalidArgument,
              "float8_quantizer_desc.f32_source rounds x to dtype, which is f32; set dtype to bf16 "
              "or f16, or leave f32_source 0");
}

Status Quantizer::check_scale_apart() const {
  const bool of_recompute = desc_.scale_apart || desc_.recast;
  if (!of_recompute || (desc_.operand == Tensor::kInput && !desc_.over_ranks)) return {};
  return fail(ErrorCode::kInvalidArgument,
              "float8_quantizer_desc.copies is {}; it is for FLOAT8_INPUT without over_ranks",
              desc_.recast ? "FLOAT8_QT_FOR_RECOMPUTE" : "FLOAT8_Q_FOR_RECOMPUTE");
}

Status Quantizer::check_kept_scale(const QuantizeCall& call) const {
  if (!kernels_.keeps_scale(desc_.operand) ||
      (call.x.fp8 != nullptr && call.x.fp8->q_inverse_scale != nullptr)) {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              "{}.x.fp8 has no q_inverse_scale; qt takes the scale of the q that "
              "FLOAT8_Q_FOR_RECOMPUTE made: give its float8_quantizer_view",
              kArgs);
}

Status Quantizer::check_flag() const {
  if (!desc_.noop_flag || (desc_.operand == Tensor::kWeight && !desc_.over_ranks)) return {};
  return fail(ErrorCode::kInvalidArgument,
              "float8_quantizer_desc.noop_flag is set; it is for FLOAT8_WEIGHT without over_ranks");
}

Status Quantizer::lay_out_shards() {
  if (is_delayed()) {
    return fail(ErrorCode::kUnsupported,
                "recipe {} has delayed scaling, whose amaxes float8_scales_sync reduces; "
                "float8_quantizer_desc.over_ranks is for dynamic scaling",
                desc_.recipe.name);
  }
  const std::vector<KernelPass> passes = kernels_.passes(copies_of(desc_), false);
  const bool are_whole = desc_.rows % kernels::kCastTile == 0 ||
                         (desc_.whole_rows > 0 && desc_.whole_rows <= desc_.rows);
  for (const KernelPass& pass : passes) {
    const bool takes_shards = codegen::takes_shards(pass.cast);
    if (are_whole || !has_blocks_of_rows(pass.cast) || (whole_rows_ > 0 && takes_shards)) continue;
    return fail(ErrorCode::kUnsupported,
                "shards of {} rows cut the blocks of 128 rows that have a scale; {}give shards "
                "whole blocks: all but the last have the quantizer's rows_max",
                desc_.rows, takes_shards ? "set float8_quantizer_desc.whole_rows, or " : "");
  }
  words_ = shard_words(passes, desc_.rows, desc_.cols, whole_rows_);
  place_shard_words(words_, layout_.tensors.of(desc_.operand));
  layout_.workspace_bytes = 0;
  return {};
}

Status Quantizer::plan_shards() {
  const ListedTensor tensor = listed();
  shards_ = F8_TRY(CastList::plan(context_, std::span(&tensor, 1)));
  return {};
}

Status Quantizer::check_computed() const {
  if (desc_.source == CastSource::kPlain) return {};
  const bool backward = desc_.source == CastSource::kSwigluBackward;
  const Tensor operand = backward ? Tensor::kGradOutput : Tensor::kInput;
  if (desc_.operand == operand && !desc_.over_ranks && !desc_.f32_source) return {};
  return fail(ErrorCode::kInvalidArgument,
              "float8_quantizer_desc.source is {}; it is for {} without over_ranks and f32_source",
              name_of(desc_.source), backward ? "FLOAT8_GRAD_OUTPUT" : "FLOAT8_INPUT");
}

Status Quantizer::plan_computed() {
  computed_ = F8_TRY(ComputedCasts::plan(*context_, kernels_, copies_of(desc_),
                                         layout_.tensors.of(desc_.operand), desc_.rows,
                                         layout_.first.offset(), computed_of(desc_.source)));
  layout_.workspace_bytes = computed_.workspace_bytes();
  return {};
}

Status Quantizer::check_factors(const QuantizeCall& call) const {
  const bool backward = desc_.source == CastSource::kSwigluBackward;
  const bool swiglu = desc_.source == CastSource::kSwiglu || backward;
  const bool norm = desc_.source == CastSource::kRmsNorm;
  for (const auto& [field, pointer, needed] :
       {std::tuple<const char*, const void*, bool>{"up.data", call.up.data, swiglu},
        {"grad.data", call.grad.data, backward},
        {"up_tensor.data", call.up_tensor.data, backward},
        {"norm_weight", call.norm_weight, norm},
        {"rstd", call.rstd, norm}}) {
    if ((pointer != nullptr) == needed) [[likely]] {
      continue;
    }
    return fail(ErrorCode::kInvalidArgument, "{}.{} is {}; the quantizer's source is {}", kArgs,
                field, needed ? "NULL" : "given", name_of(desc_.source));
  }
  if (backward && (call.transposed.data == nullptr) != (call.up_transposed.data == nullptr)) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.up_transposed.data is {} and transposed.data is {}; qt of both gradients lies "
                "apart, or follows q",
                kArgs, call.up_transposed.data == nullptr ? "NULL" : "given",
                call.transposed.data == nullptr ? "NULL" : "given");
  }
  if (desc_.source != CastSource::kPlain && over_ranks(call) && is_delayed()) {
    return fail(
        ErrorCode::kInvalidArgument,
        "float8_step.ranks is given in a first step, whose scales of what is computed from x "
        "are those of this rank: compute it, and quantize it with FLOAT8_PLAIN in that step");
  }
  return {};
}

QuantizeCall Quantizer::of_up(const QuantizeCall& call) {
  QuantizeCall up = call;
  up.x = call.up;
  up.tensor = call.up_tensor;
  up.transposed = call.up_transposed;
  up.scales = call.up_scales;
  up.counters = call.up_counters;
  return up;
}

ListedTensor Quantizer::listed() const {
  return {.kernels = kernels_,
          .tensor = desc_.operand,
          .copies = copies_of(desc_),
          .at = layout_.tensors.of(desc_.operand),
          .rows_max = desc_.rows,
          .over_ranks = desc_.over_ranks,
          .whole_rows = whole_rows_};
}

std::vector<codegen::KernelSpec> Quantizer::kernel_specs() const {
  std::vector<codegen::KernelSpec> specs;
  for (const bool first : {false, true}) {
    if (first && kernels_.slots.empty()) continue;
    for (const KernelPass& pass : kernels_.passes(copies_of(desc_), first)) {
      if (pass.amax) specs.emplace_back(*pass.amax);
      specs.emplace_back(pass.cast);
      if (pass.one_launch) specs.emplace_back(*pass.one_launch);
    }
  }
  return specs;
}

Status Quantizer::plan_launches() {
  F8_TRY(context_->compile(kernel_specs()));
  CastPlanner casts(*context_, linear_of(desc_).shape.m, kernels_,
                    {.sync = layout_.sync, .first = layout_.first, .sums = {}});
  const TensorBuffers& at = layout_.tensors.of(desc_.operand);
  for (CallKind kind = 0; kind < launches_.size(); ++kind) {
    const bool first = (kind & kFirstStep) != 0;
    if ((kind != 0 && !first) || (first && kernels_.slots.empty())) continue;
    const CastSection section{.tensors = layout_.tensors,
                              .clear = clear_amax(at.col_amax, at.row_amax, at.rows)};
    launches_[kind] = F8_TRY(casts.plan(section, copies_of(desc_), kind));
  }
  return {};
}

Status Quantizer::check_rows(const char* name, int64_t rows) const {
  const bool weight = desc_.operand == Tensor::kWeight && !desc_.over_ranks;
  if (rows >= 0 && rows <= desc_.rows && (!weight || rows == 0 || rows == desc_.rows)) [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument, "{} is {}, the quantizer was planned for {}{}", name,
              rows, weight ? "0 or " : "0 to ", desc_.rows);
}

// Checks where the rows of a shard that may cut blocks are in the whole.
Status Quantizer::check_first_row(const QuantizeCall& call) const {
  if (whole_rows_ == 0 || (call.first_row >= 0 && call.first_row <= whole_rows_ - call.rows))
      [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument,
              "{}.first_row is {}; a shard of {} rows is a part of the {} rows of the quantizer's "
              "whole_rows",
              kArgs, call.first_row, call.rows, whole_rows_);
}

void Quantizer::set_copies(const void* tensor, const void* transposed, CallArguments& to) const {
  to.set(Slot::kTensor, tensor);
  if (transposed == nullptr && tensor != nullptr) {
    transposed = static_cast<const uint8_t*>(tensor) + layout_.q_bytes;
  }
  to.set(Slot::kTransposed, transposed);
}

Result<float8_tensor> Quantizer::view(const void* tensor, const void* transposed,
                                      int64_t rows) const {
  F8_TRY(check_rows("rows", rows));
  CallArguments call;
  set_copies(tensor, transposed, call);
  float8_tensor view =
      tensor_view(layout_.refs, call, rows, desc_.cols, kernels_.of(desc_.operand));
  view.whole_rows = whole_rows_;
  return view;
}

// Checks the words of a call of `name`, which casts with them or finds them.
Status Quantizer::check_amax(const char* name, const QuantizeCall& call, bool cast) const {
  if (!desc_.over_ranks) {
    if (cast && call.amax == nullptr && call.row_amax == nullptr) [[likely]] {
      return {};
    }
    return fail(ErrorCode::kInvalidArgument,
                "{}: the quantizer finds its maxima itself; set float8_quantizer_desc.over_ranks "
                "to find, reduce and use them in several calls",
                name);
  }
  for (const auto& [field, words, count] : {std::tuple{"amax", call.amax, amax_words()},
                                            {"row_amax", call.row_amax, row_amax_words()}}) {
    if ((words == nullptr) == (count == 0)) continue;
    return fail(ErrorCode::kInvalidArgument,
                "{}.{} is {}; the quantizer is over ranks and has {} "
                "of these words, which float8_quantize_amax finds",
                kArgs, field, words == nullptr ? "NULL" : "given", count);
  }
  return {};
}

void Quantizer::add_amax(CallMemory& memory, const QuantizeCall& call, Access access) const {
  memory.add("amax", call.amax, sizeof(uint32_t) * static_cast<size_t>(amax_words()), access,
             alignof(uint32_t));
  memory.add("row_amax", call.row_amax, sizeof(uint32_t) * static_cast<size_t>(row_amax_words()),
             access, alignof(uint32_t));
}

void Quantizer::add_launch_counts(CallMemory& memory, const QuantizeCall& call) const {
  memory.add_beside("float8_step.launch_counts", step_of(call).launch_counts.data,
                    quantize_sync_bytes(context_->device().sm_count), Access::kWrite);
}

void Quantizer::add_x(CallMemory& memory, const QuantizeCall& call) const {
  memory.add_rows("x", call.x.data, call.rows, desc_.cols, call.x.ld,
                  desc_.f32_source ? Dtype::kF32 : desc_.dtype, Access::kRead);
}

Status Quantizer::check_cast(const char* name, const QuantizeCall& call) const {
  F8_TRY(check_rows("float8_quantize_args.rows", call.rows));
  F8_TRY(check_amax(name, call, true));
  F8_TRY(check_first_row(call));
  if (call.rows == 0) return {};
  F8_TRY(check_factors(call));
  F8_TRY(check_kept_scale(call));
  for (const auto& [field, pointer] : {std::pair<const char*, const void*>{"x.data", call.x.data},
                                       {"tensor.data", call.tensor.data}}) {
    if (pointer == nullptr) [[unlikely]] {
      return fail(ErrorCode::kInvalidArgument, "{}.{} is NULL", kArgs, field);
    }
  }
  if ((call.counters != nullptr || call.up_counters != nullptr) && !desc_.count) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}.{}counters is given, the quantizer's casts do not count; set "
                "float8_quantizer_desc.count",
                kArgs, call.counters == nullptr ? "up_" : "");
  }
  if (call.noop_flag != nullptr && !desc_.noop_flag) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}.noop_flag is given, the quantizer's casts do not look at it; set "
                "float8_quantizer_desc.noop_flag",
                kArgs);
  }
  F8_TRY(check_slots(call, "scales", call.scales));
  return desc_.source == CastSource::kSwigluBackward
             ? check_slots(call, "up_scales", call.up_scales)
             : Status();
}

Status Quantizer::check_slots(const QuantizeCall& call, const char* name,
                              const float8_scale_slots& scales) const {
  if (!is_delayed()) return {};
  const auto [amax, scale, format] = ScaleSlots::of(scales);
  if (amax == nullptr || scale == nullptr || (over_ranks(call) && !format)) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}.{} is empty; recipe {} has delayed scaling, see float8_scales_slots", kArgs,
                name, desc_.recipe.name);
  }
  return step_of(call).first_step != 0 ? Status() : check_not_fresh(*context_, scales);
}

CallMemory Quantizer::cast_memory(const QuantizeCall& call) const {
  CallMemory memory(kArgs);
  add_x(memory, call);
  if (kernels_.keeps_scale(desc_.operand)) {
    memory.add("x.fp8", call.x.fp8->q_inverse_scale, sizeof(float), Access::kRead, sizeof(float));
  }
  memory.add_rows("up", call.up.data, call.rows, desc_.cols, call.up.ld, desc_.dtype,
                  Access::kRead);
  memory.add_rows("grad", call.grad.data, call.rows, desc_.cols, call.grad.ld, desc_.dtype,
                  Access::kRead);
  memory.add("norm_weight", call.norm_weight,
             static_cast<size_t>(desc_.cols) * size_bytes(desc_.dtype), Access::kRead);
  memory.add("rstd", call.rstd, static_cast<size_t>(call.rows) * sizeof(float), Access::kRead,
             alignof(float));
  add_copies(memory, {"tensor", "transposed", "counters"}, call);
  memory.add("noop_flag", call.noop_flag, sizeof(uint32_t), Access::kWrite, alignof(uint32_t));
  add_amax(memory, call, Access::kRead);
  if (desc_.source == CastSource::kSwigluBackward) {
    add_copies(memory, {"up_tensor", "up_transposed", "up_counters"}, of_up(call));
  }
  return memory;
}

void Quantizer::add_copies(CallMemory& memory, const CopyNames& names,
                           const QuantizeCall& call) const {
  const auto [amax, scale, format] = ScaleSlots::of(call.scales);
  const size_t slots = kernels_.slots.size();
  memory.add(names.tensor, call.tensor.data,
             call.transposed.data == nullptr ? tensor_bytes() : layout_.q_bytes, Access::kWrite);
  memory.add(names.transposed, call.transposed.data, layout_.qt_bytes, Access::kWrite);
  memory.add(names.counters, call.counters, kCountersOfLinear * sizeof(CastCounters),
             Access::kWrite, alignof(CastCounters));
  memory.add_beside("float8_scale_slots (amax)", amax, slots * sizeof(uint32_t), Access::kWrite,
                    alignof(uint32_t));
  memory.add_beside("float8_scale_slots (scale)", scale,
                    slots * kernels::kScaleStride * sizeof(float),
                    over_ranks(call) ? Access::kWrite : Access::kRead, alignof(float));
}

void Quantizer::bind(const QuantizeCall& call, CallArguments& to) const {
  to.m = desc_.operand == Tensor::kWeight && !desc_.over_ranks ? 1 : call.rows;
  to.first_row = call.first_row;
  to.scales = ScaleSlots::of(call.scales);
  to.ranks = step_of(call).ranks;
  to.set(Slot::kX, call.x.data, call.x.ld);
  if (kernels_.keeps_scale(desc_.operand)) {
    // A tensor's inverse scale follows its scale.
    to.set(Slot::kInputScale, call.x.fp8->q_inverse_scale - kernels::kInverse);
  }
  set_copies(call.tensor.data, call.transposed.data, to);
  to.set(Slot::kCounters, call.counters);
  to.set(Slot::kNoopFlag, call.noop_flag);
  to.set(Slot::kRankAmax, call.amax);
  to.set(Slot::kRowAmax, call.row_amax);
  to.set(Slot::kAmax, step_of(call).evaluate != 0 ? nullptr : to.scales.amax);
  to.set(Slot::kScale, to.scales.scale);
}

Status Quantizer::run(const QuantizeCall& call, Stream stream, AmaxReducer reduce) const {
  constexpr const char* kCall = "float8_quantize";
  F8_TRY(check_cast(kCall, call));
  if (call.rows == 0) return {};
  if (call.workspace.data == nullptr && layout_.workspace_bytes > 0) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}.workspace.data is NULL", kArgs);
  }
  CallMemory memory = cast_memory(call);
  memory.add("workspace", call.workspace.data, layout_.workspace_bytes, Access::kWrite);
  add_launch_counts(memory, call);
  F8_TRY(memory.check(kCall, *context_, stream));
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  if (shards_) {
    const auto bind_call = [&](size_t, CallArguments& to) {
      bind(call, to);
      return true;
    };
    return shards_->run(std::cref(bind_call), {.stream = stream});
  }
  if (desc_.source != CastSource::kPlain) return run_computed(call, stream);
  CallArguments to;
  to.reduce = reduce;
  to.set(Slot::kWorkspace, call.workspace.data);
  to.set(Slot::kLaunchCounts, launch_counts(call));
  bind(call, to);
  CallKind kind = 0;
  if (step_of(call).first_step != 0 && is_delayed()) {
    kind = over_ranks(call) ? kFirstStep | kOverRanks : kFirstStep;
  }
  F8_TRY(runtime::run(launches_[kind], state, to, stream));
  return call.noop_flag == nullptr ? Status() : set_noop_flag(call.noop_flag, stream);
}

Status Quantizer::run_computed(const QuantizeCall& call, Stream stream) const {
  const bool backward = desc_.source == CastSource::kSwigluBackward;
  const float8_matrix& factor = backward ? call.grad : call.up;
  ComputedCall to{.factor = factor.data,
                  .ld_factor = factor.ld,
                  .rstd = call.rstd,
                  .first_step = step_of(call).first_step != 0 && is_delayed()};
  if (desc_.source == CastSource::kRmsNorm) to.factor = call.norm_weight;
  to.first.set(Slot::kWorkspace, call.workspace.data);
  bind(call, to.first);
  if (backward) {
    to.second.set(Slot::kWorkspace, call.workspace.data);
    bind(of_up(call), to.second);
  }
  return computed_.run(context_->state(), to, stream);
}

Status Quantizer::set_noop_flag(uint32_t* flag, Stream stream) const {
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  return set_words(state.driver, flag, 1, 1, stream);
}

Status Quantizer::check_find(const char* name, const QuantizeCall& call) const {
  F8_TRY(check_rows("float8_quantize_args.rows", call.rows));
  F8_TRY(check_amax(name, call, false));
  F8_TRY(check_first_row(call));
  if (call.x.data != nullptr || call.rows == 0) return {};
  return fail(ErrorCode::kInvalidArgument, "{}.x.data is NULL", kArgs);
}

CallMemory Quantizer::find_memory(const QuantizeCall& call) const {
  CallMemory memory(kArgs);
  add_x(memory, call);
  add_amax(memory, call, Access::kWrite);
  return memory;
}

Status Quantizer::find_amax(const QuantizeCall& call, Stream stream) const {
  constexpr const char* kCall = "float8_quantize_amax";
  F8_TRY(check_find(kCall, call));
  const CallMemory memory = find_memory(call);
  F8_TRY(memory.check(kCall, *context_, stream));
  const auto bind_call = [&](size_t, CallArguments& to) {
    bind(call, to);
    return true;
  };
  return shards_->find(std::cref(bind_call), stream);
}

}  // namespace f8::runtime
