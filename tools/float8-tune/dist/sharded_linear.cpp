#include "tools/float8-tune/dist/sharded_linear.hpp"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <mutex>

#include "recipes/dtype.hpp"
#include "recipes/fp8_layout.hpp"

namespace f8::cli {
namespace {

using Bytes = std::vector<unsigned char>;

constexpr double kCastDb = 20;   // two casts of one tensor with other scales are this close
constexpr double kOrderDb = 90;  // fp32 sums in another order

// bf16 values of a normal-like distribution, each by its index and the seed alone.
std::vector<uint16_t> values(int64_t count, uint64_t seed) {
  std::vector<uint16_t> out(static_cast<size_t>(count));
  uint64_t state = seed * 0x9e3779b97f4a7c15ULL + 1;
  for (uint16_t& value : out) {
    float sum = 0;
    for (int i = 0; i < 4; ++i) {
      state = state * 6364136223846793005ULL + 1442695040888963407ULL;
      sum += static_cast<float>(state >> 40) * 0x1p-24F - 0.5F;
    }
    value = encode_bf16(sum);
  }
  return out;
}

std::vector<float> decode(const Bytes& bytes, Dtype type) {
  std::vector<float> out(bytes.size() / size_bytes(type));
  for (size_t i = 0; i < out.size(); ++i) {
    out[i] = load_element(bytes.data(), static_cast<int64_t>(i), type);
  }
  return out;
}

size_t different(const Bytes& a, const Bytes& b) {
  size_t count = a.size() > b.size() ? a.size() - b.size() : b.size() - a.size();
  for (size_t i = 0; i < std::min(a.size(), b.size()); ++i) count += a[i] != b[i] ? 1 : 0;
  return count;
}

// What is random, and the same in every run.
struct Inputs {
  std::vector<uint16_t> x, w, dy;
  explicit Inputs(const ShardedProblem& p)
      : x(values(p.tokens * p.k, 1)), w(values(p.n * p.k, 2)), dy(values(p.tokens * p.n, 3)) {}
};

// The rows of w that each rank has; all but the last ones have `each`.
struct Rows {
  int64_t each, first, count;

  Rows(const ShardedProblem& p, int ranks, int rank) {
    const int64_t unit = p.recipe == "blockwise" ? 128 : 16;
    each = ceil_div(ceil_div(p.n, ranks), unit) * unit;
    first = std::min(p.n, rank * each);
    count = std::min(each, p.n - first);
  }
};

// The results of a forward and a backward.
struct Results {
  Bytes y, dx, dw;
};

// A linear on a rank's device with its memory.
class LinearOnRank {
 public:
  LinearOnRank(DeviceRank& rank, const ShardedProblem& problem, int64_t m, int64_t dw_rows)
      : rank_(rank), problem_(problem), m_(m), dw_rows_(dw_rows) {}

  Status plan(const uint16_t* x, const uint16_t* dy) {
    float8::LinearDesc desc;
    desc.m_max = m_;
    desc.n = problem_.n;
    desc.k = problem_.k;
    desc.recipe = float8::Recipe::named(problem_.recipe);
    desc.grad_weight_dtype = FLOAT8_F32;
    linear_.emplace(F8_TRY(of_call(float8::Linear::plan(rank_.context(), desc))));
    x_ = F8_TRY(rank_.upload(x, bytes(m_ * problem_.k, 2)));
    dy_ = F8_TRY(rank_.upload(dy, bytes(m_ * problem_.n, 2)));
    y_ = F8_TRY(rank_.allocate(bytes(m_ * problem_.n, 2)));
    dx_ = F8_TRY(rank_.allocate(bytes(m_ * problem_.k, 2)));
    dw_ = F8_TRY(rank_.allocate(bytes(dw_rows_ * problem_.k, 4)));
    saved_ = F8_TRY(rank_.allocate(linear_->saved_bytes()));
    workspace_ = F8_TRY(rank_.allocate(linear_->workspace_bytes()));
    return {};
  }
  // Either the whole weight or its fp8 copies.
  Status forward(const void* w, const float8::Tensor* w_tensor) {
    float8::ForwardArgs args;
    args.x = x_;
    args.w = w;
    args.w_tensor = w_tensor;
    args.y = y_;
    args.saved = saved_;
    return of_call(linear_->forward(args, workspace_, rank_.stream()));
  }
  Status backward(const void* w, const float8::Tensor* w_tensor) {
    float8::BackwardArgs args;
    args.dy = dy_;
    args.saved = saved_;
    args.x = x_;
    args.w = w;
    args.w_tensor = w_tensor;
    args.dx = dx_;
    args.dw = dw_;
    return of_call(linear_->backward(args, workspace_, rank_.stream()));
  }
  [[nodiscard]] Result<Results> results() {
    Results out;
    out.y = F8_TRY(rank_.download(y_, bytes(m_ * problem_.n, 2)));
    out.dx = F8_TRY(rank_.download(dx_, bytes(m_ * problem_.k, 2)));
    out.dw = F8_TRY(rank_.download(dw_, bytes(problem_.n * problem_.k, 4)));
    return out;
  }
  [[nodiscard]] void* dw() const { return dw_; }
  [[nodiscard]] Result<std::string> info() const { return of_call(linear_->info()); }

 private:
  static size_t bytes(int64_t count, size_t element) {
    return static_cast<size_t>(count) * element;
  }
  DeviceRank& rank_;
  const ShardedProblem& problem_;
  int64_t m_;
  int64_t dw_rows_;
  std::optional<float8::Linear> linear_;
  void *x_ = nullptr, *dy_ = nullptr, *y_ = nullptr, *dx_ = nullptr, *dw_ = nullptr;
  void *saved_ = nullptr, *workspace_ = nullptr;
};

// The fp8 copies of the weight: a rank's shard, the gathered ones, or those of a cast of all rows.
struct WeightCopies {
  std::optional<float8::Quantizer> quantizer;
  float8::Tensor view;
  void* memory = nullptr;

  Status plan(DeviceRank& rank, const ShardedProblem& problem, int64_t rows_max, int64_t rows,
              bool over_ranks) {
    float8::QuantizerDesc desc;
    desc.operand = FLOAT8_WEIGHT;
    desc.rows_max = rows_max;
    desc.cols = problem.k;
    desc.recipe = float8::Recipe::named(problem.recipe);
    desc.over_ranks = over_ranks;
    quantizer.emplace(F8_TRY(of_call(float8::Quantizer::plan(rank.context(), desc))));
    memory = F8_TRY(rank.allocate(quantizer->tensor_bytes()));
    view = F8_TRY(of_call(quantizer->view(memory, rows)));
    return {};
  }
};

// The defined bytes of the copies and their scales.
Result<Bytes> bytes_of(DeviceRank& rank, const float8::Tensor& tensor) {
  Bytes out;
  const auto add = [&](const void* from, int64_t lines, int64_t width, int64_t pitch) -> Status {
    const Bytes all = F8_TRY(rank.download(from, static_cast<size_t>(lines * pitch)));
    for (int64_t line = 0; line < lines; ++line) {
      out.insert(out.end(), all.begin() + line * pitch, all.begin() + line * pitch + width);
    }
    return {};
  };
  const auto scales = [&](const float* from, const float8_cast_setting& setting, int64_t rows,
                          int64_t cols) {
    int64_t floats = 1;
    if (setting.granularity == FLOAT8_AXIS) floats = rows;
    if (setting.granularity == FLOAT8_BLOCK_128X128) {
      floats = ceil_div(rows, 128) * ceil_div(ceil_div(cols, 128), 4) * 4;
    }
    return add(from, 1, floats * 4, floats * 4);
  };
  F8_TRY(add(tensor.q, tensor.rows, tensor.cols, tensor.ld_q));
  F8_TRY(scales(tensor.q_inverse_scale, tensor.q_setting, tensor.rows, tensor.cols));
  F8_TRY(add(tensor.qt, tensor.cols, tensor.rows, tensor.ld_qt));
  F8_TRY(scales(tensor.qt_inverse_scale, tensor.qt_setting, tensor.cols, tensor.rows));
  return out;
}

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
        rows_(problem, ranks, rank.index()),
        sharded_(rank, problem, problem.tokens / ranks, rows_.each * ranks),
        alone_(rank, problem, problem.tokens / ranks, problem.n) {}

  // Takes all memory, and computes without shards: no rank waits for another on its device yet.
  Status prepare() {
    const int64_t m = p_.tokens / ranks_;
    const uint16_t* const x = inputs_.x.data() + rank_.index() * m * p_.k;
    const uint16_t* const dy = inputs_.dy.data() + rank_.index() * m * p_.n;
    F8_TRY(shard_.plan(rank_, p_, rows_.each, rows_.count, true));
    F8_TRY(whole_.plan(rank_, p_, p_.n, p_.n, false));
    F8_TRY(sharded_.plan(x, dy));
    F8_TRY(alone_.plan(x, dy));
    outcome.kernels = F8_TRY(sharded_.info());
    const auto shard_elements = static_cast<size_t>(rows_.each * p_.k);
    dw_ = F8_TRY(rank_.allocate(shard_elements * sizeof(float)));
    gather_workspace_ =
        F8_TRY(rank_.allocate(float8_gather_workspace_bytes(&whole_.view, rows_.each, ranks_)));
    args_.x = F8_TRY(rank_.upload(inputs_.w.data() + rows_.first * p_.k,
                                  static_cast<size_t>(rows_.count * p_.k) * 2));
    args_.tensor = shard_.memory;
    args_.rows = rows_.count;
    amax_words_ = shard_.quantizer->amax_words();
    const size_t row_words = shard_.quantizer->row_amax_words();
    if (amax_words_ > 0) {
      args_.amax = static_cast<uint32_t*>(F8_TRY(rank_.allocate(amax_words_ * 4)));
    }
    if (row_words > 0) {
      args_.row_amax = static_cast<uint32_t*>(F8_TRY(rank_.allocate(row_words * 4)));
    }
    return run_alone();
  }

  Status run() {
    const float8_stream stream = rank_.stream();
    float8::Communicator& ranks = rank_.communicator();
    F8_TRY(of_call(shard_.quantizer->find_amax(args_, stream)));
    if (amax_words_ > 0) F8_TRY(of_call(ranks.sync_amax(args_.amax, amax_words_, stream)));
    F8_TRY(of_call(shard_.quantizer->run(args_, nullptr, stream)));
    float8::Tensor q = whole_.view, qt = whole_.view;
    q.qt = qt.q = nullptr;
    F8_TRY(gather(q));
    F8_TRY(sharded_.forward(nullptr, &q));
    F8_TRY(gather(qt));
    F8_TRY(sharded_.backward(nullptr, &qt));
    F8_TRY(of_call(ranks.reduce_scatter(sharded_.dw(), dw_, static_cast<size_t>(rows_.each * p_.k),
                                        FLOAT8_F32, stream)));
    F8_TRY(of_call(ranks.wait(rank_.context(), "verify-dist", stream)));
    outcome.copies = F8_TRY(bytes_of(rank_, whole_.view));
    outcome.sharded = F8_TRY(sharded_.results());
    outcome.dw_shard =
        F8_TRY(rank_.download(dw_, static_cast<size_t>(rows_.count * p_.k) * sizeof(float)));
    return {};
  }

  RankOutcome outcome;

 private:
  Status run_alone() {
    WeightCopies cast;
    F8_TRY(cast.plan(rank_, p_, p_.n, p_.n, false));
    void* const w = F8_TRY(rank_.upload(inputs_.w.data(), inputs_.w.size() * 2));
    void* const workspace = F8_TRY(rank_.allocate(cast.quantizer->workspace_bytes()));
    float8::QuantizeArgs args;
    args.x = w;
    args.tensor = cast.memory;
    F8_TRY(of_call(cast.quantizer->run(args, workspace, rank_.stream())));
    F8_TRY(alone_.forward(w, nullptr));
    F8_TRY(alone_.backward(w, nullptr));
    outcome.expected_copies = F8_TRY(bytes_of(rank_, cast.view));
    outcome.expected = F8_TRY(alone_.results());
    return {};
  }
  Status gather(const float8::Tensor& whole) {
    float8::GatherArgs args;
    args.shard = &shard_.view;
    args.whole = &whole;
    args.shard_rows = rows_.each;
    return of_call(rank_.communicator().gather_tensor(rank_.context(), args, gather_workspace_,
                                                      rank_.stream()));
  }

  DeviceRank& rank_;
  const ShardedProblem& p_;
  int ranks_;
  const Inputs& inputs_;
  Rows rows_;
  WeightCopies shard_, whole_;
  LinearOnRank sharded_, alone_;
  float8::QuantizeArgs args_;
  size_t amax_words_ = 0;
  void* dw_ = nullptr;
  void* gather_workspace_ = nullptr;
};

// All tokens at once, on one rank.
Result<Results> run_whole(DeviceRank& rank, const ShardedProblem& p, const Inputs& inputs) {
  LinearOnRank linear(rank, p, p.tokens, p.n);
  F8_TRY(linear.plan(inputs.x.data(), inputs.dy.data()));
  void* const w = F8_TRY(rank.upload(inputs.w.data(), inputs.w.size() * 2));
  F8_TRY(linear.forward(w, nullptr));
  F8_TRY(linear.backward(w, nullptr));
  Results out = F8_TRY(linear.results());
  rank.release();
  return out;
}

Finding bits(std::string check, const std::vector<RankOutcome>& ranks, auto got, auto expected) {
  Finding out{.check = std::move(check)};
  for (const RankOutcome& rank : ranks) out.different += different(got(rank), expected(rank));
  return out;
}

Finding close(std::string check, const std::vector<float>& expected, const std::vector<float>& got,
              double needed_db) {
  return {.check = std::move(check),
          .bits = false,
          .different = 0,
          .sqnr_db = sqnr_db(expected, got),
          .needed_db = needed_db};
}

void append(Bytes& to, const Bytes& from) {
  to.insert(to.end(), from.begin(), from.end());
}

std::vector<Finding> compare(const ShardedProblem& p, const std::vector<RankOutcome>& ranks,
                             const Results& whole) {
  using R = const RankOutcome&;
  std::vector<Finding> out;
  Finding kernels{.check = "kernels"};
  for (R rank : ranks) kernels.different += rank.kernels == ranks.front().kernels ? 0 : 1;
  out.push_back(kernels);
  out.push_back(bits(
      "copies", ranks, [](R r) -> const Bytes& { return r.copies; },
      [](R r) -> const Bytes& { return r.expected_copies; }));
  out.push_back(bits(
      "y", ranks, [](R r) -> const Bytes& { return r.sharded.y; },
      [](R r) -> const Bytes& { return r.expected.y; }));
  out.push_back(bits(
      "dx", ranks, [](R r) -> const Bytes& { return r.sharded.dx; },
      [](R r) -> const Bytes& { return r.expected.dx; }));

  Results all;
  std::vector<float> sum;
  for (R rank : ranks) {
    append(all.y, rank.sharded.y);
    append(all.dx, rank.sharded.dx);
    append(all.dw, rank.dw_shard);
    const std::vector<float> own = decode(rank.expected.dw, Dtype::kF32);
    if (sum.empty()) {
      sum = own;
    } else {
      for (size_t i = 0; i < sum.size(); ++i) sum[i] += own[i];
    }
  }
  const std::vector<float> dw = decode(all.dw, Dtype::kF32);
  if (p.one_order) {
    Bytes expected(sum.size() * sizeof(float));
    std::memcpy(expected.data(), sum.data(), expected.size());
    out.push_back({.check = "dw", .different = different(all.dw, expected)});
  } else {
    out.push_back(close("dw", sum, dw, kOrderDb));
  }
  out.push_back(
      close("batch y", decode(whole.y, Dtype::kBf16), decode(all.y, Dtype::kBf16), kCastDb));
  out.push_back(
      close("batch dx", decode(whole.dx, Dtype::kBf16), decode(all.dx, Dtype::kBf16), kCastDb));
  out.push_back(close("batch dw", decode(whole.dw, Dtype::kF32), dw, kCastDb));
  return out;
}

}  // namespace

double sqnr_db(const std::vector<float>& expected, const std::vector<float>& got) {
  if (expected.size() != got.size()) return -std::numeric_limits<double>::infinity();
  double signal = 0, noise = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double difference = double{expected[i]} - double{got[i]};
    signal += double{expected[i]} * double{expected[i]};
    noise += difference * difference;
  }
  if (std::isnan(signal) || std::isnan(noise)) return -std::numeric_limits<double>::infinity();
  if (noise == 0) return std::numeric_limits<double>::infinity();
  return 10 * std::log10(signal / noise);
}

Result<std::vector<Finding>> verify_sharded(const DeviceRanks& ranks,
                                            const ShardedProblem& problem) {
  const Inputs inputs(problem);
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
  const Results whole = F8_TRY(run_whole(*ranks.front(), problem, inputs));
  return compare(problem, outcomes, whole);
}

}  // namespace f8::cli
