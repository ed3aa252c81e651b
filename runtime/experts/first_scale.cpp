#include "runtime/experts/first_scale.hpp"

#include <bit>

#include "runtime/device/context_state.hpp"
#include "runtime/device/memory.hpp"

namespace f8::runtime {

Status check_scale_slots(Context& context, std::string_view recipe, const char* args,
                         const char* name, const float8_scale_slots& scales,
                         const float8_step& step) {
  const auto [amax, scale, format] = ScaleSlots::of(scales);
  if (amax == nullptr || scale == nullptr || format == nullptr) [[unlikely]] {
    return fail(ErrorCode::kInvalidArgument,
                "{}.{} is empty; recipe {} has delayed scaling, see float8_scales_slots", args,
                name, recipe);
  }
  if (step.first_step == 0) return check_not_fresh(context, scales);
  if (step.ranks == nullptr || step.evaluate != 0) return {};
  return fail(ErrorCode::kUnsupported,
              "float8_step.ranks is given in a first step: calls of experts take its scales from "
              "their own tensors, or from amaxes that they are given; leave it NULL");
}

void add_scale_slots(CallMemory& memory, size_t count, const float8_scale_slots& scales) {
  const auto [amax, scale, format] = ScaleSlots::of(scales);
  memory.add_beside("float8_scale_slots (amax)", amax, count * sizeof(uint32_t), Access::kWrite,
                    alignof(uint32_t));
  memory.add_beside("float8_scale_slots (scale)", scale,
                    count * kernels::kScaleStride * sizeof(float), Access::kRead, alignof(float));
  memory.add_beside("float8_scale_slots (format)", format, count * sizeof(uint32_t), Access::kRead,
                    alignof(uint32_t));
}

Status FirstScale::begin(const Driver& driver, const uint32_t* amax, Stream stream) const {
  F8_TRY(set_words(driver, words_, 0, kFirstWords, stream));
  if (amax != nullptr) {
    constexpr size_t kWord = sizeof(uint32_t);
    F8_TRY(copy_lines(driver, words_, kWord, amax, kWord, kWord, 1, stream));
  }
  return set_words(driver, words_ + kFirstWords, std::bit_cast<uint32_t>(1.0F),
                   kernels::kScaleStride, stream);
}

Status FirstScale::update(const Context::State& state, const Kernel& kernel, const uint32_t* format,
                          bool hold, Stream stream) const {
  const ScaleSlots slot{.amax = nullptr, .scale = scale(), .format = format};
  return launch_scale_update(state, kernel, first_scale_args(words_, words_ + 1, 1, slot, hold),
                             stream);
}

}  // namespace f8::runtime
