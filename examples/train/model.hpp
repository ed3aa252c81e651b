// The model and its training step. The bytes before a place are embedded side by side into the residual
// stream h; each block adds down(gelu(up(norm(h)))) to it; a norm and a head give the logits of the next
// byte. Activations are bf16; gradients of weights and the weights' masters are fp32.
//
// Micro-batch b of rank r takes the share r * micro_batches + b of a step's tokens. All memory is taken when
// the model is made, and a step is a fixed sequence of launches that waits for nothing.
#pragma once

#include <tuple>

#include "linears.hpp"

namespace train {

// A run between two steps, as a checkpoint has it.
struct State {
  std::vector<float> loss, ms;      // of each step that is done
  std::vector<float> master, m, v;  // of all ranks, as one rank lays them out
  std::vector<unsigned char> scales;

  template <class Each>
  void for_each_array(const Each& each) {
    std::apply([&](auto&... arrays) { (each(arrays), ...); },
               std::tie(loss, ms, master, m, v, scales));
  }
};

class Model {
 public:
  // Copies `text`. The device and the communicator outlive the model.
  Model(Device& device, const Config& config, const std::string& text)
      : device_(device), config_(config), layout_(config, device.rank, device.ranks) {
    places_ = text.size() - static_cast<u64>(config.context);
    const i64 stream = tokens_ * config.hidden, inner = tokens_ * config.ffn;
    text_ = device.take<u8>(std::ssize(text));
    device.upload(text_, std::vector<u8>(text.begin(), text.end()));
    slots_ = device.take<u8>(tokens_ * config.context);
    targets_ = device.take<u8>(tokens_);
    curve_ = device.take<float>(config.steps);
    for (float** array : {&master_, &m_, &v_, &grad_}) *array = device.take<float>(layout_.count);
    copy_ = device.take<u16>(layout_.count);
    for (i64 i = 0; i <= config.layers; ++i) {
      const i64 own = i < config.layers ? inner : 0;
      saved_.push_back({device.take<u16>(stream), device.take<u16>(stream),
                        device.take<float>(tokens_), device.take<u16>(own), device.take<u16>(own)});
    }
    for (u16** array : {&y_, &dh_}) *array = device.take<u16>(stream);
    da_ = device.take<u16>(inner);
    for (u16** array : {&logits_, &dlogits_}) *array = device.take<u16>(tokens_ * kBytes);
    losses_ = device.take<float>(config.tokens);
    shares_ = device.take<float>(kShares * config.hidden);
    small_ = device.take<float>(small_count_);
    norm_ = device.take<float>(1);
    // Those of all weights, then those of embeddings and gains. Those of other ranks are 0 in a rank's own.
    squares_ = device.take<float>(layout_.rows + small_count_ / config.hidden);
    own_squares_ = device.ranks == 1 ? squares_ : device.take<float>(layout_.rows);
    gathered_ = device.take<float>(device.ranks == 1 ? 0 : layout_.largest);
    linears_.emplace(device, config, layout_, copy_, grad_);
    State start;
    start.master = initial_parameters(config);
    start.m = start.v = std::vector<float>(start.master.size());
    set_state(start);
  }

  // Enqueues the next step: forward, backward, scales, optimizer.
  void step() {
    linears_->begin(step_ == 0);
    for (i64 micro_batch = 0; micro_batch < config_.micro_batches; ++micro_batch) {
      forward(micro_batch);
      backward(micro_batch);
    }
    linears_->update_scales();
    optimize();
    ++step_;
  }

  // The losses of steps [first, last), which are done.
  [[nodiscard]] std::vector<float> losses(i64 first, i64 last) {
    return device_.download(curve_ + first, last - first);
  }

  // All but loss and ms. All ranks call it.
  [[nodiscard]] State state() {
    State state;
    state.master = whole(master_);
    state.m = whole(m_);
    state.v = whole(v_);
    state.scales = linears_->scale_state();
    return state;
  }

  // The next step is the one after state.loss.size().
  void set_state(const State& state) {
    const std::vector<float> master = own_part(state.master);
    std::vector<u16> copy(master.size());
    std::ranges::transform(master, copy.begin(), to_bf16);
    device_.upload(master_, master);
    device_.upload(copy_, copy);
    device_.upload(m_, own_part(state.m));
    device_.upload(v_, own_part(state.v));
    linears_->set_scale_state(state.scales);
    step_ = std::ssize(state.loss);
  }

 private:
  // A block's backward needs these of its forward. The head has one too, without u and a.
  struct Saved {
    u16 *h, *n;  // before the norm, and behind it
    float* inv_rms;
    u16 *u, *a;  // before GELU, and behind it
  };

  void forward(i64 micro_batch) {
    const i64 first = (device_.rank * config_.micro_batches + micro_batch) * tokens_;
    LAUNCH(device_, embed, tokens_, text_, places_, config_.seed, step_ * config_.tokens + first,
           copy_ + layout_.embedding, slots_, targets_, saved_[0].h, tokens_, config_.context,
           width_);
    const size_t head = saved_.size() - 1;
    const i64 inner = tokens_ * config_.ffn;
    for (size_t i = 0; i <= head; ++i) {
      const Saved& here = saved_[i];
      const float* const gain = master_ + layout_.gain + static_cast<i64>(i) * width_;
      LAUNCH(device_, rms_norm, tokens_, i == 0 ? nullptr : saved_[i - 1].h, i == 0 ? nullptr : y_,
             here.h, gain, here.n, here.inv_rms, width_);
      if (i == head) break;
      linears_->forward(2 * i, here.n, here.u);
      LAUNCH(device_, gelu, chunks(inner), inner, here.u, here.a);
      linears_->forward(2 * i + 1, here.a, y_);
    }
    linears_->forward(2 * head, saved_[head].n, logits_);
    LAUNCH(device_, loss, tokens_, logits_, targets_, dlogits_, losses_ + first, config_.tokens);
  }

  void backward(i64 micro_batch) {
    const size_t head = saved_.size() - 1;
    const i64 inner = tokens_ * config_.ffn;
    float* const small_grad = grad_ + layout_.embedding;
    float* const small = gradient_target(device_, small_grad, small_, micro_batch);
    linears_->backward(2 * head, dlogits_, saved_[head].n, y_, micro_batch);
    norm_backward(head, nullptr, small);
    for (size_t i = head; i-- > 0;) {
      const Saved& here = saved_[i];
      linears_->backward(2 * i + 1, dh_, here.a, da_, micro_batch);
      LAUNCH(device_, gelu_grad, chunks(inner), inner, here.u, da_);
      linears_->backward(2 * i, da_, here.n, y_, micro_batch);
      norm_backward(i, dh_, small);
    }
    LAUNCH(device_, embed_grad, config_.context * kBytes, dh_, slots_, small, tokens_, width_,
           width_ / config_.context);
    add_gradient(device_, small_grad, small_, small_count_, false, micro_batch);
  }

  // Takes the gradient behind norm `index` from y_, and leaves that of the residual stream before it in dh_.
  // The gain's own goes to `small`, the gradients of embeddings and gains.
  void norm_backward(size_t index, const u16* d_residual, float* small) {
    const i64 gain = layout_.gain + static_cast<i64>(index) * width_;
    LAUNCH(device_, rms_norm_grad, kShares, y_, saved_[index].h, master_ + gain,
           saved_[index].inv_rms, d_residual, dh_, shares_, tokens_, width_);
    LAUNCH(device_, sum_shares, width_, shares_, small + (gain - layout_.embedding), width_);
  }

  // The norm of the gradient adds up rows, each of which one rank has. Sums over ranks add nothing to it but
  // zeros, so that it has the same bits on any number of them.
  void optimize() {
    for (const Weight& weight : layout_.weights) {
      LAUNCH(device_, row_sums, weight.rows, grad_ + weight.offset, weight.k, true, 1,
             own_squares_ + weight.row_index + weight.first_row);
    }
    device_.all_reduce(own_squares_, squares_, layout_.rows);
    const i64 own_tokens = config_.tokens / device_.ranks;
    (void)device_.gather(losses_ + device_.rank * own_tokens, losses_, own_tokens);
    const i64 small_rows = small_count_ / width_;
    LAUNCH(device_, row_sums, small_rows, grad_ + layout_.embedding, width_, true, 1,
           squares_ + layout_.rows);
    LAUNCH(device_, row_sums, 1, squares_, layout_.rows + small_rows, false, 1, norm_);
    const auto correction = [this](float beta) {
      return static_cast<float>(1 / (1 - std::pow(double{beta}, static_cast<double>(step_ + 1))));
    };
    LAUNCH(device_, adamw, chunks(layout_.count), layout_.count, norm_, config_.lr_at(step_),
           correction(kBeta1), correction(kBeta2), grad_, master_, m_, v_, copy_,
           layout_.embedding);
    LAUNCH(device_, row_sums, 1, losses_, config_.tokens, false,
           1.0F / static_cast<float>(config_.tokens), curve_ + step_);
  }

  [[nodiscard]] std::vector<float> whole(const float* shards) {
    std::vector<float> out;
    const auto append = [&](const float* from, i64 count) {
      const std::vector<float> values = device_.download(from, count);
      out.insert(out.end(), values.begin(), values.end());
    };
    for (const Weight& weight : layout_.weights) {
      append(device_.gather(shards + weight.offset, gathered_, weight.shard_size()),
             weight.n * weight.k);
    }
    append(shards + layout_.embedding, small_count_);
    return out;
  }

  [[nodiscard]] std::vector<float> own_part(const std::vector<float>& whole) const {
    std::vector<float> out(static_cast<size_t>(layout_.count));
    auto from = whole.begin();
    for (const Weight& weight : layout_.weights) {
      std::copy_n(from + weight.first_row * weight.k, weight.rows * weight.k,
                  out.begin() + weight.offset);
      from += weight.n * weight.k;
    }
    std::copy_n(from, small_count_, out.begin() + layout_.embedding);
    return out;
  }

  Device& device_;
  const Config config_;
  const Layout layout_;
  const i64 tokens_ = config_.batch_tokens();  // of a micro-batch
  const i64 width_ = config_.hidden;
  const i64 small_count_ = layout_.count - layout_.embedding;  // of embeddings and gains
  u64 places_;                                                 // of the text
  i64 step_ = 0;                                               // the next one

  u8 *text_, *slots_, *targets_;
  float *curve_, *master_, *m_, *v_, *grad_;
  u16* copy_;  // the weights in bf16
  std::vector<Saved> saved_;
  u16* y_;  // what a block adds; in backward the gradient behind its norm
  u16 *dh_, *da_, *logits_, *dlogits_;
  float *losses_, *shares_, *small_;
  float *squares_, *own_squares_, *norm_;  // of the rows of the gradient, and their sum
  float* gathered_;
  std::optional<Linears> linears_;
};

}  // namespace train
