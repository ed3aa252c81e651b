// Converts between the device's layout of a state, which suits its kernels, and the checkpoint's.
#include "runtime/model/scale_checkpoint.hpp"

#include <algorithm>
#include <cstring>

#include "codegen/kernels/kernel_args.cuh"
#include "recipes/scales/scale_state.hpp"
#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"

namespace f8::runtime {
namespace {

// Calls f for each part of a state that a checkpoint keeps, with the words of the image, their
// number, their stride in the image, and where the checkpoint has them.
template <class Image, class Kept, class F>
void for_each_part(const DelayedScales& scales, Image* image, Kept& kept, F&& f) {
  const ScaleLayout& layout = scales.layout();
  const size_t count = scales.count();
  const auto at = [&](size_t offset) { return image + offset / sizeof(uint32_t); };
  f(at(layout.amax), count, 1, kept.amax);
  f(at(layout.scale), count, kernels::kScaleStride, kept.scale);
  f(at(layout.scale) + kernels::kInverse, count, kernels::kScaleStride, kept.inverse);
  f(at(layout.history), count * static_cast<size_t>(scales.options().history), 1, kept.history);
  f(at(layout.non_finite), count, 1, kept.non_finite);
}

Status matches(const DelayedScales& scales, const ScaleState& kept) {
  const size_t count = scales.count();
  if (kept.slots.size() != count) {
    return fail(ErrorCode::kInvalidArgument,
                "the saved scale state is of {} operands, these linears have {}; load it with the "
                "linears that it was saved with",
                kept.slots.size(), count);
  }
  const auto history = static_cast<uint32_t>(scales.options().history);
  if (kept.length != history) {
    return fail(
        ErrorCode::kInvalidArgument,
        "the saved scale state has histories of {}, these scales were planned with {}; plan "
        "them with history {}",
        kept.length, history, kept.length);
  }
  const std::span<const DelayedSlot> slots = scales.slots();
  const auto [other, own] = std::ranges::mismatch(kept.slots, slots);
  if (own == slots.end()) return {};
  const auto text = [](const DelayedSlot& slot) {
    return f8::format("{}{}", to_string(slot.dtype), slot.pow2 ? " by powers of two" : "");
  };
  return fail(ErrorCode::kInvalidArgument,
              "the saved scale state has {} as operand {}, these linears have {}; load it with the "
              "linears that it was saved with, in their order",
              text(*other), own - slots.begin(), text(*own));
}

}  // namespace

size_t saved_state_bytes(const DelayedScales& scales) {
  return ScaleState::serialized_bytes(scales.count(),
                                      static_cast<uint32_t>(scales.options().history));
}

Status save_state(const DelayedScales& scales, const void* state, std::span<std::byte> out,
                  Stream stream) {
  F8_TRY(scales.check("float8_scales_save", state, stream));
  const size_t needed = saved_state_bytes(scales);
  if (out.size() < needed) {
    return fail(ErrorCode::kInvalidArgument,
                "the buffer for the scale state has {} bytes, {} are needed", out.size(), needed);
  }
  std::vector<uint32_t> image(scales.bytes() / sizeof(uint32_t));
  if (!image.empty()) {
    const Context::State& own = scales.context()->state();
    const ScopedContext current(own.driver, own.primary);
    F8_TRY(current.status());
    F8_TRY(own.driver.check(
        own.driver.memcpy_dtoh_async(image.data(), reinterpret_cast<CUdeviceptr>(state),
                                     scales.bytes(), stream),
        "cuMemcpyDtoHAsync"));
    F8_TRY(own.driver.check(own.driver.stream_synchronize(stream), "cuStreamSynchronize"));
  }
  ScaleState kept;
  kept.slots.assign(scales.slots().begin(), scales.slots().end());
  kept.length = static_cast<uint32_t>(scales.options().history);
  for_each_part(scales, image.data(), kept,
                [](const uint32_t* from, size_t count, size_t stride, std::vector<uint32_t>& to) {
                  to.resize(count);
                  for (size_t i = 0; i < count; ++i) to[i] = from[i * stride];
                });
  const std::string bytes = kept.serialize();
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return {};
}

Status load_state(const DelayedScales& scales, void* state, std::span<const std::byte> in,
                  Stream stream) {
  F8_TRY(scales.check("float8_scales_load", state, stream));
  const ScaleState kept =
      F8_TRY(ScaleState::parse({reinterpret_cast<const char*>(in.data()), in.size()}));
  F8_TRY(matches(scales, kept));
  std::vector<uint32_t> image = scales.initial();
  if (image.empty()) return {};
  for_each_part(scales, image.data(), kept,
                [](uint32_t* to, size_t count, size_t stride, const std::vector<uint32_t>& from) {
                  for (size_t i = 0; i < count; ++i) to[i * stride] = from[i];
                });
  Context::State& own = scales.context()->state();
  if (own.keeps_records()) {
    const bool fresh = std::ranges::all_of(kept.history, [](uint32_t amax) { return amax == 0; });
    own.records.set_fresh(state, scales.bytes(), fresh);
  }
  const ScopedContext current(own.driver, own.primary);
  F8_TRY(current.status());
  F8_TRY(own.driver.check(own.driver.memcpy_htod_async(reinterpret_cast<CUdeviceptr>(state),
                                                       image.data(), scales.bytes(), stream),
                          "cuMemcpyHtoDAsync"));
  return own.driver.check(own.driver.stream_synchronize(stream), "cuStreamSynchronize");
}

}  // namespace f8::runtime
