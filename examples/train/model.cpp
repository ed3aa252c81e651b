#include "model.hpp"

#include <algorithm>

#include "device/bf16.hpp"

namespace train {
namespace {

// Allocates `count` elements, zeroed.
template <class T>
void take(Backend& backend, int64_t count, T*& out) {
  out = static_cast<T*>(backend.allocate(static_cast<size_t>(count) * sizeof(T)));
}

template <class T>
void upload(Backend& backend, T* to, std::span<const T> values) {
  backend.upload(to, values.data(), values.size_bytes());
}

template <class T>
std::vector<T> download(Backend& backend, const T* from, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  backend.download(values.data(), from, values.size() * sizeof(T));
  return values;
}

}  // namespace

Model::Model(Backend& backend, const TrainConfig& config, std::string_view text)
    : backend_(backend), config_(config), parameters_(config) {
  allocate(text);
  linears_.emplace(backend, config, parameters_, copy_, grad_);
  Checkpoint start;
  start.master = parameters_.initial(config);
  start.m.resize(start.master.size());
  start.v.resize(start.master.size());
  set_state(start);
}

void Model::allocate(std::string_view text) {
  const int64_t stream = config_.tokens * config_.hidden;
  const int64_t inner = config_.tokens * config_.ffn;
  text_bytes_ = static_cast<u32>(text.size());
  take(backend_, text_bytes_, text_);
  backend_.upload(text_, text.data(), text.size());
  take(backend_, 1, step_);
  take(backend_, config_.steps, schedule_);
  upload<StepScalars>(backend_, schedule_, make_schedule(config_, adam_));
  take(backend_, config_.steps, curve_);
  for (float** array : {&master_, &m_, &v_, &grad_}) take(backend_, parameters_.count, *array);
  take(backend_, parameters_.count, copy_);
  take(backend_, config_.tokens * config_.context, slots_);
  take(backend_, config_.tokens, targets_);
  saved_.resize(static_cast<size_t>(config_.layers) + 1);
  for (Saved& saved : saved_) {
    take(backend_, stream, saved.h);
    take(backend_, stream, saved.n);
    take(backend_, config_.tokens, saved.inv_rms);
    if (&saved == &saved_.back()) continue;
    take(backend_, inner, saved.u);
    take(backend_, inner, saved.a);
  }
  take(backend_, stream, y_);
  take(backend_, stream, dh_);
  take(backend_, inner, da_);
  take(backend_, config_.tokens * kBytes, logits_);
  take(backend_, config_.tokens * kBytes, dlogits_);
  take(backend_, config_.tokens, losses_);
  take(backend_, backend_.share_count() * config_.hidden, partials_);
}

void Model::step(bool first_step) {
  forward(first_step);
  backward(first_step);
  linears_->update_scales();
  optimize();
}

void Model::forward(bool first_step) {
  const auto tokens = static_cast<i32>(config_.tokens);
  const auto context = static_cast<i32>(config_.context);
  const auto width = static_cast<i32>(config_.hidden);
  linears_->cast_weights(first_step);
  backend_.launch(SampleArgs{.text = text_,
                             .text_bytes = text_bytes_,
                             .seed = config_.seed,
                             .step = step_,
                             .slots = slots_,
                             .targets = targets_,
                             .tokens = tokens,
                             .context = context});
  backend_.launch(EmbedArgs{.table = copy_ + parameters_.embedding,
                            .slots = slots_,
                            .h = saved_[0].h,
                            .tokens = tokens,
                            .context = context,
                            .width = width});
  for (size_t i = 0; i < saved_.size(); ++i) {
    const Saved& here = saved_[i];
    backend_.launch(
        NormArgs{.h = i == 0 ? here.h : saved_[i - 1].h,
                 .y = i == 0 ? nullptr : y_,
                 .sum = i == 0 ? nullptr : here.h,
                 .gain = master_ + parameters_.gain + static_cast<int64_t>(i) * config_.hidden,
                 .n = here.n,
                 .inv_rms = here.inv_rms,
                 .tokens = tokens,
                 .width = width});
    if (i + 1 == saved_.size()) break;
    linears_->forward(2 * i, here.n, here.u, first_step);
    backend_.launch(GeluArgs{.u = here.u, .a = here.a, .count = config_.tokens * config_.ffn});
    linears_->forward(2 * i + 1, here.a, y_, first_step);
  }
  linears_->forward(2 * (saved_.size() - 1), saved_.back().n, logits_, first_step);
  backend_.launch(LossArgs{.logits = logits_,
                           .targets = targets_,
                           .dlogits = dlogits_,
                           .losses = losses_,
                           .tokens = tokens});
}

// Takes the gradient behind norm `index` from y_, and leaves that of the residual stream before it
// in dh_.
void Model::norm_grad(size_t index, const u16* d_residual) {
  const int64_t gain = parameters_.gain + static_cast<int64_t>(index) * config_.hidden;
  const auto width = static_cast<i32>(config_.hidden);
  backend_.launch(NormGradArgs{.dn = y_,
                               .h = saved_[index].h,
                               .gain = master_ + gain,
                               .inv_rms = saved_[index].inv_rms,
                               .d_residual = d_residual,
                               .dh = dh_,
                               .partials = partials_,
                               .blocks = backend_.share_count(),
                               .tokens = static_cast<i32>(config_.tokens),
                               .width = width});
  backend_.launch(SumRowsArgs{
      .partials = partials_, .out = grad_ + gain, .rows = backend_.share_count(), .width = width});
}

void Model::backward(bool first_step) {
  const size_t head = saved_.size() - 1;
  linears_->backward(2 * head, dlogits_, saved_[head].n, y_, first_step);
  norm_grad(head, nullptr);
  for (size_t i = head; i-- > 0;) {
    const Saved& here = saved_[i];
    linears_->backward(2 * i + 1, dh_, here.a, da_, first_step);
    backend_.launch(
        GeluGradArgs{.u = here.u, .da = da_, .du = da_, .count = config_.tokens * config_.ffn});
    linears_->backward(2 * i, da_, here.n, y_, first_step);
    norm_grad(i, dh_);
  }
  backend_.launch(EmbedGradArgs{.dh = dh_,
                                .slots = slots_,
                                .dtable = grad_ + parameters_.embedding,
                                .tokens = static_cast<i32>(config_.tokens),
                                .context = static_cast<i32>(config_.context),
                                .width = static_cast<i32>(config_.hidden)});
}

void Model::optimize() {
  const i32 shares = 4 * backend_.share_count();
  backend_.launch(SquareSumArgs{
      .x = grad_, .partials = partials_, .count = parameters_.count, .blocks = shares});
  backend_.launch(AdamArgs{.master = master_,
                           .m = m_,
                           .v = v_,
                           .grad = grad_,
                           .copy = copy_,
                           .count = parameters_.count,
                           .decayed = parameters_.decayed,
                           .partials = partials_,
                           .partial_count = shares,
                           .schedule = schedule_,
                           .step = step_,
                           .max_norm = adam_.max_norm,
                           .beta1 = adam_.beta1,
                           .beta2 = adam_.beta2,
                           .epsilon = adam_.epsilon,
                           .weight_decay = adam_.weight_decay});
  backend_.launch(FinishArgs{.losses = losses_,
                             .curve = curve_,
                             .step = step_,
                             .tokens = static_cast<i32>(config_.tokens)});
}

std::vector<float> Model::losses(int64_t first, int64_t last) const {
  return download(backend_, curve_ + first, last - first);
}

Checkpoint Model::state() const {
  Checkpoint checkpoint;
  checkpoint.master = download(backend_, master_, parameters_.count);
  checkpoint.m = download(backend_, m_, parameters_.count);
  checkpoint.v = download(backend_, v_, parameters_.count);
  checkpoint.scales = linears_->scale_state();
  return checkpoint;
}

void Model::set_state(const Checkpoint& checkpoint) {
  std::vector<u16> copy(checkpoint.master.size());
  std::ranges::transform(checkpoint.master, copy.begin(), encode_bf16);
  upload<float>(backend_, master_, checkpoint.master);
  upload<float>(backend_, m_, checkpoint.m);
  upload<float>(backend_, v_, checkpoint.v);
  upload<u16>(backend_, copy_, copy);
  linears_->set_scale_state(checkpoint.scales);
  const u32 step = static_cast<u32>(checkpoint.loss.size());
  backend_.upload(step_, &step, sizeof step);
}

}  // namespace train
