#include "linears.hpp"

#include <algorithm>

namespace f8::train {
namespace {

float8::LinearDesc desc_of(const TrainConfig& config, const LinearShape& shape) {
  float8::LinearDesc desc;
  desc.m_max = config.tokens;
  desc.n = shape.n;
  desc.k = shape.k;
  desc.recipe = float8::Recipe::bf16();
  desc.grad_weight_dtype = FLOAT8_F32;
  return desc;
}

// Which layers follow the recipe, with their plans.
Result<float8::Model> convert(const float8::Context& context, const TrainConfig& config,
                              const Parameters& parameters) {
  std::vector<float8::ModelLayer> layers;
  for (const LinearShape& shape : parameters.linears) {
    layers.push_back({shape.name, desc_of(config, shape)});
  }
  float8::ModelOptions options;
  options.recipe = float8::Recipe::named(config.recipe);
  options.tokens = config.tokens;
  // The head stays in bf16: it is a hundredth of the work, and its output decides the loss.
  options.filter_fqns = {"head"};
  return to_result(float8::Model::plan(context, layers, options));
}

}  // namespace

Result<Linears> Linears::plan(Backend& backend, const TrainConfig& config,
                              const Parameters& parameters, const u16* weights, float* grads) {
  Linears linears(backend);
  const float8::Context& context = backend.context();
  const float8::Model model = F8_TRY(convert(context, config, parameters));
  for (size_t i = 0; i < parameters.linears.size(); ++i) {
    const LinearShape& shape = parameters.linears[i];
    auto verdict = F8_TRY(to_result(model.verdict(i)));
    if (!verdict.linear) {
      verdict.linear = F8_TRY(to_result(float8::Linear::plan(context, desc_of(config, shape))));
    }
    linears.layers_.push_back(
        Layer{.linear = *verdict.linear, .w = weights + shape.offset, .dw = grads + shape.offset});
  }
  F8_TRY(linears.allocate());
  return linears;
}

Status Linears::allocate() {
  std::vector<const float8_linear*> handles;
  size_t workspace_bytes = 0;
  bool any_cast = false;
  for (Layer& layer : layers_) {
    handles.push_back(layer.linear.get());
    workspace_bytes = std::max(workspace_bytes, layer.linear.workspace_bytes());
    const bool cast = layer.linear.weight_cache_bytes() > 0;
    if (cast) layer.cache = F8_TRY(backend_->allocate(layer.linear.weight_cache_bytes()));
    if (const size_t bytes = layer.linear.saved_bytes(cast); bytes > 0) {
      layer.saved = F8_TRY(backend_->allocate(bytes));
    }
    any_cast = any_cast || cast;
  }
  if (any_cast) {
    casts_ = F8_TRY(to_result(float8::WeightCasts::plan(backend_->context(), handles)));
    workspace_bytes = std::max(workspace_bytes, casts_->workspace_bytes());
  }
  workspace_ = F8_TRY(backend_->allocate(workspace_bytes));

  scales_ = F8_TRY(to_result(float8::Scales::plan(backend_->context(), handles)));
  if (scales_->bytes() == 0) return {};  // nothing has delayed scaling: the calls do nothing
  scale_state_ = F8_TRY(backend_->allocate(scales_->bytes()));
  for (size_t i = 0; i < layers_.size(); ++i) {
    layers_[i].slots = F8_TRY(to_result(scales_->slots(scale_state_, i)));
  }
  return {};
}

Status Linears::cast_weights(bool first_step) {
  if (!casts_) return {};
  std::vector<float8_weight_args> all;
  for (const Layer& layer : layers_) {
    float8::WeightArgs args;
    args.w = layer.w;
    args.cache = layer.cache;
    args.scales = layer.slots;
    args.first_step = first_step;
    all.push_back(args.c());
  }
  return to_status(casts_->run(all, workspace_, backend_->stream()));
}

Status Linears::forward(size_t index, const void* x, void* y, bool first_step) {
  const Layer& layer = layers_[index];
  float8::ForwardArgs args;
  args.x = x;
  args.w = layer.w;
  args.y = y;
  args.saved = layer.saved;
  args.weight_cache = layer.cache;
  args.scales = layer.slots;
  args.first_step = first_step;
  return to_status(layer.linear.forward(args, workspace_, backend_->stream()));
}

Status Linears::backward(size_t index, const void* dy, const void* x, void* dx, bool first_step) {
  const Layer& layer = layers_[index];
  float8::BackwardArgs args;
  args.dy = dy;
  args.saved = layer.saved;
  args.dx = dx;
  args.dw = layer.dw;
  args.x = x;
  args.w = layer.w;
  args.weight_cache = layer.cache;
  args.scales = layer.slots;
  args.first_step = first_step;
  return to_status(layer.linear.backward(args, workspace_, backend_->stream()));
}

Status Linears::update_scales() {
  return to_status(scales_->sync(scale_state_, nullptr, backend_->stream()));
}

Result<std::vector<unsigned char>> Linears::scale_state() const {
  return to_result(scales_->save(scale_state_, backend_->stream()));
}

Status Linears::set_scale_state(const std::vector<unsigned char>& state) {
  if (!state.empty()) return to_status(scales_->load(scale_state_, state, backend_->stream()));
  return to_status(scales_->init(scale_state_, backend_->stream()));
}

}  // namespace f8::train
