#include "runtime/moe/combine.hpp"

#include "codegen/kernels/experts/moe_args.cuh"
#include "recipes/fp8_layout.hpp"
#include "recipes/problem.hpp"
#include "runtime/device/calls/call_memory.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"
#include "runtime/moe/call.hpp"
#include "runtime/moe/route.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kCombine = "float8_moe_combine";
constexpr const char* kCombineArgs = "float8_moe_combine_args";
constexpr const char* kGradient = "float8_moe_score_gradient";
constexpr const char* kGradientArgs = "float8_moe_score_gradient_args";

// Both calls read these.
template <class Call>
Status add_rows(const Call& call, const CombineDesc& desc, const char* args, CallMemory& memory) {
  F8_TRY(check_tokens(args, call.tokens, desc.tokens_max));
  if (call.tokens == 0) return {};
  F8_TRY(need(args, "y", call.y));
  F8_TRY(need(args, "position", call.position));
  F8_TRY(need(args, "offsets", call.offsets));
  const int64_t pairs = call.tokens * desc.top_k;
  memory.add("y", call.y, static_cast<size_t>(pairs * desc.cols) * size_bytes(desc.y),
             Access::kRead, desc.cols % 8 == 0 ? 16 : kMoeWord);
  memory.add("position", call.position, static_cast<size_t>(pairs) * kMoeWord, Access::kRead,
             kMoeWord);
  memory.add("offsets", call.offsets, static_cast<size_t>(desc.experts) * kMoeWord, Access::kRead,
             kMoeWord);
  return {};
}

// A matrix of the tokens.
void add_tokens(const char* name, const void* at, int64_t tokens, const CombineDesc& desc,
                Access access, CallMemory& memory) {
  memory.add(name, at, static_cast<size_t>(tokens * desc.cols) * size_bytes(desc.out), access,
             desc.cols % 8 == 0 ? 16 : kMoeWord);
}

}  // namespace

Result<CombinePlan> CombinePlan::create(const std::shared_ptr<Context>& context,
                                        const CombineDesc& desc) {
  F8_TRY(check_routing_sizes(desc.tokens_max, desc.top_k, desc.experts));
  if (desc.cols < 1 || desc.cols > kMaxDim) {
    return fail(ErrorCode::kInvalidArgument, "cols is {}; it is 1 to {}", desc.cols, kMaxDim);
  }
  if (desc.cols % 8 != 0 && (desc.y != Dtype::kF32 || desc.out != Dtype::kF32)) {
    return fail(ErrorCode::kInvalidArgument,
                "cols is {}; rows of 16-bit elements have a multiple of 8", desc.cols);
  }
  const Kernel* combine = F8_TRY(
      context->kernel(codegen::CombineSpec{.y = desc.y, .out = desc.out, .gradient = false}));
  const Kernel* gradient =
      F8_TRY(context->kernel(codegen::CombineSpec{.y = desc.y, .out = desc.out, .gradient = true}));
  return CombinePlan(context, desc, *combine, *gradient);
}

template <class Args>
Status CombinePlan::launch(const Args& args, const Kernel& kernel, int64_t blocks,
                           Stream stream) const {
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  return launch_with(args, state.driver, kernel, blocks, state.options.programmatic_launch, stream);
}

Status CombinePlan::run(const CombineCall& call, Stream stream) const {
  CallMemory memory(kCombineArgs);
  F8_TRY(add_rows(call, desc_, kCombineArgs, memory));
  if (call.tokens == 0) return {};
  F8_TRY(need(kCombineArgs, "out", call.out));
  memory.add("scores", call.scores, static_cast<size_t>(call.tokens * desc_.top_k) * kMoeWord,
             Access::kRead, kMoeWord);
  add_tokens("out", call.out, call.tokens, desc_, Access::kWrite, memory);
  F8_TRY(memory.check(kCombine, *context_, stream));
  const kernels::CombineArgs args{.y = call.y,
                                  .scores = call.scores,
                                  .position = call.position,
                                  .rows = call.offsets + desc_.experts - 1,
                                  .out = call.out,
                                  .tokens = static_cast<int32_t>(call.tokens),
                                  .cols = static_cast<int32_t>(desc_.cols),
                                  .top_k = static_cast<int32_t>(desc_.top_k),
                                  .padding = 0};
  return launch(args, *combine_, call.tokens, stream);
}

Status CombinePlan::run(const ScoreGradientCall& call, Stream stream) const {
  CallMemory memory(kGradientArgs);
  F8_TRY(add_rows(call, desc_, kGradientArgs, memory));
  if (call.tokens == 0) return {};
  F8_TRY(need(kGradientArgs, "dout", call.dout));
  F8_TRY(need(kGradientArgs, "dscores", call.dscores));
  const int64_t pairs = call.tokens * desc_.top_k;
  add_tokens("dout", call.dout, call.tokens, desc_, Access::kRead, memory);
  memory.add("dscores", call.dscores, static_cast<size_t>(pairs) * kMoeWord, Access::kWrite,
             kMoeWord);
  F8_TRY(memory.check(kGradient, *context_, stream));
  const kernels::ScoreGradientArgs args{.dout = call.dout,
                                        .y = call.y,
                                        .position = call.position,
                                        .rows = call.offsets + desc_.experts - 1,
                                        .dscores = call.dscores,
                                        .tokens = static_cast<int32_t>(call.tokens),
                                        .cols = static_cast<int32_t>(desc_.cols),
                                        .top_k = static_cast<int32_t>(desc_.top_k),
                                        .padding = 0};
  return launch(args, *gradient_, ceil_div(pairs, kernels::kTileThreads / 32), stream);
}

}  // namespace f8::runtime
