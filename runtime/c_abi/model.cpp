// A model's linears: which are converted, and their plans.
#include "base/file.hpp"
#include "base/text.hpp"
#include "runtime/c_abi/common.hpp"
#include "runtime/c_abi/linear.hpp"
#include "runtime/c_abi/recipe.hpp"
#include "runtime/model/model_plan.hpp"

using namespace f8::c_abi;
using f8::ErrorCode;

struct float8_model {
  f8::runtime::ModelPlan plan;
  std::vector<float8_linear> linears;  // of each layer; without a plan where it is kept
};

struct float8_attention_verdicts {
  f8::FilterFile file;
  f8::FilterIndex index{file};
  std::string path;
};

namespace {

f8::Result<f8::runtime::ModelLinear> read_layer(const float8_model_layer& layer, size_t index) {
  float8_model_layer known;
  F8_TRY(read_struct(&layer, "float8_model_layer", known));
  if (known.name == nullptr || known.desc == nullptr) {
    return f8::fail(ErrorCode::kInvalidArgument, "float8_model_desc.layers[{}]: {} is NULL", index,
                    known.name == nullptr ? "name" : "desc");
  }
  float8_linear_desc desc;
  F8_TRY(read_struct(known.desc, "float8_linear_desc", desc));
  if (desc.recipe != nullptr || desc.custom_recipe != nullptr) {
    return f8::fail(ErrorCode::kInvalidArgument,
                    "layer {}: recipe and custom_recipe of its desc are the model's to say; leave "
                    "them NULL",
                    f8::quote(known.name));
  }
  const std::string field = f8::format("float8_model_desc.layers[{}].", index);
  if (known.experts < 0 || known.experts > f8::kMaxExperts) {
    return f8::fail(ErrorCode::kInvalidArgument, "{}experts is {}; it is 1 to {}, or 0 of a linear",
                    field, known.experts, f8::kMaxExperts);
  }
  if (known.skew < f8::kEven || known.skew > f8::kOneExpert) {
    return f8::fail(ErrorCode::kInvalidArgument, "{}skew is {}; it is {} to {}", field, known.skew,
                    f8::kEven, f8::kOneExpert);
  }
  return f8::runtime::ModelLinear{.name = known.name,
                                  .in_features = desc.k,
                                  .out_features = desc.n,
                                  .desc = F8_TRY(linear_options(desc)),
                                  .tokens = desc.m_max,
                                  .groups = {.experts = known.experts, .skew = known.skew}};
}

// Reads the layers in their own version of the struct, whose size the first one tells.
f8::Result<std::vector<f8::runtime::ModelLinear>> read_layers(const float8_model_desc& desc) {
  std::vector<f8::runtime::ModelLinear> layers;
  if (desc.count > 0) F8_TRY(need(desc.layers, "float8_model_desc.layers"));
  const auto* at = reinterpret_cast<const unsigned char*>(desc.layers);
  for (size_t i = 0; i < desc.count; ++i, at += desc.layers->struct_size) {
    const auto& layer = *reinterpret_cast<const float8_model_layer*>(at);
    if (layer.struct_size != desc.layers->struct_size) {
      return f8::fail(ErrorCode::kInvalidArgument,
                      "float8_model_desc.layers[{}]: struct_size is {}, that of layers[0] is {}", i,
                      layer.struct_size, desc.layers->struct_size);
    }
    layers.push_back(F8_TRY(read_layer(layer, i)));
  }
  return layers;
}

f8::Result<f8::FilterFile> read_filter_file(const char* path) {
  const std::string text = F8_TRY(f8::read_file(path));
  auto parsed = f8::FilterFile::parse(text);
  if (!parsed) return f8::fail(parsed.error().code, "{}: {}", path, parsed.error().message);
  return parsed;
}

f8::Result<f8::runtime::ModelFilter> read_filter(const float8_model_desc& desc) {
  f8::runtime::ModelFilter filter;
  if (desc.filter_fqn_count > 0) F8_TRY(need(desc.filter_fqns, "float8_model_desc.filter_fqns"));
  for (size_t i = 0; i < desc.filter_fqn_count; ++i) {
    F8_TRY(need(desc.filter_fqns[i], "an entry of float8_model_desc.filter_fqns"));
    filter.names.emplace_back(desc.filter_fqns[i]);
  }
  F8_TRY(check_enum("float8_model_desc.policy", desc.policy, FLOAT8_FILTER_TORCHAO));
  filter.policy = desc.policy == FLOAT8_FILTER_TORCHAO ? f8::FilterPolicy::kTorchao
                                                       : f8::FilterPolicy::kMeasured;
  if (desc.margin != 0) filter.margin = desc.margin;
  if (desc.callback != nullptr) {
    filter.callback = [call = desc.callback,
                       user = desc.callback_user](const f8::runtime::ModelLinear& layer) {
      return call(user, layer.name.c_str(), layer.out_features, layer.in_features) != 0;
    };
  }
  if (desc.verdicts != nullptr) {
    filter.verdicts = F8_TRY(read_filter_file(desc.verdicts));
  }
  return filter;
}

f8::tuning_db::Parallelism parallelism_of(const float8_model_desc& desc) {
  return {.fsdp = desc.fsdp == 0 ? 1 : desc.fsdp,
          .tp = desc.tp == 0 ? 1 : desc.tp,
          .hosts = desc.hosts,
          .network_gbit = desc.network_gbit};
}

f8::Status give(const float8_attention_verdicts& of, const f8::FilterFile::Attention& found,
                float8_attention_verdict* verdict) {
  float8_attention_verdict known;
  F8_TRY(read_struct(verdict, "float8_attention_verdict", known));
  known.name = found.fqn.c_str();
  known.recipe = found.recipe.c_str();
  known.reason = found.reason.c_str();
  known.heads_q = found.heads_q;
  known.heads_kv = found.heads_kv;
  known.head_dim = found.head_dim;
  known.tokens = of.file.tokens;
  known.sequence = of.file.sequence;
  known.speedup = found.speedup.speedup;
  known.speedup_low = found.speedup.lo;
  known.speedup_high = found.speedup.hi;
  known.evidence = static_cast<int32_t>(found.evidence);
  std::memcpy(verdict, &known, std::min(verdict->struct_size, sizeof known));
  return {};
}

}  // namespace

float8_status float8_model_plan(float8_context* context, const float8_model_desc* desc,
                                float8_model** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(context, "context"));
    float8_model_desc known;
    F8_TRY(read_struct(desc, "float8_model_desc", known));
    if (known.compile_threads < 0) {
      return f8::fail(ErrorCode::kInvalidArgument,
                      "float8_model_desc.compile_threads is {}; 0 for all cores",
                      known.compile_threads);
    }
    f8::runtime::ModelOptions options;
    options.recipe = F8_TRY(one_recipe("float8_model_desc", known.recipe, known.custom_recipe));
    options.tokens = known.tokens;
    options.compile_threads = known.compile_threads;
    options.filter = F8_TRY(read_filter(known));
    options.parallel = parallelism_of(known);
    options.fused_mlps = known.fused_mlps != 0;
    options.device = known.device == nullptr ? "" : known.device;
    const auto layers = F8_TRY(read_layers(known));
    auto model = std::make_unique<float8_model>();
    model->plan = F8_TRY(f8::runtime::plan_model(context->context, layers, options));
    for (const auto& linear : model->plan.linears) model->linears.push_back({linear.plan});
    *out = model.release();
    return {};
  });
}

void float8_model_destroy(float8_model* model) {
  destroy(model);
}

float8_status float8_model_layer_verdict(const float8_model* model, size_t index,
                                         float8_model_verdict* verdict) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(model, "model"));
    float8_model_verdict known;
    F8_TRY(read_struct(verdict, "float8_model_verdict", known));
    if (index >= model->linears.size()) {
      return f8::fail(ErrorCode::kInvalidArgument, "there is no layer {}: the model has {}", index,
                      model->linears.size());
    }
    const f8::runtime::ConvertedLinear& layer = model->plan.linears[index];
    known.name = layer.name.c_str();
    known.reason = layer.reason.c_str();
    known.linear = layer.plan == nullptr ? nullptr : &model->linears[index];
    known.speedup = layer.speedup.speedup;
    known.speedup_low = layer.speedup.lo;
    known.speedup_high = layer.speedup.hi;
    known.evidence = static_cast<int32_t>(layer.evidence);
    known.convert = layer.convert ? 1 : 0;
    const f8::tuning_db::WireShare wire = layer.wire.value_or(f8::tuning_db::WireShare{});
    known.wire_bf16_us = wire.bf16_us;
    known.wire_fp8_us = wire.fp8_us;
    known.exposed_bf16_us = wire.bf16_exposed_us;
    known.exposed_fp8_us = wire.fp8_exposed_us;
    known.wire_is_prediction = wire.is_prediction ? 1 : 0;
    known.device = model->plan.device.c_str();
    known.measured_on = layer.measured_on.c_str();
    std::memcpy(verdict, &known, std::min(verdict->struct_size, sizeof known));
    return {};
  });
}

size_t float8_model_layer_count(const float8_model* model) {
  return model == nullptr ? 0 : model->linears.size();
}

size_t float8_model_converted_count(const float8_model* model) {
  return model == nullptr ? 0 : model->plan.converted;
}

size_t float8_model_workspace_bytes(const float8_model* model) {
  return model == nullptr ? 0 : model->plan.workspace_bytes;
}

float8_status float8_attention_verdicts_read(const char* path, float8_attention_verdicts** out) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(out, "out"));
    *out = nullptr;
    F8_TRY(need(path, "path"));
    f8::FilterFile file = F8_TRY(read_filter_file(path));
    if (file.sequence == 0) {
      return f8::fail(ErrorCode::kInvalidArgument,
                      "{}: the filter file has linears alone; write it with `float8-tune filter "
                      "--attention --sequence N --verdicts FILE`",
                      path);
    }
    *out = new float8_attention_verdicts{.file = std::move(file), .path = path};
    return {};
  });
}

void float8_attention_verdicts_destroy(float8_attention_verdicts* verdicts) {
  destroy(verdicts);
}

size_t float8_attention_verdicts_count(const float8_attention_verdicts* verdicts) {
  return verdicts == nullptr ? 0 : verdicts->file.attention.size();
}

float8_status float8_attention_verdicts_get(const float8_attention_verdicts* verdicts, size_t index,
                                            float8_attention_verdict* verdict) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(verdicts, "verdicts"));
    if (index >= verdicts->file.attention.size()) {
      return f8::fail(ErrorCode::kInvalidArgument, "there is no attention {}: the file has {}",
                      index, verdicts->file.attention.size());
    }
    return give(*verdicts, verdicts->file.attention[index], verdict);
  });
}

float8_status float8_attention_verdicts_find(const float8_attention_verdicts* verdicts,
                                             const char* name, float8_attention_verdict* verdict) {
  return guarded([&]() -> f8::Status {
    F8_TRY(need(verdicts, "verdicts"));
    F8_TRY(need(name, "name"));
    const f8::FilterFile::Attention* found = verdicts->index.find_attention(name);
    if (found == nullptr) {
      return f8::fail(
          ErrorCode::kInvalidArgument,
          "{} has no attention {}, and has {}; write it again by this model's config.json",
          verdicts->path, f8::quote(name), f8::quote(verdicts->file.attention.front().fqn));
    }
    return give(*verdicts, *found, verdict);
  });
}
