#include "runtime/quantize/delayed_scales.hpp"

#include <bit>
#include <cmath>
#include <limits>

#include "codegen/kernels/kernel_args.cuh"
#include "recipes/fp8_layout.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/launch.hpp"
#include "runtime/device/memory.hpp"

namespace f8::runtime {
namespace {

constexpr size_t kStateWord = 4;
constexpr int64_t kFoundInfThreads = 256;  // kUpdateThreads of scale_update.cuh

template <class T>
T* part(void* state, size_t offset) {
  return reinterpret_cast<T*>(static_cast<uint8_t*>(state) + offset);
}

}  // namespace

ScaleLayout scale_layout(size_t slots, int history) {
  Arena arena;
  ScaleLayout layout;
  layout.amax = arena.take(kStateWord * slots);
  layout.scale = arena.take(kStateWord * kernels::kScaleStride * slots);
  layout.history = arena.take(kStateWord * static_cast<size_t>(history) * slots);
  layout.format = arena.take(kStateWord * slots);
  layout.non_finite = arena.take(kStateWord * slots);
  layout.bytes = arena.size();
  return layout;
}

Result<DelayedScales> DelayedScales::plan(const std::shared_ptr<Context>& context,
                                          std::span<const DelayedSlot> slots,
                                          const DelayedOptions& options) {
  F8_TRY(validate(options));
  if (slots.size() > std::numeric_limits<int32_t>::max() / kFoundInfThreads) {
    return fail(ErrorCode::kInvalidArgument, "delayed scales: {} slots", slots.size());
  }
  for (const DelayedSlot& slot : slots) {
    if (!is_fp8(slot.dtype)) {
      return fail(ErrorCode::kInvalidArgument, "delayed scales: a slot for {}; e4m3 or e5m2",
                  to_string(slot.dtype));
    }
  }
  DelayedScales scales;
  scales.context_ = context;
  if (!slots.empty()) {
    scales.kernel_ = F8_TRY(context->kernel(codegen::ScaleUpdateSpec{}));
    scales.found_inf_kernel_ = F8_TRY(context->kernel(codegen::FoundInfSpec{}));
  }
  scales.slots_.assign(slots.begin(), slots.end());
  scales.options_ = options;
  scales.layout_ = scale_layout(slots.size(), options.history);
  return scales;
}

std::vector<uint32_t> DelayedScales::initial() const {
  std::vector<uint32_t> image(layout_.bytes / kStateWord);
  const auto one = std::bit_cast<uint32_t>(1.0F);
  for (size_t i = 0; i < slots_.size(); ++i) {
    const size_t scale = layout_.scale / kStateWord + i * kernels::kScaleStride;
    image[scale] = one;
    image[scale + kernels::kInverse] = one;
    image[layout_.format / kStateWord + i] =
        (slots_[i].dtype == Dtype::kE5m2 ? kernels::kFormatE5m2 : 0) |
        (slots_[i].pow2 ? kernels::kFormatPow2 : 0);
  }
  return image;
}

Status DelayedScales::check(const char* call, const void* state, Stream stream) const {
  if (slots_.empty()) return {};
  if (state == nullptr || !is_aligned(state)) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}: state is {}", call,
                state == nullptr ? "NULL" : "not aligned to 16 bytes");
  }
  CallMemory memory;
  memory.add("state", state, layout_.bytes, Access::kWrite);
  return memory.check_device(call, *context_, stream);
}

Status DelayedScales::check_found_inf(const char* call, const float* found_inf, Access access,
                                      Stream stream) const {
  if (!is_aligned(found_inf, sizeof(float))) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}: found_inf is not aligned to {} bytes", call,
                sizeof(float));
  }
  CallMemory memory;
  memory.add("found_inf", found_inf, sizeof(float), access);
  return memory.check_device(call, *context_, stream);
}

Status DelayedScales::init(void* state, Stream stream) const {
  if (slots_.empty()) return {};
  F8_TRY(check("float8_scales_init", state, stream));
  const std::vector<uint32_t> image = initial();
  const Context::State& own = context_->state();
  const ScopedContext current(own.driver, own.primary);
  F8_TRY(current.status());
  if (own.keeps_records()) context_->state().records.set_fresh(state, layout_.bytes, true);
  // The bytes are in pageable memory, so the driver has taken them when it returns.
  return own.driver.check(own.driver.memcpy_htod_async(reinterpret_cast<CUdeviceptr>(state),
                                                       image.data(), layout_.bytes, stream),
                          "cuMemcpyHtoDAsync");
}

uint32_t* DelayedScales::amaxes(void* state) const {
  return part<uint32_t>(state, layout_.amax);
}

ScaleSlots DelayedScales::slots(void* state, size_t first) const {
  return {.amax = amaxes(state) + first,
          .scale = part<float>(state, layout_.scale) + first * kernels::kScaleStride,
          .format = part<uint32_t>(state, layout_.format) + first};
}

kernels::ScaleUpdateArgs DelayedScales::update_args(void* state) const {
  return {.amax = amaxes(state),
          .history = part<uint32_t>(state, layout_.history),
          .scale = part<float>(state, layout_.scale),
          .format = part<uint32_t>(state, layout_.format),
          .non_finite = part<uint32_t>(state, layout_.non_finite),
          .count = static_cast<int32_t>(slots_.size()),
          .length = options_.history,
          .margin_factor = std::ldexp(1.0F, -options_.margin),
          .most_recent = options_.scale_from == ScaleFrom::kMostRecent,
          .freeze = options_.non_finite == NonFinite::kSaturate,
          .drop = 0,
          .found_inf = nullptr,
          .first = 0,
          .padding = 0};
}

Status DelayedScales::launch_update(const kernels::ScaleUpdateArgs& args, Stream stream) const {
  const Context::State& own = context_->state();
  const ScopedContext current(own.driver, own.primary);
  F8_TRY(current.status());
  return launch_scale_update(own, *kernel_, args, stream);
}

Status DelayedScales::update(void* state, Stream stream, const float* found_inf) const {
  if (slots_.empty()) return {};
  const char* const call =
      found_inf == nullptr ? "float8_scales_sync" : "float8_scales_sync_unless";
  F8_TRY(check(call, state, stream));
  if (found_inf != nullptr) F8_TRY(check_found_inf(call, found_inf, Access::kRead, stream));
  Context::State& own = context_->state();
  if (own.keeps_records()) own.records.set_fresh(state, layout_.bytes, false);
  kernels::ScaleUpdateArgs args = update_args(state);
  args.found_inf = found_inf;
  return launch_update(args, stream);
}

Status DelayedScales::discard(void* state, Stream stream) const {
  if (slots_.empty()) return {};
  F8_TRY(check("float8_scales_discard", state, stream));
  kernels::ScaleUpdateArgs args = update_args(state);
  args.drop = 1;
  return launch_update(args, stream);
}

Result<std::vector<std::vector<uint32_t>>> DelayedScales::histories(const void* state,
                                                                    Stream stream) const {
  std::vector<std::vector<uint32_t>> histories(slots_.size());
  if (slots_.empty()) return histories;
  F8_TRY(check("float8_scales_first_steps", state, stream));
  const auto length = static_cast<size_t>(options_.history);
  std::vector<uint32_t> words(length * slots_.size());
  const Context::State& own = context_->state();
  const ScopedContext current(own.driver, own.primary);
  F8_TRY(current.status());
  const auto from = reinterpret_cast<CUdeviceptr>(state) + layout_.history;
  F8_TRY(own.driver.check(
      own.driver.memcpy_dtoh_async(words.data(), from, kStateWord * words.size(), stream),
      "cuMemcpyDtoHAsync"));
  F8_TRY(own.driver.check(own.driver.stream_synchronize(stream), "cuStreamSynchronize"));
  for (size_t i = 0; i < words.size(); ++i) histories[i % slots_.size()].push_back(words[i]);
  return histories;
}

Status DelayedScales::find_inf(const void* state, float* found_inf, Stream stream) const {
  constexpr const char* kCall = "float8_scales_found_inf";
  if (slots_.empty()) return {};
  F8_TRY(check(kCall, state, stream));
  if (found_inf == nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument, "{}: found_inf is NULL", kCall);
  }
  F8_TRY(check_found_inf(kCall, found_inf, Access::kWrite, stream));
  const Context::State& own = context_->state();
  const ScopedContext current(own.driver, own.primary);
  F8_TRY(current.status());
  const kernels::FoundInfArgs args{.amax = amaxes(const_cast<void*>(state)),
                                   .found_inf = found_inf,
                                   .count = static_cast<int32_t>(slots_.size()),
                                   .padding = 0};
  return launch_with(args, own.driver, *found_inf_kernel_, ceil_div(args.count, kFoundInfThreads),
                     own.options.programmatic_launch, stream);
}

// An emulated device's memory can be looked at: a state that a trainer copied there is none of the
// initial ones, whose scales are 1.
Status check_not_fresh(Context& context, const float8_scale_slots& scales) {
  if (!context.state().keeps_records()) [[likely]] {
    return {};
  }
  const ScaleSlots slots = ScaleSlots::of(scales);
  if (!context.state().records.is_fresh(slots.amax)) return {};
  if (context.options().emulate && *slots.scale != 1.0F) return {};
  return fail(
      ErrorCode::kInvalidArgument,
      "float8_step.first_step is 0, the scale state was initialised and has not seen a step; "
      "set it in all calls of the first step");
}

Status launch_scale_update(const Context::State& context, const Kernel& kernel,
                           const kernels::ScaleUpdateArgs& args, Stream stream) {
  return launch_with(args, context.driver, kernel, 1, context.options.programmatic_launch, stream);
}

kernels::ScaleUpdateArgs first_scale_args(uint32_t* amax, uint32_t* scratch, size_t count,
                                          const ScaleSlots& slots, bool hold) {
  return {.amax = amax,
          .history = scratch,
          .scale = const_cast<float*>(slots.scale),
          .format = slots.format,
          .non_finite = scratch + count,
          .count = static_cast<int32_t>(count),
          .length = 1,
          .margin_factor = 1.0F,
          .most_recent = 1,
          .freeze = hold ? 1 : 0,
          .drop = 0,
          .found_inf = nullptr,
          .first = 1,
          .padding = 0};
}

}  // namespace f8::runtime
