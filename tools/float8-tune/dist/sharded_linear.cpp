#include "tools/float8-tune/dist/sharded_linear.hpp"

#include <algorithm>
#include <cstring>

#include "recipes/fp8_layout.hpp"
#include "tools/float8-tune/dist/tensor_parallel.hpp"

namespace f8::cli {
namespace {

// The rows of w that each rank has; all but the last ones have `each`.
struct Rows {
  int64_t each, first, count;

  Rows(const ShardedProblem& p, int ranks, int rank) {
    const int64_t unit = p.recipe == "blockwise" ? 128 : 16;
    each = ceil_div(ceil_div(p.shape.n, ranks), unit) * unit;
    first = std::min(p.shape.n, rank * each);
    count = std::min(each, p.shape.n - first);
  }
};

// What a rank leaves for the comparison.
struct RankOutcome {
  std::string kernels;
  Bytes copies, expected_copies;
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
        alone_(rank, problem.recipe, shape_, shape_.n) {}

  // Takes all memory, and computes without shards: no rank waits for another on its device yet.
  Status prepare() {
    const auto [m, n, k] = shape_;
    const uint16_t* const x = inputs_.x.data() + rank_.index() * m * k;
    const uint16_t* const dy = inputs_.dy.data() + rank_.index() * m * n;
    F8_TRY(shard_.plan(rank_, p_.recipe, FLOAT8_WEIGHT, rows_.each, rows_.count, k, true));
    F8_TRY(shard_.upload(inputs_.w.data() + rows_.first * k));
    F8_TRY(whole_.plan(rank_, p_.recipe, FLOAT8_WEIGHT, n, n, k, false));
    F8_TRY(shard_.take_workspace(whole_.view(), ranks_));
    F8_TRY(sharded_.plan(x, dy));
    F8_TRY(alone_.plan(x, dy));
    dw_ = F8_TRY(rank_.allocate(static_cast<size_t>(rows_.each * k) * sizeof(float)));
    outcome.kernels = F8_TRY(sharded_.info());
    return run_alone();
  }

  Status run() {
    float8::Communicator& ranks = rank_.communicator();
    F8_TRY(shard_.cast());
    float8::Tensor q = whole_.view(), qt = whole_.view();
    q.qt = qt.q = nullptr;
    F8_TRY(shard_.gather(q));
    F8_TRY(sharded_.forward(nullptr, &q));
    F8_TRY(shard_.gather(qt));
    F8_TRY(sharded_.backward(nullptr, &qt));
    F8_TRY(
        of_call(ranks.reduce_scatter(sharded_.dw(), dw_, static_cast<size_t>(rows_.each * shape_.k),
                                     FLOAT8_F32, rank_.stream())));
    F8_TRY(of_call(ranks.wait(rank_.context(), "verify-dist", rank_.stream())));
    outcome.copies = F8_TRY(whole_.bytes());
    outcome.sharded = F8_TRY(sharded_.results());
    outcome.dw_shard =
        F8_TRY(rank_.download(dw_, static_cast<size_t>(rows_.count * shape_.k) * sizeof(float)));
    return {};
  }

  RankOutcome outcome;

 private:
  Status run_alone() {
    TensorOnRank cast;
    F8_TRY(cast.plan(rank_, p_.recipe, FLOAT8_WEIGHT, shape_.n, shape_.n, shape_.k, false));
    F8_TRY(cast.upload(inputs_.w.data()));
    F8_TRY(cast.cast());
    void* const w = F8_TRY(rank_.upload(inputs_.w.data(), inputs_.w.size() * 2));
    F8_TRY(alone_.forward(w, nullptr));
    F8_TRY(alone_.backward(w, nullptr));
    outcome.expected_copies = F8_TRY(cast.bytes());
    outcome.expected = F8_TRY(alone_.results());
    return {};
  }

  DeviceRank& rank_;
  const ShardedProblem& p_;
  int ranks_;
  const Inputs& inputs_;
  Shape shape_;  // of the rank's tokens
  Rows rows_;
  TensorOnRank shard_, whole_;
  LinearOnRank sharded_, alone_;
  void* dw_ = nullptr;
};

void append(Bytes& to, const Bytes& from) {
  to.insert(to.end(), from.begin(), from.end());
}

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

std::vector<Finding> compare(const ShardedProblem& p, const std::vector<RankOutcome>& ranks,
                             const Results& whole) {
  Finding kernels{.check = "kernels"};
  Results got, expected;
  Bytes copies, expected_copies;
  for (const RankOutcome& rank : ranks) {
    kernels.different += rank.kernels == ranks.front().kernels ? 0 : 1;
    append(copies, rank.copies);
    append(expected_copies, rank.expected_copies);
    append(got.y, rank.sharded.y);
    append(got.dx, rank.sharded.dx);
    append(got.dw, rank.dw_shard);
    append(expected.y, rank.expected.y);
    append(expected.dx, rank.expected.dx);
  }
  expected.dw = sum_of(ranks);
  return {kernels,
          equal_bits("copies", expected_copies, copies),
          equal_bits("y", expected.y, got.y),
          equal_bits("dx", expected.dx, got.dx),
          p.one_order ? equal_bits("dw", expected.dw, got.dw)
                      : close_by("dw", expected.dw, got.dw, Dtype::kF32, kOrderDb),
          close_by("batch y", whole.y, got.y, Dtype::kBf16, kCastDb),
          close_by("batch dx", whole.dx, got.dx, Dtype::kBf16, kCastDb),
          close_by("batch dw", whole.dw, got.dw, Dtype::kF32, kCastDb)};
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
