// Handles of scale states by layout, and the linears whose first step is to come.
#include "python/shim/scales/scales.hpp"

#include <map>
#include <mutex>
#include <set>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <tuple>
#include <vector>

#include "python/shim/base/errors.hpp"

namespace float8_torch {
namespace {

constexpr size_t kPartBytes = 16;  // python/float8/torch/scales.py
constexpr int64_t kExportedFirst = int64_t{1} << 56;
constexpr int64_t kLayoutBits = kExportedFirst - 1;
constexpr int64_t kMostLinears = int64_t{1} << 20;

[[nodiscard]] int64_t linears_of(int64_t layout) {
  return layout & 0xffffffff;
}
[[nodiscard]] int32_t history_of(int64_t layout) {
  return static_cast<uint16_t>(layout >> 32);
}

using HandleKey = std::tuple<uint64_t, int64_t, int32_t>;  // config, layout, device

struct Known {
  std::shared_mutex mutex;
  std::map<HandleKey, float8_scales*> handles;
  std::map<const void*, std::set<int64_t>> first;  // linears, by the state
};

Known& known() {
  static Known* const all = new Known;
  return *all;
}

float8_scales* make_handle(uint64_t config, int64_t layout, int32_t device, const AnyPlan& plan) {
  const auto count = static_cast<uint32_t>(layout);
  const std::vector<const float8_linear*> linears(plan.linear != nullptr ? count : 0, plan.linear);
  const std::vector<const float8_experts*> experts(plan.linear == nullptr ? count : 0,
                                                   plan.experts);
  float8_scales_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.linears = linears.data();
  desc.count = linears.size();
  desc.experts = experts.data();
  desc.experts_count = experts.size();
  desc.history = history_of(layout);
  desc.margin = static_cast<uint8_t>(layout >> 48);
  desc.non_finite = Config(config).saturate() ? FLOAT8_SATURATE : FLOAT8_PROPAGATE;
  float8_scales* handle = nullptr;
  check(float8_scales_plan(context_of(device), &desc, &handle));
  return handle;
}

}  // namespace

void check_form_of_state(const Tensor& tensor) {
  if (tensor.dim() == 1 && tensor.is_contiguous() && dtype_of(tensor) == aoti_torch_dtype_uint8())
      [[likely]] {
    return;
  }
  throw std::invalid_argument(
      "float8: a scale state is a contiguous tensor of one dimension in uint8, as "
      "float8.torch.attach_scales makes it; convert the model again");
}

Scales::Scales(const Tensor& tensor, int64_t layout, Config config, const Place& place)
    : place_(place),
      config_(config.of_casts()),
      layout_(layout & ~kExportedFirst),
      exported_first_((layout & kExportedFirst) != 0) {
  check_form_of_state(tensor);
  if (layout_ != (layout & kLayoutBits) || linears_of(layout_) < 1 ||
      linears_of(layout_) > kMostLinears) [[unlikely]] {
    throw std::invalid_argument("float8: " + std::to_string(layout) +
                                " is no layout of a scale state of 1 to 2^20 linears; convert the "
                                "model again");
  }
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_size(tensor.get(), &bytes_));
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_storage_offset(tensor.get(), &offset_));
  state_ = static_cast<char*>(tensor.mutable_data_ptr()) - offset_;
}

float8_scales* Scales::handle(const AnyPlan& plan) const {
  Known& all = known();
  const HandleKey key{config_, layout_, place_.key()};
  {
    const std::shared_lock lock(all.mutex);
    if (const auto found = all.handles.find(key); found != all.handles.end()) return found->second;
  }
  if (place_.capturing) {
    throw std::runtime_error(
        "float8: a CUDA graph is being captured before the first step of delayed scaling; run a "
        "whole step once before the capture");
  }
  const std::unique_lock lock(all.mutex);
  float8_scales*& handle = all.handles[key];
  if (handle == nullptr) handle = make_handle(config_, layout_, place_.key(), plan);
  return handle;
}

float8_scales* Scales::plan_of_state(const AnyPlan& any) const {
  // Every linear has more than a part of the state, so no layout makes a plan beyond its memory.
  const bool has_parts = linears_of(layout_) <= bytes_ / static_cast<int64_t>(kPartBytes);
  float8_scales* const plan = has_parts ? handle(any) : nullptr;
  // A copy of a part is no state: its amaxes would be lost, and what lies behind it is not ours.
  if (plan != nullptr && float8_scales_bytes(plan) == static_cast<size_t>(bytes_)) [[likely]] {
    return plan;
  }
  throw std::invalid_argument(
      "float8: a linear was given " + std::to_string(bytes_) +
      " bytes that are not the scale state of its " + std::to_string(linears_of(layout_)) +
      " linears" +
      (has_parts ? ", which has " + std::to_string(float8_scales_bytes(plan)) : std::string()) +
      (bytes_ == static_cast<int64_t>(kPartBytes)
           ? "; they are a copy of a part of it, as hooks that copy what a compiled graph saves "
             "for backward make one (activation offload): leave the hooks out, or torch.compile"
           : "; the state was replaced, resized or freed, or its layout changed: convert the model "
             "again"));
}

void Scales::check_whole(const Tensor& tensor) const {
  const int64_t numel = tensor.numel();
  if (offset_ == 0 && numel == bytes_) return;
  throw std::invalid_argument("float8: a scale state was given as " + std::to_string(numel) +
                              " bytes at " + std::to_string(offset_) + " of a storage of " +
                              std::to_string(bytes_) +
                              ", not as all of it; the state was replaced, resized or freed");
}

float8_scale_slots Scales::slots(const AnyPlan& any) const {
  const float8_scales* const plan = plan_of_state(any);
  if (offset_ % static_cast<int64_t>(kPartBytes) != 0) {
    throw std::invalid_argument(
        "float8: a linear's part of a scale state begins at a multiple of " +
        std::to_string(kPartBytes) + " bytes, not at " + std::to_string(offset_));
  }
  float8_scale_slots slots;
  check(float8_scales_slots(plan, state_, static_cast<size_t>(offset_) / kPartBytes, &slots));
  return slots;
}

void float8_forget_state(const void* state) {
  copy_first_steps(nullptr, state);
}

void copy_first_steps(const void* from, const void* to) {
  Known& all = known();
  const std::unique_lock lock(all.mutex);
  const auto found = from == nullptr ? all.first.end() : all.first.find(from);
  if (found == all.first.end()) {
    all.first.erase(to);
  } else {
    all.first[to] = found->second;
  }
}

bool Scales::first_step() const {
  if (exported_first_) return true;
  Known& all = known();
  const std::shared_lock lock(all.mutex);
  const auto found = all.first.find(state_);
  if (found == all.first.end()) return false;
  if (place_.capturing && found->second.size() == static_cast<uint32_t>(layout_)) {
    throw std::runtime_error(
        "float8: a CUDA graph is being captured in the first step of delayed scaling; run a whole "
        "step, with sync_float8_amax_and_scale_history, before the capture");
  }
  return found->second.contains(offset_ / static_cast<int64_t>(kPartBytes));
}

void Scales::set_first_steps(const std::vector<int64_t>& linears) const {
  Known& all = known();
  const std::unique_lock lock(all.mutex);
  if (linears.empty()) {
    all.first.erase(state_);
  } else {
    all.first[state_] = {linears.begin(), linears.end()};
  }
}

std::vector<int64_t> Scales::find_first_steps() const {
  const AnyPlan any = any_plan(config_, place_.key());
  std::vector<int32_t> first(static_cast<uint32_t>(layout_), 1);
  if (any.is_there()) {
    check(float8_scales_first_steps(plan_of_state(any), state_, first.data(), first.size(),
                                    place_.stream));
  }
  std::vector<int64_t> linears;
  for (size_t i = 0; i < first.size(); ++i) {
    if (first[i] != 0) linears.push_back(static_cast<int64_t>(i));
  }
  return linears;
}

void Scales::sync(const float* found_inf) const {
  const AnyPlan any = any_plan(config_, place_.key());
  if (!any.is_there()) return;
  check(float8_scales_sync_unless(plan_of_state(any), state_, found_inf, nullptr, place_.stream));
}

void Scales::init() const {
  const AnyPlan any = any_plan(config_, place_.key());
  if (!any.is_there()) {
    throw std::invalid_argument("float8: no linear of this recipe has a plan; call prepare first");
  }
  check(float8_scales_init(plan_of_state(any), state_, place_.stream));
}

int64_t Scales::bytes() const {
  return scale_state_bytes(config_, static_cast<uint32_t>(layout_), history_of(layout_));
}

static Scales scales_of(const Tensor& state, int64_t config, int64_t layout) {
  const Scales scales(state, layout, Config(config), place_of(state, Config(config)));
  scales.check_whole(state);
  return scales;
}

// It reads no memory, so an emulated device's state may be on a GPU.
static Place place_of_flag(const Tensor& state, Config config) {
  return config.emulate() ? Place{.device = device_of(state), .emulated = true}
                          : place_of(state, config);
}

int64_t scales_bytes(int64_t config, int64_t layout) {
  Place place;
  place.emulated = true;
  return Scales(empty_bytes(1, {}), layout, Config(config), place).bytes();
}

void scales_init(const Tensor& state, int64_t config, int64_t layout) {
  scales_of(state, config, layout).init();
}

void scales_set_first(const Tensor& state, int64_t config, int64_t layout,
                      std::vector<int64_t> linears) {
  const Place place = place_of_flag(state, Config(config));
  const Scales scales(state, layout, Config(config), place);
  scales.check_whole(state);
  scales.set_first_steps(linears);
}

std::vector<int64_t> scales_find_first(const Tensor& state, int64_t config, int64_t layout) {
  return scales_of(state, config, layout).find_first_steps();
}

void scales_sync(const Tensor& state, int64_t config, int64_t layout,
                 const std::optional<Tensor>& found_inf) {
  const float* flag = nullptr;
  if (found_inf) {
    if (found_inf->numel() != 1 || dtype_of(*found_inf) != aoti_torch_dtype_float32() ||
        device_of(*found_inf) != device_of(state)) {
      throw std::invalid_argument(
          "float8: found_inf is one float32 element on the device of the scale state");
    }
    check_memory(*found_inf, "found_inf");
    flag = static_cast<const float*>(found_inf->mutable_data_ptr());
  }
  scales_of(state, config, layout).sync(flag);
}

}  // namespace float8_torch
