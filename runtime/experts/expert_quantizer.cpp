#include "runtime/experts/expert_quantizer.hpp"

#include <algorithm>
#include <limits>

#include "recipes/fp8_layout.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/experts/first_scale.hpp"
#include "runtime/experts/group_layout.hpp"
#include "runtime/linear/plan/call_arguments.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kExpertQuantizeArgs = "float8_expert_quantize_args";

// The floats of the inverse scales of all experts' copies [lines][length]; a tensor's lie with its scale.
int64_t scale_floats_of(const CastSetting& copy, int64_t experts, int64_t lines, int64_t length) {
  switch (copy.granularity) {
    case Granularity::kTensor:
      return (copy.scaling == Scaling::kDelayed ? 1 : experts) * kernels::kScaleStride;
    case Granularity::kBlock128x128:
      return experts * kernels::scales_2d(lines, length);
    default:
      return experts * lines;
  }
}

// The bytes from the begin of the scales to the inverse scales.
size_t inverse_at(const CastSetting& setting) {
  return setting.granularity == Granularity::kTensor ? kernels::kInverse * sizeof(float) : 0;
}

template <class T>
T* placed_at(void* base, size_t offset) {
  return reinterpret_cast<T*>(static_cast<uint8_t*>(base) + offset);
}

}  // namespace

Status ExpertQuantizer::check_sizes() const {
  F8_TRY(check_experts(desc_.experts));
  if (desc_.rows < 1 || desc_.rows > kMaxDim || (!desc_.over_ranks && desc_.rows % 16 != 0)) {
    return fail(
        ErrorCode::kInvalidArgument,
        "float8_expert_quantizer_desc.n is {}; it is a multiple of 16, or with over_ranks at "
        "least 1",
        desc_.rows);
  }
  if (desc_.two_tensors && desc_.rows % 32 != 0) {
    return fail(ErrorCode::kInvalidArgument,
                "float8_expert_quantizer_desc.two_tensors is set with n {}; each tensor has a "
                "multiple of 16 rows of an expert",
                desc_.rows);
  }
  if (desc_.noop_flag && desc_.over_ranks) {
    return fail(
        ErrorCode::kInvalidArgument,
        "float8_expert_quantizer_desc.noop_flag is set; it is for casts without over_ranks");
  }
  if (desc_.experts * desc_.rows > std::numeric_limits<int32_t>::max()) {
    return fail(ErrorCode::kInvalidArgument, "{} experts of {} rows: more than 2^31 rows",
                desc_.experts, desc_.rows);
  }
  return {};
}

Status ExpertQuantizer::check_copies() const {
  for (const auto& copy : {copies_.q, copies_.qt}) {
    if (!copy || copy->granularity == Granularity::kBlock1x128) {
      return fail(ErrorCode::kUnsupported,
                  "recipe {}: casts of experts' weights apart have scales of a matrix, of its rows "
                  "or of 128x128 blocks, in output and grad_input",
                  desc_.recipe.name);
    }
    if (desc_.over_ranks && desc_.rows % kernels::kCastTile != 0 &&
        copy->granularity == Granularity::kBlock128x128) {
      return fail(ErrorCode::kUnsupported,
                  "recipe {}: ranks have {} rows of each expert, which cuts blocks of 128x128",
                  desc_.recipe.name, desc_.rows);
    }
  }
  return {};
}

Status ExpertQuantizer::lay_out() {
  F8_TRY(check_sizes());
  LinearDesc linear;
  linear.shape = {1, padded(desc_.rows), desc_.cols};
  linear.recipe = desc_.recipe;
  linear.tensor_dtype = desc_.dtype;
  linear.grad_weight_dtype = desc_.dtype;
  linear.non_finite = desc_.non_finite;
  LinearKernels kernels = F8_TRY(linear_kernels(linear));
  kernels.from_f32 = desc_.f32_source;
  kernels.noop_flag = desc_.noop_flag;
  copies_ = kernels.of(Tensor::kWeight);
  slots_ = kernels.slots;
  F8_TRY(check_copies());
  for (const KernelPass& pass : kernels.passes(kWq | kWqt, false)) {
    CastDesc& cast = descs_.emplace_back(pass.cast, pass.casts.front().slot);
    cast.spec.group = true;
    if (desc_.two_tensors) cast.spec.source = kernels::RowSource::kPair;
  }
  place_copies();
  if (desc_.over_ranks) count_words();
  return {};
}

void ExpertQuantizer::place_copies() {
  const auto [experts, n, k] = std::tuple(desc_.experts, desc_.rows, desc_.cols);
  const bool one_scale = copies_.share_scale();
  const auto floats = [](int64_t count) { return static_cast<size_t>(count) * sizeof(float); };
  Arena tensor, transposed;
  tensor.take(fp8_copy_bytes(rows(), k));
  if (!one_scale) q_scales_ = tensor.take(floats(scale_floats_of(*copies_.q, experts, n, k)));
  transposed.take(fp8_copy_bytes(experts * k, n));
  qt_scales_ = transposed.take(floats(scale_floats_of(*copies_.qt, experts, k, n)));
  layout_.tensor_bytes = tensor.size() + transposed.size();
  layout_.transposed_bytes = transposed.size();
  layout_.ld_q = row_pitch(k);
  layout_.ld_qt = row_pitch(n);
  layout_.q_inverse_scale = (one_scale ? qt_scales_ : q_scales_) + inverse_at(*copies_.q);
  layout_.qt_inverse_scale = qt_scales_ + inverse_at(*copies_.qt);
  layout_.q_scale_apart = one_scale ? 1 : 0;
}

void ExpertQuantizer::count_words() {
  for (const CastDesc& cast : descs_) {
    layout_.amax_words += GroupCastPlan::words_of_groups(cast.spec, desc_.experts, desc_.cols);
    layout_.row_amax_words += GroupCastPlan::words_of_rows(cast.spec, rows());
  }
  if (is_delayed()) ++layout_.amax_words;
}

std::optional<codegen::CastSpec> ExpertQuantizer::with_one_maximum() const {
  const auto delayed =
      std::ranges::find_if(descs_, [](const CastDesc& cast) { return cast.slot >= 0; });
  if (delayed == descs_.end()) return std::nullopt;
  codegen::CastSpec spec = delayed->spec;
  spec.delayed = spec.qt = false;
  spec.q = true;
  spec.scale_q = spec.scale_qt = codegen::ScaleMode::kTensor;
  return spec;
}

Status ExpertQuantizer::plan_casts() {
  const Maxima maxima = desc_.over_ranks ? Maxima::kApart : Maxima::kOwn;
  const std::optional<codegen::CastSpec> one_maximum = with_one_maximum();
  std::vector<codegen::KernelSpec> kernels;
  const auto add = [&](const codegen::CastSpec& spec, Maxima from) {
    std::ranges::move(GroupCastPlan::specs(spec, desc_.rows, desc_.cols, from),
                      std::back_inserter(kernels));
  };
  for (const CastDesc& cast : descs_) add(cast.spec, maxima);
  if (one_maximum) {
    add(*one_maximum, Maxima::kAlone);
    kernels.emplace_back(codegen::ScaleUpdateSpec{});
  }
  F8_TRY(context_->compile(kernels));  // side by side
  size_t words = 0;
  for (const auto& [spec, slot] : descs_) {
    casts_.push_back(
        {F8_TRY(GroupCastPlan::create(context_, spec, desc_.rows, desc_.cols, maxima)), slot, 0});
    words = std::max(words, casts_.back().plan.words(rows(), desc_.experts));
  }
  Arena workspace;
  workspace.take(words * sizeof(uint32_t));
  if (one_maximum) {
    maximum_ =
        F8_TRY(GroupCastPlan::create(context_, *one_maximum, rows(), desc_.cols, Maxima::kAlone));
    scale_update_ = F8_TRY(context_->kernel(codegen::ScaleUpdateSpec{}));
    for (Cast& cast : casts_) cast.first = workspace.take(cast.slot < 0 ? 0 : FirstScale::kBytes);
  }
  workspace_bytes_ = workspace.size();
  return {};
}

Result<std::shared_ptr<const ExpertQuantizer>> ExpertQuantizer::plan(
    const std::shared_ptr<Context>& context, const ExpertQuantizerDesc& desc) {
  std::shared_ptr<ExpertQuantizer> made(new ExpertQuantizer(context, desc));
  F8_TRY(made->lay_out());
  F8_TRY(made->plan_casts());
  return std::shared_ptr<const ExpertQuantizer>(std::move(made));
}

Result<float8_layout> ExpertQuantizer::layout_of(const ExpertQuantizerDesc& desc) {
  ExpertQuantizer made(nullptr, desc);
  F8_TRY(made.lay_out());
  return made.layout_;
}

Status ExpertQuantizer::check(const char* name, const ExpertQuantizeCall& call, bool cast,
                              Stream stream) const {
  F8_TRY(need(kExpertQuantizeArgs, "w.data", call.w.data));
  if (call.noop_flag != nullptr && !desc_.noop_flag) {
    return fail(ErrorCode::kInvalidArgument,
                "{}.noop_flag is given, the casts do not look at it; set "
                "float8_expert_quantizer_desc.noop_flag",
                kExpertQuantizeArgs);
  }
  // The word of delayed scales is written, and read in a first step alone.
  const bool leaves_word =
      desc_.over_ranks && is_delayed() && cast && step_of(call).first_step == 0;
  const size_t amax_words = layout_.amax_words - (leaves_word ? 1 : 0);
  if (amax_words > 0) F8_TRY(need(kExpertQuantizeArgs, "amax", call.amax));
  if (layout_.row_amax_words > 0) F8_TRY(need(kExpertQuantizeArgs, "row_amax", call.row_amax));
  if (desc_.two_tensors) F8_TRY(need(kExpertQuantizeArgs, "second_w.data", call.second_w.data));
  CallMemory memory(kExpertQuantizeArgs);
  for (const auto& [field, w] : {std::pair("w", call.w), std::pair("second_w", call.second_w)}) {
    memory.add_rows(field, w.data, desc_.experts * rows_of_tensor(), desc_.cols, w.ld,
                    desc_.f32_source ? Dtype::kF32 : desc_.dtype, Access::kRead);
  }
  const Access words = cast ? Access::kRead : Access::kWrite;
  memory.add("amax", call.amax, amax_words * sizeof(uint32_t), words, alignof(uint32_t));
  memory.add("row_amax", call.row_amax, layout_.row_amax_words * sizeof(uint32_t), words,
             alignof(uint32_t));
  if (cast) {
    F8_TRY(need(kExpertQuantizeArgs, "tensor.data", call.tensor.data));
    F8_TRY(need(kExpertQuantizeArgs, "transposed.data", call.transposed.data));
    if (workspace_bytes_ > 0)
      F8_TRY(need(kExpertQuantizeArgs, "workspace.data", call.workspace.data));
    if (is_delayed()) {
      F8_TRY(check_scale_slots(*context_, desc_.recipe.name, kExpertQuantizeArgs, "scales",
                               call.scales, step_of(call)));
      add_scale_slots(memory, slots_.size(), call.scales);
    }
    memory.add("tensor", call.tensor.data, layout_.tensor_bytes - layout_.transposed_bytes,
               Access::kWrite);
    memory.add("transposed", call.transposed.data, layout_.transposed_bytes, Access::kWrite);
    memory.add("workspace", call.workspace.data, workspace_bytes_, Access::kWrite);
    memory.add("noop_flag", call.noop_flag, sizeof(uint32_t), Access::kWrite, alignof(uint32_t));
  }
  return memory.check(name, *context_, stream);
}

GroupCastCall ExpertQuantizer::rows_of(const ExpertQuantizeCall& call, int64_t groups) const {
  GroupCastCall out{.groups = {.words = nullptr,
                               .layout = {},
                               .count = static_cast<int32_t>(groups),
                               .rows = static_cast<int32_t>(rows() / groups)},
                    .x = call.w.data,
                    .rows = rows(),
                    .ld = call.w.ld};
  if (desc_.two_tensors) {
    out.source.up = call.second_w.data;
    out.source.ld_up = call.second_w.ld == 0 ? desc_.cols : call.second_w.ld;
    out.source.half_rows = out.groups.rows / 2;
  }
  out.noop_flag = call.noop_flag;
  return out;
}

// All weights are one group. Those of a pair are the rows of the one tensor and then those of the other.
Status ExpertQuantizer::find_maximum(const ExpertQuantizeCall& call, uint32_t* amax,
                                     Stream stream) const {
  GroupCastCall one = rows_of(call, 1);
  one.words = amax;
  return maximum_->find_maxima(one, stream);
}

Result<const float*> ExpertQuantizer::first_scale(const Cast& cast, const ExpertQuantizeCall& call,
                                                  Stream stream) const {
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const FirstScale first(placed_at<uint32_t>(call.workspace.data, cast.first));
  const uint32_t* const of_ranks =
      desc_.over_ranks ? call.amax + (layout_.amax_words - 1) : nullptr;
  F8_TRY(first.begin(state.driver, of_ranks, stream));
  if (of_ranks == nullptr) F8_TRY(find_maximum(call, first.amax(), stream));
  F8_TRY(first.update(state, *scale_update_, ScaleSlots::of(call.scales).format + cast.slot,
                      desc_.non_finite == NonFinite::kSaturate, stream));
  return first.scale();
}

template <class Work>
Status ExpertQuantizer::each(const ExpertQuantizeCall& call, const Work& work) const {
  uint32_t* amax = call.amax;
  uint32_t* row_amax = call.row_amax;
  for (const Cast& cast : casts_) {
    const codegen::CastSpec& spec = cast.plan.spec();
    GroupCastCall one = rows_of(call, desc_.experts);
    one.words = static_cast<uint32_t*>(call.workspace.data);
    if (desc_.over_ranks) {
      one.words = amax;
      one.row_words = row_amax;
      amax += GroupCastPlan::words_of_groups(spec, desc_.experts, desc_.cols);
      row_amax += GroupCastPlan::words_of_rows(spec, rows());
    }
    one.q = static_cast<uint8_t*>(call.tensor.data);
    one.qt = static_cast<uint8_t*>(call.transposed.data);
    const bool scales_q = spec.q && copies_.q->granularity == Granularity::kTensor;
    if (call.tensor.data != nullptr) {
      one.inv_row = placed_at<float>(call.tensor.data, q_scales_);
      one.inv_col = placed_at<float>(call.transposed.data, qt_scales_);
      one.scale = scales_q && !copies_.share_scale() ? one.inv_row : one.inv_col;
    }
    F8_TRY(work(cast, one));
  }
  return {};
}

Status ExpertQuantizer::find_amax(const ExpertQuantizeCall& call, Stream stream) const {
  if (!desc_.over_ranks) {
    return fail(ErrorCode::kInvalidArgument,
                "float8_expert_quantize_amax is for float8_expert_quantizer_desc.over_ranks");
  }
  F8_TRY(check("float8_expert_quantize_amax", call, false, stream));
  ExpertQuantizeCall words = call;
  words.tensor = words.transposed = {};
  F8_TRY(each(words, [&](const Cast& cast, const GroupCastCall& one) {
    return cast.plan.find_maxima(one, stream);
  }));
  if (!is_delayed()) return {};
  return find_maximum(words, words.amax + (layout_.amax_words - 1), stream);
}

Status ExpertQuantizer::run(const ExpertQuantizeCall& call, Stream stream) const {
  F8_TRY(check("float8_expert_quantize", call, true, stream));
  const auto [amax, scale, _] = ScaleSlots::of(call.scales);
  const auto cast_groups = [&, amax = amax, scale = scale](const Cast& cast,
                                                           GroupCastCall one) -> Status {
    if (cast.slot >= 0) {
      one.delayed = scale + cast.slot * kernels::kScaleStride;
      if (step_of(call).first_step != 0) one.delayed = F8_TRY(first_scale(cast, call, stream));
      if (step_of(call).evaluate == 0) one.amax = amax + cast.slot;
    }
    return cast.plan.run(one, stream);
  };
  F8_TRY(each(call, cast_groups));
  if (call.noop_flag == nullptr) return {};
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  return set_words(state.driver, call.noop_flag, 1, 1, stream);
}

}  // namespace f8::runtime
