// The first error of the routings of a device, which outlives their layouts.
#pragma once

#include <cstddef>

#include "python/shim/base/tensors.hpp"
#include "python/shim/plans/plans.hpp"

namespace float8_torch {

inline constexpr size_t kRoutingErrorBytes = 2 * sizeof(int32_t);  // at the front of a layout

// The memory of the error of a place, made at its first layout, which is never a captured one.
Tensor kept_routing_error(const Place& place, const GroupLayoutPlan& plan);
void copy_routing_error(Tensor to, const Tensor& from, const Place& place);

}  // namespace float8_torch
