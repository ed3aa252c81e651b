// Sorting tensors into launches.
#include "runtime/linear/tensors/cast_list.hpp"

#include <algorithm>
#include <array>
#include <functional>
#include <utility>

#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"
#include "runtime/linear/plan/plan_casts.hpp"

namespace f8::runtime {

ShardWords shard_words(std::span<const KernelPass> passes, int64_t rows, int64_t cols,
                       int64_t whole_rows) {
  ShardWords words;
  bool tensor = false;
  for (const KernelPass& pass : passes) {
    if (has_scale(pass.cast, codegen::ScaleMode::kBlock128x128)) {
      words.blocks = cast_tiles(whole_rows, cols);
    }
    if (!pass.amax) continue;
    if (pass.amax->col) words.columns = cols;
    // A launch that finds the tensor's amax in one word finds those of rows or columns beside it.
    if (pass.amax->row || (pass.amax->tensor && !pass.amax->col)) words.rows = rows;
    tensor = tensor || pass.amax->tensor;
  }
  words.over_ranks = words.columns + words.blocks + (tensor ? 1 : 0);
  return words;
}

void place_shard_words(const ShardWords& words, TensorBuffers& at) {
  at.rows = 0;
  at.row_amax = Slot::kRowAmax;
  at.col_amax = Slot::kRankAmax;
  at.block_amax = word_at(Slot::kRankAmax, words.columns);
  at.amax = at.partials = word_at(Slot::kRankAmax, words.columns + words.blocks);
}

Result<std::vector<CastList::Group>> CastList::groups(const std::shared_ptr<Context>& context,
                                                      std::span<const ListedTensor> tensors,
                                                      bool first) {
  struct Alike {
    codegen::CastSpec cast;
    bool over_ranks;
    std::vector<Member> members;
  };
  std::vector<Alike> all;
  for (size_t i = 0; i < tensors.size(); ++i) {
    const ListedTensor& tensor = tensors[i];
    const bool first_step = first && !tensor.kernels.slots.empty();
    for (const KernelPass& pass : tensor.kernels.passes(tensor.copies, first_step)) {
      codegen::CastSpec kernel = pass.cast;
      kernel.shard = tensor.whole_rows > 0 && has_scale(kernel, codegen::ScaleMode::kBlock128x128);
      for (const FusedCast& cast : pass.casts) {
        if (cast.tensor != tensor.tensor) continue;
        auto alike = std::ranges::find_if(all, [&](const Alike& other) {
          return other.cast == kernel && other.over_ranks == tensor.over_ranks;
        });
        if (alike == all.end()) alike = all.insert(all.end(), {kernel, tensor.over_ranks, {}});
        CastOperand operand = cast_operand(cast, tensor.at, Slot::kAmax);
        operand.whole_rows = tensor.whole_rows;
        alike->members.push_back({i, operand});
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
        sizes.push_back({tensors[member.tensor].rows_max, member.operand.cols});
      }
      const ListOptions of_group = alike.over_ranks
                                       ? ListOptions{.given_maxima = true}
                                       : ListOptions{.tile_amax = true, .one_launch = true};
      groups.push_back({F8_TRY(QuantizeList::plan(context, alike.cast, std::move(sizes), of_group)),
                        members, alike.over_ranks, alike.cast.delayed});
    }
  }
  return groups;
}

Result<CastList> CastList::plan(const std::shared_ptr<Context>& context,
                                std::span<const ListedTensor> tensors) {
  CastList list;
  list.context_ = context;
  bool has_slots = false;
  for (const ListedTensor& tensor : tensors) {
    const LinearKernels& kernels = tensor.kernels;
    const auto index = static_cast<size_t>(tensor.tensor);
    const size_t first = kernels.first_slot[index];
    const size_t end = index + 1 < kernels.first_slot.size() ? kernels.first_slot[index + 1]
                                                             : kernels.slots.size();
    Listed listed{.words = {},
                  .first_word = list.first_count_,
                  .first_slot = first,
                  .slots = end - first,
                  .hold = kernels.hold};
    if (tensor.over_ranks) {
      const auto passes = kernels.passes(tensor.copies, false);
      listed.words = shard_words(passes, tensor.rows_max, tensor.at.cols, tensor.whole_rows);
    }
    list.first_count_ += kernels.slots.size();
    has_slots = has_slots || listed.slots > 0;
    list.tensors_.push_back(listed);
  }
  if (!has_slots) list.first_count_ = 0;
  list.groups_ = F8_TRY(groups(context, tensors, false));
  if (has_slots) {
    list.first_groups_ = F8_TRY(groups(context, tensors, true));
    list.scale_update_ = F8_TRY(context->kernel(codegen::ScaleUpdateSpec{}));
  }
  size_t scratch = 0;
  for (const auto* groups : {&list.groups_, &list.first_groups_}) {
    for (const Group& group : *groups) scratch = std::max(scratch, group.list.workspace_bytes());
  }
  // The front of a workspace belongs to one-launch casts, also where linears share it.
  Arena arena;
  const bool shards_alone = std::ranges::all_of(list.groups_, &Group::over_ranks);
  if (scratch + list.first_count_ > 0 || !shards_alone) {
    arena.take(quantize_sync_bytes(context->device().sm_count));
  }
  list.scratch_ = arena.take(scratch);
  list.first_words_ = arena.take(sizeof(uint32_t) * kFirstWords * list.first_count_);
  list.workspace_bytes_ = arena.size();
  return list;
}

size_t CastList::launches(int64_t m) const {
  size_t count = 0;
  for (const Group& group : groups_) {
    Operands operands;
    for (size_t i = 0; i < group.members.size(); ++i) {
      const CastOperand& operand = group.members[i].operand;
      operands[i] = {.rows = operand.rows == 0 ? m : operand.rows, .cols = operand.cols};
    }
    count += group.list.launches(std::span(operands.data(), group.members.size()));
  }
  return count;
}

// Gives a group's operands; those that the call leaves out have no rows.
std::span<const QuantizeOperand> CastList::bind_group(const Bind& bind, const Group& group,
                                                      uint32_t* recorded,
                                                      Operands& operands) const {
  for (size_t i = 0; i < group.members.size(); ++i) {
    const auto& [tensor, operand] = group.members[i];
    CallArguments arguments;
    if (!bind(tensor, arguments)) {
      operands[i] = {.cols = operand.cols};
      continue;
    }
    if (recorded != nullptr) {
      arguments.set(Slot::kAmax, recorded + tensors_[tensor].first_word);
      arguments.set(Slot::kCounters, nullptr);
    }
    operands[i] = operand.at(arguments);
  }
  return {operands.data(), group.members.size()};
}

Status CastList::run_groups(const Bind& bind, const Call& call, bool first,
                            uint32_t* recorded) const {
  auto* workspace = static_cast<uint8_t*>(call.workspace);
  // Launches follow each other, so they may share the workspace.
  for (const Group& group : first ? first_groups_ : groups_) {
    if (recorded != nullptr && !group.delayed) continue;
    Operands operands;
    const auto bound = bind_group(bind, group, recorded, operands);
    if (group.over_ranks) {
      F8_TRY(group.list.cast(bound, call.stream));
    } else {
      F8_TRY(group.list.run(bound, workspace + scratch_, call.stream, call.noop_flag,
                            call.launch_counts));
    }
  }
  return {};
}

Status CastList::run(const Bind& bind, const Call& call) const {
  const bool first = !first_groups_.empty() && call.first_step;
  const bool over_ranks = first && call.ranks != nullptr;
  if (over_ranks) F8_TRY(find_first_scales(bind, call));
  return run_groups(bind, call, first && !over_ranks, nullptr);
}

// The first half of a first step over ranks, with one reduction for all tensors.
Status CastList::find_first_scales(const Bind& bind, const Call& call) const {
  auto* amax = reinterpret_cast<uint32_t*>(static_cast<uint8_t*>(call.workspace) + first_words_);
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  F8_TRY(set_words(state.driver, amax, 0, kFirstWords * first_count_, call.stream));
  F8_TRY(run_groups(bind, call, false, amax));
  F8_TRY(call.reduce(amax, first_count_, call.ranks, call.stream));
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const auto& [words, first_word, first_slot, count, hold] = tensors_[i];
    CallArguments arguments;
    if (count == 0 || !bind(i, arguments)) continue;
    ScaleSlots slots = arguments.scales;
    slots.scale += first_slot * kernels::kScaleStride;
    slots.format += first_slot;
    const auto args =
        first_scale_args(amax + first_word + first_slot, amax + first_count_, count, slots, hold);
    F8_TRY(launch_scale_update(state, *scale_update_, args, call.stream));
  }
  return {};
}

// Clears words of the shards, with one call for those that follow each other in one allocation: the
// driver sets none of two.
Status CastList::clear(const Bind& bind, Slot slot, int64_t ShardWords::*count,
                       Stream stream) const {
  const Driver& driver = context_->state().driver;
  uint32_t* begin = nullptr;
  const void* end = nullptr;  // of its allocation
  size_t pending = 0;
  const auto flush = [&]() -> Status {
    if (pending == 0) return {};
    return set_words(driver, begin, 0, std::exchange(pending, 0), stream);
  };
  for (size_t i = 0; i < tensors_.size(); ++i) {
    CallArguments arguments;
    const auto words = static_cast<size_t>(tensors_[i].words.*count);
    if (words == 0 || !bind(i, arguments)) continue;
    auto* at = arguments.at<uint32_t>(slot);
    if (at != begin + pending || std::greater<const void*>()(at + words, end)) {
      F8_TRY(flush());
      begin = at;
      end = allocation_end(driver, at);
    }
    pending += words;
  }
  return flush();
}

Status CastList::find(const Bind& bind, Stream stream) const {
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  F8_TRY(clear(bind, Slot::kRankAmax, &ShardWords::over_ranks, stream));
  F8_TRY(clear(bind, Slot::kRowAmax, &ShardWords::rows, stream));
  for (const Group& group : groups_) {
    if (!group.over_ranks) continue;
    Operands operands;
    F8_TRY(group.list.find(bind_group(bind, group, nullptr, operands), stream));
  }
  return {};
}

}  // namespace f8::runtime
