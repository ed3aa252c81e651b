// The scale update of delayed scaling: from the amaxes that the casts recorded to the scales of the
// next step, for all operands of a model at once, one thread each. recipes/delayed.hpp is the
// specification.
#pragma once

#include "scale.cuh"

namespace f8::kernels {

inline constexpr int kUpdateThreads = 256;

F8_DEVICE void scale_update(const ScaleUpdateArgs& args) {
  launch_dependents();
  grid_dependency_wait();
  const i32 i = static_cast<i32>(blockIdx.x * kUpdateThreads + threadIdx.x);
  if (i >= args.count) return;
  const u32 amax = load_global(args.amax + i);
  args.amax[i] = 0;
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

}  // namespace f8::kernels
