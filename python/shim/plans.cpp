// Contexts and plans, each made once. Nothing here is ever destroyed: a process that ends may have
// lost its CUDA context before static objects go.
#include "python/shim/plans.hpp"

#include <map>
#include <memory>
#include <mutex>
#include <shared_mutex>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <utility>

#include "python/shim/cuda.hpp"
#include "python/shim/errors.hpp"

namespace float8_torch {
namespace {

constexpr int32_t kEmulated = -1;

struct Hash {
  size_t operator()(const PlanKey& key) const {
    uint64_t hash = key.config;
    const auto add = [&hash](uint64_t value) {
      hash ^= value;
      hash *= 0x9e3779b97f4a7c15u;
      hash ^= hash >> 29;
    };
    add(static_cast<uint64_t>(key.m_max));
    add(static_cast<uint64_t>(key.n) << 32 ^ static_cast<uint64_t>(key.k));
    add(static_cast<uint64_t>(static_cast<uint32_t>(key.device)) << 32 |
        static_cast<uint64_t>(key.tensor_dtype) << 8 | static_cast<uint64_t>(key.grad_dtype));
    return hash;
  }
};

struct Plans {
  std::shared_mutex mutex;
  std::unordered_map<PlanKey, std::unique_ptr<const Plan>, Hash> plans;
  std::map<std::pair<uint64_t, int32_t>, const float8_linear*> any;  // by config and device

  const Plan* find(const PlanKey& key) {
    const std::shared_lock lock(mutex);
    const auto found = plans.find(key);
    return found == plans.end() ? nullptr : found->second.get();
  }
};

Plans& plans() {
  static Plans* const all = new Plans;
  return *all;
}

// Everything that a desc has but m_max and the recipe.
float8_linear_desc layer_desc(const PlanKey& key) {
  const Config config(key.config);
  float8_linear_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.n = key.n;
  desc.k = key.k;
  desc.tensor_dtype = key.tensor_dtype;
  desc.grad_weight_dtype = key.grad_dtype;
  desc.bias = config.bias();
  desc.bias_grad = config.bias();
  desc.bias_grad_dtype = key.grad_dtype;
  desc.recompute = config.recompute();
  desc.non_finite = config.hold() ? FLOAT8_HOLD : FLOAT8_PROPAGATE;
  return desc;
}

std::unique_ptr<Plan> make_plan(const PlanKey& key) {
  float8_linear_desc desc = layer_desc(key);
  float8_recipe custom;
  desc.m_max = key.m_max;
  Config(key.config).set_recipe(desc, custom);
  auto plan = std::make_unique<Plan>();
  check(float8_linear_plan(context_of(key.device), &desc, &plan->linear));
  plan->workspace_bytes = float8_linear_workspace_bytes(plan->linear);
  plan->saved_bytes = float8_linear_saved_bytes(plan->linear);
  return plan;
}

}  // namespace

float8_context* context_of(int32_t device) {
  static std::mutex* const mutex = new std::mutex;
  static auto* const contexts = new std::map<int32_t, float8_context*>;
  const std::lock_guard lock(*mutex);
  float8_context*& context = (*contexts)[device];
  if (context == nullptr) {
    float8_context_options options = {};
    options.struct_size = sizeof options;
    options.emulate = device == kEmulated;
    if (device != kEmulated) load_cuda_libraries();
    check(float8_context_create(device == kEmulated ? 0 : device, &options, &context));
  }
  return context;
}

Place place_of(const Tensor& tensor, Config config) {
  Place place{.device = device_of(tensor), .emulated = config.emulate()};
  if (place.device.is_cuda()) {
    if (place.emulated) {
      throw std::invalid_argument(
          "float8: a CUDA tensor met a linear with emulate=True, which computes on the CPU; "
          "convert "
          "the model without emulate");
    }
    place.stream = current_stream(place.device.index);
    place.capturing = is_capturing(place.stream);
  } else if (!place.emulated || place.device.type != aoti_torch_device_type_cpu()) {
    throw std::invalid_argument(
        "float8: the tensors are not on a CUDA device; move the model and its input to a Hopper "
        "GPU, or set emulate=True in the config to compute on the CPU (slow, for tests)");
  }
  return place;
}

const Plan& plan_for(const PlanKey& key, const Place& place) {
  Plans& all = plans();
  if (const Plan* plan = all.find(key)) [[likely]] {
    return *plan;
  }
  if (place.capturing) {
    throw std::runtime_error(
        "float8: a CUDA graph is being captured, and the linear of M up to " +
        std::to_string(key.m_max) + ", N " + std::to_string(key.n) + ", K " +
        std::to_string(key.k) +
        " has no plan yet; run forward and backward once with this shape before the capture");
  }
  static std::mutex* const planning = new std::mutex;
  const std::lock_guard lock(*planning);
  if (const Plan* plan = all.find(key)) return *plan;  // another thread was first
  auto plan = make_plan(key);
  const std::unique_lock write(all.mutex);
  all.any.emplace(std::pair(Config(key.config).without_bias(), key.device), plan->linear);
  return *all.plans.emplace(key, std::move(plan)).first->second;
}

void plan_all(const std::vector<PlanKey>& keys, const Place& place) {
  if (keys.empty()) return;
  // A model's plan compiles for all of its layers; the context keeps the kernels.
  std::vector<float8_linear_desc> descs;
  std::vector<std::string> names;
  for (const PlanKey& key : keys) {
    descs.push_back(layer_desc(key));
    names.push_back(std::to_string(key.n).append(" by ").append(std::to_string(key.k)));
  }
  std::vector<float8_model_layer> layers;
  for (size_t i = 0; i < keys.size(); ++i) {
    layers.push_back({sizeof(float8_model_layer), names[i].c_str(), &descs[i]});
  }
  float8_linear_desc recipe = {};
  float8_recipe custom;
  Config(keys[0].config).set_recipe(recipe, custom);
  float8_model_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.layers = layers.data();
  desc.count = layers.size();
  desc.tokens = keys[0].m_max;
  desc.recipe = recipe.recipe;
  desc.custom_recipe = recipe.custom_recipe;
  float8_model* model = nullptr;
  check(float8_model_plan(context_of(keys[0].device), &desc, &model));
  float8_model_destroy(model);
  for (const PlanKey& key : keys) (void)plan_for(key, place);
}

const float8_linear* any_plan(uint64_t config, int32_t device) {
  Plans& all = plans();
  const std::shared_lock lock(all.mutex);
  const auto found = all.any.find({config, device});
  return found == all.any.end() ? nullptr : found->second;
}

SavedBytes saved_bytes(int64_t n, int64_t k, Config config) {
  PlanKey key{.config = config.bits(), .m_max = kRows, .n = n, .k = k, .device = kEmulated};
  Place place;
  place.emulated = true;
  const auto one = static_cast<int64_t>(plan_for(key, place).saved_bytes);
  key.m_max = 2 * kRows;
  const auto two = static_cast<int64_t>(plan_for(key, place).saved_bytes);
  return {.base = one - (two - one), .per_block = two - one};
}

}  // namespace float8_torch
