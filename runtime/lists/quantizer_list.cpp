#include "runtime/lists/quantizer_list.hpp"

#include <algorithm>

#include "runtime/device/calls/call_array.hpp"
#include "runtime/device/memory.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kRun = "float8_quantize_list";
constexpr const char* kFind = "float8_quantize_list_amax";

// A tensor's own args, and with what is common to all.
QuantizeCall given(const QuantizeListCall& call, size_t i) {
  return CallArray<QuantizeCall>{call.count, call.tensors}.at(i);
}
QuantizeCall in_list(const QuantizeListCall& call, size_t i) {
  QuantizeCall of = given(call, i);
  of.step = call.step;
  of.noop_flag = call.noop_flag;
  return of;
}

// Checks the memory of a tensor's cast alone, and adds it to that of the others. Casts may have scale
// slots and counters in common, to which they add; workspace, launch counts and flag are common.
Status add_memory(const char* name, const CallMemory& memory, const QuantizeListCall& list,
                  const QuantizeCall& call, size_t i, Context& context, Stream stream,
                  CallOverlaps& overlaps) {
  F8_TRY(memory.check(name, context, stream));
  for (const Region& region : memory.regions()) {
    const auto is = [&](const void* at) { return region.begin == reinterpret_cast<uintptr_t>(at); };
    if (is(list.workspace.data) || is(launch_counts(list)) || is(list.noop_flag)) continue;
    overlaps.add(region, i,
                 is(call.counters) || is(call.scales.opaque[0]) || is(call.scales.opaque[1]));
  }
  return {};
}

Status in_call(size_t i, Status status) {
  if (!status) [[unlikely]] {
    status.error().message =
        f8::format("float8_quantize_list_args.tensors[{}]: {}", i, status.error().message);
  }
  return status;
}

// A list's workspace, step and flag are those of all tensors.
Status check_own(const QuantizeCall& own) {
  for (const auto& [field, pointer] : {std::pair<const char*, const void*>{"step", own.step},
                                       {"workspace", own.workspace.data},
                                       {"noop_flag", own.noop_flag}}) {
    if (pointer == nullptr) [[likely]] {
      continue;
    }
    return fail(
        ErrorCode::kInvalidArgument,
        "float8_quantize_args.{} is given; in a list it is float8_quantize_list_args.{}, for "
        "all tensors",
        field, field);
  }
  return {};
}

}  // namespace

Result<QuantizerList> QuantizerList::plan(
    const std::shared_ptr<Context>& context,
    std::span<const std::shared_ptr<const Quantizer>> quantizers) {
  QuantizerList list;
  list.quantizers_.assign(quantizers.begin(), quantizers.end());
  std::vector<ListedTensor> tensors;
  for (size_t i = 0; i < quantizers.size(); ++i) {
    if (quantizers[i] == nullptr || quantizers[i]->context_ != context) {
      return fail(ErrorCode::kInvalidArgument, "float8_quantizer_list_plan: quantizers[{}] is {}",
                  i, quantizers[i] == nullptr ? "NULL" : "another context's");
    }
    const QuantizerDesc& desc = quantizers[i]->desc();
    if (desc.source != CastSource::kPlain || desc.recast) {
      return fail(ErrorCode::kUnsupported,
                  "float8_quantizer_list_plan: quantizers[{}] has {}, which the casts of a list do "
                  "not look at",
                  i,
                  desc.recast ? "FLOAT8_QT_FOR_RECOMPUTE"
                              : f8::format("{} as its source", name_of(desc.source)));
    }
    tensors.push_back(quantizers[i]->listed());
  }
  constexpr size_t kRegionsOfCall = 8;
  list.overlaps_ = std::make_unique<SharedOverlaps>(quantizers.size() * kRegionsOfCall);
  list.casts_ = F8_TRY(CastList::plan(context, tensors));
  return list;
}

Status QuantizerList::check_count(const char* name, const QuantizeListCall& call) const {
  if (call.count == quantizers_.size()) [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument, "{}: {} quantizers were planned, {} args are given",
              name, quantizers_.size(), call.count);
}

Status QuantizerList::check_run(const QuantizeListCall& call, Stream stream,
                                CallOverlaps& overlaps) const {
  for (size_t i = 0; i < call.count; ++i) {
    const Quantizer& quantizer = *quantizers_[i];
    F8_TRY(in_call(i, check_own(given(call, i))));
    const QuantizeCall of = in_list(call, i);
    F8_TRY(in_call(i, quantizer.check_cast(kRun, of)));
    if (of.rows == 0 && of.noop_flag != nullptr) [[unlikely]] {
      return in_call(i, fail(ErrorCode::kInvalidArgument,
                             "float8_quantize_args.rows is 0 beside the list's noop_flag; one flag "
                             "is for all tensors, so leave none of them out"));
    }
    if (of.rows == 0) continue;
    CallMemory memory = quantizer.cast_memory(of);
    memory.add_beside("float8_quantize_list_args.workspace", call.workspace.data, workspace_bytes(),
                      Access::kWrite);
    quantizer.add_launch_counts(memory, of);
    F8_TRY(
        in_call(i, add_memory(kRun, memory, call, of, i, *quantizer.context_, stream, overlaps)));
  }
  return overlaps.check(kRun);
}

Status QuantizerList::run(const QuantizeListCall& call, Stream stream, AmaxReducer reduce) const {
  F8_TRY(check_count(kRun, call));
  if (workspace_bytes() > 0 && (call.workspace.data == nullptr || !is_aligned(call.workspace.data)))
      [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "float8_quantize_list_args.workspace.data is {}",
                call.workspace.data == nullptr ? "NULL" : "not aligned to 16 bytes");
  }
  const Status good =
      overlaps_->with([&](CallOverlaps& overlaps) { return check_run(call, stream, overlaps); });
  if (!good) [[unlikely]] {
    return good;
  }
  const auto bind = [&](size_t i, CallArguments& to) {
    const QuantizeCall of = in_list(call, i);
    if (of.rows > 0) quantizers_[i]->bind(of, to);
    return of.rows > 0;
  };
  const float8_step& step = step_of(call);
  F8_TRY(casts_->run(std::cref(bind), {.first_step = step.first_step != 0,
                                       .ranks = step.evaluate != 0 ? nullptr : step.ranks,
                                       .reduce = reduce,
                                       .noop_flag = call.noop_flag,
                                       .workspace = call.workspace.data,
                                       .launch_counts = launch_counts(call),
                                       .stream = stream}));
  if (call.noop_flag == nullptr || call.count == 0) return {};
  return quantizers_[0]->set_noop_flag(call.noop_flag, stream);
}

Status QuantizerList::check_find(const QuantizeListCall& call, Stream stream,
                                 CallOverlaps& overlaps) const {
  for (size_t i = 0; i < call.count; ++i) {
    const Quantizer& quantizer = *quantizers_[i];
    if (!quantizer.desc().over_ranks) continue;
    const QuantizeCall of = in_list(call, i);
    F8_TRY(in_call(i, quantizer.check_find(kFind, of)));
    F8_TRY(in_call(i, add_memory(kFind, quantizer.find_memory(of), call, of, i, *quantizer.context_,
                                 stream, overlaps)));
  }
  return overlaps.check(kFind);
}

Status QuantizerList::find_amax(const QuantizeListCall& call, Stream stream) const {
  F8_TRY(check_count(kFind, call));
  const auto over_ranks = [](const auto& quantizer) { return quantizer->desc().over_ranks; };
  if (!quantizers_.empty() && std::ranges::none_of(quantizers_, over_ranks)) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}: the quantizers find their maxima themselves; set "
                "float8_quantizer_desc.over_ranks to find, reduce and use them in several calls",
                kFind);
  }
  const Status good =
      overlaps_->with([&](CallOverlaps& overlaps) { return check_find(call, stream, overlaps); });
  if (!good) [[unlikely]] {
    return good;
  }
  const auto bind = [&](size_t i, CallArguments& to) {
    quantizers_[i]->bind(in_list(call, i), to);
    return true;
  };
  return casts_->find(std::cref(bind), stream);
}

}  // namespace f8::runtime
