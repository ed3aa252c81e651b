#include "runtime/experts/group_layout.hpp"

#include "recipes/problem.hpp"
#include "runtime/device/calls/call_memory.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"

namespace f8::runtime {
namespace {

constexpr const char* kCall = "float8_group_layout";
constexpr const char* kArgs = "float8_group_layout_args";

static_assert(FLOAT8_NO_GROUP_ERROR == static_cast<int>(kernels::kNoGroupError) &&
              FLOAT8_NEGATIVE_END == static_cast<int>(kernels::kNegativeEnd) &&
              FLOAT8_FALLING_END == static_cast<int>(kernels::kFallingEnd) &&
              FLOAT8_END_BEYOND_M == static_cast<int>(kernels::kEndBeyondM));
static_assert(FLOAT8_MAX_EXPERTS == kernels::kMaxExperts);

}  // namespace

Status check_experts(int64_t experts) {
  if (experts >= 1 && experts <= kernels::kMaxExperts) return {};
  return fail(ErrorCode::kInvalidArgument, "experts is {}; it is 1 to {}", experts,
              kernels::kMaxExperts);
}

Result<kernels::GroupLayout> group_layout_of(int64_t m_max, int64_t experts) {
  if (m_max < 1 || m_max > kMaxDim) {
    return fail(ErrorCode::kInvalidArgument, "m_max is {}; the rows of all experts are 1 to {}",
                m_max, kMaxDim);
  }
  F8_TRY(check_experts(experts));
  return kernels::GroupLayout{.experts = static_cast<int32_t>(experts),
                              .m_max = static_cast<int32_t>(m_max)};
}

Result<GroupLayoutPlan> GroupLayoutPlan::create(const std::shared_ptr<Context>& context,
                                                int64_t m_max, int64_t experts) {
  const kernels::GroupLayout layout = F8_TRY(group_layout_of(m_max, experts));
  const Kernel* kernel = F8_TRY(context->kernel(codegen::GroupLayoutSpec{}));
  return GroupLayoutPlan(context, *kernel, layout);
}

Status GroupLayoutPlan::run(const GroupLayoutCall& call, Stream stream) const {
  F8_TRY(need(kArgs, "offsets", call.offsets));
  F8_TRY(need(kArgs, "layout", call.layout.data));
  if (call.m < 0 || call.m > layout_.m_max) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}.m is {}; the plan was made for 0 to {}", kArgs,
                call.m, layout_.m_max);
  }
  CallMemory memory(kArgs);
  memory.add("offsets", call.offsets, static_cast<size_t>(layout_.experts) * sizeof(int32_t),
             Access::kRead, alignof(int32_t));
  memory.add("layout", call.layout.data, bytes(), Access::kWrite);
  F8_TRY(memory.check(kCall, *context_, stream));
  const Context::State& state = context_->state();
  const ScopedContext current(state.driver, state.primary);
  F8_TRY(current.status());
  const kernels::GroupLayoutArgs args{.offsets = call.offsets,
                                      .words = static_cast<int32_t*>(call.layout.data),
                                      .m = static_cast<int32_t>(call.m),
                                      .padding = 0,
                                      .layout = layout_};
  return launch_with(args, state.driver, *kernel_, 1, state.options.programmatic_launch, stream);
}

Result<float8_group_error> GroupLayoutPlan::take_error(void* layout, Stream stream) const {
  F8_TRY(need(kArgs, "layout", layout));
  const Driver& driver = context_->state().driver;
  const ScopedContext current(driver, context_->state().primary);
  F8_TRY(current.status());
  const auto at = reinterpret_cast<CUdeviceptr>(layout);
  int32_t words[2] = {};  // kGroupError and kBadExpert
  F8_TRY(
      driver.check(driver.memcpy_dtoh_async(words, at, sizeof words, stream), "cuMemcpyDtoHAsync"));
  F8_TRY(driver.check(driver.stream_synchronize(stream), "cuStreamSynchronize"));
  if (words[0] != FLOAT8_NO_GROUP_ERROR) {
    F8_TRY(driver.check(driver.memset_d8_async(at, 0, sizeof words, stream), "cuMemsetD8Async"));
  }
  return float8_group_error{.struct_size = sizeof(float8_group_error),
                            .code = words[0],
                            .expert = words[0] == FLOAT8_NO_GROUP_ERROR ? -1 : words[1]};
}

}  // namespace f8::runtime
