// What a call of a linear must bring. Errors name the call and the argument.
#include "runtime/gemm/provider.hpp"
#include "runtime/linear/state.hpp"

namespace f8::runtime {
namespace {

Status check_pointer(const char* call, const char* name, const void* pointer) {
  if (pointer == nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}: {} is null", call, name);
  }
  if (!is_aligned(pointer)) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}: {} is not aligned to 16 bytes", call, name);
  }
  return {};
}

Status check_stride(const char* call, const char* name, int64_t ld, int64_t cols, Dtype type) {
  if (is_row_stride(ld, cols, type)) [[likely]] {
    return {};
  }
  return fail(
      ErrorCode::kInvalidArgument,
      "{}: ld_{} is {}; rows of {} {} elements lie at least as many apart, a multiple of {} "
      "elements (16 bytes); 0 where they are dense",
      call, name, ld, cols, to_string(type), 16 / size_bytes(type));
}

Status check_optional(const char* call, const char* name, const void* pointer) {
  return pointer == nullptr ? Status() : check_pointer(call, name, pointer);
}

Status check_m(const char* call, int64_t m, int64_t planned) {
  if (m < 0 || m > planned) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}: m is {}, the plan was made for 0 to {}", call, m,
                planned);
  }
  return {};
}

}  // namespace

Status Linear::State::check_counters(const char* call, const CastCounters* counters) const {
  if (counters == nullptr) return {};
  if (!desc.count) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}: counters are given, the plan's casts do not count; set LinearDesc::count",
                call);
  }
  if (!is_aligned(counters, alignof(CastCounters))) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}: counters are not aligned to {} bytes", call,
                alignof(CastCounters));
  }
  return {};
}

// Whether a call takes its first scales from all ranks' tensors, and so writes them.
template <class Call>
static bool over_ranks(const Call& call) {
  return call.first_step && call.ranks.reduce != nullptr;
}

template <class Call>
Status Linear::State::check_scales(const char* name, const Call& call) const {
  if (kernels.slots.empty()) return {};
  if (call.scales.amax == nullptr || call.scales.scale == nullptr ||
      (over_ranks(call) && call.scales.format == nullptr)) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}: scales is empty; recipe {} has delayed scaling, see DelayedScales::slots",
                name, desc.recipe.name);
  }
  for (const void* part :
       {static_cast<const void*>(call.scales.amax), static_cast<const void*>(call.scales.scale),
        static_cast<const void*>(call.scales.format)}) {
    if (is_aligned(part, sizeof(float))) [[likely]] {
      continue;
    }
    return fail(ErrorCode::kInvalidArgument,
                "{}: scales is not aligned to {} bytes; see DelayedScales::slots", name,
                sizeof(float));
  }
  return {};
}

Status Linear::State::check(const ForwardCall& call, const void* workspace) const {
  F8_TRY(check_m("forward", call.m, desc.shape.m));
  if (call.m == 0) return {};
  F8_TRY(check_pointer("forward", "x", call.x));
  if (call.weight_cache == nullptr || !is_fp8(Gemm::kOutput)) {
    F8_TRY(check_pointer("forward", "w", call.w));
  }
  F8_TRY(check_pointer("forward", "y", call.y));
  F8_TRY(check_stride("forward", "x", call.ld_x, desc.shape.k, desc.tensor_dtype));
  F8_TRY(check_stride("forward", "w", call.ld_w, desc.shape.k, desc.tensor_dtype));
  F8_TRY(check_stride("forward", "y", call.ld_y, desc.shape.n, desc.tensor_dtype));
  if (desc.bias) F8_TRY(check_pointer("forward", "bias", call.bias));
  if (!desc.bias && call.bias != nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "forward: a bias is given, the plan has none; set LinearDesc::bias");
  }
  F8_TRY(check_optional("forward", "saved", call.saved));
  F8_TRY(check_optional("forward", "weight_cache", call.weight_cache));
  F8_TRY(check_scales("forward", call));
  F8_TRY(check_counters("forward", call.counters));
  F8_TRY(check_pointer("forward", "workspace", workspace));
  return memory(call, workspace).check_overlaps("forward");
}

Status Linear::State::check(const BackwardCall& call, const void* workspace) const {
  F8_TRY(check_m("backward", call.m, desc.shape.m));
  const bool dx = call.dx != nullptr;
  const bool dw = call.dw != nullptr;
  F8_TRY(check_optional("backward", "dw", call.dw));
  F8_TRY(check_stride("backward", "dw", call.ld_dw, desc.shape.k, desc.grad_weight_dtype));
  if (dw && call.accumulate && gemms.add_grad_weight == nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "backward: accumulate is set, the plan has no product that adds; set "
                "LinearDesc::accumulate_grad_weight");
  }
  if (dx && !desc.needs_grad_input) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "backward: dx is given, the plan was made without needs_grad_input");
  }
  F8_TRY(check_optional("backward", "db", call.db));
  if (call.db != nullptr && !desc.bias_grad) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "backward: db is given, the plan has no gradient of a bias; set "
                "LinearDesc::bias_grad");
  }
  if (call.m == 0 || (!dx && !dw && call.db == nullptr)) return {};
  F8_TRY(check_optional("backward", "dx", call.dx));
  F8_TRY(check_pointer("backward", "dy", call.dy));
  F8_TRY(check_stride("backward", "dy", call.ld_dy, desc.shape.n, desc.tensor_dtype));
  F8_TRY(check_stride("backward", "dx", call.ld_dx, desc.shape.k, desc.tensor_dtype));
  F8_TRY(check_stride("backward", "x", call.ld_x, desc.shape.k, desc.tensor_dtype));
  F8_TRY(check_stride("backward", "w", call.ld_w, desc.shape.k, desc.tensor_dtype));
  F8_TRY(check_optional("backward", "weight_cache", call.weight_cache));
  // Whether a gradient wants a copy of the weight, of the input, that no cache has.
  const bool casts_weight = dx && is_fp8(Gemm::kGradInput) && call.weight_cache == nullptr;
  const bool casts_input = dw && is_fp8(Gemm::kGradWeight);
  if (!desc.recompute && (casts_weight || casts_input)) {
    F8_TRY(check_pointer("backward", "saved", call.saved));
  }
  const auto check_source = [&](const char* name, const void* pointer, Gemm gemm) -> Status {
    if (pointer == nullptr) [[unlikely]] {
      return fail(
          ErrorCode::kInvalidArgument, "backward: {} is null; {} is computed from {} itself: {}",
          name, to_string(gemm), name,
          is_fp8(gemm) ? std::string("LinearDesc::recompute casts it again")
                       : fmt::format("recipe {} has it in high precision", desc.recipe.name));
    }
    return check_pointer("backward", name, pointer);
  };
  if (dx && (!is_fp8(Gemm::kGradInput) || (desc.recompute && casts_weight))) {
    F8_TRY(check_source("w", call.w, Gemm::kGradInput));
  }
  if (dw && (!is_fp8(Gemm::kGradWeight) || desc.recompute)) {
    F8_TRY(check_source("x", call.x, Gemm::kGradWeight));
  }
  F8_TRY(check_scales("backward", call));
  F8_TRY(check_counters("backward", call.counters));
  F8_TRY(check_pointer("backward", "workspace", workspace));
  return memory(call, workspace).check_overlaps("backward");
}

Status Linear::State::check(const WeightCall& call) const {
  F8_TRY(check_pointer("cast_weight", "w", call.w));
  F8_TRY(check_pointer("cast_weight", "cache", call.cache));
  F8_TRY(check_stride("cast_weight", "w", call.ld_w, desc.shape.k, kernels.master_dtype));
  F8_TRY(check_counters("cast_weight", call.counters));
  if (call.valid != nullptr && (!desc.weight_flag || !is_aligned(call.valid, 4))) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "cast_weight: valid is {}",
                desc.weight_flag ? "not aligned to 4 bytes"
                                 : "given, the plan's casts heed no flag; set "
                                   "LinearDesc::weight_flag");
  }
  return check_scales("cast_weight", call);
}

Status Linear::State::check(const WeightCall& call, const void* workspace) const {
  F8_TRY(check(call));
  F8_TRY(check_pointer("cast_weight", "workspace", workspace));
  return memory(call, workspace).check_overlaps("cast_weight");
}

template <class Call>
void Linear::State::add_scales(CallMemory& memory, const Call& call) const {
  const size_t count = kernels.slots.size();
  memory.add("scales (amax)", call.scales.amax, count * sizeof(uint32_t), Access::kWrite);
  memory.add("scales", call.scales.scale, count * kernels::kScaleStride * sizeof(float),
             over_ranks(call) ? Access::kWrite : Access::kRead);
  if (over_ranks(call))
    memory.add("scales (format)", call.scales.format, count * sizeof(uint32_t), Access::kRead);
}

CallMemory Linear::State::memory(const ForwardCall& call, const void* workspace) const {
  const auto [m, n, k] = Shape{call.m, desc.shape.n, desc.shape.k};
  const bool cached = call.weight_cache != nullptr;
  CallMemory memory;
  memory.add_rows("x", call.x, m, k, call.ld_x, desc.tensor_dtype, Access::kRead);
  memory.add_rows("w", call.w, n, k, call.ld_w, desc.tensor_dtype, Access::kRead);
  memory.add_rows("y", call.y, m, n, call.ld_y, desc.tensor_dtype, Access::kWrite);
  memory.add_rows("bias", call.bias, 1, n, 0, desc.tensor_dtype, Access::kRead);
  memory.add("saved", call.saved, cached ? layout.saved_input_bytes : layout.saved_bytes,
             Access::kWrite);
  memory.add("weight_cache", call.weight_cache, layout.cache_bytes, Access::kRead);
  memory.add("workspace", workspace, layout.workspace_bytes, Access::kWrite);
  memory.add("counters", call.counters, kCountersOfLinear * sizeof(CastCounters), Access::kWrite);
  add_scales(memory, call);
  return memory;
}

// Of x and w what is read of them: a trainer that needs the input no more may put dx in its place.
// The weight itself must outlive every call.
CallMemory Linear::State::memory(const BackwardCall& call, const void* workspace) const {
  const auto [m, n, k] = Shape{call.m, desc.shape.n, desc.shape.k};
  const bool cached = call.weight_cache != nullptr;
  const bool reads_input = call.dw != nullptr && (desc.recompute || !is_fp8(Gemm::kGradWeight));
  CallMemory memory;
  memory.add_rows("dy", call.dy, m, n, call.ld_dy, desc.tensor_dtype, Access::kRead);
  memory.add_rows("dx", call.dx, m, k, call.ld_dx, desc.tensor_dtype, Access::kWrite);
  memory.add_rows("dw", call.dw, n, k, call.ld_dw, desc.grad_weight_dtype, Access::kWrite);
  memory.add_rows("db", call.db, 1, n, 0, desc.bias_grad_dtype, Access::kWrite);
  memory.add_rows("x", reads_input ? call.x : nullptr, m, k, call.ld_x, desc.tensor_dtype,
                  Access::kRead);
  memory.add_rows("w", call.w, n, k, call.ld_w, desc.tensor_dtype, Access::kRead);
  memory.add("saved", call.saved, cached ? layout.saved_input_bytes : layout.saved_bytes,
             Access::kRead);
  memory.add("weight_cache", call.weight_cache, layout.cache_bytes, Access::kRead);
  memory.add("workspace", workspace, layout.workspace_bytes, Access::kWrite);
  memory.add("counters", call.counters, kCountersOfLinear * sizeof(CastCounters), Access::kWrite);
  add_scales(memory, call);
  return memory;
}

CallMemory Linear::State::memory(const WeightCall& call, const void* workspace) const {
  CallMemory memory;
  memory.add_rows("w", call.w, desc.shape.n, desc.shape.k, call.ld_w, kernels.master_dtype,
                  Access::kRead);
  memory.add("cache", call.cache, layout.cache_bytes, Access::kWrite);
  memory.add("valid", call.valid, sizeof(uint32_t), Access::kWrite);
  memory.add("workspace", workspace, layout.workspace_bytes, Access::kWrite);
  memory.add("counters", call.counters, kCountersOfLinear * sizeof(CastCounters), Access::kWrite);
  add_scales(memory, call);
  return memory;
}

}  // namespace f8::runtime
