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

uint64_t mix(uint64_t hash, uint64_t value) {
  hash ^= value;
  hash *= 0x9e3779b97f4a7c15u;
  return hash ^ hash >> 29;
}

uint64_t pair_of(int64_t high, int64_t low) {
  return static_cast<uint64_t>(high) << 32 ^ static_cast<uint64_t>(low);
}

struct Hash {
  size_t operator()(const PlanKey& key) const {
    const uint64_t shape =
        mix(mix(key.config, static_cast<uint64_t>(key.m_max)), pair_of(key.n, key.k));
    return mix(shape, pair_of(key.device, (key.weight_shards ? 1 << 16 : 0) |
                                              key.tensor_dtype << 8 | key.grad_dtype));
  }
  size_t operator()(const QuantizerKey& key) const {
    const int64_t flags = (key.noop_flag ? 1 << 12 : 0) | (key.f32_source ? 4 : 0) |
                          key.source << 17 | (key.over_ranks ? 2 : 0) | key.copies << 13;
    const uint64_t shape = mix(mix(key.config, pair_of(key.rows_max, key.cols)),
                               static_cast<uint64_t>(key.whole_rows));
    return mix(shape, pair_of(key.device, key.operand << 10 | key.dtype << 3 | flags));
  }
  size_t operator()(const std::vector<const Quantizer*>& key) const {
    uint64_t hash = key.size();
    for (const Quantizer* quantizer : key) {
      hash = mix(hash, reinterpret_cast<uintptr_t>(quantizer));
    }
    return hash;
  }
  size_t operator()(const GemmKey& key) const {
    const int64_t flags = (key.bias ? 2 : 0) | (key.accumulate ? 1 : 0);
    const uint64_t shape =
        mix(mix(key.config, static_cast<uint64_t>(key.m_max)), pair_of(key.n, key.k));
    return mix(shape,
               pair_of(key.device, key.sm_limit << 12 | key.kind << 10 | key.dtype << 2 | flags));
  }
  size_t operator()(const ExpertsKey& key) const {
    const uint64_t shape =
        mix(mix(key.config, static_cast<uint64_t>(key.m_max)), pair_of(key.n, key.k));
    return mix(shape,
               pair_of(key.device, key.experts << 8 | key.tensor_dtype << 4 | key.grad_dtype));
  }
  size_t operator()(const ExpertQuantizerKey& key) const {
    const int flags = (key.noop_flag ? 4 : 0) | (key.f32_source ? 2 : 0) | (key.over_ranks ? 1 : 0);
    return mix(mix(key.config, pair_of(key.n, key.k)),
               pair_of(key.device, key.experts << 8 | key.dtype << 4 | flags));
  }
  size_t operator()(const MoeKey& key) const {
    return mix((*this)(key.linear), key.rows_in_place ? 1 : 0);
  }
  size_t operator()(const GroupLayoutKey& key) const {
    return mix(static_cast<uint64_t>(key.m_max), pair_of(key.device, key.experts));
  }
  size_t operator()(const RouteKey& key) const {
    return mix(pair_of(key.top_k, key.experts), pair_of(key.device, key.long_ids ? 1 : 0));
  }
  size_t operator()(const CombineKey& key) const {
    return mix(mix(static_cast<uint64_t>(key.cols), pair_of(key.top_k, key.experts)),
               pair_of(key.device, key.dtype));
  }
};

// Values that are made at the first use of their key, one at a time, and kept.
template <class Key, class Value>
class Registry {
 public:
  // `make` returns a unique_ptr; `what` names the key where a captured stream has no value.
  template <class Make, class What>
  const Value& get(const Key& key, const Place& place, const Make& make, const What& what) {
    if (const Value* value = find(key)) [[likely]] {
      return *value;
    }
    if (place.capturing) {
      throw std::runtime_error(
          "float8: a CUDA graph is being captured, and " + what() +
          " has no plan yet; run forward and backward once with this shape before the capture");
    }
    const std::lock_guard lock(making_);
    if (const Value* value = find(key)) return *value;  // another thread was first
    auto value = make();
    const std::unique_lock write(mutex_);
    return *values_.emplace(key, std::move(value)).first->second;
  }

  template <class Visit>
  void for_each(const Visit& visit) {
    const std::shared_lock lock(mutex_);
    for (const auto& [key, value] : values_) visit(key, *value);
  }

 private:
  const Value* find(const Key& key) {
    const std::shared_lock lock(mutex_);
    const auto found = values_.find(key);
    return found == values_.end() ? nullptr : found->second.get();
  }

  std::shared_mutex mutex_;
  std::mutex making_;
  std::unordered_map<Key, std::unique_ptr<const Value>, Hash> values_;
};

// One plan of each recipe and device, for what needs any of them.
struct AnyPlans {
  std::mutex mutex;
  std::map<std::pair<uint64_t, int32_t>, AnyPlan> plans;
};

AnyPlans& any_plans() {
  static auto* const all = new AnyPlans;
  return *all;
}

void keep_any(uint64_t config, int32_t device, const AnyPlan& plan) {
  AnyPlans& any = any_plans();
  const std::lock_guard lock(any.mutex);
  any.plans.emplace(std::pair(Config(config).of_casts(), device), plan);
}

Registry<PlanKey, Plan>& plans() {
  static auto* const all = new Registry<PlanKey, Plan>;
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
  desc.non_finite = config.saturate() ? FLOAT8_SATURATE : FLOAT8_PROPAGATE;
  desc.weight_shards = key.weight_shards;
  return desc;
}

std::unique_ptr<Plan> make_plan(const PlanKey& key) {
  float8_linear_desc desc = layer_desc(key);
  float8_recipe custom;
  desc.m_max = key.m_max;
  Config(key.config).set_recipe(desc, custom);
  auto plan = std::make_unique<Plan>();
  const float8_status status = float8_linear_plan(context_of(key.device), &desc, &plan->linear);
  if (key.weight_shards && status == FLOAT8_UNSUPPORTED) return plan;
  check(status);
  plan->workspace_bytes = float8_linear_workspace_bytes(plan->linear);
  for (int given = 0; given < 4; ++given) {
    plan->saved[static_cast<size_t>(given)] =
        float8_linear_saved_bytes_with_tensors(plan->linear, given & 1, given >> 1);
  }
  keep_any(key.config, key.device, {.linear = plan->linear});
  return plan;
}

// `custom` is what the desc points to.
float8_quantizer_desc quantizer_desc(const QuantizerKey& key, float8_recipe& custom) {
  const Config config(key.config);
  float8_quantizer_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.rows_max = key.rows_max;
  desc.cols = key.cols;
  desc.operand = key.operand;
  desc.dtype = key.dtype;
  desc.copies = key.copies;
  desc.over_ranks = key.over_ranks;
  desc.whole_rows = key.whole_rows;
  desc.noop_flag = key.noop_flag;
  desc.f32_source = key.f32_source;
  desc.source = key.source;
  config.set_recipe(desc, custom);
  desc.non_finite = config.saturate() ? FLOAT8_SATURATE : FLOAT8_PROPAGATE;
  return desc;
}

std::unique_ptr<Quantizer> make_quantizer(const QuantizerKey& key) {
  float8_recipe custom;
  const float8_quantizer_desc desc = quantizer_desc(key, custom);
  auto made = std::make_unique<Quantizer>();
  made->context = context_of(key.device);
  check(float8_quantizer_plan(made->context, &desc, &made->quantizer));
  if (key.noop_flag) check(float8_weights_compare(made->context, nullptr, 0, nullptr));
  made->workspace_bytes = float8_quantizer_workspace_bytes(made->quantizer);
  made->qt_bytes = float8_quantizer_transposed_bytes(made->quantizer);
  made->q_bytes = float8_quantizer_tensor_bytes(made->quantizer) - made->qt_bytes;
  made->amax_words = static_cast<int64_t>(float8_quantizer_amax_words(made->quantizer));
  made->row_amax_words = static_cast<int64_t>(float8_quantizer_row_amax_words(made->quantizer));
  return made;
}

std::unique_ptr<GemmPlan> make_gemm(const GemmKey& key) {
  float8_recipe custom;
  float8_gemm_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.m_max = key.m_max;
  desc.n = key.n;
  desc.k = key.k;
  desc.gemm = key.kind;
  desc.d_dtype = key.dtype;
  Config(key.config).set_recipe(desc, custom);
  desc.bias = key.bias;
  desc.accumulate = key.accumulate;
  desc.sm_limit = key.sm_limit;
  auto made = std::make_unique<GemmPlan>();
  check(float8_gemm_plan_create(context_of(key.device), &desc, &made->plan));
  made->workspace_bytes = float8_gemm_workspace_bytes(made->plan);
  return made;
}

std::unique_ptr<ExpertsPlan> make_experts(const ExpertsKey& key) {
  const Config config(key.config);
  float8_recipe custom;
  float8_experts_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.m_max = key.m_max;
  desc.n = key.n;
  desc.k = key.k;
  desc.experts = key.experts;
  desc.tensor_dtype = key.tensor_dtype;
  config.set_recipe(desc, custom);
  desc.grad_weight_dtype = key.grad_dtype;
  desc.non_finite = config.saturate() ? FLOAT8_SATURATE : FLOAT8_PROPAGATE;
  desc.recompute_weight = config.recompute() ? 1 : 0;
  auto made = std::make_unique<ExpertsPlan>();
  check(float8_experts_plan(context_of(key.device), &desc, &made->experts));
  made->workspace_bytes = float8_experts_workspace_bytes(made->experts);
  made->saved_bytes = float8_experts_saved_bytes(made->experts);
  keep_any(key.config, key.device, {.experts = made->experts});
  return made;
}

// Calls `work` with the description of a quantizer, which does not outlive the call.
template <class Work>
void with_expert_desc(const ExpertQuantizerKey& key, const Work& work) {
  const Config config(key.config);
  float8_recipe custom;
  float8_expert_quantizer_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.n = key.n;
  desc.k = key.k;
  desc.experts = key.experts;
  desc.dtype = key.dtype;
  config.set_recipe(desc, custom);
  desc.non_finite = config.saturate() ? FLOAT8_SATURATE : FLOAT8_PROPAGATE;
  desc.f32_source = key.f32_source ? 1 : 0;
  desc.over_ranks = key.over_ranks ? 1 : 0;
  desc.noop_flag = key.noop_flag ? 1 : 0;
  work(desc);
}

std::unique_ptr<ExpertQuantizer> make_expert_quantizer(const ExpertQuantizerKey& key) {
  auto made = std::make_unique<ExpertQuantizer>();
  with_expert_desc(key, [&](const float8_expert_quantizer_desc& desc) {
    check(float8_expert_quantizer_plan(context_of(key.device), &desc, &made->quantizer));
  });
  made->context = context_of(key.device);
  made->workspace_bytes = float8_expert_quantizer_workspace_bytes(made->quantizer);
  made->layout = expert_layout(key);
  return made;
}

std::unique_ptr<MoePlan> make_moe(const MoeKey& key) {
  const Config config(key.linear.config);
  float8_recipe custom;
  float8_moe_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.m_max = key.linear.m_max;
  desc.dim = key.linear.k;
  desc.hidden = key.linear.n;
  desc.experts = key.linear.experts;
  desc.tensor_dtype = key.linear.tensor_dtype;
  config.set_recipe(desc, custom);
  desc.grad_weight_dtype = key.linear.grad_dtype;
  desc.non_finite = config.saturate() ? FLOAT8_SATURATE : FLOAT8_PROPAGATE;
  desc.recompute_weight = config.recompute() ? 1 : 0;
  desc.rows_in_place = key.rows_in_place ? 1 : 0;
  auto made = std::make_unique<MoePlan>();
  check(float8_moe_plan(context_of(key.linear.device), &desc, &made->moe));
  made->workspace_bytes = float8_moe_workspace_bytes(made->moe);
  made->saved_bytes = float8_moe_saved_bytes(made->moe);
  return made;
}

std::unique_ptr<GroupLayoutPlan> make_group_layout(const GroupLayoutKey& key) {
  float8_group_layout_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.m_max = key.m_max;
  desc.experts = key.experts;
  auto made = std::make_unique<GroupLayoutPlan>();
  check(float8_group_layout_plan_create(context_of(key.device), &desc, &made->plan));
  made->bytes = float8_group_layout_bytes(made->plan);
  return made;
}

constexpr int64_t kMostPairs = int64_t{1} << 30;  // of a routing

std::unique_ptr<RoutePlan> make_route(const RouteKey& key) {
  float8_moe_route_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.tokens_max = kMostPairs / std::max(key.top_k, 1);
  desc.top_k = key.top_k;
  desc.experts = key.experts;
  desc.long_ids = key.long_ids ? 1 : 0;
  auto made = std::make_unique<RoutePlan>();
  check(float8_moe_route_plan_create(context_of(key.device), &desc, &made->plan));
  made->workspace_bytes = float8_moe_route_workspace_bytes(made->plan);
  return made;
}

std::unique_ptr<CombinePlan> make_combine(const CombineKey& key) {
  float8_moe_combine_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.tokens_max = kMostPairs / std::max(key.top_k, 1);
  desc.cols = key.cols;
  desc.top_k = key.top_k;
  desc.experts = key.experts;
  desc.y_dtype = key.dtype;
  desc.out_dtype = key.dtype;
  auto made = std::make_unique<CombinePlan>();
  check(float8_moe_combine_plan_create(context_of(key.device), &desc, &made->plan));
  return made;
}

}  // namespace

// The contexts of devices, and how those of GPUs tune.
struct Contexts {
  std::mutex mutex;
  std::map<int32_t, float8_context*> all;
  int32_t tune_ms = 0;
  std::string database;
};

static Contexts& contexts() {
  static auto* const contexts = new Contexts;
  return *contexts;
}

void tune_on_first_use(int64_t milliseconds, std::string database) {
  Contexts& known = contexts();
  const std::lock_guard lock(known.mutex);
  for (const auto& [device, context] : known.all) {
    if (device == kEmulated || context == nullptr) continue;
    throw std::runtime_error(
        "float8: tune_on_first_use comes too late, a linear was planned on a GPU; call it before "
        "the first one");
  }
  known.tune_ms = static_cast<int32_t>(milliseconds);
  known.database = std::move(database);
}

float8_context* context_of(int32_t device) {
  Contexts& known = contexts();
  const std::lock_guard lock(known.mutex);
  float8_context*& context = known.all[device];
  if (context == nullptr) {
    float8_context_options options = {};
    options.struct_size = sizeof options;
    options.emulate = device == kEmulated;
    options.moves_saved = 1;  // saved_tensors_hooks may
    if (device != kEmulated) {
      load_cuda_libraries();
      options.tune_on_first_use = known.tune_ms;
      options.database = known.database.empty() ? nullptr : known.database.c_str();
    }
    check(float8_context_create(device == kEmulated ? 0 : device, &options, &context));
  }
  return context;
}

int8_t checked_copies(int64_t copies) {
  if (copies >= FLOAT8_BOTH_COPIES && copies <= FLOAT8_QT_FOR_RECOMPUTE)
    return static_cast<int8_t>(copies);
  throw std::invalid_argument("float8: copies is " + std::to_string(copies) +
                              "; it is 0 (both), 1 (q alone), 2 (qt alone), 3 (q for recompute) "
                              "or 4 (qt for recompute)");
}

Place place_of(const Tensor& tensor, Config config) {
  Place place{.device = device_of(tensor), .emulated = config.emulate()};
  if (place.device.is_cuda()) {
    if (place.emulated) throw std::logic_error("float8: tensors of a GPU were not staged");
    place.stream = current_stream(place.device.index);
    place.capturing = is_capturing(place.stream);
  } else if (!place.emulated || place.device.type != aoti_torch_device_type_cpu()) {
    throw std::invalid_argument(
        "float8: the tensors are not on a CUDA device; move the model and its input to a Hopper "
        "GPU, or set emulate=True (of LinearConfig, or of the function) to compute on the CPU "
        "(slow, for tests)");
  }
  return place;
}

const Plan& plan_for(const PlanKey& key, const Place& place) {
  return plans().get(
      key, place, [&] { return make_plan(key); },
      [&] {
        return "the linear of M up to " + std::to_string(key.m_max) + ", N " +
               std::to_string(key.n) + ", K " + std::to_string(key.k);
      });
}

float8_operand operand_of(int64_t operand) {
  if (operand >= FLOAT8_INPUT && operand <= FLOAT8_GRAD_OUTPUT) {
    return static_cast<float8_operand>(operand);
  }
  throw std::invalid_argument("float8: operand " + std::to_string(operand) +
                              " is not 0 (input), 1 (weight) or 2 (grad_output)");
}

const Quantizer& quantizer_for(const QuantizerKey& key, const Place& place) {
  static auto* const quantizers = new Registry<QuantizerKey, Quantizer>;
  return quantizers->get(
      key, place, [&] { return make_quantizer(key); },
      [&] {
        return "the cast of " + std::to_string(key.rows_max) + " rows of " +
               std::to_string(key.cols);
      });
}

const QuantizerList& quantizer_list_for(const std::vector<const Quantizer*>& quantizers,
                                        const Place& place) {
  static auto* const lists = new Registry<std::vector<const Quantizer*>, QuantizerList>;
  const auto make = [&] {
    std::vector<const float8_quantizer*> handles;
    for (const Quantizer* quantizer : quantizers) handles.push_back(quantizer->quantizer);
    auto made = std::make_unique<QuantizerList>();
    check(float8_quantizer_list_plan(context_of(place.key()), handles.data(), handles.size(),
                                     &made->list));
    made->workspace_bytes = float8_quantizer_list_workspace_bytes(made->list);
    return made;
  };
  return lists->get(quantizers, place, make, [&] {
    return "the list of the casts of " + std::to_string(quantizers.size()) + " tensors";
  });
}

const GemmPlan& gemm_for(const GemmKey& key, const Place& place) {
  static auto* const gemms = new Registry<GemmKey, GemmPlan>;
  return gemms->get(
      key, place, [&] { return make_gemm(key); },
      [&] {
        return "GEMM " + std::to_string(key.kind) + " of M up to " + std::to_string(key.m_max) +
               ", N " + std::to_string(key.n) + ", K " + std::to_string(key.k);
      });
}

const ExpertsPlan& experts_for(const ExpertsKey& key, const Place& place) {
  static auto* const plans = new Registry<ExpertsKey, ExpertsPlan>;
  return plans->get(
      key, place, [&] { return make_experts(key); },
      [&] {
        return "the linear of " + std::to_string(key.experts) + " experts of M up to " +
               std::to_string(key.m_max) + ", N " + std::to_string(key.n) + ", K " +
               std::to_string(key.k);
      });
}

const ExpertQuantizer& expert_quantizer_for(const ExpertQuantizerKey& key, const Place& place) {
  static auto* const plans = new Registry<ExpertQuantizerKey, ExpertQuantizer>;
  return plans->get(
      key, place, [&] { return make_expert_quantizer(key); },
      [&] {
        return "the casts of the weights of " + std::to_string(key.experts) + " experts, N " +
               std::to_string(key.n) + ", K " + std::to_string(key.k);
      });
}

float8_layout expert_layout(const ExpertQuantizerKey& key) {
  float8_layout layout = {};
  layout.struct_size = sizeof layout;
  with_expert_desc(key, [&](const float8_expert_quantizer_desc& desc) {
    check(float8_expert_quantizer_layout(&desc, &layout));
  });
  return layout;
}

const MoePlan& moe_for(const MoeKey& key, const Place& place) {
  static auto* const plans = new Registry<MoeKey, MoePlan>;
  return plans->get(
      key, place, [&] { return make_moe(key); },
      [&] {
        return "the MLP of " + std::to_string(key.linear.experts) + " experts of M up to " +
               std::to_string(key.linear.m_max) + ", D " + std::to_string(key.linear.k) + ", F " +
               std::to_string(key.linear.n);
      });
}

const GroupLayoutPlan& group_layout_for(const GroupLayoutKey& key, const Place& place) {
  static auto* const plans = new Registry<GroupLayoutKey, GroupLayoutPlan>;
  return plans->get(
      key, place, [&] { return make_group_layout(key); },
      [&] {
        return "the layout of " + std::to_string(key.experts) + " experts of M up to " +
               std::to_string(key.m_max);
      });
}

const RoutePlan& route_plan_for(const RouteKey& key, const Place& place) {
  static auto* const plans = new Registry<RouteKey, RoutePlan>;
  return plans->get(
      key, place, [&] { return make_route(key); },
      [&] {
        return "the routing of " + std::to_string(key.experts) + " experts, " +
               std::to_string(key.top_k) + " of a token";
      });
}

const CombinePlan& combine_plan_for(const CombineKey& key, const Place& place) {
  static auto* const plans = new Registry<CombineKey, CombinePlan>;
  return plans->get(
      key, place, [&] { return make_combine(key); },
      [&] {
        return "the sums of rows of " + std::to_string(key.cols) + " of " +
               std::to_string(key.experts) + " experts, " + std::to_string(key.top_k) +
               " of a token";
      });
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
    layers.push_back({sizeof(float8_model_layer), names[i].c_str(), &descs[i], 0, 0});
  }
  float8_recipe custom;
  float8_model_desc desc = {};
  desc.struct_size = sizeof desc;
  desc.layers = layers.data();
  desc.count = layers.size();
  desc.tokens = keys[0].m_max;
  Config(keys[0].config).set_recipe(desc, custom);
  float8_model* model = nullptr;
  check(float8_model_plan(context_of(keys[0].device), &desc, &model));
  float8_model_destroy(model);
  for (const PlanKey& key : keys) (void)plan_for(key, place);
}

AnyPlan any_plan(uint64_t config, int32_t device) {
  {
    AnyPlans& any = any_plans();
    const std::lock_guard lock(any.mutex);
    const auto found = any.plans.find({config, device});
    if (found != any.plans.end()) return found->second;
  }
  if (device != kEmulated) return {};
  const PlanKey small{.config = config, .m_max = kRows, .n = 16, .k = 16, .device = kEmulated};
  return {.linear = plan_for(small, Place{.emulated = true}).linear};
}

std::vector<const float8_linear*> all_plans(int32_t device) {
  std::vector<const float8_linear*> found;
  plans().for_each([&](const PlanKey& key, const Plan& plan) {
    if (key.device == device) found.push_back(plan.linear);
  });
  return found;
}

int64_t saved_bytes(int64_t m, int64_t n, int64_t k, Config config, bool x_given,
                    bool weight_given) {
  float8_recipe custom;
  float8_linear_desc desc = layer_desc({.config = config.bits(), .m_max = m, .n = n, .k = k});
  desc.m_max = m;
  config.set_recipe(desc, custom);
  float8_saved_bytes sizes{sizeof sizes, 0, 0};
  check(float8_linear_sizes(&desc, &sizes));
  return static_cast<int64_t>((x_given ? 0 : sizes.x) + (weight_given ? 0 : sizes.w));
}

static float8_layout layout_of(const QuantizerKey& key, int64_t rows) {
  float8_recipe custom;
  const float8_quantizer_desc desc = quantizer_desc(key, custom);
  float8_layout layout{};
  layout.struct_size = sizeof layout;
  check(float8_tensor_layout(&desc, rows, &layout));
  return layout;
}

QuantizedBytes quantized_bytes(int64_t rows, int64_t cols, Config config, int64_t operand,
                               bool backward, int64_t whole_rows) {
  const float8_layout layout =
      layout_of({.config = config.of_casts(),
                 .rows_max = rows,
                 .cols = cols,
                 .operand = static_cast<int8_t>(operand_of(operand)),
                 .copies = copies_of(config, operand_of(operand), backward),
                 .over_ranks = whole_rows > 0,
                 .whole_rows = whole_rows},
                0);
  return {static_cast<int64_t>(layout.tensor_bytes - layout.transposed_bytes),
          static_cast<int64_t>(layout.transposed_bytes)};
}

CopyLayout copy_layout(const QuantizerKey& key, int64_t rows) {
  const float8_layout at = layout_of(key, rows);
  return {.q_pitch = at.ld_q,
          .q_scales = static_cast<int64_t>(at.q_inverse_scale),
          .scales_in_qt = at.q_scale_apart != 0,
          .qt_pitch = at.ld_qt,
          .qt_scales = static_cast<int64_t>(at.qt_inverse_scale),
          .amax_words = static_cast<int64_t>(at.amax_words),
          .row_amax_words = static_cast<int64_t>(at.row_amax_words)};
}

int64_t scale_state_bytes(uint64_t config, size_t count, int32_t history) {
  float8_recipe custom;
  float8_linear_desc desc = layer_desc({.config = config, .n = 16, .k = 16});
  desc.m_max = 1;
  Config(config).set_recipe(desc, custom);
  const std::vector<const float8_linear_desc*> linears(count, &desc);
  size_t bytes = 0;
  check(float8_scales_size(linears.data(), linears.size(), history, &bytes));
  return static_cast<int64_t>(bytes);
}

}  // namespace float8_torch
