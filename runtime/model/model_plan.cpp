#include "runtime/model/model_plan.hpp"

#include <algorithm>
#include <map>
#include <set>

#include "base/text.hpp"
#include "recipes/model/tensor_parallel.hpp"
#include "runtime/linear/plan/kernels.hpp"
#include "runtime/model/first_use.hpp"
#include "tuning_db/estimate/device_name.hpp"
#include "tuning_db/estimate/filter.hpp"

namespace f8::runtime {
namespace {

int64_t tokens_of(const ModelLinear& linear, const ModelOptions& options) {
  return linear.tokens == 0 ? options.tokens : linear.tokens;
}

NamedLinear named(const ModelLinear& linear, const ModelOptions& options) {
  return {.fqn = linear.name,
          .in_features = linear.in_features,
          .out_features = linear.out_features,
          .count = 1,
          .tokens_share =
              static_cast<double>(tokens_of(linear, options)) / static_cast<double>(options.tokens),
          .kept = linear.kept,
          .groups = linear.groups};
}

Result<std::vector<NamedLinear>> check(std::span<const ModelLinear> linears,
                                       const ModelOptions& options) {
  F8_TRY(options.recipe.validate());
  std::set<std::string_view> names;
  std::vector<NamedLinear> layers;
  for (const ModelLinear& linear : linears) {
    if (linear.name.empty()) {
      return fail(ErrorCode::kInvalidArgument, "a linear of {} x {} has no name",
                  linear.out_features, linear.in_features);
    }
    if (!names.insert(linear.name).second) {
      return fail(ErrorCode::kInvalidArgument, "layer {} is listed twice", quote(linear.name));
    }
    if (linear.desc.shape != Shape{} || linear.desc.recipe != Recipe{}) {
      return fail(ErrorCode::kInvalidArgument,
                  "layer {}: its desc has a shape or a recipe; both are the model's to say",
                  quote(linear.name));
    }
    if (linear.tokens < 0) {
      return fail(ErrorCode::kInvalidArgument,
                  "layer {}: {} tokens; it is 1 or more, or the model's", quote(linear.name),
                  linear.tokens);
    }
    layers.push_back(named(linear, options));
  }
  return layers;
}

Status check_verdicts(const ModelOptions& options) {
  const FilterFile& file = *options.filter.verdicts;
  if (is_label_of(file.recipe, options.recipe) && file.tokens == options.tokens) return {};
  return fail(ErrorCode::kInvalidArgument,
              "the filter file is for recipe {} and {} tokens, the model is planned for {} and "
              "{}; write it again for these",
              file.recipe, file.tokens, describe(options.recipe), options.tokens);
}

// Takes over what the filter file says of a layer.
Status take_verdict(const FilterIndex& file, const ModelLinear& linear, ConvertedLinear& out) {
  const FilterFile::Decision* found = file.find(linear.name);
  if (found == nullptr) {
    return fail(ErrorCode::kInvalidArgument,
                "the filter file has no layer {}; write it again for this model",
                quote(linear.name));
  }
  if (found->in_features != linear.in_features || found->out_features != linear.out_features) {
    return fail(ErrorCode::kInvalidArgument,
                "layer {} has N {} and K {}, the filter file says N {} and K {}; write it again",
                quote(linear.name), linear.out_features, linear.in_features, found->out_features,
                found->in_features);
  }
  out.convert = found->convert;
  out.reason = f8::format("by the filter file: {}", found->reason);
  out.evidence = found->evidence;
  out.speedup = found->speedup;
  out.measured_on.clear();
  return {};
}

LinearDesc desc_of(const ModelLinear& linear, const ModelOptions& options) {
  LinearDesc desc = linear.desc;
  desc.shape = {tokens_of(linear, options), linear.out_features, linear.in_features};
  desc.recipe = options.recipe;
  return desc;
}

Error of_layer(const std::string& name, Error error) {
  error.message = f8::format("layer {}: {}", quote(name), error.message);
  return error;
}

// A plan of the model, and which of the linears are planned by it.
struct Distinct {
  LinearDesc desc;
  std::vector<size_t> members;
  ChosenKernels chosen = {};
};

std::vector<Distinct> distinct_plans(std::span<const ModelLinear> linears,
                                     const ModelOptions& options,
                                     const std::vector<ConvertedLinear>& verdicts) {
  std::vector<Distinct> all;
  std::map<Shape, std::vector<size_t>> of_shape;  // the plans of a shape differ in few options
  for (size_t i = 0; i < linears.size(); ++i) {
    if (!verdicts[i].convert || linears[i].groups.experts > 0) continue;
    LinearDesc desc = desc_of(linears[i], options);
    std::vector<size_t>& alike = of_shape[desc.shape];
    const auto same =
        std::ranges::find_if(alike, [&](size_t plan) { return all[plan].desc == desc; });
    if (same == alike.end()) {
      alike.push_back(all.size());
      all.push_back({.desc = std::move(desc), .members = {i}});
    } else {
      all[*same].members.push_back(i);
    }
  }
  return all;
}

// Chooses the kernels of all of them, and gives each once.
Result<std::vector<codegen::KernelSpec>> choose_kernels(std::span<const ModelLinear> linears,
                                                        std::vector<Distinct>& plans,
                                                        const Context& context) {
  const auto table = context.table();
  std::vector<codegen::KernelSpec> specs;
  std::set<std::string> keys;
  for (Distinct& plan : plans) {
    auto chosen = runtime::choose_kernels(plan.desc, table.get(), context.device().sm_count);
    if (!chosen) {
      return std::unexpected(
          of_layer(linears[plan.members.front()].name, std::move(chosen.error())));
    }
    plan.chosen = *std::move(chosen);
    for (codegen::KernelSpec& spec : plan.chosen.specs()) {
      if (keys.insert(codegen::key(spec)).second) specs.push_back(std::move(spec));
    }
  }
  return specs;
}

// The parts that a tensor-parallel rank has of the linears.
Result<std::vector<ModelLinear>> parts_of_rank(std::span<const ModelLinear> linears,
                                               const ModelOptions& options) {
  std::vector<ModelLinear> parts(linears.begin(), linears.end());
  if (options.parallel.tp == 1) return parts;
  std::vector<NamedLinear> layers;
  for (const ModelLinear& linear : linears) layers.push_back(named(linear, options));
  F8_TRY(shard_tensor_parallel(layers, options.parallel.tp, "the model"));
  for (size_t i = 0; i < parts.size(); ++i) {
    parts[i].in_features = layers[i].in_features;
    parts[i].out_features = layers[i].out_features;
    parts[i].kept = layers[i].kept;
  }
  return parts;
}

// The name of the device whose rows alone are asked; empty: those of all are.
Result<std::string> wanted_device(const ModelOptions& options, const TuningTable* table) {
  const TuningTable none;
  auto name = device_named(table == nullptr ? none.devices : table->devices, options.device);
  if (!name) {
    return fail(name.error().code, "float8_model_desc.device: {}", name.error().message);
  }
  return name;
}

// The verdicts on a rank's linears.
Result<std::vector<ConvertedLinear>> filter_parts(std::span<const ModelLinear> linears,
                                                  const ModelOptions& options,
                                                  const TuningTable* table,
                                                  const tuning_db::Machine* here) {
  const std::vector<NamedLinear> layers = F8_TRY(check(linears, options));
  const ModelFilter& filter = options.filter;
  std::optional<FilterIndex> verdicts;
  if (filter.verdicts) {
    F8_TRY(check_verdicts(options));
    verdicts.emplace(*filter.verdicts);
  }
  const TuningTable none;
  const std::string device = F8_TRY(wanted_device(options, table));
  const tuning_db::Estimator estimator(table == nullptr ? none : *table, options.recipe, device,
                                       device.empty() ? here : nullptr);
  auto decided = F8_TRY(tuning_db::filter(layers,
                                          {.policy = filter.policy,
                                           .tokens = options.tokens,
                                           .filter_fqns = filter.names,
                                           .margin = filter.margin,
                                           .parallel = options.parallel,
                                           .fused_mlps = options.fused_mlps},
                                          estimator));
  const NameFilter names = F8_TRY(name_filter(filter.names));
  std::vector<ConvertedLinear> all;
  for (size_t i = 0; i < linears.size(); ++i) {
    tuning_db::FilterDecision& d = decided.decisions[i];
    ConvertedLinear out{.name = linears[i].name,
                        .convert = d.convert,
                        .reason = std::move(d.reason),
                        .evidence = d.evidence,
                        .speedup = {d.speedup, d.lo, d.hi},
                        .measured_on = std::move(d.device),
                        .wire = d.wire,
                        .plan = nullptr};
    if (kept_by_name_or_size(names, layers[i]).empty()) {
      if (filter.callback && !filter.callback(linears[i])) {
        out.convert = false;
        out.reason = "kept in bf16: the callback said so";
        out.evidence = Evidence::kRule;
      } else if (verdicts) {
        F8_TRY(take_verdict(*verdicts, linears[i], out));
      }
    }
    all.push_back(std::move(out));
  }
  return all;
}

}  // namespace

Result<std::vector<ConvertedLinear>> filter_model(std::span<const ModelLinear> linears,
                                                  const ModelOptions& options,
                                                  const TuningTable* table,
                                                  const tuning_db::Machine* here) {
  return filter_parts(F8_TRY(parts_of_rank(linears, options)), options, table, here);
}

Result<ModelPlan> plan_model(const std::shared_ptr<Context>& context,
                             std::span<const ModelLinear> wholes, const ModelOptions& options) {
  ModelPlan model;
  const std::vector<ModelLinear> linears = F8_TRY(parts_of_rank(wholes, options));
  // Verdicts need the measurements too.
  const NameFilter names = F8_TRY(name_filter(options.filter.names));
  for (const ModelLinear& linear : linears) {
    const bool experts = linear.groups.experts > 0;
    if (experts || !kept_by_name_or_size(names, named(linear, options)).empty()) continue;
    tune_first_use(*context, options.recipe,
                   {tokens_of(linear, options), linear.out_features, linear.in_features});
  }
  const auto table = context->table();
  // An emulated device is asked for the device that was measured first.
  std::optional<tuning_db::Machine> here;
  if (!context->device().emulated) here = {context->device(), toolchain_versions()};
  model.device = F8_TRY(wanted_device(options, table.get()));
  if (model.device.empty() && (here || table != nullptr)) {
    model.device = here ? here->device.name : table->device_name();
  }
  model.linears = F8_TRY(filter_parts(linears, options, table.get(), here ? &*here : nullptr));
  std::vector<Distinct> plans = distinct_plans(linears, options, model.linears);
  const auto specs = F8_TRY(choose_kernels(linears, plans, *context));
  F8_TRY(context->compile(specs, options.compile_threads));
  model.kernels = specs.size();
  model.distinct_plans = plans.size();
  for (Distinct& distinct : plans) {
    auto plan = Linear::plan(context, distinct.desc, std::move(distinct.chosen));
    if (!plan) {
      const std::string& name = linears[distinct.members.front()].name;
      return std::unexpected(of_layer(name, std::move(plan.error())));
    }
    for (const size_t i : distinct.members) model.linears[i].plan = *plan;
    model.workspace_bytes = std::max(model.workspace_bytes, (*plan)->workspace_bytes());
  }
  for (ConvertedLinear& linear : model.linears) {
    if (linear.convert) ++model.converted;
    if (linear.plan == nullptr) continue;
    linear.first_slot = model.slots.size();
    const std::vector<DelayedSlot>& slots = linear.plan->scale_slots();
    model.slots.insert(model.slots.end(), slots.begin(), slots.end());
  }
  return model;
}

}  // namespace f8::runtime
