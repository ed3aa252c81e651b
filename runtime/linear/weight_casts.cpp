// Sorting the weights of linears into launches.
#include "runtime/linear/weight_casts.hpp"

#include <algorithm>
#include <array>

#include "runtime/device/memory.hpp"
#include "runtime/linear/state.hpp"

namespace f8::runtime {
Result<std::vector<WeightCasts::Group>> WeightCasts::groups(const std::shared_ptr<Context>& context,
                                                            bool first) const {
  struct Alike {
    codegen::CastSpec cast;
    std::vector<Member> members;
  };
  std::vector<Alike> all;
  for (size_t i = 0; i < linears_.size(); ++i) {
    const Linear::State& linear = *linears_[i]->state_;
    const LinearKernels& kernels = linear.kernels;
    const bool first_step = first && !kernels.slots.empty();
    for (const KernelPass& pass : kernels.passes(kernels.cache_copies(), first_step)) {
      auto alike = std::ranges::find(all, pass.cast, &Alike::cast);
      if (alike == all.end()) alike = all.insert(all.end(), {pass.cast, {}});
      for (const FusedCast& cast : pass.casts) {
        alike->members.push_back({i, cache_operand(linear.layout, cast)});
      }
    }
  }
  constexpr auto kMost = static_cast<size_t>(kernels::kMaxListed);
  std::vector<Group> groups;
  for (const Alike& alike : all) {
    const size_t count = alike.members.size();
    const size_t launches = (count + kMost - 1) / kMost;
    for (size_t g = 0; g < launches; ++g) {
      const std::vector<Member> members(
          alike.members.begin() + static_cast<std::ptrdiff_t>(count * g / launches),
          alike.members.begin() + static_cast<std::ptrdiff_t>(count * (g + 1) / launches));
      std::vector<MatrixSize> sizes;
      for (const Member& member : members) {
        const Shape& shape = linears_[member.linear]->desc().shape;
        sizes.push_back({shape.n, shape.k});
      }
      groups.push_back(
          {F8_TRY(QuantizeList::plan(context, alike.cast, std::move(sizes))), members});
    }
  }
  return groups;
}

Result<WeightCasts> WeightCasts::plan(const std::shared_ptr<Context>& context,
                                      std::span<const std::shared_ptr<const Linear>> linears) {
  WeightCasts casts;
  casts.linears_.assign(linears.begin(), linears.end());
  size_t slots = 0;
  for (size_t i = 0; i < linears.size(); ++i) {
    if (linears[i] == nullptr || linears[i]->state_->context != context) {
      return fail(ErrorCode::kInvalidArgument, "float8_weight_casts_plan: linears[{}] is {}", i,
                  linears[i] == nullptr ? "NULL" : "another context's");
    }
    casts.first_slot_.push_back(slots);
    slots += linears[i]->scale_slots().size();
  }
  casts.first_slot_.push_back(slots);
  constexpr size_t kRegionsOfCall = 6;  // and one that all calls share
  casts.overlaps_ = std::make_unique<SharedOverlaps>(linears.size() * kRegionsOfCall + 1);
  casts.groups_ = F8_TRY(casts.groups(context, false));
  if (slots > 0) {
    casts.first_groups_ = F8_TRY(casts.groups(context, true));
    casts.scale_update_ = F8_TRY(context->kernel(codegen::ScaleUpdateSpec{}));
  }
  for (const auto* groups : {&casts.groups_, &casts.first_groups_}) {
    for (const Group& group : *groups) {
      casts.workspace_bytes_ = std::max(casts.workspace_bytes_, group.list.workspace_bytes());
    }
  }
  // The front of a workspace that linears share with these casts belongs to one-launch casts.
  Arena arena;
  if (casts.workspace_bytes_ + slots > 0) {
    arena.take(quantize_sync_bytes(context->device().sm_count));
  }
  casts.scratch_ = arena.take(casts.workspace_bytes_);
  casts.first_words_ = arena.take(sizeof(uint32_t) * kFirstWords * slots);
  casts.workspace_bytes_ = arena.size();
  return casts;
}

Status WeightCasts::run(const WeightCalls& calls, void* workspace, Stream stream,
                        AmaxReducer reduce) const {
  if (calls.count != linears_.size()) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "float8_weight_casts_run: {} weights were planned, {} are given", linears_.size(),
                calls.count);
  }
  const WeightCall common = calls.count > 0 ? calls.at(0) : WeightCall{};
  const Status good = overlaps_->with([&](CallOverlaps& overlaps) -> Status {
    F8_TRY(check(calls, common, workspace, stream, overlaps));
    return overlaps.check("float8_weight_casts_run");
  });
  if (!good) [[unlikely]] {
    return good;
  }
  if (workspace_bytes_ > 0 && (workspace == nullptr || !is_aligned(workspace))) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "workspace of float8_weight_casts_run is {}",
                workspace == nullptr ? "NULL" : "not aligned to 16 bytes");
  }
  const bool first = !first_groups_.empty() && common.first_step != 0;
  const bool over_ranks = first && common.ranks != nullptr;
  if (over_ranks) F8_TRY(find_first_scales(calls, workspace, stream, reduce));
  F8_TRY(run_groups(calls, first && !over_ranks, workspace, nullptr, stream));
  if (common.valid == nullptr) return {};
  const Linear::State& any = *linears_[0]->state_;
  const ScopedContext current(*any.driver, any.primary);
  F8_TRY(current.status());
  return set_words(*any.driver, common.valid, 1, 1, stream);
}

// Checks each call alone, that it says what the first one says for all, and adds its memory.
Status WeightCasts::check(const WeightCalls& calls, const WeightCall& common, void* workspace,
                          Stream stream, CallOverlaps& overlaps) const {
  for (size_t i = 0; i < calls.count; ++i) {
    const Linear::State& linear = *linears_[i]->state_;
    if (linear.layout.cache_bytes == 0) continue;
    const WeightCall call = calls.at(i);
    CallMemory memory = linear.memory(call, nullptr);
    memory.add_beside("workspace", workspace, workspace_bytes_, Access::kWrite);
    Status good = linear.check(call);
    if (good && linear.context->state().keeps_records()) good = linear.check_records(call);
    if (good) good = memory.check_alignment("float8_weight_casts_run");
    if (good) good = memory.check_overlaps("float8_weight_casts_run");
    if (good) good = memory.check_device("float8_weight_casts_run", *linear.context, stream);
    if (!good) [[unlikely]] {
      good.error().message = f8::format("args[{}]: {}", i, good.error().message);
      return good;
    }
    const auto is_common = [&](bool same, const char* field, const char* why) -> Status {
      if (same) [[likely]] {
        return {};
      }
      return fail(ErrorCode::kInvalidArgument,
                  "float8_weight_casts_run: args[{}].{} is not args[0]'s; {}", i, field, why);
    };
    F8_TRY(is_common(call.valid == common.valid, "valid", "one flag is for all weights"));
    F8_TRY(is_common((call.first_step != 0) == (common.first_step != 0), "first_step",
                     "a step is the first one for all"));
    F8_TRY(is_common(call.ranks == common.ranks, "ranks", "all are reduced at once"));
    // Each call was compared with what all of them share.
    for (const Region& region : memory.regions()) {
      const bool shared = region.begin == reinterpret_cast<uintptr_t>(workspace) ||
                          region.begin == reinterpret_cast<uintptr_t>(call.valid);
      const bool is_cache = region.begin == reinterpret_cast<uintptr_t>(call.cache);
      if (!shared) overlaps.add(region, i, !is_cache);
    }
  }
  return {};
}

Status WeightCasts::run_groups(const WeightCalls& calls, bool first, void* workspace,
                               uint32_t* recorded, Stream stream) const {
  // Launches follow each other, so they may share the workspace.
  for (const Group& group : first ? first_groups_ : groups_) {
    std::array<QuantizeOperand, kernels::kMaxListed> operands;
    const uint32_t* noop_flag = nullptr;
    for (size_t i = 0; i < group.members.size(); ++i) {
      const Member& member = group.members[i];
      const WeightCall call = calls.at(member.linear);
      noop_flag = call.valid;
      CallArguments arguments;
      linears_[member.linear]->state_->bind(call, nullptr, arguments);
      if (recorded != nullptr) {
        arguments.set(Slot::kAmax, recorded + first_slot_[member.linear]);
        arguments.set(Slot::kCounters, nullptr);
      }
      operands[i] = member.operand.at(arguments);
    }
    F8_TRY(group.list.run(std::span(operands.data(), group.members.size()),
                          static_cast<uint8_t*>(workspace) + scratch_, stream, noop_flag));
  }
  return {};
}

// The first half of a first step over ranks, with one reduction for all weights.
Status WeightCasts::find_first_scales(const WeightCalls& calls, void* workspace, Stream stream,
                                      AmaxReducer reduce) const {
  const size_t slots = first_slot_.back();
  auto* amax = reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(workspace) + first_words_);
  const Linear::State& any = *linears_[0]->state_;
  const ScopedContext current(*any.driver, any.primary);
  F8_TRY(current.status());
  F8_TRY(set_words(*any.driver, amax, 0, kFirstWords * slots, stream));
  F8_TRY(run_groups(calls, false, workspace, amax, stream));
  F8_TRY(reduce(amax, slots, calls.at(0).ranks, stream));
  for (size_t i = 0; i < linears_.size(); ++i) {
    const Linear::State& linear = *linears_[i]->state_;
    const size_t count = linear.kernels.slots.size();
    if (count == 0 || linear.layout.cache_bytes == 0) continue;
    const auto args = first_scale_args(amax + first_slot_[i], amax + slots, count,
                                       ScaleSlots::of(calls.at(i).scales), linear.kernels.hold);
    F8_TRY(launch_scale_update(linear.context->state(), *scale_update_, args, stream));
  }
  return {};
}

}  // namespace f8::runtime
