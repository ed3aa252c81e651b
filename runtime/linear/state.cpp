// The checks of a call's arguments, and their way to the launches. Errors name the field of the C
// interface, as a caller writes it.
#include "runtime/linear/state.hpp"

#include "runtime/gemm/provider.hpp"

namespace f8::runtime {
namespace {

Status check_pointer(const char* name, const void* pointer) {
  if (pointer == nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{} is NULL", name);
  }
  if (!is_aligned(pointer)) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{} is not aligned to 16 bytes", name);
  }
  return {};
}

Status check_stride(const char* name, int64_t ld, int64_t cols, Dtype type) {
  if (is_row_stride(ld, cols, type)) [[likely]] {
    return {};
  }
  return fail(
      ErrorCode::kInvalidArgument,
      "{} is {}; rows of {} {} elements lie at least as many apart, a multiple of {} elements "
      "(16 bytes); 0 if they are dense",
      name, ld, cols, to_string(type), 16 / size_bytes(type));
}

Status check_optional(const char* name, const void* pointer) {
  return pointer == nullptr ? Status() : check_pointer(name, pointer);
}

Status check_m(const char* name, int64_t m, int64_t planned) {
  if (m < 0 || m > planned) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{} is {}, the plan was made for 0 to {}", name, m,
                planned);
  }
  return {};
}

// Gives the name of a call's struct in the C interface.
constexpr const char* args_name(const ForwardCall&) {
  return "float8_forward_args";
}
constexpr const char* args_name(const BackwardCall&) {
  return "float8_backward_args";
}
constexpr const char* args_name(const WeightCall&) {
  return "float8_weight_args";
}

}  // namespace

template <class Call>
Status Linear::State::check_counters(const Call& call) const {
  const CastCounters* counters = call.counters;
  if (counters == nullptr) return {};
  if (!desc.count) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}.counters is given, the plan's casts do not count; set "
                "float8_linear_desc.count",
                args_name(call));
  }
  if (!is_aligned(counters, alignof(CastCounters))) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}.counters is not aligned to {} bytes",
                args_name(call), alignof(CastCounters));
  }
  return {};
}

// The call takes its first scales from all ranks' tensors, and so writes them.
template <class Call>
static bool over_ranks(const Call& call) {
  if constexpr (requires { call.evaluate; }) {
    if (call.evaluate != 0) return false;
  }
  return call.first_step != 0 && call.ranks != nullptr;
}

template <class Call>
Status Linear::State::check_scales(const Call& call) const {
  if (kernels.slots.empty()) return {};
  const auto [amax, scale, format] = ScaleSlots::of(call.scales);
  if (amax == nullptr || scale == nullptr || (over_ranks(call) && format == nullptr)) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}.scales is empty; recipe {} has delayed scaling, see float8_scales_slots",
                args_name(call), desc.recipe.name);
  }
  for (const void* part : call.scales.opaque) {
    if (is_aligned(part, sizeof(float))) [[likely]] {
      continue;
    }
    return fail(ErrorCode::kInvalidArgument,
                "{}.scales is not aligned to {} bytes; see float8_scales_slots", args_name(call),
                sizeof(float));
  }
  return {};
}

Status Linear::State::check(const ForwardCall& call, const void* workspace) const {
  F8_TRY(check_m("float8_forward_args.m", call.m, desc.shape.m));
  if (call.m == 0) return {};
  F8_TRY(check_pointer("float8_forward_args.x", call.x));
  if (call.weight_cache == nullptr || !is_fp8(Gemm::kOutput)) {
    F8_TRY(check_pointer("float8_forward_args.w", call.w));
  }
  F8_TRY(check_pointer("float8_forward_args.y", call.y));
  F8_TRY(check_stride("float8_forward_args.ld_x", call.ld_x, desc.shape.k, desc.tensor_dtype));
  F8_TRY(check_stride("float8_forward_args.ld_w", call.ld_w, desc.shape.k, desc.tensor_dtype));
  F8_TRY(check_stride("float8_forward_args.ld_y", call.ld_y, desc.shape.n, desc.tensor_dtype));
  if (desc.bias) F8_TRY(check_pointer("float8_forward_args.bias", call.bias));
  if (!desc.bias && call.bias != nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "float8_forward_args.bias is given, the plan has none; set "
                "float8_linear_desc.bias");
  }
  F8_TRY(check_optional("float8_forward_args.saved", call.saved));
  F8_TRY(check_optional("float8_forward_args.weight_cache", call.weight_cache));
  F8_TRY(check_scales(call));
  F8_TRY(check_counters(call));
  F8_TRY(check_pointer("workspace of float8_linear_forward", workspace));
  return memory(call, workspace).check_overlaps("float8_linear_forward");
}

Status Linear::State::check(const BackwardCall& call, const void* workspace) const {
  F8_TRY(check_m("float8_backward_args.m", call.m, desc.shape.m));
  const bool dx = call.dx != nullptr;
  const bool dw = call.dw != nullptr;
  F8_TRY(check_optional("float8_backward_args.dw", call.dw));
  F8_TRY(
      check_stride("float8_backward_args.ld_dw", call.ld_dw, desc.shape.k, desc.grad_weight_dtype));
  if (dw && call.accumulate != 0 && gemms.add_grad_weight == nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "float8_backward_args.accumulate is set, the plan has no GEMM "
                "that adds; set float8_linear_desc.accumulate_grad_weight");
  }
  if (dx && !desc.needs_grad_input) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "float8_backward_args.dx is given, the plan was made with "
                "float8_linear_desc.no_grad_input");
  }
  F8_TRY(check_optional("float8_backward_args.db", call.db));
  if (call.db != nullptr && !desc.bias_grad) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "float8_backward_args.db is given, the plan has no gradient "
                "of a bias; set float8_linear_desc.bias_grad");
  }
  if (call.m == 0 || (!dx && !dw && call.db == nullptr)) return {};
  F8_TRY(check_optional("float8_backward_args.dx", call.dx));
  F8_TRY(check_pointer("float8_backward_args.dy", call.dy));
  F8_TRY(check_stride("float8_backward_args.ld_dy", call.ld_dy, desc.shape.n, desc.tensor_dtype));
  F8_TRY(check_stride("float8_backward_args.ld_dx", call.ld_dx, desc.shape.k, desc.tensor_dtype));
  F8_TRY(check_stride("float8_backward_args.ld_x", call.ld_x, desc.shape.k, desc.tensor_dtype));
  F8_TRY(check_stride("float8_backward_args.ld_w", call.ld_w, desc.shape.k, desc.tensor_dtype));
  F8_TRY(check_optional("float8_backward_args.weight_cache", call.weight_cache));
  // A gradient needs a copy of the weight or of the input that no cache has.
  const bool casts_weight = dx && is_fp8(Gemm::kGradInput) && call.weight_cache == nullptr;
  const bool casts_input = dw && is_fp8(Gemm::kGradWeight);
  if (!desc.recompute && (casts_weight || casts_input)) {
    F8_TRY(check_pointer("float8_backward_args.saved", call.saved));
  }
  const auto check_source = [&](const char* name, const void* pointer, Gemm gemm) -> Status {
    if (pointer == nullptr) [[unlikely]] {
      return fail(ErrorCode::kInvalidArgument, "{} is NULL; {} is computed from it: {}", name,
                  to_string(gemm),
                  is_fp8(gemm)
                      ? std::string("float8_linear_desc.recompute casts it again")
                      : f8::format("recipe {} has the GEMM in high precision", desc.recipe.name));
    }
    return check_pointer(name, pointer);
  };
  if (dx && (!is_fp8(Gemm::kGradInput) || (desc.recompute && casts_weight))) {
    F8_TRY(check_source("float8_backward_args.w", call.w, Gemm::kGradInput));
  }
  if (dw && (!is_fp8(Gemm::kGradWeight) || desc.recompute)) {
    F8_TRY(check_source("float8_backward_args.x", call.x, Gemm::kGradWeight));
  }
  F8_TRY(check_scales(call));
  F8_TRY(check_counters(call));
  F8_TRY(check_pointer("workspace of float8_linear_backward", workspace));
  return memory(call, workspace).check_overlaps("float8_linear_backward");
}

Status Linear::State::check(const WeightCall& call) const {
  F8_TRY(check_pointer("float8_weight_args.w", call.w));
  F8_TRY(check_pointer("float8_weight_args.cache", call.cache));
  F8_TRY(check_stride("float8_weight_args.ld_w", call.ld_w, desc.shape.k, kernels.master_dtype));
  F8_TRY(check_counters(call));
  if (call.valid != nullptr && (!desc.weight_flag || !is_aligned(call.valid, 4))) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "float8_weight_args.valid is {}",
                desc.weight_flag ? "not aligned to 4 bytes"
                                 : "given, the plan's casts look at no flag; set "
                                   "float8_linear_desc.weight_flag");
  }
  return check_scales(call);
}

Status Linear::State::check(const WeightCall& call, const void* workspace) const {
  F8_TRY(check(call));
  F8_TRY(check_pointer("workspace of float8_linear_cast_weight", workspace));
  return memory(call, workspace).check_overlaps("float8_linear_cast_weight");
}

Status Linear::State::check_records(const ForwardCall& call) const {
  F8_TRY(check_fresh_scales(call));
  if (call.saved != nullptr && !desc.recompute) {
    const bool cached = call.weight_cache != nullptr;
    context->state().records.set_forward(call.saved, {this, call.m, cached});
  }
  return {};
}

Status Linear::State::check_records(const BackwardCall& call) const {
  F8_TRY(check_fresh_scales(call));
  if (call.saved == nullptr || desc.recompute) return {};
  const CallRecords::Forward forward = context->state().records.forward(call.saved);
  if (forward.linear != this) return {};  // unknown: the buffer may have been moved
  if (forward.m != call.m) {
    return fail(ErrorCode::kInvalidArgument,
                "float8_backward_args.m is {}, the forward that filled "
                "`saved` had an m of {}",
                call.m, forward.m);
  }
  const bool cached = call.weight_cache != nullptr;
  if (forward.weight_cache != cached && layout.cache_bytes > 0) {
    return fail(ErrorCode::kInvalidArgument,
                "float8_backward_args.weight_cache is {}, the forward that "
                "filled `saved` had {}; give it to both or to neither",
                cached ? "given" : "NULL", cached ? "none" : "one");
  }
  return {};
}

Status Linear::State::check_records(const WeightCall& call) const {
  return check_fresh_scales(call);
}

// An emulated device's memory can be looked at: a state that a trainer copied there is none of the
// initial ones, whose scales are 1.
template <class Call>
Status Linear::State::check_fresh_scales(const Call& call) const {
  if (kernels.slots.empty() || call.first_step != 0) return {};
  const ScaleSlots slots = ScaleSlots::of(call.scales);
  if (!context->state().records.is_fresh(slots.amax)) return {};
  if (context->options().emulate && *slots.scale != 1.0F) return {};
  return fail(ErrorCode::kInvalidArgument,
              "{}.first_step is 0, the scale state was initialised and has not seen a step; set "
              "it in all calls of the first step",
              args_name(call));
}

template <class Call>
void Linear::State::add_scales(CallMemory& memory, const Call& call) const {
  const size_t count = kernels.slots.size();
  const auto [amax, scale, format] = ScaleSlots::of(call.scales);
  memory.add("float8_scale_slots (amax)", amax, count * sizeof(uint32_t), Access::kWrite);
  memory.add("float8_scale_slots (scale)", scale, count * kernels::kScaleStride * sizeof(float),
             over_ranks(call) ? Access::kWrite : Access::kRead);
  if (over_ranks(call)) {
    memory.add("float8_scale_slots (format)", format, count * sizeof(uint32_t), Access::kRead);
  }
}

CallMemory Linear::State::memory(const ForwardCall& call, const void* workspace) const {
  const auto [m, n, k] = Shape{call.m, desc.shape.n, desc.shape.k};
  const bool cached = call.weight_cache != nullptr;
  CallMemory memory;
  memory.add_rows("float8_forward_args.x", call.x, m, k, call.ld_x, desc.tensor_dtype,
                  Access::kRead);
  memory.add_rows("float8_forward_args.w", call.w, n, k, call.ld_w, desc.tensor_dtype,
                  Access::kRead);
  memory.add_rows("float8_forward_args.y", call.y, m, n, call.ld_y, desc.tensor_dtype,
                  Access::kWrite);
  memory.add_rows("float8_forward_args.bias", call.bias, 1, n, 0, desc.tensor_dtype, Access::kRead);
  memory.add("float8_forward_args.saved", call.saved,
             cached ? layout.saved_input_bytes : layout.saved_bytes, Access::kWrite);
  memory.add("float8_forward_args.weight_cache", call.weight_cache, layout.cache_bytes,
             Access::kRead);
  memory.add("workspace", workspace, layout.workspace_bytes, Access::kWrite);
  memory.add("float8_forward_args.counters", call.counters,
             kCountersOfLinear * sizeof(CastCounters), Access::kWrite);
  add_scales(memory, call);
  return memory;
}

// x and w count as far as they are read: a trainer that needs the input no more may put dx in its
// place. The weight itself must outlive every call.
CallMemory Linear::State::memory(const BackwardCall& call, const void* workspace) const {
  const auto [m, n, k] = Shape{call.m, desc.shape.n, desc.shape.k};
  const bool cached = call.weight_cache != nullptr;
  const bool reads_input = call.dw != nullptr && (desc.recompute || !is_fp8(Gemm::kGradWeight));
  CallMemory memory;
  memory.add_rows("float8_backward_args.dy", call.dy, m, n, call.ld_dy, desc.tensor_dtype,
                  Access::kRead);
  memory.add_rows("float8_backward_args.dx", call.dx, m, k, call.ld_dx, desc.tensor_dtype,
                  Access::kWrite);
  memory.add_rows("float8_backward_args.dw", call.dw, n, k, call.ld_dw, desc.grad_weight_dtype,
                  Access::kWrite);
  memory.add_rows("float8_backward_args.db", call.db, 1, n, 0, desc.bias_grad_dtype,
                  Access::kWrite);
  memory.add_rows("float8_backward_args.x", reads_input ? call.x : nullptr, m, k, call.ld_x,
                  desc.tensor_dtype, Access::kRead);
  memory.add_rows("float8_backward_args.w", call.w, n, k, call.ld_w, desc.tensor_dtype,
                  Access::kRead);
  memory.add("float8_backward_args.saved", call.saved,
             cached ? layout.saved_input_bytes : layout.saved_bytes, Access::kRead);
  memory.add("float8_backward_args.weight_cache", call.weight_cache, layout.cache_bytes,
             Access::kRead);
  memory.add("workspace", workspace, layout.workspace_bytes, Access::kWrite);
  memory.add("float8_backward_args.counters", call.counters,
             kCountersOfLinear * sizeof(CastCounters), Access::kWrite);
  add_scales(memory, call);
  return memory;
}

CallMemory Linear::State::memory(const WeightCall& call, const void* workspace) const {
  CallMemory memory;
  memory.add_rows("float8_weight_args.w", call.w, desc.shape.n, desc.shape.k, call.ld_w,
                  kernels.master_dtype, Access::kRead);
  memory.add("float8_weight_args.cache", call.cache, layout.cache_bytes, Access::kWrite);
  memory.add("float8_weight_args.valid", call.valid, sizeof(uint32_t), Access::kWrite);
  memory.add("workspace", workspace, layout.workspace_bytes, Access::kWrite);
  memory.add("float8_weight_args.counters", call.counters, kCountersOfLinear * sizeof(CastCounters),
             Access::kWrite);
  add_scales(memory, call);
  return memory;
}

const LaunchList& Linear::State::bind(const ForwardCall& call, void* workspace,
                                      CallArguments& to) const {
  set_common(call, workspace, to);
  to.m = call.m;
  to.set(Slot::kX, call.x, call.ld_x);
  to.set(Slot::kW, call.w, call.ld_w);
  to.set(Slot::kY, call.y, call.ld_y);
  to.set(Slot::kBias, call.bias);
  to.set(Slot::kSaved, call.saved);
  to.set(Slot::kCache, call.weight_cache);
  CallKind kind = step_kind(call.first_step != 0, to);
  if (call.evaluate != 0) {
    to.set(Slot::kAmax, nullptr);
    kind &= ~kOverRanks;
  }
  if (call.weight_cache != nullptr) kind |= kForwardCached;
  if (call.saved != nullptr && !desc.recompute) kind |= kForwardSaved;
  return launches.forward[kind];
}

const LaunchList& Linear::State::bind(const BackwardCall& call, void* workspace,
                                      CallArguments& to) const {
  set_common(call, workspace, to);
  to.m = call.m;
  to.accumulate_bias = call.accumulate_bias != 0;
  to.set(Slot::kX, call.x, call.ld_x);
  to.set(Slot::kW, call.w, call.ld_w);
  to.set(Slot::kDy, call.dy, call.ld_dy);
  to.set(Slot::kDx, call.dx, call.ld_dx);
  to.set(Slot::kDw, call.dw, call.ld_dw);
  to.set(Slot::kDb, call.db);
  to.set(Slot::kSaved, call.saved);
  const bool dw = call.dw != nullptr;
  if (call.m == 0) {
    return launches
        .empty_backward[(dw && call.accumulate == 0 ? kEmptyDw : 0) |
                        (call.db != nullptr && call.accumulate_bias == 0 ? kEmptyDb : 0)];
  }
  const bool cached = call.weight_cache != nullptr;
  const void* const from = cached ? call.weight_cache : desc.recompute ? workspace : call.saved;
  if (from != nullptr) {
    const CopyLayout& at = cached ? layout.cache : layout.w;
    to.set(Slot::kWeightQt, static_cast<const uint8_t*>(from) + at.qt);
    to.set(Slot::kWeightQtScale, static_cast<const uint8_t*>(from) + at.qt_scale);
  }
  CallKind kind = 0;
  if (call.dx != nullptr) kind |= kBackwardDx;
  if (dw) kind |= kBackwardDw | (call.accumulate != 0 ? kBackwardAccumulate : 0);
  if (call.db != nullptr) kind |= kBackwardDb;
  if (kind == 0) return launches.backward[0];
  if (cached && desc.recompute) kind |= kBackwardCached;
  return launches.backward[kind | step_kind(call.first_step != 0, to)];
}

const LaunchList& Linear::State::bind(const WeightCall& call, void* workspace,
                                      CallArguments& to) const {
  set_common(call, workspace, to);
  to.m = desc.shape.m;  // any will do
  to.set(Slot::kW, call.w, call.ld_w);
  to.set(Slot::kCache, call.cache);
  to.set(Slot::kNoopFlag, call.valid);
  return launches
      .cast_weight[step_kind(call.first_step != 0, to) | (call.valid != nullptr ? kWeightFlag : 0)];
}

}  // namespace f8::runtime
