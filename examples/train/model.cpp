#include "model.hpp"

#include <algorithm>

#include "recipes/dtype.hpp"

namespace f8::train {
namespace {

// `count` elements, zeroed.
template <class T>
Status take(Backend& backend, int64_t count, T*& out) {
  out = static_cast<T*>(F8_TRY(backend.allocate(static_cast<size_t>(count) * sizeof(T))));
  return {};
}

template <class T>
Status upload(Backend& backend, T* to, std::span<const T> values) {
  return backend.upload(to, values.data(), values.size_bytes());
}

template <class T>
Result<std::vector<T>> download(Backend& backend, const T* from, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  F8_TRY(backend.download(values.data(), from, values.size() * sizeof(T)));
  return values;
}

}  // namespace

Result<std::unique_ptr<Model>> Model::create(Backend& backend, const TrainConfig& config,
                                             std::string_view text) {
  F8_TRY(validate(config));
  std::unique_ptr<Model> model(new Model(backend, config));
  F8_TRY(model->allocate(text));
  model->linears_ =
      F8_TRY(Linears::plan(backend, config, model->parameters_, model->copy_, model->grad_));
  Checkpoint start;
  start.master = model->parameters_.initial(config);
  start.m.resize(start.master.size());
  start.v.resize(start.master.size());
  F8_TRY(model->set_state(start));
  return model;
}

Status Model::allocate(std::string_view text) {
  const int64_t stream = config_.tokens * config_.hidden;
  const int64_t inner = config_.tokens * config_.ffn;
  text_bytes_ = static_cast<u32>(text.size());
  F8_TRY(take(backend_, text_bytes_, text_));
  F8_TRY(backend_.upload(text_, text.data(), text.size()));
  F8_TRY(take(backend_, 1, step_));
  F8_TRY(take(backend_, config_.steps, schedule_));
  F8_TRY(upload<StepScalars>(backend_, schedule_, make_schedule(config_, adam_)));
  F8_TRY(take(backend_, config_.steps, curve_));
  for (float** array : {&master_, &m_, &v_, &grad_}) {
    F8_TRY(take(backend_, parameters_.count, *array));
  }
  F8_TRY(take(backend_, parameters_.count, copy_));
  F8_TRY(take(backend_, config_.tokens * config_.context, slots_));
  F8_TRY(take(backend_, config_.tokens, targets_));
  saved_.resize(static_cast<size_t>(config_.layers) + 1);
  for (Saved& saved : saved_) {
    F8_TRY(take(backend_, stream, saved.h));
    F8_TRY(take(backend_, stream, saved.n));
    F8_TRY(take(backend_, config_.tokens, saved.inv_rms));
    if (&saved == &saved_.back()) continue;
    F8_TRY(take(backend_, inner, saved.u));
    F8_TRY(take(backend_, inner, saved.a));
  }
  F8_TRY(take(backend_, stream, y_));
  F8_TRY(take(backend_, stream, dh_));
  F8_TRY(take(backend_, inner, da_));
  F8_TRY(take(backend_, config_.tokens * kBytes, logits_));
  F8_TRY(take(backend_, config_.tokens * kBytes, dlogits_));
  F8_TRY(take(backend_, config_.tokens, losses_));
  return take(backend_, backend_.share_count() * config_.hidden, partials_);
}

Status Model::step(bool first_step) {
  F8_TRY(forward(first_step));
  F8_TRY(backward(first_step));
  F8_TRY(linears_->update_scales());
  return optimize();
}

Status Model::forward(bool first_step) {
  const auto tokens = static_cast<i32>(config_.tokens);
  const auto context = static_cast<i32>(config_.context);
  const auto width = static_cast<i32>(config_.hidden);
  F8_TRY(linears_->cast_weights(first_step));
  F8_TRY(backend_.launch(SampleArgs{.text = text_,
                                    .text_bytes = text_bytes_,
                                    .seed = config_.seed,
                                    .step = step_,
                                    .slots = slots_,
                                    .targets = targets_,
                                    .tokens = tokens,
                                    .context = context}));
  F8_TRY(backend_.launch(EmbedArgs{.table = copy_ + parameters_.embedding,
                                   .slots = slots_,
                                   .h = saved_[0].h,
                                   .tokens = tokens,
                                   .context = context,
                                   .width = width}));
  for (size_t i = 0; i < saved_.size(); ++i) {
    const Saved& here = saved_[i];
    F8_TRY(backend_.launch(
        NormArgs{.h = i == 0 ? here.h : saved_[i - 1].h,
                 .y = i == 0 ? nullptr : y_,
                 .sum = i == 0 ? nullptr : here.h,
                 .gain = master_ + parameters_.gain + static_cast<int64_t>(i) * config_.hidden,
                 .n = here.n,
                 .inv_rms = here.inv_rms,
                 .tokens = tokens,
                 .width = width}));
    if (i + 1 == saved_.size()) break;
    F8_TRY(linears_->forward(2 * i, here.n, here.u, first_step));
    F8_TRY(
        backend_.launch(GeluArgs{.u = here.u, .a = here.a, .count = config_.tokens * config_.ffn}));
    F8_TRY(linears_->forward(2 * i + 1, here.a, y_, first_step));
  }
  F8_TRY(linears_->forward(2 * (saved_.size() - 1), saved_.back().n, logits_, first_step));
  return backend_.launch(LossArgs{.logits = logits_,
                                  .targets = targets_,
                                  .dlogits = dlogits_,
                                  .losses = losses_,
                                  .tokens = tokens});
}

// From the gradient behind norm `index` in y_ to that of the residual stream before it in dh_.
Status Model::norm_grad(size_t index, const u16* d_residual) {
  const int64_t gain = parameters_.gain + static_cast<int64_t>(index) * config_.hidden;
  const auto width = static_cast<i32>(config_.hidden);
  F8_TRY(backend_.launch(NormGradArgs{.dn = y_,
                                      .h = saved_[index].h,
                                      .gain = master_ + gain,
                                      .inv_rms = saved_[index].inv_rms,
                                      .d_residual = d_residual,
                                      .dh = dh_,
                                      .partials = partials_,
                                      .blocks = backend_.share_count(),
                                      .tokens = static_cast<i32>(config_.tokens),
                                      .width = width}));
  return backend_.launch(SumRowsArgs{
      .partials = partials_, .out = grad_ + gain, .rows = backend_.share_count(), .width = width});
}

Status Model::backward(bool first_step) {
  const size_t head = saved_.size() - 1;
  F8_TRY(linears_->backward(2 * head, dlogits_, saved_[head].n, y_, first_step));
  F8_TRY(norm_grad(head, nullptr));
  for (size_t i = head; i-- > 0;) {
    const Saved& here = saved_[i];
    F8_TRY(linears_->backward(2 * i + 1, dh_, here.a, da_, first_step));
    F8_TRY(backend_.launch(
        GeluGradArgs{.u = here.u, .da = da_, .du = da_, .count = config_.tokens * config_.ffn}));
    F8_TRY(linears_->backward(2 * i, da_, here.n, y_, first_step));
    F8_TRY(norm_grad(i, dh_));
  }
  return backend_.launch(EmbedGradArgs{.dh = dh_,
                                       .slots = slots_,
                                       .dtable = grad_ + parameters_.embedding,
                                       .tokens = static_cast<i32>(config_.tokens),
                                       .context = static_cast<i32>(config_.context),
                                       .width = static_cast<i32>(config_.hidden)});
}

Status Model::optimize() {
  const i32 shares = 4 * backend_.share_count();
  F8_TRY(backend_.launch(SquareSumArgs{
      .x = grad_, .partials = partials_, .count = parameters_.count, .blocks = shares}));
  F8_TRY(backend_.launch(AdamArgs{.master = master_,
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
                                  .weight_decay = adam_.weight_decay}));
  return backend_.launch(FinishArgs{.losses = losses_,
                                    .curve = curve_,
                                    .step = step_,
                                    .tokens = static_cast<i32>(config_.tokens)});
}

Result<std::vector<float>> Model::losses(int64_t first, int64_t last) const {
  return download(backend_, curve_ + first, last - first);
}

Result<Checkpoint> Model::state() const {
  Checkpoint checkpoint;
  checkpoint.master = F8_TRY(download(backend_, master_, parameters_.count));
  checkpoint.m = F8_TRY(download(backend_, m_, parameters_.count));
  checkpoint.v = F8_TRY(download(backend_, v_, parameters_.count));
  checkpoint.scales = F8_TRY(linears_->scale_state());
  return checkpoint;
}

Status Model::set_state(const Checkpoint& checkpoint) {
  std::vector<u16> copy(checkpoint.master.size());
  std::ranges::transform(checkpoint.master, copy.begin(), encode_bf16);
  F8_TRY(upload<float>(backend_, master_, checkpoint.master));
  F8_TRY(upload<float>(backend_, m_, checkpoint.m));
  F8_TRY(upload<float>(backend_, v_, checkpoint.v));
  F8_TRY(upload<u16>(backend_, copy_, copy));
  F8_TRY(linears_->set_scale_state(checkpoint.scales));
  const u32 step = static_cast<u32>(checkpoint.loss.size());
  return backend_.upload(step_, &step, sizeof step);
}

}  // namespace f8::train
