// The scale update of delayed scaling: from the amaxes that the casts recorded to the scales of the
// next step, for all operands of a model at once. recipes/scales/delayed.hpp is the specification. One
// block does it, since each operand's history depends on whether all amaxes are finite.
#pragma once

#include "codegen/kernels/cast/scale.cuh"

namespace f8::kernels {

inline constexpr int kUpdateThreads = 256;

F8_DEVICE bool is_non_finite(u32 amax) {
  return amax >= 0x7F800000U;
}
F8_DEVICE bool counts(u32 amax) {
  return amax != 0 && !is_non_finite(amax);
}

F8_DEVICE bool any_non_finite(const ScaleUpdateArgs& args) {
  int found = 0;
  for (i32 i = static_cast<i32>(threadIdx.x); i < args.count; i += kUpdateThreads) {
    found |= is_non_finite(args.amax[i]) ? 1 : 0;
  }
  return __syncthreads_or(found) != 0;
}

// Puts the amax of a step that counts into a history, and gives the amax that the scale is for.
F8_DEVICE u32 record(const ScaleUpdateArgs& args, i32 i, u32 amax, bool dropped, float growth) {
  const bool rolls = counts(amax) && !dropped;
  u32 most = rolls ? amax : 0;
  u32 newest = most;
  u32 second = 0;
  u32 moved = amax;
  for (i32 age = 0; age < args.length; ++age) {
    u32* const at = args.history + static_cast<i64>(age) * args.count + i;
    const u32 known = *at;
    if (rolls) *at = moved;
    moved = known;
    if (!counts(known) || (rolls && age + 1 == args.length)) continue;
    if (newest == 0) newest = known;
    second = max(second, min(most, known));
    most = max(most, known);
  }
  if (args.most_recent != 0) return newest;
  if (second == 0) return most;
  return min(most, __float_as_uint(__uint_as_float(second) * growth));
}

F8_DEVICE void update_operand(const ScaleUpdateArgs& args, i32 i, bool asked, bool dropped) {
  const u32 amax = args.amax[i];
  args.amax[i] = 0;
  if (is_non_finite(amax) && !asked) ++args.non_finite[i];
  const u32 format = args.format[i];
  const bool e5m2 = (format & kFormatE5m2) != 0;
  u32 most = 0;
  if (args.first == 0) {
    most = record(args, i, amax, dropped, e5m2 ? 0x1p16F : 0x1p8F);
  } else if (!is_non_finite(amax) || args.freeze == 0) {
    most = amax;
  }
  float scale = 1.0F;
  if (most != 0) {
    scale = scale_from_amax(most, e5m2 ? 57344.0F : 448.0F);
    scale = scale * args.margin_factor;
    if ((format & kFormatPow2) != 0) scale = power_of_two(scale);
  } else if (!dropped) {
    return;
  }
  args.scale[static_cast<i64>(i) * kScaleStride] = scale;
  args.scale[static_cast<i64>(i) * kScaleStride + kInverse] = inverse(scale);
}

F8_DEVICE void scale_update(const ScaleUpdateArgs& args) {
  launch_dependents();
  grid_dependency_wait();
  const bool asked =
      args.drop != 0 || (args.found_inf != nullptr && load_global(args.found_inf) != 0.0F);
  const bool checks = args.first == 0 && args.freeze == 0;
  const bool dropped = asked || (checks && any_non_finite(args));
  for (i32 i = static_cast<i32>(threadIdx.x); i < args.count; i += kUpdateThreads) {
    update_operand(args, i, asked, dropped);
  }
}

// Tells a trainer, without a wait, that the step recorded an amax that is not finite.
F8_DEVICE void found_inf(const FoundInfArgs& args) {
  launch_dependents();
  grid_dependency_wait();
  const i32 i = static_cast<i32>(blockIdx.x * kUpdateThreads + threadIdx.x);
  if (i < args.count && load_global(args.amax + i) >= 0x7F800000U) *args.found_inf = 1.0F;
}

}  // namespace f8::kernels
