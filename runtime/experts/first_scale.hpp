// Delayed scaling in calls of experts: the slots of a scale state that a call is given, and the scale of a
// first step, which comes from the call's own tensors.
#pragma once

#include <string_view>

#include "runtime/quantize/delayed_scales.hpp"

namespace f8::runtime {

// Checks the slots of a call, whose recipe has delayed scaling.
[[nodiscard]] Status check_scale_slots(Context& context, std::string_view recipe, const char* args,
                                       const char* name, const float8_scale_slots& scales,
                                       const float8_step& step);
// Lists the memory of `count` slots, which a call reads and whose amaxes it raises.
void add_scale_slots(CallMemory& memory, size_t count, const float8_scale_slots& scales);

// The scale of a first step, in scratch of a call: begin(), something that raises the amax, then update().
class FirstScale {
 public:
  static constexpr size_t kBytes = (kFirstWords + kernels::kScaleStride) * sizeof(uint32_t);
  explicit FirstScale(uint32_t* scratch) : words_(scratch) {}

  [[nodiscard]] uint32_t* amax() const { return words_; }
  [[nodiscard]] float* scale() const { return reinterpret_cast<float*>(words_ + kFirstWords); }
  // Sets the amax to *amax, in device memory, or to 0 for NULL, and the scale to 1.
  [[nodiscard]] Status begin(const Driver& driver, const uint32_t* amax, Stream stream) const;
  // Replaces the scale by that of the amax. It stays 1 where the amax gives none.
  [[nodiscard]] Status update(const Context::State& state, const Kernel& kernel,
                              const uint32_t* format, bool hold, Stream stream) const;

 private:
  uint32_t* words_;
};

}  // namespace f8::runtime
