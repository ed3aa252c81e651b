#include "model.hpp"

#include <algorithm>

#include "device/bf16.hpp"
#include "error.hpp"

namespace train {
namespace {

constexpr i32 kSmallChunks = 64;  // of the gradients of embeddings and gains
constexpr size_t kRunFacts = 7;

// What follows `words`, up to one of `ends`.
std::string text_after(const std::string& text, std::string_view words, const char* ends) {
  const size_t at = text.find(words);
  if (at == std::string::npos) return "none";
  const size_t begin = at + words.size();
  return text.substr(begin, text.find_first_of(ends, begin) - begin);
}

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

Model::Model(Backend& backend, const TrainConfig& config, const Ranks& ranks, std::string_view text)
    : backend_(backend),
      config_(config),
      ranks_(ranks),
      whole_parameters_(config),
      parameters_(config, ranks.fsdp, ranks.tp.count),
      grad_sum_(backend, ranks_.fsdp, 1, 0),
      run_agreement_(backend, ranks_.world, kRunFacts),
      plan_agreement_(backend, ranks_.world, parameters_.linears.size()) {
  allocate(text);
  linears_.emplace(backend, config_, ranks_, parameters_, copy_, grad_);
  Checkpoint start;
  start.master = whole_parameters_.initial(config);
  start.m.resize(start.master.size());
  start.v.resize(start.master.size());
  set_state(start);
}

void Model::allocate(std::string_view text) {
  const int64_t tokens = config_.batch_tokens();
  const int64_t stream = tokens * config_.hidden;
  const int64_t inner = tokens * config_.ffn / config_.tp;
  text_bytes_ = static_cast<u32>(text.size());
  take(backend_, text_bytes_, text_);
  backend_.upload(text_, text.data(), text.size());
  take(backend_, 1, step_);
  take(backend_, config_.steps, schedule_);
  upload<StepScalars>(backend_, schedule_, make_schedule(config_, adam_));
  take(backend_, config_.steps, curve_);
  for (float** array : {&master_, &m_, &v_, &grad_}) take(backend_, parameters_.count, *array);
  take(backend_, parameters_.count, copy_);
  take(backend_, tokens * config_.context, slots_);
  take(backend_, tokens, targets_);
  saved_.resize(static_cast<size_t>(config_.layers) + 1);
  for (Saved& saved : saved_) {
    take(backend_, stream, saved.h);
    take(backend_, stream, saved.n);
    take(backend_, tokens, saved.inv_rms);
    if (&saved == &saved_.back()) continue;
    take(backend_, inner, saved.u);
    take(backend_, inner, saved.a);
  }
  take(backend_, stream, y_);
  take(backend_, stream, dh_);
  take(backend_, inner, da_);
  take(backend_, tokens * kBytes, logits_);
  take(backend_, tokens * kBytes, dlogits_);
  take(backend_, config_.tokens, losses_);
  take(backend_, backend_.share_count() * config_.hidden, partials_);
  take(backend_, square_count(), own_squares_);
  squares_ = own_squares_;
  if (!ranks_.world.is_alone()) take(backend_, square_count(), squares_);
  if (!ranks_.fsdp.is_alone() || config_.micro_batches > 1) {
    take(backend_, parameters_.count - parameters_.embedding, small_);
  }
}

void Model::agree(const std::string& run) const {
  const std::string info = backend_.context().info().value();
  const std::string same_options = "give all ranks the same options";
  run_agreement_.compare({
      {"version", float8_version(), "use one build on all ranks"},
      {"device", text_after(info, ": ", "\n"), "use devices of one class"},
      {"table", text_after(info, ", hash ", " \n"), "give all ranks one tuning table with --table"},
      {"recipe", config_.recipe, same_options},
      {"shape",
       format("hidden %ld, ffn %ld, layers %ld, context %ld, tokens %ld", config_.hidden,
              config_.ffn, config_.layers, config_.context, config_.tokens),
       same_options},
      {"ranks",
       format("fsdp %ld, tp %ld, micro-batches %ld", config_.fsdp, config_.tp,
              config_.micro_batches),
       same_options},
      {"run", run, "give all ranks the same options and text"},
  });
  std::vector<Fact> plans;
  for (size_t i = 0; i < parameters_.linears.size(); ++i) {
    plans.push_back({"kernels of " + parameters_.linears[i].name, linears_->plan_hash(i),
                     "give all ranks one tuning table with --table"});
  }
  plan_agreement_.compare(plans);
}

void Model::step(bool first_step) {
  linears_->cast_weights(first_step);
  for (int64_t batch = 0; batch < config_.micro_batches; ++batch) {
    forward(batch, first_step);
    backward(batch, first_step);
  }
  linears_->update_scales();
  optimize();
}

void Model::forward(int64_t batch, bool first_step) {
  const int64_t share = ranks_.fsdp.index * config_.micro_batches + batch;
  const auto step_tokens = static_cast<i32>(config_.tokens);
  const auto tokens = static_cast<i32>(config_.batch_tokens());
  const auto context = static_cast<i32>(config_.context);
  const auto width = static_cast<i32>(config_.hidden);
  backend_.launch(SampleArgs{.text = text_,
                             .text_bytes = text_bytes_,
                             .seed = config_.seed,
                             .step = step_,
                             .slots = slots_,
                             .targets = targets_,
                             .tokens = tokens,
                             .context = context,
                             .first = static_cast<i32>(share) * tokens,
                             .step_tokens = step_tokens});
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
    backend_.launch(GeluArgs{.u = here.u, .a = here.a, .count = tokens * config_.ffn / config_.tp});
    linears_->forward(2 * i + 1, here.a, y_, first_step);
    sum_over_tp(y_);
  }
  linears_->forward(2 * (saved_.size() - 1), saved_.back().n, logits_, first_step);
  backend_.launch(LossArgs{.logits = logits_,
                           .targets = targets_,
                           .dlogits = dlogits_,
                           .losses = losses_ + share * tokens,
                           .tokens = tokens,
                           .step_tokens = step_tokens});
}

// Takes the gradient behind norm `index` from y_, and leaves that of the residual stream before it
// in dh_. The gain's own goes to `small`, the gradients of embeddings and gains.
void Model::norm_grad(size_t index, const u16* d_residual, float* small) {
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
                               .tokens = static_cast<i32>(config_.batch_tokens()),
                               .width = width});
  backend_.launch(SumRowsArgs{.partials = partials_,
                              .out = small + (gain - parameters_.embedding),
                              .rows = backend_.share_count(),
                              .width = width});
}

void Model::backward(int64_t batch, bool first_step) {
  const size_t head = saved_.size() - 1;
  float* const small_grad = grad_ + parameters_.embedding;
  float* const small = grad_sum_.target(small_grad, small_, batch);
  const int64_t tokens = config_.batch_tokens();
  linears_->backward(2 * head, dlogits_, saved_[head].n, y_, first_step, batch);
  norm_grad(head, nullptr, small);
  for (size_t i = head; i-- > 0;) {
    const Saved& here = saved_[i];
    linears_->backward(2 * i + 1, dh_, here.a, da_, first_step, batch);
    backend_.launch(GeluGradArgs{
        .u = here.u, .da = da_, .du = da_, .count = tokens * config_.ffn / config_.tp});
    linears_->backward(2 * i, da_, here.n, y_, first_step, batch);
    sum_over_tp(y_);
    norm_grad(i, dh_, small);
  }
  backend_.launch(EmbedGradArgs{.dh = dh_,
                                .slots = slots_,
                                .dtable = small,
                                .tokens = static_cast<i32>(tokens),
                                .context = static_cast<i32>(config_.context),
                                .width = static_cast<i32>(config_.hidden)});
  grad_sum_.add(small_grad, small_, parameters_.count - parameters_.embedding, false, batch);
}

void Model::sum_over_tp(u16* activations) {
  if (ranks_.tp.is_alone()) return;
  check(ranks_.tp.communicator->all_reduce(
      activations, activations, static_cast<size_t>(config_.batch_tokens() * config_.hidden),
      FLOAT8_BF16, backend_.stream()));
}

int64_t Model::square_count() const {
  return config_.tp * parameters_.chunks + kSmallChunks;
}

// Each chunk of rows of a linear's gradient has a sum of squares. A rank has those of its rows and 0 for
// all others, so that a sum over ranks adds nothing but zeros: the sums are the same bits on any number
// of FSDP ranks. What ranks of tensor parallelism have alike counts on the first one.
void Model::square_sums() {
  for (const LinearShape& shape : parameters_.linears) {
    if (shape.rows == 0 || (shape.split == Split::kNone && ranks_.tp.index > 0)) continue;
    const int64_t chunk = ranks_.tp.index * parameters_.chunks + shape.first_chunk +
                          shape.first_row(ranks_.fsdp) / shape.chunk_rows;
    backend_.launch(SquareSumArgs{.x = grad_ + shape.offset,
                                  .partials = own_squares_ + chunk,
                                  .count = shape.rows * shape.k,
                                  .blocks = static_cast<i32>(shape.rows / shape.chunk_rows)});
  }
  if (ranks_.world.index == 0) {
    backend_.launch(SquareSumArgs{.x = grad_ + parameters_.embedding,
                                  .partials = own_squares_ + config_.tp * parameters_.chunks,
                                  .count = parameters_.count - parameters_.embedding,
                                  .blocks = kSmallChunks});
  }
  if (ranks_.world.is_alone()) return;
  check(ranks_.world.communicator->all_reduce(
      own_squares_, squares_, static_cast<size_t>(square_count()), FLOAT8_F32, backend_.stream()));
}

void Model::optimize() {
  square_sums();
  backend_.launch(AdamArgs{.master = master_,
                           .m = m_,
                           .v = v_,
                           .grad = grad_,
                           .copy = copy_,
                           .count = parameters_.count,
                           .decayed = parameters_.decayed,
                           .partials = squares_,
                           .partial_count = static_cast<i32>(square_count()),
                           .schedule = schedule_,
                           .step = step_,
                           .max_norm = adam_.max_norm,
                           .beta1 = adam_.beta1,
                           .beta2 = adam_.beta2,
                           .epsilon = adam_.epsilon,
                           .weight_decay = adam_.weight_decay});
  if (const Rank& fsdp = ranks_.fsdp; !fsdp.is_alone()) {
    const int64_t own = config_.tokens / fsdp.count;
    check(fsdp.communicator->all_gather(losses_ + fsdp.index * own, losses_,
                                        static_cast<size_t>(own), FLOAT8_F32, backend_.stream()));
  }
  backend_.launch(FinishArgs{.losses = losses_,
                             .curve = curve_,
                             .step = step_,
                             .tokens = static_cast<i32>(config_.tokens)});
}

std::vector<float> Model::losses(int64_t first, int64_t last) const {
  return download(backend_, curve_ + first, last - first);
}

// Gathers an array over the parameters of all ranks.
std::vector<float> Model::whole(const float* shards) const {
  if (ranks_.world.is_alone()) return download(backend_, shards, parameters_.count);
  std::vector<float> out(static_cast<size_t>(whole_parameters_.count));
  for (size_t i = 0; i < parameters_.linears.size(); ++i) {
    const LinearShape& shape = parameters_.linears[i];
    const LinearShape& whole_shape = whole_parameters_.linears[i];
    const int64_t part = ranks_.fsdp.count * shape.shard_rows * shape.k;  // of tensor parallelism
    const int parts = shape.split == Split::kNone ? 1 : ranks_.tp.count;
    float* const all = linears_->gradient_scratch();
    float* const own = all + (parts == 1 ? 0 : ranks_.tp.index * part);
    gather(ranks_.fsdp, shards + shape.offset, own, shape.shard_rows * shape.k);
    if (parts > 1) gather(ranks_.tp, own, all, part);
    const std::vector<float> values = download(backend_, all, parts * part);
    for (int64_t row = 0; row < parts * shape.n; ++row) {
      const int64_t p = row / shape.n, row_of_part = row % shape.n;
      const int64_t at = shape.split == Split::kColumns ? row_of_part * whole_shape.k + p * shape.k
                                                        : row * shape.k;
      std::copy_n(values.begin() + p * part + row_of_part * shape.k, shape.k,
                  out.begin() + whole_shape.offset + at);
    }
  }
  backend_.download(out.data() + whole_parameters_.embedding, shards + parameters_.embedding,
                    static_cast<size_t>(parameters_.count - parameters_.embedding) * sizeof(float));
  return out;
}

// Gathers `count` elements of each rank of a group; one rank's are copied.
void Model::gather(const Rank& group, const float* from, float* to, int64_t count) const {
  if (!group.is_alone()) {
    check(group.communicator->all_gather(from, to, static_cast<size_t>(count), FLOAT8_F32,
                                         backend_.stream()));
  } else if (from != to) {
    const std::vector<float> values = download(backend_, from, count);
    upload<float>(backend_, to, values);
  }
}

// Gives this rank's part of such an array.
std::vector<float> Model::shard(const std::vector<float>& whole) const {
  std::vector<float> out;
  for (size_t i = 0; i < parameters_.linears.size(); ++i) {
    const LinearShape& shape = parameters_.linears[i];
    const LinearShape& whole_shape = whole_parameters_.linears[i];
    const int64_t first_row = (shape.split == Split::kRows ? ranks_.tp.index * shape.n : 0) +
                              shape.first_row(ranks_.fsdp);
    const int64_t column = shape.split == Split::kColumns ? ranks_.tp.index * shape.k : 0;
    for (int64_t row = first_row; row < first_row + shape.rows; ++row) {
      const auto from = whole.begin() + whole_shape.offset + row * whole_shape.k + column;
      out.insert(out.end(), from, from + shape.k);
    }
    out.resize(static_cast<size_t>(shape.offset + shape.shard_rows * shape.k));
  }
  out.insert(out.end(), whole.begin() + whole_parameters_.embedding, whole.end());
  return out;
}

Checkpoint Model::state() const {
  Checkpoint checkpoint;
  checkpoint.master = whole(master_);
  checkpoint.m = whole(m_);
  checkpoint.v = whole(v_);
  checkpoint.scales = linears_->scale_state();
  return checkpoint;
}

void Model::set_state(const Checkpoint& checkpoint) {
  const std::vector<float> master = shard(checkpoint.master);
  std::vector<u16> copy(master.size());
  std::ranges::transform(master, copy.begin(), encode_bf16);
  upload<float>(backend_, master_, master);
  upload<float>(backend_, m_, shard(checkpoint.m));
  upload<float>(backend_, v_, shard(checkpoint.v));
  upload<u16>(backend_, copy_, copy);
  linears_->set_scale_state(checkpoint.scales);
  const u32 step = static_cast<u32>(checkpoint.loss.size());
  backend_.upload(step_, &step, sizeof step);
}

}  // namespace train
