#include "tools/float8-tune/dist/tensor_parallel.hpp"

#include <cstring>

namespace f8::cli {
namespace {

// A part of a row-major matrix of elements of `element` bytes.
struct Block {
  int64_t first_row, rows, first_col, cols;
};

Bytes part(const void* from, int64_t all_cols, const Block& block, size_t element) {
  Bytes out(static_cast<size_t>(block.rows * block.cols) * element);
  const auto row_bytes = static_cast<size_t>(block.cols) * element;
  for (int64_t row = 0; row < block.rows; ++row) {
    const auto at = static_cast<size_t>((block.first_row + row) * all_cols + block.first_col);
    std::memcpy(out.data() + static_cast<size_t>(row) * row_bytes,
                static_cast<const unsigned char*>(from) + at * element, row_bytes);
  }
  return out;
}

std::vector<uint16_t> part(const std::vector<uint16_t>& from, int64_t all_cols,
                           const Block& block) {
  const Bytes bytes = part(from.data(), all_cols, block, sizeof(uint16_t));
  std::vector<uint16_t> out(bytes.size() / sizeof(uint16_t));
  std::memcpy(out.data(), bytes.data(), bytes.size());
  return out;
}

// A rank's parts of the results, and those of one device's results.
struct Pair {
  Results got, expected;
};

// An activation in fp8: by tokens it is cast as a shard and gathered, by columns each rank has its own.
struct Activation {
  float8_operand operand;
  int64_t cols;  // of the rank
  TensorOnRank shard, all;
};

// One rank of a column-wise (`columns`) or row-wise linear.
class RankTp {
 public:
  RankTp(DeviceRank& rank, const ShardedProblem& problem, const Inputs& inputs,
         const Results& whole, int ranks, bool columns)
      : rank_(rank),
        p_(problem),
        inputs_(inputs),
        whole_(whole),
        ranks_(ranks),
        columns_(columns),
        local_{problem.shape.m, problem.shape.n / (columns ? ranks : 1),
               problem.shape.k / (columns ? 1 : ranks)},
        linear_(rank, problem.recipe, local_, local_.n),
        delayed_(problem.settings().has_delayed_scales()),
        has_fp8_grad_weight_(problem.settings().at(Gemm::kGradWeight).is_fp8()),
        x_{FLOAT8_INPUT, local_.k, {}, {}},
        dy_{FLOAT8_GRAD_OUTPUT, local_.n, {}, {}} {}

  // Takes all memory: no rank waits for another on its device yet.
  Status prepare() {
    const auto [m, n, k] = p_.shape;
    const int64_t r = rank_.index();
    const Block columns{0, m, columns_ ? r * local_.n : r * local_.k,
                        columns_ ? local_.n : local_.k};
    const std::vector<uint16_t> x = columns_ ? inputs_.x : part(inputs_.x, k, columns);
    const std::vector<uint16_t> dy = columns_ ? part(inputs_.dy, n, columns) : inputs_.dy;
    const Block of_w =
        columns_ ? Block{r * local_.n, local_.n, 0, k} : Block{0, n, r * local_.k, local_.k};
    const std::vector<uint16_t> w = part(inputs_.w, k, of_w);
    F8_TRY(linear_.plan(x.data(), dy.data()));
    F8_TRY(linear_.plan_scales());
    sum_elements_ = m / ranks_ * (columns_ ? k : n);
    sum_ = F8_TRY(rank_.allocate(static_cast<size_t>(sum_elements_) * 2));
    if (delayed_) {
      w_high_precision_ = F8_TRY(rank_.upload(w.data(), w.size() * 2));
      return {};
    }
    F8_TRY(w_.plan(rank_, p_.recipe, FLOAT8_WEIGHT, local_.n, local_.n, local_.k,
                   columns_ ? Held::kRows : Held::kColumns));
    F8_TRY(w_.upload(w.data()));
    F8_TRY(plan_activation(by_tokens(), columns_ ? inputs_.x : inputs_.dy));
    F8_TRY(plan_activation(by_columns(), columns_ ? dy : x));
    F8_TRY(grad_input_.plan(rank_, p_.recipe, FLOAT8_GRAD_INPUT, local_, FLOAT8_BF16));
    if (!has_fp8_grad_weight_) return {};
    return grad_weight_.plan(rank_, p_.recipe, FLOAT8_GRAD_WEIGHT, local_, FLOAT8_F32);
  }

  Status run() {
    if (delayed_) {
      // A first step has the scales of all ranks' tensors.
      linear_.set_first_step(true, rank_.communicator().get());
      F8_TRY(linear_.forward(w_high_precision_, nullptr));
      F8_TRY(linear_.backward(w_high_precision_, nullptr));
    } else {
      F8_TRY(w_.cast());
      F8_TRY(by_tokens().shard.cast());
      F8_TRY(by_tokens().shard.gather(by_tokens().all.view()));
      F8_TRY(by_columns().all.cast());
      const float8::Tensor &x = x_.all.view(), &w = w_.view(), &dy = dy_.all.view();
      F8_TRY(linear_.forward(nullptr, &w, &x));
      F8_TRY(grad_input_.run(dy, w, linear_.dx()));
      F8_TRY(has_fp8_grad_weight_ ? grad_weight_.run(dy, x, linear_.dw())
                                  : linear_.backward(nullptr, &w, &x, false));
    }
    F8_TRY(of_call(rank_.communicator().reduce_scatter(columns_ ? linear_.dx() : linear_.y(), sum_,
                                                       static_cast<size_t>(sum_elements_),
                                                       FLOAT8_BF16, rank_.stream())));
    F8_TRY(of_call(rank_.communicator().wait(rank_.context(), "verify-dist", rank_.stream())));
    return take_results();
  }

  Pair outcome;

 private:
  Activation& by_tokens() { return columns_ ? x_ : dy_; }
  Activation& by_columns() { return columns_ ? dy_ : x_; }
  // `values` are all tokens, of this rank's columns.
  Status plan_activation(Activation& activation, const std::vector<uint16_t>& values) {
    const bool tokens = &activation == &by_tokens();
    const auto& [operand, cols, shard, all] = activation;
    const int64_t m = p_.shape.m;
    F8_TRY(activation.all.plan(rank_, p_.recipe, operand, m, m, cols,
                               tokens ? Held::kAll : Held::kColumns));
    if (!tokens) return activation.all.upload(values.data());
    const int64_t rows = m / ranks_;
    F8_TRY(activation.shard.plan(rank_, p_.recipe, operand, rows, rows, cols, Held::kRows));
    F8_TRY(activation.shard.upload(values.data() + rank_.index() * rows * cols));
    return activation.shard.take_workspace(activation.all.view(), rows, ranks_);
  }
  Status take_results() {
    const auto [m, n, k] = p_.shape;
    const int64_t r = rank_.index(), rows = m / ranks_;
    const Bytes sum = F8_TRY(rank_.download(sum_, static_cast<size_t>(sum_elements_) * 2));
    outcome.got = F8_TRY(linear_.results());
    Results& expected = outcome.expected;
    if (columns_) {
      outcome.got.dx = sum;
      expected.y = part(whole_.y.data(), n, {0, m, r * local_.n, local_.n}, 2);
      expected.dx = part(whole_.dx.data(), k, {r * rows, rows, 0, k}, 2);
      expected.dw = part(whole_.dw.data(), k, {r * local_.n, local_.n, 0, k}, 4);
    } else {
      outcome.got.y = sum;
      expected.y = part(whole_.y.data(), n, {r * rows, rows, 0, n}, 2);
      expected.dx = part(whole_.dx.data(), k, {0, m, r * local_.k, local_.k}, 2);
      expected.dw = part(whole_.dw.data(), k, {0, n, r * local_.k, local_.k}, 4);
    }
    return {};
  }

  DeviceRank& rank_;
  const ShardedProblem& p_;
  const Inputs& inputs_;
  const Results& whole_;
  int ranks_;
  bool columns_;
  Shape local_;
  LinearOnRank linear_;
  bool delayed_, has_fp8_grad_weight_;
  Activation x_, dy_;
  TensorOnRank w_;
  GemmOnRank grad_input_, grad_weight_;
  void* w_high_precision_ = nullptr;
  void* sum_ = nullptr;
  int64_t sum_elements_ = 0;
};

Result<std::vector<Pair>> run_all(const DeviceRanks& ranks, const ShardedProblem& problem,
                                  const Inputs& inputs, const Results& whole, bool columns) {
  std::vector<std::unique_ptr<RankTp>> runs;
  for (const auto& rank : ranks) {
    runs.push_back(std::make_unique<RankTp>(*rank, problem, inputs, whole,
                                            static_cast<int>(ranks.size()), columns));
  }
  const auto run_of = [&](const DeviceRank& rank) -> RankTp& {
    return *runs[static_cast<size_t>(rank.index())];
  };
  F8_TRY(run_ranks(ranks, [&](DeviceRank& rank) { return run_of(rank).prepare(); }));
  F8_TRY(run_ranks(ranks, [&](DeviceRank& rank) { return run_of(rank).run(); }));
  std::vector<Pair> out;
  for (const auto& run : runs) out.push_back(std::move(run->outcome));
  for (const auto& rank : ranks) rank->release();
  return out;
}

bool is_shared_equally(const ShardedProblem& problem, int64_t ranks) {
  const bool blocks = problem.settings().has_block_scales();
  const int64_t unit = (blocks ? 128 : 16) * ranks;
  const auto [m, n, k] = problem.shape;
  // Blocks of 128 tokens have a scale too.
  return n % unit == 0 && k % unit == 0 && m % (blocks ? unit : ranks) == 0;
}

}  // namespace

Result<std::vector<Finding>> verify_tensor_parallel(const DeviceRanks& ranks,
                                                    const ShardedProblem& problem,
                                                    const Inputs& inputs, const Results& whole) {
  std::vector<Finding> out;
  if (!is_shared_equally(problem, static_cast<int64_t>(ranks.size()))) return out;
  for (const bool columns : {true, false}) {
    const std::vector<Pair> all = F8_TRY(run_all(ranks, problem, inputs, whole, columns));
    const auto add = [&](const char* name, Bytes Results::*field, Dtype type, bool is_part) {
      const std::string check = f8::format("{} {}", columns ? "column" : "row", name);
      Finding bits{.check = check, .notes = {}};
      Bytes expected, got;
      for (size_t r = 0; r < all.size(); ++r) {
        add_bits(bits, static_cast<int>(r), all[r].expected.*field, all[r].got.*field);
        append(expected, all[r].expected.*field);
        append(got, all[r].got.*field);
      }
      out.push_back(is_part && problem.one_kernel ? bits
                                                  : close_by(check, expected, got, type, kSumDb));
    };
    add("y", &Results::y, Dtype::kBf16, columns);
    add("dx", &Results::dx, Dtype::kBf16, !columns);
    add("dw", &Results::dw, Dtype::kF32, true);
  }
  return out;
}

}  // namespace f8::cli
