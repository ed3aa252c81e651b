#include "runtime/linear/tensors/quantizer.hpp"

#include <algorithm>
#include <utility>

#include "recipes/fp8_layout.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/linear/plan/plan_casts.hpp"

namespace f8::runtime {
namespace {

// The kernels' name of a source that is no kPlain.
codegen::Computed computed_of(CastSource source) {
  return static_cast<codegen::Computed>(static_cast<int>(source) - 1);
}
static_assert(static_cast<int>(CastSource::kMergedGluBackwardUpFirst) - 1 ==
              static_cast<int>(codegen::Computed::kMergedGluBackwardUpFirst));

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

CastSource source_of(codegen::Computed computed) {
  return static_cast<CastSource>(static_cast<int>(computed) + 1);
}

bool is_merged(CastSource source) {
  return source != CastSource::kPlain && codegen::is_merged(computed_of(source));
}

const char* name_of(CastSource source) {
  switch (source) {
    case CastSource::kGlu:
      return "FLOAT8_GLU";
    case CastSource::kGluBackward:
      return "FLOAT8_GLU_BACKWARD";
    case CastSource::kRmsNorm:
      return "FLOAT8_RMS_NORM";
    case CastSource::kActivation:
      return "FLOAT8_ACTIVATION";
    case CastSource::kActivationBackward:
      return "FLOAT8_ACTIVATION_BACKWARD";
    case CastSource::kLayerNorm:
      return "FLOAT8_LAYER_NORM";
    case CastSource::kMergedGluBackward:
      return "FLOAT8_MERGED_GLU_BACKWARD";
    case CastSource::kMergedGluBackwardUpFirst:
      return "FLOAT8_MERGED_GLU_BACKWARD_UP_FIRST";
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
  // What a norm makes keeps no maxima, since a graph may compute it in one of both casts alone.
  kernels_.keeps_column_amax =
      activates() && (desc_.scale_apart || desc_.recast) && copies.have_dynamic_axes();
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
  F8_TRY(desc.source != CastSource::kPlain ? quantizer->plan_computed()
         : desc.over_ranks                 ? quantizer->plan_shards()
                                           : quantizer->plan_launches());
  quantizer->set_single_pass();
  return std::shared_ptr<const Quantizer>(std::move(quantizer));
}

void Quantizer::set_single_pass() {
  const std::vector<KernelPass> passes = kernels_.passes(copies_of(desc_), false);
  if (desc_.source != CastSource::kPlain || desc_.recast || whole_rows_ > 0 || passes.size() != 1 ||
      passes.front().amax) {
    return;
  }
  codegen::CastSpec cast = passes.front().cast;
  cast.one_launch = false;
  for (const FusedCast& fused : passes.front().casts) {
    if (fused.tensor != desc_.operand) continue;
    single_pass_.emplace(cast, cast_operand(fused, layout_.tensors.of(desc_.operand), Slot::kAmax));
  }
}

Result<SinglePassCast> Quantizer::single_pass(const char* name, const QuantizeCall& call,
                                              Stream stream) const {
  F8_TRY(check_cast(name, call));
  if (!single_pass_ || step_of(call).first_step != 0) {
    return fail(
        ErrorCode::kUnsupported,
        "{}: a cast under recipe {} is not one launch{}; leave the quantizer NULL, and call "
        "float8_quantize behind",
        name, desc_.recipe.name,
        single_pass_ ? " in a first step" : ", since its scales need maxima before");
  }
  F8_TRY(cast_memory(call).check(name, *context_, stream));
  CallArguments to;
  bind(call, to);
  return SinglePassCast{single_pass_->first, single_pass_->second.at(to)};
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

bool Quantizer::activates() const {
  return desc_.source != CastSource::kPlain && codegen::has_activation(computed_of(desc_.source));
}

bool Quantizer::casts_gradients() const {
  return desc_.source != CastSource::kPlain && codegen::is_gradient(computed_of(desc_.source));
}

Status Quantizer::check_computed() const {
  if (desc_.column_sums && !casts_gradients()) {
    return fail(ErrorCode::kInvalidArgument,
                "float8_quantizer_desc.column_sums is set and source is {}; it is for the "
                "gradients of activations",
                name_of(desc_.source));
  }
  if (desc_.less_workspace && desc_.source != CastSource::kGluBackward) {
    return fail(ErrorCode::kInvalidArgument,
                "float8_quantizer_desc.less_workspace is set and source is {}; it is for "
                "FLOAT8_GLU_BACKWARD",
                name_of(desc_.source));
  }
  if (!activates() && desc_.activation != codegen::Activation::kSilu) {
    return fail(ErrorCode::kInvalidArgument,
                "float8_quantizer_desc.activation is given and source is {}, which has none; set "
                "it to 0",
                name_of(desc_.source));
  }
  if (desc_.source == CastSource::kPlain) return {};
  if (is_merged(desc_.source) && (desc_.cols % (2 * kernels::kCastTile) != 0 || desc_.over_ranks)) {
    return fail(ErrorCode::kUnsupported,
                "float8_quantizer_desc.source is {} with cols {}{}; gate and "
                "up have whole {} columns each, of one rank: cast others with FLOAT8_GLU_BACKWARD",
                name_of(desc_.source), desc_.cols, desc_.over_ranks ? " and over_ranks" : "",
                kernels::kCastTile);
  }
  const Tensor operand = casts_gradients() ? Tensor::kGradOutput : Tensor::kInput;
  const bool cut = activates() ? desc_.whole_rows != 0 : desc_.over_ranks;
  if (desc_.operand == operand && !cut && !desc_.f32_source) return {};
  return fail(ErrorCode::kInvalidArgument,
              "float8_quantizer_desc.source is {}; it is for {} without {} and f32_source",
              name_of(desc_.source), casts_gradients() ? "FLOAT8_GRAD_OUTPUT" : "FLOAT8_INPUT",
              activates() ? "whole_rows" : "over_ranks");
}

Status Quantizer::plan_computed() {
  const bool over_ranks = desc_.over_ranks;
  // Gradients in the workspace would be cast by a kernel that leaves the sums of one tensor.
  const bool less_workspace =
      desc_.less_workspace || (desc_.column_sums && desc_.source == CastSource::kGluBackward);
  const bool kept = kernels_.keeps_column_amax;
  computed_ = F8_TRY(ComputedCasts::plan(*context_, kernels_, copies_of(desc_),
                                         layout_.tensors.of(desc_.operand), desc_.rows,
                                         over_ranks ? 0 : layout_.first.offset(),
                                         {.source = computed_of(desc_.source),
                                          .activation = desc_.activation,
                                          .sums = desc_.column_sums,
                                          .given_maxima = over_ranks || (kept && desc_.recast),
                                          .keeps_columns = kept && desc_.scale_apart,
                                          .less_workspace = less_workspace}));
  return {};
}

QuantizeCall Quantizer::of_up(const QuantizeCall& call) {
  QuantizeCall up = call;
  up.x = call.up;
  up.tensor = call.up_tensor;
  up.transposed = call.up_transposed;
  up.scales = call.up_scales;
  up.counters = call.up_counters;
  up.amax = call.up_amax;
  up.row_amax = call.up_row_amax;
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

void Quantizer::bind(const QuantizeCall& call, CallArguments& to) const {
  to.m = desc_.operand == Tensor::kWeight && !desc_.over_ranks ? 1 : call.rows;
  to.first_row = call.first_row;
  to.scales = ScaleSlots::of(call.scales);
  to.ranks = step_of(call).ranks;
  to.set(Slot::kX, call.x.data, call.x.ld);
  if (kernels_.keeps_scale(desc_.operand)) {
    // A tensor's inverse scale follows its scale.
    to.set(Slot::kInputScale, call.x.fp8->q_inverse_scale - kernels::kInverse);
  } else if (reads_kept()) {
    to.set(Slot::kInputScale, call.x.fp8->qt_inverse_scale);
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
  F8_TRY(check_workspace(call));
  CallMemory memory = cast_memory(call);
  memory.add("workspace", call.workspace.data, needed_workspace(call), Access::kWrite);
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
  if (desc_.source != CastSource::kPlain) {
    return computed_.run(state, computed_call(call), stream);
  }
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

ComputedCall Quantizer::computed_call(const QuantizeCall& call) const {
  const float8_matrix& factor = casts_gradients() ? call.grad : call.up;
  ComputedCall to{.factor = factor.data,
                  .ld_factor = factor.ld,
                  .rstd = call.rstd,
                  .mean = call.mean,
                  .bias = call.norm_bias,
                  .sums = call.column_sums,
                  .first_step = step_of(call).first_step != 0 && is_delayed()};
  if (codegen::is_norm(computed_of(desc_.source))) to.factor = call.norm_weight;
  to.first.set(Slot::kWorkspace, call.workspace.data);
  bind(call, to.first);
  if (desc_.source == CastSource::kGluBackward) {
    to.second.set(Slot::kWorkspace, call.workspace.data);
    bind(of_up(call), to.second);
  }
  return to;
}

// A call without rows has words too, all 0.
Status Quantizer::find_computed(const QuantizeCall& call, Stream stream) const {
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  for (const auto& [words, count] : {std::pair{call.amax, amax_words()},
                                     {call.row_amax, row_amax_words()},
                                     {call.up_amax, amax_words()},
                                     {call.up_row_amax, row_amax_words()}}) {
    if (words == nullptr) continue;
    F8_TRY(set_words(state.driver, words, 0, static_cast<size_t>(count), stream));
  }
  return call.rows == 0 ? Status() : computed_.find(state, computed_call(call), stream);
}

Status Quantizer::set_noop_flag(uint32_t* flag, Stream stream) const {
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  return set_words(state.driver, flag, 1, 1, stream);
}

Status Quantizer::find_amax(const QuantizeCall& call, Stream stream) const {
  constexpr const char* kCall = "float8_quantize_amax";
  F8_TRY(check_find(kCall, call));
  const CallMemory memory = find_memory(call);
  F8_TRY(memory.check(kCall, *context_, stream));
  if (desc_.source != CastSource::kPlain) return find_computed(call, stream);
  const auto bind_call = [&](size_t, CallArguments& to) {
    bind(call, to);
    return true;
  };
  return shards_->find(std::cref(bind_call), stream);
}

}  // namespace f8::runtime
