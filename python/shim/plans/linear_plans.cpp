// The plans of linears, of their casts and of single GEMMs, and the sizes of their buffers.
#include <map>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "python/shim/base/errors.hpp"
#include "python/shim/plans/registry.hpp"

namespace float8_torch {
namespace {

// One plan of each recipe and device, for what needs any of them.
struct AnyPlans {
  std::mutex mutex;
  std::map<std::pair<uint64_t, int32_t>, AnyPlan> plans;
};

AnyPlans& any_plans() {
  static auto* const all = new AnyPlans;
  return *all;
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
  desc.no_grad_weight = config.frozen();
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
  desc.activation = key.activation;
  desc.column_sums = key.column_sums;
  desc.less_workspace = key.less_workspace;
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

float8_layout layout_of(const QuantizerKey& key, int64_t rows) {
  float8_recipe custom;
  const float8_quantizer_desc desc = quantizer_desc(key, custom);
  float8_layout layout{};
  layout.struct_size = sizeof layout;
  check(float8_tensor_layout(&desc, rows, &layout));
  return layout;
}

}  // namespace

void keep_any(uint64_t config, int32_t device, const AnyPlan& plan) {
  AnyPlans& any = any_plans();
  const std::lock_guard lock(any.mutex);
  any.plans.emplace(std::pair(Config(config).of_casts(), device), plan);
}

int8_t checked_copies(int64_t copies) {
  if (copies >= FLOAT8_BOTH_COPIES && copies <= FLOAT8_QT_FOR_RECOMPUTE)
    return static_cast<int8_t>(copies);
  throw std::invalid_argument("float8: copies is " + std::to_string(copies) +
                              "; it is 0 (both), 1 (q alone), 2 (qt alone), 3 (q for recompute) "
                              "or 4 (qt for recompute)");
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

QuantizedBytes quantized_bytes(int64_t rows, int64_t cols, Config config, int64_t operand,
                               bool backward, int64_t whole_rows, bool of_activation) {
  const float8_layout layout =
      layout_of({.config = config.of_casts(),
                 .rows_max = rows,
                 .cols = cols,
                 .operand = static_cast<int8_t>(operand_of(operand)),
                 .copies = copies_of(config, operand_of(operand), backward),
                 .over_ranks = whole_rows > 0,
                 .whole_rows = whole_rows,
                 .source = static_cast<int8_t>(of_activation ? FLOAT8_ACTIVATION : FLOAT8_PLAIN)},
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
