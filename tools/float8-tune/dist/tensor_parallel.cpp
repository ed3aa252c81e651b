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
        linear_(rank, problem.recipe, local_, local_.n) {}

  Status prepare() {
    const auto [m, n, k] = p_.shape;
    const int64_t r = rank_.index();
    const Block all_rows{0, m, columns_ ? r * local_.n : r * local_.k,
                         columns_ ? local_.n : local_.k};
    if (columns_) {
      F8_TRY(linear_.plan(inputs_.x.data(), part(inputs_.dy, n, all_rows).data()));
      const int64_t rows = m / ranks_;
      F8_TRY(x_shard_.plan(rank_, p_.recipe, FLOAT8_INPUT, rows, rows, k, true));
      F8_TRY(x_shard_.upload(inputs_.x.data() + r * rows * k));
      F8_TRY(x_.plan(rank_, p_.recipe, FLOAT8_INPUT, m, m, k, false));
      F8_TRY(x_shard_.take_workspace(x_.view(), ranks_));
      F8_TRY(w_.plan(rank_, p_.recipe, FLOAT8_WEIGHT, local_.n, local_.n, k, true));
      F8_TRY(w_.upload(inputs_.w.data() + r * local_.n * k));
      sum_elements_ = rows * k;
    } else {
      F8_TRY(linear_.plan(part(inputs_.x, k, all_rows).data(), inputs_.dy.data()));
      const Block w_columns{0, n, r * local_.k, local_.k};
      w_high_precision_ = F8_TRY(rank_.upload(part(inputs_.w, k, w_columns).data(),
                                              static_cast<size_t>(n * local_.k) * 2));
      sum_elements_ = m / ranks_ * n;
    }
    sum_ = F8_TRY(rank_.allocate(static_cast<size_t>(sum_elements_) * 2));
    return {};
  }

  Status run() {
    if (columns_) {
      F8_TRY(x_shard_.cast());
      F8_TRY(x_shard_.gather(x_.view()));
      F8_TRY(w_.cast());
      F8_TRY(linear_.forward(nullptr, &w_.view(), &x_.view()));
      F8_TRY(linear_.backward(nullptr, &w_.view(), &x_.view()));
    } else {
      F8_TRY(linear_.forward(w_high_precision_, nullptr));
      F8_TRY(linear_.backward(w_high_precision_, nullptr));
    }
    F8_TRY(of_call(rank_.communicator().reduce_scatter(columns_ ? linear_.dx() : linear_.y(), sum_,
                                                       static_cast<size_t>(sum_elements_),
                                                       FLOAT8_BF16, rank_.stream())));
    F8_TRY(of_call(rank_.communicator().wait(rank_.context(), "verify-dist", rank_.stream())));
    return take_results();
  }

  Pair outcome;

 private:
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
  TensorOnRank x_shard_, x_, w_;
  void* w_high_precision_ = nullptr;
  void* sum_ = nullptr;
  int64_t sum_elements_ = 0;
};

Result<Pair> run_all(const DeviceRanks& ranks, const ShardedProblem& problem, const Inputs& inputs,
                     const Results& whole, bool columns) {
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
  Pair out;
  for (const auto& run : runs) {
    for (const auto field : {&Results::y, &Results::dx, &Results::dw}) {
      for (const auto side : {&Pair::got, &Pair::expected}) {
        const Bytes& from = run->outcome.*side.*field;
        Bytes& to = out.*side.*field;
        to.insert(to.end(), from.begin(), from.end());
      }
    }
  }
  for (const auto& rank : ranks) rank->release();
  return out;
}

bool is_shared_equally(const ShardedProblem& problem, int64_t ranks) {
  const int64_t unit = (problem.recipe == "blockwise" ? 128 : 16) * ranks;
  const auto [m, n, k] = problem.shape;
  // Blocks of 128 tokens have a scale too.
  return n % unit == 0 && k % unit == 0 && m % (problem.recipe == "blockwise" ? unit : ranks) == 0;
}

}  // namespace

Result<std::vector<Finding>> verify_tensor_parallel(const DeviceRanks& ranks,
                                                    const ShardedProblem& problem,
                                                    const Inputs& inputs, const Results& whole) {
  std::vector<Finding> out;
  if (!is_shared_equally(problem, static_cast<int64_t>(ranks.size()))) return out;
  for (const bool columns : {true, false}) {
    const Pair all = F8_TRY(run_all(ranks, problem, inputs, whole, columns));
    const auto add = [&](const char* name, const Bytes Results::*field, Dtype type, bool is_part) {
      const std::string check = f8::format("{} {}", columns ? "column" : "row", name);
      const bool bits = is_part && problem.one_kernel && problem.recipe == "rowwise";
      out.push_back(bits ? equal_bits(check, all.expected.*field, all.got.*field)
                         : close_by(check, all.expected.*field, all.got.*field, type, kCastDb));
    };
    add("y", &Results::y, Dtype::kBf16, columns);
    add("dx", &Results::dx, Dtype::kBf16, !columns);
    add("dw", &Results::dw, Dtype::kF32, true);
  }
  return out;
}

}  // namespace f8::cli
