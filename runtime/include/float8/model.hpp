// A whole model: which linears to convert, and the plans of those.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "float8/linear.hpp"
#include "float8/model.h"

namespace float8 {

// A layer of a model: its desc's recipe is the model's and not looked at.
struct ModelLayer {
  std::string name = {};
  LinearDesc desc = {};  // an m_max of 0 is the model's tokens
  // The experts of a layer, as float8_model_layer has them.
  std::int64_t experts = 0, skew = 0;
};

struct ModelOptions {
  Recipe recipe = Recipe::tensorwise();
  std::int64_t tokens = 0;
  // "auto_filter_small_kn" switches the automatic rule on.
  std::vector<std::string> filter_fqns = {};
  float8_filter_policy policy = FLOAT8_FILTER_MEASURED;
  double margin = 0;  // 0: 0.02
  std::function<bool(const std::string& name, std::int64_t n, std::int64_t k)> callback = {};
  std::string verdicts = {};  // a filter file; empty: none
  int compile_threads = 0;
  // The ranks that share the model, as in float8_model_desc.
  std::int64_t fsdp = 1, tp = 1;
  std::int64_t hosts = 0;   // 0: as few as have at most 8 each
  double network_gbit = 0;  // 0: 400
  bool fused_mlps = false;  // MLPs run as one function each
  std::string device = {};  // as in float8_model_desc; empty: the context's
};

// The decision about a layer.
struct ModelVerdict {
  std::string name = {};
  std::string reason = {};
  std::optional<Linear> linear = {};  // none: kept in high precision, or experts
  double speedup = 1, speedup_low = 1, speedup_high = 1;
  float8_evidence evidence = FLOAT8_EVIDENCE_RULE;
  // What ranks send in a step, in bf16 and fp8, and what of it GEMMs do not hide.
  double wire_bf16_us = 0, wire_fp8_us = 0, exposed_bf16_us = 0, exposed_fp8_us = 0;
  bool wire_is_prediction = false;
  bool convert = false;
  std::string device = {}, measured_on = {};  // whom it is for, and whose rows the speedup is of
};

class Model {
 public:
  static Result<Model> plan(const Context& context, const std::vector<ModelLayer>& layers,
                            const ModelOptions& options) {
    const auto recipe = options.recipe.settings();
    if (!recipe) return recipe.error();
    const float8_recipe& settings = recipe.value();
    std::vector<float8_linear_desc> descs;
    for (const ModelLayer& layer : layers) descs.push_back(layer.desc.c());
    std::vector<float8_model_layer> all;
    for (std::size_t i = 0; i < layers.size(); ++i) {
      all.push_back({sizeof(float8_model_layer), layers[i].name.c_str(), &descs[i],
                     layers[i].experts, layers[i].skew});
    }
    std::vector<const char*> names;
    for (const std::string& name : options.filter_fqns) names.push_back(name.c_str());
    float8_model_desc c{};
    c.struct_size = sizeof c;
    c.layers = all.data();
    c.count = all.size();
    c.tokens = options.tokens;
    c.custom_recipe = &settings;
    c.filter_fqns = names.data();
    c.filter_fqn_count = names.size();
    if (options.callback) {
      c.callback = [](void* user, const char* name, std::int64_t n, std::int64_t k) {
        return std::int32_t{static_cast<const ModelOptions*>(user)->callback(name, n, k)};
      };
      c.callback_user = const_cast<ModelOptions*>(&options);
    }
    c.verdicts = options.verdicts.empty() ? nullptr : options.verdicts.c_str();
    c.margin = options.margin;
    c.policy = options.policy;
    c.compile_threads = options.compile_threads;
    c.fsdp = options.fsdp;
    c.tp = options.tp;
    c.hosts = options.hosts;
    c.network_gbit = options.network_gbit;
    c.fused_mlps = options.fused_mlps ? 1 : 0;
    c.device = options.device.empty() ? nullptr : options.device.c_str();
    float8_model* handle = nullptr;
    const float8_status status = float8_model_plan(context.get(), &c, &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return Model({handle, float8_model_destroy}, options.tokens);
  }

  // Returns the verdict of the layer that was the index-th of the list.
  [[nodiscard]] Result<ModelVerdict> verdict(std::size_t index) const {
    float8_model_verdict c{};
    c.struct_size = sizeof c;
    const float8_status status = float8_model_layer_verdict(handle_.get(), index, &c);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    ModelVerdict verdict{c.name,
                         c.reason,
                         {},
                         c.speedup,
                         c.speedup_low,
                         c.speedup_high,
                         static_cast<float8_evidence>(c.evidence),
                         c.wire_bf16_us,
                         c.wire_fp8_us,
                         c.exposed_bf16_us,
                         c.exposed_fp8_us,
                         c.wire_is_prediction != 0,
                         c.convert != 0,
                         c.device == nullptr ? "" : c.device,  // of an older library
                         c.measured_on == nullptr ? "" : c.measured_on};
    // It is the model's, which it keeps alive.
    if (c.linear != nullptr) verdict.linear = Linear({handle_, c.linear}, tokens_);
    return verdict;
  }
  [[nodiscard]] std::size_t layers() const { return float8_model_layer_count(handle_.get()); }
  [[nodiscard]] std::size_t converted() const {
    return float8_model_converted_count(handle_.get());
  }
  [[nodiscard]] std::size_t workspace_bytes() const {
    return float8_model_workspace_bytes(handle_.get());
  }
  [[nodiscard]] float8_model* get() const { return handle_.get(); }

 private:
  Model(std::shared_ptr<float8_model> handle, std::int64_t tokens)
      : handle_(std::move(handle)), tokens_(tokens) {}
  std::shared_ptr<float8_model> handle_;
  std::int64_t tokens_;
};

// The decision about a layer's attention, as float8_attention_verdict has it.
struct AttentionVerdict {
  std::string name = {};
  std::string recipe = {};  // "bf16": it is kept
  std::string reason = {};
  std::int64_t heads_q = 0, heads_kv = 0, head_dim = 0;
  std::int64_t tokens = 0, sequence = 0;
  double speedup = 1, speedup_low = 1, speedup_high = 1;
  float8_evidence evidence = FLOAT8_EVIDENCE_RULE;
};

// The verdicts of a filter file on attention.
class AttentionVerdicts {
 public:
  static Result<AttentionVerdicts> read(const std::string& path) {
    float8_attention_verdicts* handle = nullptr;
    const float8_status status = float8_attention_verdicts_read(path.c_str(), &handle);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return AttentionVerdicts({handle, float8_attention_verdicts_destroy});
  }
  [[nodiscard]] std::size_t size() const { return float8_attention_verdicts_count(handle_.get()); }
  [[nodiscard]] Result<AttentionVerdict> at(std::size_t index) const {
    return of([&](auto* c) { return float8_attention_verdicts_get(handle_.get(), index, c); });
  }
  // The verdict on the attention of this name, or of the nearest module around it.
  [[nodiscard]] Result<AttentionVerdict> find(const std::string& name) const {
    return of(
        [&](auto* c) { return float8_attention_verdicts_find(handle_.get(), name.c_str(), c); });
  }

 private:
  explicit AttentionVerdicts(std::shared_ptr<float8_attention_verdicts> handle)
      : handle_(std::move(handle)) {}
  template <class Call>
  static Result<AttentionVerdict> of(const Call& call) {
    float8_attention_verdict c{};
    c.struct_size = sizeof c;
    const float8_status status = call(&c);
    if (status != FLOAT8_OK) return Error{status, float8_last_error()};
    return AttentionVerdict{
        c.name,     c.recipe,      c.reason,       c.heads_q,
        c.heads_kv, c.head_dim,    c.tokens,       c.sequence,
        c.speedup,  c.speedup_low, c.speedup_high, static_cast<float8_evidence>(c.evidence)};
  }
  std::shared_ptr<float8_attention_verdicts> handle_;
};

}  // namespace float8
