#include "runtime/lists/quantizer_list.hpp"

#include <algorithm>

#include "runtime/device/memory.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kRun = "float8_quantize_list";
constexpr const char* kFind = "float8_quantize_list_amax";

// Checks the memory of a call alone, and adds it to that of the others. Calls may have scale slots
// and counters in common, to which their casts add; a flag they have in common.
Status add_memory(const char* name, const CallMemory& memory, const QuantizeCall& call, size_t i,
                  Context& context, Stream stream, const void* workspace, CallOverlaps& overlaps) {
  F8_TRY(memory.check_alignment(name));
  F8_TRY(memory.check_overlaps(name));
  F8_TRY(memory.check_device(name, context, stream));
  for (const Region& region : memory.regions()) {
    const auto is = [&](const void* at) { return region.begin == reinterpret_cast<uintptr_t>(at); };
    if (workspace != nullptr && is(workspace)) continue;
    if (call.noop_flag != nullptr && is(call.noop_flag)) continue;
    overlaps.add(region, i,
                 is(call.counters) || is(call.scales.opaque[0]) || is(call.scales.opaque[1]));
  }
  return {};
}

Status in_call(size_t i, Status status) {
  if (!status) [[unlikely]] {
    status.error().message = f8::format("args[{}]: {}", i, status.error().message);
  }
  return status;
}

Status check_common(size_t i, bool same, const char* field, const char* why) {
  if (same) [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument, "{}: args[{}].{} is not args[0]'s; {}", kRun, i, field,
              why);
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
    if (desc.swiglu) {
      return fail(ErrorCode::kUnsupported,
                  "float8_quantizer_list_plan: quantizers[{}] has FLOAT8_SWIGLU as its source, "
                  "which the casts of a list do not look at",
                  i);
    }
    tensors.push_back(quantizers[i]->listed());
  }
  constexpr size_t kRegionsOfCall = 8;
  list.overlaps_ = std::make_unique<SharedOverlaps>(quantizers.size() * kRegionsOfCall);
  list.casts_ = F8_TRY(CastList::plan(context, tensors));
  return list;
}

Status QuantizerList::check_count(const char* name, const QuantizeCalls& calls) const {
  if (calls.count == quantizers_.size()) [[likely]] {
    return {};
  }
  return fail(ErrorCode::kInvalidArgument, "{}: {} quantizers were planned, {} args are given",
              name, quantizers_.size(), calls.count);
}

Status QuantizerList::check_run(const QuantizeCalls& calls, void* workspace, Stream stream,
                                CallOverlaps& overlaps) const {
  const QuantizeCall common = calls.count > 0 ? calls.at(0) : QuantizeCall{};
  for (size_t i = 0; i < calls.count; ++i) {
    const Quantizer& quantizer = *quantizers_[i];
    const QuantizeCall call = calls.at(i);
    F8_TRY(in_call(i, quantizer.check_cast(kRun, call)));
    if (call.launch_counts != nullptr) [[unlikely]] {
      return in_call(i, fail(ErrorCode::kInvalidArgument,
                             "float8_quantize_args.launch_counts is given; the casts of a list "
                             "count in its workspace, so leave it NULL"));
    }
    F8_TRY(check_common(i, (call.first_step != 0) == (common.first_step != 0), "first_step",
                        "a step is the first one for all"));
    F8_TRY(check_common(i, (call.evaluate != 0) == (common.evaluate != 0), "evaluate",
                        "all record their amaxes or none does"));
    F8_TRY(check_common(i, call.ranks == common.ranks, "ranks", "all are reduced at once"));
    F8_TRY(check_common(i, call.noop_flag == common.noop_flag, "noop_flag",
                        "one flag is for all tensors"));
    if (call.rows == 0 && call.noop_flag != nullptr) [[unlikely]] {
      return in_call(i, fail(ErrorCode::kInvalidArgument,
                             "float8_quantize_args.rows is 0 beside noop_flag; one flag is for all "
                             "tensors, so leave none of them out"));
    }
    if (call.rows == 0) continue;
    CallMemory memory = quantizer.cast_memory(call);
    memory.add_beside("workspace", workspace, workspace_bytes(), Access::kWrite);
    F8_TRY(in_call(
        i, add_memory(kRun, memory, call, i, *quantizer.context_, stream, workspace, overlaps)));
  }
  return overlaps.check(kRun);
}

Status QuantizerList::run(const QuantizeCalls& calls, void* workspace, Stream stream,
                          AmaxReducer reduce) const {
  F8_TRY(check_count(kRun, calls));
  if (workspace_bytes() > 0 && (workspace == nullptr || !is_aligned(workspace))) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "workspace of {} is {}", kRun,
                workspace == nullptr ? "NULL" : "not aligned to 16 bytes");
  }
  const Status good = overlaps_->with(
      [&](CallOverlaps& overlaps) { return check_run(calls, workspace, stream, overlaps); });
  if (!good) [[unlikely]] {
    return good;
  }
  const auto bind = [&](size_t i, CallArguments& to) {
    const QuantizeCall call = calls.at(i);
    if (call.rows > 0) quantizers_[i]->bind(call, to);
    return call.rows > 0;
  };
  const QuantizeCall common = calls.count > 0 ? calls.at(0) : QuantizeCall{};
  F8_TRY(casts_->run(std::cref(bind), {.first_step = common.first_step != 0,
                                       .ranks = common.evaluate != 0 ? nullptr : common.ranks,
                                       .reduce = reduce,
                                       .noop_flag = common.noop_flag,
                                       .workspace = workspace,
                                       .stream = stream}));
  return common.noop_flag == nullptr ? Status()
                                     : quantizers_[0]->set_noop_flag(common.noop_flag, stream);
}

Status QuantizerList::check_find(const QuantizeCalls& calls, Stream stream,
                                 CallOverlaps& overlaps) const {
  for (size_t i = 0; i < calls.count; ++i) {
    const Quantizer& quantizer = *quantizers_[i];
    if (!quantizer.desc().over_ranks) continue;
    const QuantizeCall call = calls.at(i);
    F8_TRY(in_call(i, quantizer.check_find(kFind, call)));
    F8_TRY(in_call(i, add_memory(kFind, quantizer.find_memory(call), call, i, *quantizer.context_,
                                 stream, nullptr, overlaps)));
  }
  return overlaps.check(kFind);
}

Status QuantizerList::find_amax(const QuantizeCalls& calls, Stream stream) const {
  F8_TRY(check_count(kFind, calls));
  const auto over_ranks = [](const auto& quantizer) { return quantizer->desc().over_ranks; };
  if (!quantizers_.empty() && std::ranges::none_of(quantizers_, over_ranks)) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}: the quantizers find their maxima themselves; set "
                "float8_quantizer_desc.over_ranks to find, reduce and use them in several calls",
                kFind);
  }
  const Status good =
      overlaps_->with([&](CallOverlaps& overlaps) { return check_find(calls, stream, overlaps); });
  if (!good) [[unlikely]] {
    return good;
  }
  const auto bind = [&](size_t i, CallArguments& to) {
    quantizers_[i]->bind(calls.at(i), to);
    return true;
  };
  return casts_->find(std::cref(bind), stream);
}

}  // namespace f8::runtime
