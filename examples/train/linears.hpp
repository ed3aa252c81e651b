// The linears of the model on float8, whose weights ranks share out by rows (FSDP). A step begins with the
// casts of all shards by one list: it finds all maxima, one all-reduce takes them to all ranks, and it casts.
// Then each forward gathers q and each backward qt, one byte an element. A weight that no GEMM reads in fp8 is
// gathered in bf16. One rank alone has the same casts, and gathers nothing.
//
// Nothing here depends on a recipe by its name, which goes to Recipe::named alone.
#pragma once

#include <optional>

#include "config.hpp"

namespace train {

// The gradient of a step is the sum of its micro-batches', first over ranks and then over those of a rank, so
// that n ranks give the bits of n micro-batches. A kernel leaves a micro-batch's in `apart`, or in its place.
[[nodiscard]] inline float* gradient_target(const Device& device, float* grad, float* apart,
                                            i64 micro_batch) {
  return device.ranks == 1 && micro_batch == 0 ? grad : apart;
}
// Then this adds it to `grad`, of `count` elements. Of a gradient in shards, `apart` has so many of each rank.
inline void add_gradient(Device& device, float* grad, float* apart, i64 count, bool in_shards,
                         i64 micro_batch) {
  float* const own = in_shards ? apart + device.rank * count : apart;
  float* const sum = micro_batch == 0 ? grad : own;
  in_shards ? device.reduce_scatter(apart, sum, count) : device.all_reduce(apart, sum, count);
  if (micro_batch > 0) LAUNCH(device, add, chunks(count), count, own, grad);
}

class Linears {
 public:
  // `weights` are the rank's parameters in bf16, and `grads` their gradients.
  Linears(Device& device, const Config& config, const Layout& layout, const u16* weights,
          float* grads)
      : device_(device), weights_(weights), grads_(grads) {
    size_t workspace_bytes = 0;
    std::vector<const float8_linear*> handles;
    for (const Weight& weight : layout.weights) {
      const float8::LinearDesc desc{.m_max = config.batch_tokens(),
                                    .n = weight.n,
                                    .k = weight.k,
                                    .recipe = recipe_of(config, weight),
                                    .grad_weight_dtype = FLOAT8_F32};
      Layer layer{.weight = weight, .linear = float8::Linear::plan(device.context(), desc).value()};
      workspace_bytes = std::max(workspace_bytes, layer.linear.workspace_bytes());
      handles.push_back(layer.linear.get());
      layers_.push_back(std::move(layer));
    }
    scales_ = float8::Scales::plan(device.context(), handles).value();
    is_delayed_ = scales_->bytes() > 0;
    scale_state_ = device.allocate(scales_->bytes());
    for (size_t i = 0; is_delayed_ && i < layers_.size(); ++i) {
      layers_[i].slots = scales_->slots(scale_state_, i).value();
    }
    plan_casts(config);
    if (casts_) workspace_bytes = std::max(workspace_bytes, casts_->workspace_bytes());
    workspace_ = device.allocate(workspace_bytes);
    dw_ = device.take<float>(layout.largest);
    whole_bf16_ = device.take<u16>(device.ranks == 1 ? 0 : layout.largest);
  }

  // Begins a step. In the first step of all, delayed scaling has no scales of earlier ones.
  void begin(bool first_step) {
    step_ = {.first_step = first_step, .ranks = device_.handle()};
    const float8::Step cast_step{.first_step = first_step,
                                 .ranks = is_delayed_ ? device_.handle() : nullptr};
    if (!casts_) return;
    if (!is_delayed_) check(casts_->find_amax({}, cast_args_, device_.stream()));
    if (amax_words_ > 0 && device_.communicator != nullptr) {
      check(device_.communicator->sync_amax(amax_, amax_words_, device_.stream()));
    }
    check(
        casts_->run({.workspace = {workspace_}, .step = &cast_step}, cast_args_, device_.stream()));
  }

  void forward(size_t index, const void* x, void* y) {
    float8::ForwardArgs args;
    set_common(layers_[index], args, false);
    args.x.data = x;
    args.y.data = y;
    args.workspace.data = workspace_;
    check(layers_[index].linear.forward(args, device_.stream()));
  }

  // x is the forward's. The gradient of the weight is then that of all ranks and micro-batches so far.
  void backward(size_t index, const void* dy, const void* x, void* dx, i64 micro_batch) {
    Layer& layer = layers_[index];
    float* const grad = grads_ + layer.weight.offset;
    float8::BackwardArgs args;
    set_common(layer, args, true);
    args.dy.data = dy;
    args.x.data = x;
    args.dx.data = dx;
    args.dw.data = gradient_target(device_, grad, dw_, micro_batch);
    args.workspace.data = workspace_;
    check(layer.linear.backward(args, device_.stream()));
    add_gradient(device_, grad, dw_, layer.weight.shard_size(), true, micro_batch);
  }

  // Comes between backward and the optimizer. It is for delayed scaling, and does nothing elsewhere.
  void update_scales() { check(scales_->sync(scale_state_, device_.handle(), device_.stream())); }

  // The state of delayed scaling for a checkpoint; an empty one is that before the first step.
  [[nodiscard]] std::vector<unsigned char> scale_state() const {
    return scales_->save(scale_state_, device_.stream()).value();
  }
  void set_scale_state(const std::vector<unsigned char>& state) {
    check(state.empty() ? scales_->init(scale_state_, device_.stream())
                        : scales_->load(scale_state_, state, device_.stream()));
  }

 private:
  struct Layer {
    Weight weight;
    float8::Linear linear;
    void* saved = nullptr;
    float8::ScaleSlots slots = {};
    std::optional<float8::Quantizer> cast_shard = {}, cast_whole = {};  // none: it is never cast
    void* shard = nullptr;                                              // in fp8
  };

  static float8::Recipe recipe_of(const Config& config, const Weight& weight) {
    return float8::Recipe::named(weight.follows_recipe ? config.recipe : "bf16");
  }

  float8::Result<float8::Quantizer> plan_cast(const Config& config, const Weight& weight, i64 rows,
                                              bool over_ranks) {
    const float8::QuantizerDesc desc{
        .operand = FLOAT8_WEIGHT,
        .rows_max = rows,
        .cols = weight.k,
        .recipe = recipe_of(config, weight),
        .over_ranks = over_ranks,
        .whole_rows = over_ranks ? weight.n : 0};  // shards may cut blocks that have a scale
    return float8::Quantizer::plan(device_.context(), desc);
  }

  void plan_casts(const Config& config) {
    std::vector<float8::Quantizer> plans;
    size_t whole_bytes = 0, gather_bytes = 0;
    for (Layer& layer : layers_) {
      const Weight& weight = layer.weight;
      const auto whole = plan_cast(config, weight, weight.n, false);
      const bool is_cast = whole.ok() || whole.error().code != FLOAT8_UNSUPPORTED;
      layer.saved = device_.allocate(layer.linear.saved_bytes_with_tensors(false, is_cast));
      if (!is_cast) continue;
      layer.cast_whole = whole.value();
      // A delayed scale is the same on all ranks already; its casts have all rows that are planned.
      const i64 rows = is_delayed_ && weight.rows > 0 ? weight.rows : weight.shard_rows;
      const auto& shard = layer.cast_shard = plan_cast(config, weight, rows, !is_delayed_).value();
      plans.push_back(*shard);
      float8::QuantizeArgs args;
      args.x.data = weights_ + weight.offset;
      args.tensor.data = layer.shard = device_.allocate(shard->tensor_bytes());
      args.rows = weight.rows;
      args.first_row = weight.first_row;
      if (const size_t words = shard->row_amax_words(); words > 0) {
        args.row_amax = device_.take<u32>(static_cast<i64>(words));
      }
      args.scales = layer.slots;
      cast_args_.push_back(args);
      amax_words_ += shard->amax_words();
      const float8::Tensor view = layer.cast_whole->view(layer.shard, weight.n).value();
      whole_bytes = std::max(whole_bytes, layer.cast_whole->tensor_bytes());
      gather_bytes = std::max(gather_bytes, float8::Communicator::gather_workspace_bytes(
                                                view, weight.shard_rows, device_.ranks));
    }
    if (plans.empty()) return;
    casts_ = float8::QuantizerList::plan(device_.context(), plans).value();
    whole_fp8_ = device_.allocate(device_.ranks == 1 ? 0 : whole_bytes);
    gather_workspace_ = device_.allocate(gather_bytes);
    // The words that span ranks follow each other, for one all-reduce.
    u32* amax = amax_ = device_.take<u32>(static_cast<i64>(amax_words_));
    for (size_t i = 0; i < plans.size(); ++i) {
      if (plans[i].amax_words() > 0) cast_args_[i].amax = amax;
      amax += plans[i].amax_words();
    }
  }

  // Sets what the arguments of forward and backward have alike.
  template <class Args>
  void set_common(Layer& layer, Args& args, bool backward) {
    args.saved.data = layer.saved;
    args.scales = layer.slots;
    args.step = &step_;
    const Weight& weight = layer.weight;
    if (layer.cast_shard) {
      w_fp8_ = fp8_weight(layer, backward);
      args.w.fp8 = &w_fp8_;
    } else {
      args.w.data = device_.gather(weights_ + weight.offset, whole_bf16_, weight.shard_size());
    }
  }

  // The copy that forward or backward reads: q or qt.
  float8::Tensor fp8_weight(const Layer& layer, bool backward) {
    const Weight& weight = layer.weight;
    float8::Tensor shard;
    shard.cols = weight.k;
    if (weight.rows > 0) shard = layer.cast_shard->view(layer.shard, weight.rows).value();
    if (device_.communicator == nullptr) return shard;
    float8::Tensor whole = layer.cast_whole->view(whole_fp8_, weight.n).value();
    (backward ? whole.q : whole.qt) = nullptr;
    const float8::GatherArgs args{.shard = &shard,
                                  .whole = &whole,
                                  .shard_rows = weight.shard_rows,
                                  .workspace = {gather_workspace_}};
    check(device_.communicator->gather_tensor(device_.context(), args, device_.stream()));
    return whole;
  }

  Device& device_;
  const u16* weights_;
  float* grads_;
  float8::Step step_;
  std::vector<Layer> layers_;
  std::optional<float8::Scales> scales_;
  bool is_delayed_ = false;
  void* scale_state_ = nullptr;
  std::optional<float8::QuantizerList> casts_;
  std::vector<float8::QuantizeArgs> cast_args_;
  u32* amax_ = nullptr;
  size_t amax_words_ = 0;
  // These serve one call at a time.
  float8::Tensor w_fp8_;
  void *workspace_ = nullptr, *gather_workspace_ = nullptr;
  void* whole_fp8_ = nullptr;
  u16* whole_bf16_ = nullptr;
  float* dw_ = nullptr;
};

}  // namespace train
