// Counters on the device of what casts do to a linear's operands: how many elements saturated, were
// flushed to zero or came in as infinities and NaNs. Casts of a plan with LinearDesc::count add to
// them; nothing in a step waits for them. A snapshot copies them to the host in stream order.
//
// A linear has kCountersOfLinear of them, one for each fp8 copy of its tensors: those of x, w and
// dy as they lie ([0], [2], [4]) and transposed ([1], [3], [5]). What a recipe never casts stays
// zero. The layout is kernels::CastCounters', 40 bytes, aligned to 8.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

#include "codegen/kernels/kernel_args.cuh"
#include "float8/float8.h"
#include "runtime/device/context.hpp"

namespace f8::runtime {

using CastCounters = float8_cast_counters;
static_assert(sizeof(CastCounters) == 40 && sizeof(kernels::CastCounters) == 40 &&
              offsetof(CastCounters, scale) == offsetof(kernels::CastCounters, scale) &&
              offsetof(CastCounters, elements) == offsetof(kernels::CastCounters, elements));

inline constexpr std::array<const char*, 6> kCounterNames = {"x", "x^T", "w", "w^T", "dy", "dy^T"};
inline constexpr size_t kCountersOfLinear = kCounterNames.size();
static_assert(kCountersOfLinear == FLOAT8_LINEAR_COUNTERS);

// Both enqueue on `stream` and touch `count` counters. `to` may be pageable, where the copy may
// wait for the stream; into pinned memory it does not, and in a CUDA graph it must be pinned.
[[nodiscard]] Status clear_counters(Context& context, CastCounters* counters, size_t count,
                                    Stream stream);
[[nodiscard]] Status snapshot_counters(Context& context, const CastCounters* counters, size_t count,
                                       CastCounters* to, Stream stream);

// A line for each copy that was cast: "layer.0 w^T: amax 3.5 scale 128 saturated 0 flushed 12
// (0.0029%) non-finite 0 of 409600". The scale is shown where it is the tensor's.
[[nodiscard]] std::string format_counters(std::string_view linear,
                                          std::span<const CastCounters> counters);

}  // namespace f8::runtime
