// The scale update of delayed scaling: from the amaxes that the casts recorded to the scales of the
// next step, for all operands of a model at once, one thread each. recipes/delayed.hpp is the
// specification.
#pragma once

#include "scale.cuh"

namespace f8::kernels {

inline constexpr int kUpdateThreads = 256;

// The step leaves nothing behind. A state without a history has scale 1, as init() leaves it: a
// first step over ranks may have left its own scale there.
F8_DEVICE void drop_step(const ScaleUpdateArgs& args, i32 i) {
  for (i32 age = 0; age < args.length; ++age) {
    if (load_global(args.history + static_cast<i64>(age) * args.count + i) != 0) return;
  }
  args.scale[static_cast<i64>(i) * kScaleStride] = 1.0F;
  args.scale[static_cast<i64>(i) * kScaleStride + kInverse] = 1.0F;
}

F8_DEVICE void scale_update(const ScaleUpdateArgs& args) {
  launch_dependents();
  grid_dependency_wait();
  const i32 i = static_cast<i32>(blockIdx.x * kUpdateThreads + threadIdx.x);
  if (i >= args.count) return;
  const u32 amax = load_global(args.amax + i);
  args.amax[i] = 0;
  if (args.drop != 0 || (args.found_inf != nullptr && load_global(args.found_inf) != 0.0F)) {
    return drop_step(args, i);
  }
  if (amax >= 0x7F800000U) {
    args.non_finite[i] = load_global(args.non_finite + i) + 1;
    if (args.freeze != 0) return;
  }
  u32 most = amax;
  for (i32 age = args.length - 1; age > 0; --age) {
    const u32 older = load_global(args.history + static_cast<i64>(age - 1) * args.count + i);
    args.history[static_cast<i64>(age) * args.count + i] = older;
    most = max(most, older);
  }
  args.history[i] = amax;
  if (args.most_recent != 0) most = amax;
  if (most == 0) return;
  const u32 format = load_global(args.format + i);
  float scale = scale_from_amax(most, (format & kFormatE5m2) != 0 ? 57344.0F : 448.0F);
  scale = scale * args.margin_factor;
  if ((format & kFormatPow2) != 0) scale = power_of_two(scale);
  args.scale[static_cast<i64>(i) * kScaleStride] = scale;
  args.scale[static_cast<i64>(i) * kScaleStride + kInverse] = inverse(scale);
}

// Tells a trainer, without a wait, that the step recorded an amax that is not finite.
F8_DEVICE void found_inf(const FoundInfArgs& args) {
  launch_dependents();
  grid_dependency_wait();
  const i32 i = static_cast<i32>(blockIdx.x * kUpdateThreads + threadIdx.x);
  if (i < args.count && load_global(args.amax + i) >= 0x7F800000U) *args.found_inf = 1.0F;
}

}  // namespace f8::kernels
