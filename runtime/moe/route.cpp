#include "runtime/moe/route.hpp"

#include "recipes/problem.hpp"
#include "runtime/device/calls/call_memory.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"
#include "runtime/experts/group_layout.hpp"
#include "runtime/moe/call.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kRoute = "float8_moe_route";
constexpr const char* kRouteArgs = "float8_moe_route_args";

}  // namespace

Status check_routing_sizes(int64_t tokens_max, int64_t top_k, int64_t experts) {
  F8_TRY(check_experts(experts));
  if (top_k < 1) {
    return fail(ErrorCode::kInvalidArgument, "top_k is {}; a token has at least 1 expert", top_k);
  }
  if (tokens_max < 1 || tokens_max > kMaxDim / top_k) {
    return fail(ErrorCode::kInvalidArgument,
                "tokens_max is {} and top_k {}; their product is 1 to {}", tokens_max, top_k,
                kMaxDim);
  }
  return {};
}

Result<RoutePlan> RoutePlan::create(const std::shared_ptr<Context>& context,
                                    const RouteDesc& desc) {
  F8_TRY(check_routing_sizes(desc.tokens_max, desc.top_k, desc.experts));
  const Kernel* count =
      F8_TRY(context->kernel(codegen::RouteSpec{.place = false, .long_ids = desc.long_ids}));
  const Kernel* place =
      F8_TRY(context->kernel(codegen::RouteSpec{.place = true, .long_ids = desc.long_ids}));
  return RoutePlan(context, desc, *count, *place);
}

size_t RoutePlan::workspace_bytes() const {
  // Fewer pairs may be in more chunks, which are smaller.
  const auto pairs = static_cast<int32_t>(desc_.tokens_max * desc_.top_k);
  const int32_t most =
      std::min((pairs - 1) / kernels::kMinRouteChunk + 1, kernels::kMaxRouteChunks);
  return static_cast<size_t>(most * (desc_.experts + 1)) * kMoeWord;
}

Status RoutePlan::check(const RouteCall& call, Stream stream) const {
  F8_TRY(check_tokens(kRouteArgs, call.tokens, desc_.tokens_max));
  F8_TRY(need(kRouteArgs, "offsets", call.offsets));
  F8_TRY(need(kRouteArgs, "workspace.data", call.workspace.data));
  if (call.tokens > 0) {
    F8_TRY(need(kRouteArgs, "topk_ids", call.topk_ids));
    F8_TRY(need(kRouteArgs, "index", call.index));
    F8_TRY(need(kRouteArgs, "position", call.position));
    if ((call.scores == nullptr) != (call.row_scores == nullptr)) {
      return fail(ErrorCode::kInvalidArgument,
                  "{}.scores and row_scores: give both, or leave both NULL", kRouteArgs);
    }
  }
  const size_t pairs = static_cast<size_t>(call.tokens * desc_.top_k);
  const uint32_t id_bytes = desc_.long_ids ? 2 * kMoeWord : kMoeWord;
  CallMemory memory(kRouteArgs);
  memory.add("topk_ids", call.topk_ids, pairs * id_bytes, Access::kRead, id_bytes);
  memory.add("index", call.index, pairs * kMoeWord, Access::kWrite, kMoeWord);
  memory.add("position", call.position, pairs * kMoeWord, Access::kWrite, kMoeWord);
  memory.add("offsets", call.offsets, static_cast<size_t>(desc_.experts) * kMoeWord, Access::kWrite,
             kMoeWord);
  memory.add("scores", call.scores, pairs * kMoeWord, Access::kRead, kMoeWord);
  memory.add("row_scores", call.row_scores, pairs * kMoeWord, Access::kWrite, kMoeWord);
  memory.add("workspace", call.workspace.data, workspace_bytes(), Access::kWrite);
  return memory.check(kRoute, *context_, stream);
}

Status RoutePlan::run(const RouteCall& call, Stream stream) const {
  F8_TRY(check(call, stream));
  const auto pairs = static_cast<int32_t>(call.tokens * desc_.top_k);
  const kernels::RouteArgs args{.ids = call.topk_ids,
                                .scores = call.scores,
                                .counts = static_cast<int32_t*>(call.workspace.data),
                                .index = call.index,
                                .position = call.position,
                                .offsets = call.offsets,
                                .row_scores = call.row_scores,
                                .pairs = pairs,
                                .top_k = static_cast<int32_t>(desc_.top_k),
                                .experts = static_cast<int32_t>(desc_.experts),
                                .chunk = kernels::RouteArgs::chunk_of(pairs)};
  const int64_t chunks = kernels::RouteArgs::chunks_of(pairs);
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const bool programmatic = state.options.programmatic_launch;
  F8_TRY(launch_with(args, state.driver, *count_, chunks, programmatic, stream));
  return launch_with(args, state.driver, *place_, chunks, programmatic, stream);
}

}  // namespace f8::runtime
