#include "ranks/shards.hpp"

#include <algorithm>

#include "error.hpp"

namespace train {
namespace {

constexpr int64_t kBlock = 128;

// Plans the cast of up to `rows` rows of a weight. `is_whole`: these are all, which may end in a part of a
// block.
float8::Quantizer quantizer(const float8::Context& context, const std::string& recipe, int64_t rows,
                            int64_t cols, bool delayed, bool is_whole) {
  float8::QuantizerDesc desc;
  desc.operand = FLOAT8_WEIGHT;
  desc.rows_max = rows;
  desc.cols = cols;
  desc.recipe = float8::Recipe::named(recipe);
  desc.over_ranks = !delayed;  // a delayed scale is known, and is the same on all ranks
  if (desc.over_ranks && is_whole) desc.whole_rows = rows;
  return float8::Quantizer::plan(context, desc).value();
}

}  // namespace

bool lies_in_shards(const LinearShape& shape, const Rank& fsdp) {
  return fsdp.count > 1 && shape.n == fsdp.count * shape.shard_rows &&
         shape.shard_rows % kBlock == 0;
}

Shards::Shards(Backend& backend, const Ranks& ranks, const Parameters& parameters,
               const u16* weights)
    : backend_(backend), ranks_(ranks), parameters_(parameters), weights_(weights) {
  casts_.resize(parameters.linears.size());
}

void Shards::add_cast(size_t index, const std::string& recipe, const float8::ScaleSlots* slots,
                      bool in_shards) {
  const LinearShape& shape = parameters_.linears[index];
  const bool delayed = slots != nullptr;
  // A weight without over_ranks has all of its planned rows, or none.
  const int64_t rows = delayed && shape.rows > 0 ? shape.rows : shape.shard_rows;
  casts_[index] = Cast{
      .quantizer = quantizer(backend_.context(), recipe, rows, shape.k, delayed, false),
      .whole_quantizer = quantizer(backend_.context(), recipe, shape.n, shape.k, delayed, true),
      .slots = slots,
      .in_shards = in_shards,
      .shard = {},
      .q = {},
      .qt = {}};
}

// A tensor's one maximum does, and those of columns if all parts have these columns.
bool Shards::amax_spans_tp(size_t index) const {
  const Split split = parameters_.linears[index].split;
  return split == Split::kRows ||
         (split == Split::kColumns && casts_[index]->quantizer.amax_words() == 1);
}

bool Shards::rows_span_tp(size_t index) const {
  return parameters_.linears[index].split == Split::kColumns;
}

// The words of all weights lie by the groups over which they are reduced, so that each group reduces one
// run of them: FSDP the first two kinds, tensor parallelism the second and third.
void Shards::allocate_words() {
  for (const size_t i : listed_) {
    const float8::Quantizer& plan = casts_[i]->quantizer;
    (amax_spans_tp(i) ? count_.both : count_.fsdp) += plan.amax_words();
    (rows_span_tp(i) ? count_.tp : count_.none) += plan.row_amax_words();
  }
  const size_t all = count_.fsdp + count_.both + count_.tp + count_.none;
  words_ = static_cast<u32*>(backend_.allocate(all * sizeof(u32)));
  u32* fsdp = words_;
  u32* both = fsdp + count_.fsdp;
  u32* tp = both + count_.both;
  u32* none = tp + count_.tp;
  const auto take = [](u32*& from, size_t words) {
    u32* const taken = words == 0 ? nullptr : from;
    from += words;
    return taken;
  };
  for (const size_t i : listed_) {
    Cast& cast = *casts_[i];
    cast.amax = take(amax_spans_tp(i) ? both : fsdp, cast.quantizer.amax_words());
    cast.row_amax = take(rows_span_tp(i) ? tp : none, cast.quantizer.row_amax_words());
  }
}

void Shards::allocate_gathers() {
  size_t q_bytes = 0;
  size_t qt_bytes = 0;
  size_t bf16_elements = 0;
  for (size_t i = 0; i < casts_.size(); ++i) {
    const LinearShape& shape = parameters_.linears[i];
    if (!casts_[i]) {
      const int64_t all = shape.shard_rows * ranks_.fsdp.count * shape.k;
      bf16_elements = std::max(bf16_elements, static_cast<size_t>(all));
      continue;
    }
    const float8::Quantizer& whole = casts_[i]->whole_quantizer;
    q_bytes = std::max(q_bytes, whole.tensor_bytes() - whole.transposed_bytes());
    qt_bytes = std::max(qt_bytes, whole.transposed_bytes());
  }
  q_ = backend_.allocate(q_bytes);
  qt_ = backend_.allocate(qt_bytes);
  bf16_ = backend_.allocate(bf16_elements * sizeof(u16));
}

void Shards::view_copies(size_t index) {
  Cast& cast = *casts_[index];
  const LinearShape& shape = parameters_.linears[index];
  cast.tensor = backend_.allocate(cast.quantizer.tensor_bytes());
  cast.shard.cols = shape.k;
  if (shape.rows > 0) cast.shard = cast.quantizer.view(cast.tensor, shape.rows).value();
  cast.q = cast.qt = cast.whole_quantizer.view(q_, shape.n, qt_).value();
  cast.q.qt = cast.qt.q = nullptr;
  if (!cast.in_shards) return;
  cast.qt.qt_shards = ranks_.fsdp.count;
  cast.qt.ld_qt = shape.shard_rows;
}

void Shards::allocate() {
  // Words that span fewer ranks come first in the list, so that they follow each other in its order.
  for (const bool columns : {true, false}) {
    for (size_t i = 0; i < casts_.size(); ++i) {
      if (casts_[i] && rows_span_tp(i) == columns) listed_.push_back(i);
    }
  }
  allocate_gathers();
  if (listed_.empty()) return;
  allocate_words();
  std::vector<float8::Quantizer> quantizers;
  size_t gather_bytes = 0;
  for (const size_t i : listed_) {
    view_copies(i);
    const Cast& cast = *casts_[i];
    quantizers.push_back(cast.quantizer);
    for (const float8::Tensor* whole : {&cast.q, &cast.qt}) {
      const int64_t rows = parameters_.linears[i].shard_rows;
      gather_bytes =
          std::max(gather_bytes, float8_gather_workspace_bytes(whole, rows, ranks_.fsdp.count));
    }
  }
  list_ = float8::QuantizerList::plan(backend_.context(), quantizers).value();
  workspace_ = backend_.allocate(list_->workspace_bytes());
  gather_workspace_ = backend_.allocate(gather_bytes);
}

std::vector<float8::QuantizeArgs> Shards::args(bool first_step) const {
  std::vector<float8::QuantizeArgs> all;
  for (const size_t i : listed_) {
    const Cast& cast = *casts_[i];
    float8::QuantizeArgs args;
    args.x = weights_ + parameters_.linears[i].offset;
    args.tensor = cast.tensor;
    args.rows = parameters_.linears[i].rows;
    args.amax = cast.amax;
    args.row_amax = cast.row_amax;
    if (cast.slots != nullptr) {
      args.scales = *cast.slots;
      args.first_step = first_step;
      args.ranks = ranks_.world.handle();
    }
    all.push_back(args);
  }
  return all;
}

void Shards::reduce_words() {
  const auto reduce = [&](const Rank& group, u32* from, size_t words) {
    if (group.is_alone() || words == 0) return;
    check(group.communicator->sync_amax(from, words, backend_.stream()));
  };
  reduce(ranks_.fsdp, words_, count_.fsdp + count_.both);
  reduce(ranks_.tp, words_ + count_.fsdp, count_.both + count_.tp);
}

void Shards::cast(bool first_step) {
  if (!list_) return;
  const std::vector<float8::QuantizeArgs> all = args(first_step);
  if (casts_[listed_.front()]->slots == nullptr) {
    check(list_->find_amax(all, backend_.stream()));
    reduce_words();
  }
  check(list_->run(all, workspace_, backend_.stream()));
}

const float8::Tensor* Shards::gather(size_t index, bool backward) {
  if (!casts_[index]) return nullptr;
  const Cast& cast = *casts_[index];
  if (ranks_.fsdp.is_alone()) return &cast.shard;
  float8::GatherArgs args;
  args.shard = &cast.shard;
  args.whole = backward ? &cast.qt : &cast.q;
  args.shard_rows = parameters_.linears[index].shard_rows;
  check(ranks_.fsdp.communicator->gather_tensor(backend_.context(), args, gather_workspace_,
                                                backend_.stream()));
  return args.whole;
}

const void* Shards::gather_bf16(size_t index) {
  if (casts_[index]) return nullptr;
  const LinearShape& shape = parameters_.linears[index];
  if (ranks_.fsdp.is_alone()) return weights_ + shape.offset;
  check(ranks_.fsdp.communicator->all_gather(weights_ + shape.offset, bf16_,
                                             static_cast<size_t>(shape.shard_rows * shape.k),
                                             FLOAT8_BF16, backend_.stream()));
  return bf16_;
}

}  // namespace train
