#include "ranks/shards.hpp"

#include <algorithm>

#include "error.hpp"

namespace train {
namespace {

float8::Quantizer quantizer(const float8::Context& context, const std::string& recipe, int64_t rows,
                            int64_t cols, bool delayed) {
  float8::QuantizerDesc desc;
  desc.operand = FLOAT8_WEIGHT;
  desc.rows_max = rows;
  desc.cols = cols;
  desc.recipe = float8::Recipe::named(recipe);
  desc.over_ranks = !delayed;  // a delayed scale is known, and is the same on all ranks
  return float8::Quantizer::plan(context, desc).value();
}

}  // namespace

Shards::Shards(Backend& backend, const Ranks& ranks, const Parameters& parameters,
               const u16* weights)
    : backend_(backend), ranks_(ranks), parameters_(parameters), weights_(weights) {
  casts_.resize(parameters.linears.size());
}

void Shards::add_cast(size_t index, const std::string& recipe, const float8::ScaleSlots* slots) {
  const LinearShape& shape = parameters_.linears[index];
  const bool delayed = slots != nullptr;
  casts_[index] =
      Cast{.quantizer = quantizer(backend_.context(), recipe, shape.rows, shape.k, delayed),
           .whole_quantizer = quantizer(backend_.context(), recipe, shape.n, shape.k, delayed),
           .slots = slots,
           .shard = {},
           .q = {},
           .qt = {}};
}

// A tensor's one maximum does, and those of columns if all parts have these columns.
bool Shards::spans_tp(size_t index) const {
  const Split split = parameters_.linears[index].split;
  return split == Split::kRows ||
         (split == Split::kColumns && casts_[index]->quantizer.amax_words() == 1);
}

void Shards::allocate_amax() {
  for (size_t i = 0; i < casts_.size(); ++i) {
    if (!casts_[i]) continue;
    const size_t words = casts_[i]->quantizer.amax_words();
    amax_words_ += words;
    if (spans_tp(i)) tp_words_ += words;
  }
  amax_ = static_cast<u32*>(backend_.allocate(amax_words_ * sizeof(u32)));
  u32* spanning = amax_;
  u32* other = amax_ + tp_words_;
  for (size_t i = 0; i < casts_.size(); ++i) {
    if (!casts_[i]) continue;
    Cast& cast = *casts_[i];
    u32*& next = spans_tp(i) ? spanning : other;
    if (cast.quantizer.amax_words() > 0) cast.amax = next;
    next += cast.quantizer.amax_words();
    if (const size_t words = cast.quantizer.row_amax_words(); words > 0) {
      cast.row_amax = static_cast<u32*>(backend_.allocate(words * sizeof(u32)));
    }
  }
}

void Shards::allocate() {
  size_t q_bytes = 0;
  size_t qt_bytes = 0;
  size_t bf16_bytes = 0;
  for (size_t i = 0; i < casts_.size(); ++i) {
    const LinearShape& shape = parameters_.linears[i];
    if (!casts_[i]) {
      bf16_bytes = std::max(bf16_bytes, static_cast<size_t>(shape.n * shape.k) * sizeof(u16));
      continue;
    }
    const float8::Quantizer& whole = casts_[i]->whole_quantizer;
    q_bytes = std::max(q_bytes, whole.tensor_bytes() - whole.transposed_bytes());
    qt_bytes = std::max(qt_bytes, whole.transposed_bytes());
  }
  q_ = backend_.allocate(q_bytes);
  qt_ = backend_.allocate(qt_bytes);
  bf16_ = backend_.allocate(bf16_bytes);
  allocate_amax();
  size_t workspace_bytes = 0;
  size_t gather_bytes = 0;
  for (size_t i = 0; i < casts_.size(); ++i) {
    if (!casts_[i]) continue;
    Cast& cast = *casts_[i];
    const LinearShape& shape = parameters_.linears[i];
    cast.tensor = backend_.allocate(cast.quantizer.tensor_bytes());
    cast.shard = cast.quantizer.view(cast.tensor, shape.rows).value();
    cast.q = cast.qt = cast.whole_quantizer.view(q_, shape.n, qt_).value();
    cast.q.qt = cast.qt.q = nullptr;
    workspace_bytes = std::max(workspace_bytes, cast.quantizer.workspace_bytes());
    for (const float8::Tensor* whole : {&cast.q, &cast.qt}) {
      gather_bytes = std::max(gather_bytes,
                              float8_gather_workspace_bytes(whole, shape.rows, ranks_.fsdp.count));
    }
  }
  workspace_ = backend_.allocate(workspace_bytes);
  gather_workspace_ = backend_.allocate(gather_bytes);
}

float8::QuantizeArgs Shards::args_of(size_t index, bool first_step) const {
  const Cast& cast = *casts_[index];
  float8::QuantizeArgs args;
  args.x = weights_ + parameters_.linears[index].offset;
  args.tensor = cast.tensor;
  args.amax = cast.amax;
  args.row_amax = cast.row_amax;
  if (cast.slots != nullptr) {
    args.scales = *cast.slots;
    args.first_step = first_step;
    args.ranks = ranks_.world.handle();
  }
  return args;
}

void Shards::cast(bool first_step) {
  const auto each = [&](const auto& run) {
    for (size_t i = 0; i < casts_.size(); ++i) {
      if (casts_[i]) check(run(*casts_[i], args_of(i, first_step)));
    }
  };
  if (amax_words_ > 0) {
    each([&](const Cast& cast, const float8::QuantizeArgs& args) {
      return cast.quantizer.find_amax(args, backend_.stream());
    });
    const auto reduce = [&](const Rank& group, size_t words) {
      if (group.is_alone() || words == 0) return;
      check(group.communicator->sync_amax(amax_, words, backend_.stream()));
    };
    reduce(ranks_.fsdp, amax_words_);
    reduce(ranks_.tp, tp_words_);
  }
  each([&](const Cast& cast, const float8::QuantizeArgs& args) {
    return cast.quantizer.run(args, workspace_, backend_.stream());
  });
}

const float8::Tensor* Shards::gather(size_t index, bool backward) {
  if (!casts_[index]) return nullptr;
  const Cast& cast = *casts_[index];
  if (ranks_.fsdp.is_alone()) return &cast.shard;
  float8::GatherArgs args;
  args.shard = &cast.shard;
  args.whole = backward ? &cast.qt : &cast.q;
  args.shard_rows = parameters_.linears[index].rows;
  check(ranks_.fsdp.communicator->gather_tensor(backend_.context(), args, gather_workspace_,
                                                backend_.stream()));
  return args.whole;
}

const void* Shards::gather_bf16(size_t index) {
  if (casts_[index]) return nullptr;
  const LinearShape& shape = parameters_.linears[index];
  if (ranks_.fsdp.is_alone()) return weights_ + shape.offset;
  check(ranks_.fsdp.communicator->all_gather(weights_ + shape.offset, bf16_,
                                             static_cast<size_t>(shape.rows * shape.k), FLOAT8_BF16,
                                             backend_.stream()));
  return bf16_;
}

}  // namespace train
