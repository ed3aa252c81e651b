#include "tools/float8-tune/dist/sharded_linear.hpp"

#include <algorithm>
#include <cstring>
#include <utility>

#include "recipes/fp8_layout.hpp"
#include "tools/float8-tune/dist/tensor_parallel.hpp"

namespace f8::cli {
namespace {

// The rows of w that each rank has; all but the last ones have `each`.
struct Rows {
  int64_t each, first, count;

  Rows(const ShardedProblem& p, int ranks, int rank) {
    each = ceil_div(ceil_div(p.shape.n, ranks), 16) * 16;
    first = std::min(p.shape.n, rank * each);
    count = std::min(each, p.shape.n - first);
  }
};

// What a rank leaves for the comparison.
struct RankOutcome {
  std::string kernels;
  Bytes copies, expected_copies;
  Bytes scales;  // of delayed scaling
  Results sharded, expected;
  Bytes dw_shard;  // the rows of the summed gradient
};

// The sharded step of one rank, and the same without shards.
class RankRun {
 public:
  RankRun(DeviceRank& rank, const ShardedProblem& problem, const Inputs& inputs, int ranks)
      : rank_(rank),
        p_(problem),
        ranks_(ranks),
        inputs_(inputs),
        shape_{problem.shape.m / ranks, problem.shape.n, problem.shape.k},
        rows_(problem, ranks, rank.index()),
        sharded_(rank, problem.recipe, shape_, rows_.each * ranks),
        alone_(rank, problem.recipe, shape_, shape_.n),
        delayed_(problem.settings().has_delayed_scales()) {}

  // Takes all memory: no rank waits for another on its device yet.
  Status prepare() {
    const auto [m, n, k] = shape_;
    const uint16_t* const x = inputs_.x.data() + rank_.index() * m * k;
    const uint16_t* const dy = inputs_.dy.data() + rank_.index() * m * n;
    // A delayed scale is known, so each rank casts all rows of a tensor of its own.
    const bool own = delayed_ && rows_.count > 0;
    F8_TRY(shard_.plan(rank_, p_.recipe, FLOAT8_WEIGHT, own ? rows_.count : rows_.each, rows_.count,
                       k, delayed_ ? Held::kAll : Held::kRows, delayed_ ? 0 : n, rows_.first));
    F8_TRY(shard_.upload(inputs_.w.data() + rows_.first * k));
    F8_TRY(whole_.plan(rank_, p_.recipe, FLOAT8_WEIGHT, n, n, k, Held::kAll));
    F8_TRY(sharded_.plan(x, dy, ranks_ > 1 && n == rows_.each * ranks_ && rows_.each % 128 == 0));
    if (sharded_.reads_shards()) whole_.lie_in_shards(ranks_, rows_.each);
    F8_TRY(shard_.take_workspace(whole_.view(), rows_.each, ranks_));
    F8_TRY(alone_.plan(x, dy));
    F8_TRY(alone_.plan_scales());
    sharded_.use_slots(alone_.slots());
    F8_TRY(cast_.plan(rank_, p_.recipe, FLOAT8_WEIGHT, n, n, k, Held::kAll));
    F8_TRY(cast_.upload(inputs_.w.data()));
    w_ = F8_TRY(rank_.upload(inputs_.w.data(), inputs_.w.size() * 2));
    dw_ = F8_TRY(rank_.allocate(static_cast<size_t>(rows_.each * k) * sizeof(float)));
    outcome.kernels = F8_TRY(sharded_.info());
    return {};
  }

  Status run() {
    float8::Communicator& ranks = rank_.communicator();
    if (delayed_) F8_TRY(find_scales());
    F8_TRY(run_alone());
    F8_TRY(shard_.cast(alone_.slots()));
    float8::Tensor q = whole_.view(), qt = whole_.view();
    q.qt = qt.q = nullptr;
    F8_TRY(shard_.gather(q));
    F8_TRY(sharded_.forward(nullptr, &q));
    F8_TRY(shard_.gather(qt));
    F8_TRY(sharded_.backward(nullptr, &qt));
    F8_TRY(
        of_call(ranks.reduce_scatter(sharded_.dw(), dw_, static_cast<size_t>(rows_.each * shape_.k),
                                     FLOAT8_F32, rank_.stream())));
    if (delayed_) F8_TRY(alone_.sync_scales(ranks.get()));
    F8_TRY(of_call(ranks.wait(rank_.context(), "verify-dist", rank_.stream())));
    outcome.scales = F8_TRY(alone_.scale_state());
    outcome.copies = F8_TRY(whole_.bytes());
    outcome.sharded = F8_TRY(sharded_.results());
    outcome.dw_shard =
        F8_TRY(rank_.download(dw_, static_cast<size_t>(rows_.count * shape_.k) * sizeof(float)));
    return {};
  }

  RankOutcome outcome;

 private:
  // A first step leaves the scales of all ranks' tensors, for the linears of the next.
  Status find_scales() {
    const float8_nccl_comm ranks = rank_.communicator().get();
    alone_.set_first_step(true, ranks);
    F8_TRY(alone_.forward(w_, nullptr));
    F8_TRY(alone_.backward(w_, nullptr));
    alone_.set_first_step(false, nullptr);
    return alone_.sync_scales(ranks);
  }
  Status run_alone() {
    F8_TRY(cast_.cast(alone_.slots()));
    F8_TRY(alone_.forward(w_, nullptr));
    F8_TRY(alone_.backward(w_, nullptr));
    outcome.expected_copies = F8_TRY(cast_.bytes());
    outcome.expected = F8_TRY(alone_.results());
    return {};
  }

  DeviceRank& rank_;
  const ShardedProblem& p_;
  int ranks_;
  const Inputs& inputs_;
  Shape shape_;  // of the rank's tokens
  Rows rows_;
  TensorOnRank shard_, whole_, cast_;
  LinearOnRank sharded_, alone_;
  bool delayed_;
  void *w_ = nullptr, *dw_ = nullptr;
};

// The sum of fp32 gradients in the order of ranks.
Bytes sum_of(const std::vector<RankOutcome>& ranks) {
  std::vector<float> sum = decode(ranks.front().expected.dw, Dtype::kF32);
  for (size_t r = 1; r < ranks.size(); ++r) {
    const std::vector<float> own = decode(ranks[r].expected.dw, Dtype::kF32);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += own[i];
  }
  Bytes out(sum.size() * sizeof(float));
  std::memcpy(out.data(), sum.data(), out.size());
  return out;
}

// The first line in which two texts differ, as the first one has it.
std::string first_difference(std::string_view text, std::string_view other) {
  const size_t common = static_cast<size_t>(std::ranges::mismatch(text, other).in1 - text.begin());
  const size_t begin = text.rfind('\n', common == 0 ? 0 : common - 1) + 1;
  const std::string_view line = text.substr(begin, text.find('\n', begin) - begin);
  return std::string(line.substr(std::min(line.find_first_not_of(' '), line.size())));
}

Finding compare_kernels(const std::vector<RankOutcome>& ranks) {
  Finding finding{.check = "kernels", .notes = {}};
  const std::string& first = ranks.front().kernels;
  for (size_t r = 1; r < ranks.size(); ++r) {
    const std::string& own = ranks[r].kernels;
    if (own == first) continue;
    ++finding.different;
    finding.notes.push_back(
        f8::format("rank {} differs in kernels: it has {}, and rank 0 has {}; give all ranks one "
                   "tuning table with --table",
                   r, first_difference(own, first), first_difference(first, own)));
  }
  return finding;
}

std::vector<Finding> compare(const ShardedProblem& p, const std::vector<RankOutcome>& ranks,
                             const Results& whole) {
  std::vector<Finding> out = {compare_kernels(ranks)};
  const auto add_bits_of = [&](const char* check, const auto& expected, const auto& got) {
    Finding finding{.check = check, .notes = {}};
    for (size_t r = 0; r < ranks.size(); ++r) {
      add_bits(finding, static_cast<int>(r), expected(ranks[r]), got(ranks[r]));
    }
    out.push_back(std::move(finding));
  };
  const auto add_results = [&](const char* check, Bytes Results::*field) {
    add_bits_of(
        check, [&](const RankOutcome& r) -> const Bytes& { return r.expected.*field; },
        [&](const RankOutcome& r) -> const Bytes& { return r.sharded.*field; });
  };
  if (p.settings().has_delayed_scales()) {
    add_bits_of(
        "scales", [&](const RankOutcome&) -> const Bytes& { return ranks.front().scales; },
        [](const RankOutcome& r) -> const Bytes& { return r.scales; });
  }
  add_bits_of(
      "copies", [](const RankOutcome& r) -> const Bytes& { return r.expected_copies; },
      [](const RankOutcome& r) -> const Bytes& { return r.copies; });
  add_results("y", &Results::y);
  add_results("dx", &Results::dx);

  Results got;
  for (const RankOutcome& rank : ranks) {
    append(got.y, rank.sharded.y);
    append(got.dx, rank.sharded.dx);
    append(got.dw, rank.dw_shard);
  }
  const Bytes sum = sum_of(ranks);
  if (p.one_order) {
    Finding dw{.check = "dw", .notes = {}};
    size_t at = 0;
    for (size_t r = 0; r < ranks.size(); ++r) {
      const Bytes& own = ranks[r].dw_shard;
      const auto begin =
          sum.begin() + static_cast<std::ptrdiff_t>(std::exchange(at, at + own.size()));
      add_bits(dw, static_cast<int>(r),
               Bytes(begin, begin + static_cast<std::ptrdiff_t>(own.size())), own);
    }
    out.push_back(std::move(dw));
  } else {
    out.push_back(close_by("dw", sum, got.dw, Dtype::kF32, kOrderDb));
  }
  out.push_back(close_by("batch y", whole.y, got.y, Dtype::kBf16, kCastDb));
  out.push_back(close_by("batch dx", whole.dx, got.dx, Dtype::kBf16, kCastDb));
  out.push_back(close_by("batch dw", whole.dw, got.dw, Dtype::kF32, kCastDb));
  return out;
}

}  // namespace

Result<std::vector<Finding>> verify_sharded(const DeviceRanks& ranks,
                                            const ShardedProblem& problem) {
  const Inputs inputs(problem.shape);
  std::vector<std::unique_ptr<RankRun>> runs;
  for (const auto& rank : ranks) {
    runs.push_back(
        std::make_unique<RankRun>(*rank, problem, inputs, static_cast<int>(ranks.size())));
  }
  const auto run_of = [&](const DeviceRank& rank) -> RankRun& {
    return *runs[static_cast<size_t>(rank.index())];
  };
  F8_TRY(run_ranks(ranks, [&](DeviceRank& rank) { return run_of(rank).prepare(); }));
  F8_TRY(run_ranks(ranks, [&](DeviceRank& rank) { return run_of(rank).run(); }));
  std::vector<RankOutcome> outcomes;
  for (const auto& run : runs) outcomes.push_back(std::move(run->outcome));
  for (const auto& rank : ranks) rank->release();
  const Results whole = F8_TRY(run_whole(*ranks.front(), problem.recipe, problem.shape, inputs));
  std::vector<Finding> findings = compare(problem, outcomes, whole);
  for (Finding& finding : F8_TRY(verify_tensor_parallel(ranks, problem, inputs, whole))) {
    findings.push_back(std::move(finding));
  }
  return findings;
}

}  // namespace f8::cli
