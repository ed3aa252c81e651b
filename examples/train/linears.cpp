#include "linears.hpp"

#include <algorithm>

#include "error.hpp"
#include "files.hpp"

namespace train {
namespace {

float8::LinearDesc desc_of(const TrainConfig& config, const LinearShape& shape) {
  float8::LinearDesc desc;
  desc.m_max = config.batch_tokens();
  desc.n = shape.n;
  desc.k = shape.k;
  desc.recipe = float8::Recipe::bf16();
  desc.grad_weight_dtype = FLOAT8_F32;
  return desc;
}

// Decides which layers follow the recipe, and plans them.
float8::Model convert(const float8::Context& context, const TrainConfig& config,
                      const Parameters& parameters) {
  std::vector<float8::ModelLayer> layers;
  for (const LinearShape& shape : parameters.linears) {
    layers.push_back({shape.name, desc_of(config, shape)});
  }
  float8::ModelOptions options;
  options.recipe = float8::Recipe::named(config.recipe);
  options.tokens = config.batch_tokens();
  // The head stays in bf16: it is a hundredth of the work, and its output decides the loss.
  options.filter_fqns = {"head"};
  return float8::Model::plan(context, layers, options).value();
}

// Plans a converted linear again so that grad_input reads a gathered qt as it lies; null where the choice
// for grad_input is cuBLASLt, which does not.
std::optional<float8::Linear> plan_for_shards(const float8::Context& context,
                                              const TrainConfig& config, const LinearShape& shape) {
  float8::LinearDesc desc = desc_of(config, shape);
  desc.recipe = float8::Recipe::named(config.recipe);
  desc.weight_shards = true;
  auto linear = float8::Linear::plan(context, desc);
  if (linear) return std::move(linear).value();
  if (linear.error().code != FLOAT8_UNSUPPORTED) throw float8::Exception(linear.error());
  return std::nullopt;
}

// Whether the scales of a tensor that ranks hold columns of span them: those of its rows, or the one.
bool spans_columns(const float8_cast_setting& setting) {
  return setting.scaling == FLOAT8_DYNAMIC &&
         (setting.granularity == FLOAT8_TENSOR || setting.granularity == FLOAT8_AXIS);
}

// The same of x or dy of a linear that tensor parallelism splits.
bool has_columns_over_ranks(const TrainConfig& config, const LinearShape& shape) {
  if (config.tp == 1 || shape.split == Split::kNone) return false;
  const auto settings = float8::Recipe::named(config.recipe).settings().value();
  return spans_columns(shape.split == Split::kRows ? settings.grad_input.a : settings.output.a);
}

int64_t most_of_a_rank(const Parameters& parameters) {
  int64_t most = 0;
  for (const LinearShape& shape : parameters.linears) {
    most = std::max(most, shape.shard_rows * shape.k);
  }
  return most;
}

}  // namespace

Linears::Linears(Backend& backend, const TrainConfig& config, const Ranks& ranks,
                 const Parameters& parameters, const u16* weights, float* grads)
    : backend_(backend),
      ranks_(ranks),
      parameters_(parameters),
      grad_sum_(backend, ranks_.fsdp, config.micro_batches, most_of_a_rank(parameters)) {
  const float8::Context& context = backend.context();
  const float8::Model model = convert(context, config, parameters);
  for (size_t i = 0; i < parameters.linears.size(); ++i) {
    const LinearShape& shape = parameters.linears[i];
    auto linear = model.verdict(i).value().linear;
    if (!linear) linear = float8::Linear::plan(context, desc_of(config, shape)).value();
    const bool may_lie_in_shards =
        linear->weight_cache_bytes() > 0 && lies_in_shards(shape, ranks.fsdp);
    const auto for_shards =
        may_lie_in_shards ? plan_for_shards(context, config, shape) : std::nullopt;
    layers_.push_back(Layer{.linear = for_shards.value_or(*linear),
                            .w = weights + shape.offset,
                            .dw = grads + shape.offset,
                            .in_shards = for_shards.has_value(),
                            .x = nullptr,
                            .dy = nullptr});
  }
  if (!ranks.world.is_alone()) shards_.emplace(backend, ranks_, parameters, weights);
  allocate();
  if (shards_) allocate_shards(config.recipe);
  allocate_columns(config);
  if (!ranks.world.is_alone() || config.micro_batches > 1) {
    dw_ = static_cast<float*>(backend.allocate(
        static_cast<size_t>(most_of_a_rank(parameters) * ranks.world.count) * sizeof(float)));
  }
}

void Linears::allocate() {
  std::vector<const float8_linear*> handles;
  size_t workspace_bytes = 0;
  bool any_cast = false;
  for (Layer& layer : layers_) {
    handles.push_back(layer.linear.get());
    workspace_bytes = std::max(workspace_bytes, layer.linear.workspace_bytes());
    const bool cast = layer.linear.weight_cache_bytes() > 0;
    if (cast && !shards_) layer.cache = backend_.allocate(layer.linear.weight_cache_bytes());
    if (const size_t bytes = layer.linear.saved_bytes(cast); bytes > 0) {
      layer.saved = backend_.allocate(bytes);
    }
    any_cast = any_cast || cast;
  }
  if (any_cast && !shards_) {
    casts_ = float8::WeightCasts::plan(backend_.context(), handles).value();
    workspace_bytes = std::max(workspace_bytes, casts_->workspace_bytes());
  }
  workspace_ = backend_.allocate(workspace_bytes);

  scales_ = float8::Scales::plan(backend_.context(), handles).value();
  if (scales_->bytes() == 0) return;  // nothing has delayed scaling, so the calls do nothing
  scale_state_ = backend_.allocate(scales_->bytes());
  for (size_t i = 0; i < layers_.size(); ++i) {
    layers_[i].slots = scales_->slots(scale_state_, i).value();
  }
}

void Linears::allocate_shards(const std::string& recipe) {
  for (size_t i = 0; i < layers_.size(); ++i) {
    if (layers_[i].linear.weight_cache_bytes() == 0) continue;
    shards_->add_cast(i, recipe, scale_state_ == nullptr ? nullptr : &layers_[i].slots,
                      layers_[i].in_shards);
  }
  shards_->allocate();
}

void Linears::allocate_columns(const TrainConfig& config) {
  std::shared_ptr<ColumnActivation> dy;
  for (size_t i = 0; i < layers_.size(); ++i) {
    const LinearShape& shape = parameters_.linears[i];
    const float8::LinearDesc desc = desc_of(config, shape);
    Layer& layer = layers_[i];
    if (layer.linear.weight_cache_bytes() == 0 || !has_columns_over_ranks(config, shape)) continue;
    if (shape.split == Split::kColumns) {
      layer.x = std::make_unique<ColumnActivation>(backend_, ranks_.tp, config.recipe, FLOAT8_INPUT,
                                                   desc.m_max, desc.k);
      continue;
    }
    if (!dy) {
      dy = std::make_shared<ColumnActivation>(backend_, ranks_.tp, config.recipe,
                                              FLOAT8_GRAD_OUTPUT, desc.m_max, desc.n);
    }
    layer.dy = dy;
  }
}

void Linears::cast_weights(bool first_step) {
  if (shards_) shards_->cast(first_step);
  if (!casts_) return;
  std::vector<float8::WeightArgs> all;
  for (const Layer& layer : layers_) {
    float8::WeightArgs args;
    args.w = layer.w;
    args.cache = layer.cache;
    args.scales = layer.slots;
    args.first_step = first_step;
    all.push_back(args);
  }
  check(casts_->run(all, workspace_, backend_.stream()));
}

void Linears::forward(size_t index, const void* x, void* y, bool first_step) {
  Layer& layer = layers_[index];
  float8::ForwardArgs args;
  args.x = x;
  args.w = layer.w;
  args.y = y;
  args.saved = layer.saved;
  args.weight_cache = layer.cache;
  args.scales = layer.slots;
  args.first_step = first_step;
  args.ranks = ranks_.world.handle();
  if (shards_) {
    args.w_tensor = shards_->gather(index, false);
    args.w = shards_->gather_bf16(index);
  }
  if (layer.x) args.x_tensor = layer.x_tensor = layer.x->cast(x);
  check(layer.linear.forward(args, workspace_, backend_.stream()));
}

void Linears::backward(size_t index, const void* dy, const void* x, void* dx, bool first_step,
                       int64_t batch) {
  const Layer& layer = layers_[index];
  const LinearShape& shape = parameters_.linears[index];
  float8::BackwardArgs args;
  args.dy = dy;
  args.saved = layer.saved;
  args.dx = dx;
  args.dw = grad_sum_.target(layer.dw, dw_, batch);
  args.x = x;
  args.w = layer.w;
  args.weight_cache = layer.cache;
  args.scales = layer.slots;
  args.first_step = first_step;
  args.ranks = ranks_.world.handle();
  if (shards_) {
    args.w_tensor = shards_->gather(index, true);
    args.w = shards_->gather_bf16(index);
  }
  args.x_tensor = layer.x_tensor;
  if (layer.dy) args.dy_tensor = layer.dy->cast(dy);
  check(layer.linear.backward(args, workspace_, backend_.stream()));
  grad_sum_.add(layer.dw, dw_, shape.shard_rows * shape.k, true, batch);
}

std::string Linears::plan_hash(size_t index) const {
  return hash_hex(layers_[index].linear.info().value());
}

void Linears::update_scales() {
  check(scales_->sync(scale_state_, ranks_.world.handle(), backend_.stream()));
}

std::vector<unsigned char> Linears::scale_state() const {
  return scales_->save(scale_state_, backend_.stream()).value();
}

void Linears::set_scale_state(const std::vector<unsigned char>& state) {
  check(state.empty() ? scales_->init(scale_state_, backend_.stream())
                      : scales_->load(scale_state_, state, backend_.stream()));
}

}  // namespace train
