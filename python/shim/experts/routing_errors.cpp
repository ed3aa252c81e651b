#include "python/shim/experts/routing_errors.hpp"

#include <torch/csrc/stable/ops.h>

#include <cstring>
#include <map>
#include <mutex>
#include <vector>

#include "python/shim/base/cuda.hpp"
#include "python/shim/base/errors.hpp"
#include "python/shim/experts/experts.hpp"
#include "python/shim/plans/workspace.hpp"

namespace float8_torch {
namespace {

// The first error of the routings of a device since it was asked for the last time. A layout begins with
// it and gives it back, so that the error outlives the layout, also in replays of a CUDA graph.
struct RoutingErrors {
  std::mutex mutex;
  struct Kept {
    Tensor words;
    const GroupLayoutPlan* plan = nullptr;  // any of the device
    Place place;
  };
  std::map<int32_t, Kept> of_devices;
};

RoutingErrors& routing_errors_of_all() {
  static auto* const all = new RoutingErrors;
  return *all;
}

}  // namespace

Tensor kept_routing_error(const Place& place, const GroupLayoutPlan& plan) {
  RoutingErrors& all = routing_errors_of_all();
  const std::lock_guard lock(all.mutex);
  RoutingErrors::Kept& kept = all.of_devices[place.key()];
  if (kept.plan == nullptr) {
    kept.words = allocate_kept(place, kRoutingErrorBytes);
    if (place.emulated) {
      std::memset(kept.words.mutable_data_ptr(), 0, kRoutingErrorBytes);
    } else {
      torch::stable::zero_(kept.words);
      // Other streams may use it at once, so the host waits, this one time.
      float8_group_error none{};
      none.struct_size = sizeof none;
      check(
          float8_group_layout_error(plan.plan, kept.words.mutable_data_ptr(), place.stream, &none));
    }
    kept.plan = &plan;
    kept.place = place;
  }
  return kept.words;
}

void copy_routing_error(Tensor to, const Tensor& from, const Place& place) {
  if (place.emulated) {
    std::memcpy(to.mutable_data_ptr(), from.mutable_data_ptr(), kRoutingErrorBytes);
  } else {
    torch::stable::copy_(to, from, true);
  }
}

std::vector<int64_t> routing_errors() {
  RoutingErrors& all = routing_errors_of_all();
  const std::lock_guard lock(all.mutex);
  std::vector<int64_t> found;
  for (auto& [device, kept] : all.of_devices) {
    if (kept.plan == nullptr) continue;
    float8_group_error error{};
    error.struct_size = sizeof error;
    const float8_stream stream = kept.place.emulated ? nullptr : current_stream(device);
    check(
        float8_group_layout_error(kept.plan->plan, kept.words.mutable_data_ptr(), stream, &error));
    if (error.code != FLOAT8_NO_GROUP_ERROR) {
      found.insert(found.end(), {device, error.code, error.expert});
    }
  }
  return found;
}

}  // namespace float8_torch
