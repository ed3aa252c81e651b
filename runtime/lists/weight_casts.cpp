#include "runtime/lists/weight_casts.hpp"

#include "runtime/device/memory.hpp"
#include "runtime/linear/state.hpp"

namespace f8::runtime {

Result<WeightCasts> WeightCasts::plan(const std::shared_ptr<Context>& context,
                                      std::span<const std::shared_ptr<const Linear>> linears) {
  WeightCasts casts;
  casts.linears_.assign(linears.begin(), linears.end());
  std::vector<ListedTensor> weights;
  for (size_t i = 0; i < linears.size(); ++i) {
    if (linears[i] == nullptr || linears[i]->state_->context != context) {
      return fail(ErrorCode::kInvalidArgument, "float8_weight_casts_plan: linears[{}] is {}", i,
                  linears[i] == nullptr ? "NULL" : "another context's");
    }
    const Linear::State& linear = *linears[i]->state_;
    weights.push_back({.kernels = linear.kernels,
                       .tensor = Tensor::kWeight,
                       .copies = linear.kernels.cache_copies(),
                       .at = linear.layout.cache,
                       .rows_max = linear.desc.shape.n});
  }
  constexpr size_t kRegionsOfCall = 6;  // and one that all calls share
  casts.overlaps_ = std::make_unique<SharedOverlaps>(linears.size() * kRegionsOfCall + 1);
  casts.casts_ = F8_TRY(CastList::plan(context, weights));
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
  if (workspace_bytes() > 0 && (workspace == nullptr || !is_aligned(workspace))) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "workspace of float8_weight_casts_run is {}",
                workspace == nullptr ? "NULL" : "not aligned to 16 bytes");
  }
  const auto bind = [&](size_t i, CallArguments& to) {
    linears_[i]->state_->bind(calls.at(i), nullptr, to);
    return true;
  };
  F8_TRY(casts_->run(std::cref(bind), {.first_step = common.first_step != 0,
                                       .ranks = common.ranks,
                                       .reduce = reduce,
                                       .noop_flag = common.valid,
                                       .workspace = workspace,
                                       .stream = stream}));
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
    memory.add_beside("workspace", workspace, workspace_bytes(), Access::kWrite);
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

}  // namespace f8::runtime
