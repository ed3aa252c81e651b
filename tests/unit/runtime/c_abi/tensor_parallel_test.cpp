// Tensor parallelism with the sequence sharded, composed of the calls of float8.h on emulated ranks:
// what a rank computes is its part of one device's result, bit for bit where it is no sum over ranks.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <float8/float8.hpp>
#include <functional>
#include <thread>
#include <vector>

#include "recipes/dtype.hpp"
#include "tests/call_args.hpp"

namespace f8 {
namespace {

constexpr int kRanks = 2;
constexpr int64_t kM = 96, kN = 64, kK = 128;

using Words = std::vector<uint16_t>;

Words random_bf16(int64_t rows, int64_t cols, unsigned seed) {
  Words out(static_cast<size_t>(rows * cols));
  uint64_t state = seed;
  for (uint16_t& value : out) {
    state = state * 6364136223846793005ULL + 1442695040888963407ULL;
    value = encode_bf16((static_cast<float>(state >> 40) * 0x1p-24F - 0.5F) *
                        static_cast<float>(1 + (state >> 33) % 5));
  }
  return out;
}

// A part of a matrix: `rows` rows from `first_row` on, of which the columns from `first_col` on.
template <class T>
std::vector<T> part(const std::vector<T>& from, int64_t all_cols, int64_t first_row, int64_t rows,
                    int64_t first_col, int64_t cols) {
  std::vector<T> out;
  for (int64_t row = first_row; row < first_row + rows; ++row) {
    const auto begin = from.begin() + row * all_cols + first_col;
    out.insert(out.end(), begin, begin + cols);
  }
  return out;
}

float8::Context emulated(int device) {
  float8::ContextOptions options;
  options.emulate = true;
  return float8::Context::create(device, options).value();
}

// Memory of one call or tensor, aligned, 0 at first.
struct Buffer {
  explicit Buffer(size_t bytes) : bytes_(bytes + 256) {}
  void* get() {
    const auto at = reinterpret_cast<uintptr_t>(bytes_.data());
    return bytes_.data() + (256 - at % 256);
  }

 private:
  std::vector<unsigned char> bytes_;
};

// A tensor in fp8 with its memory, cast here or gathered.
struct Fp8 {
  float8::Quantizer quantizer;
  Buffer memory;
  float8::Tensor view;

  Fp8(const float8::Context& context, float8_operand operand, int64_t rows, int64_t cols,
      bool over_ranks)
      : quantizer(plan(context, operand, rows, cols, over_ranks)),
        memory(quantizer.tensor_bytes()),
        view(quantizer.view(memory.get(), rows).value()) {}
  // The cast of a tensor that no other rank has a part of.
  void cast(const Words& x) {
    Buffer workspace(quantizer.workspace_bytes());
    float8::QuantizeArgs args;
    args.x.data = x.data();
    args.tensor.data = memory.get();
    const float8::Status status = quantizer.run(with_workspace(args, workspace.get()), nullptr);
    ASSERT_TRUE(status) << status.message();
  }
  // The cast of this rank's rows.
  void cast_shard(const Words& x, const float8::Communicator& ranks) {
    std::vector<uint32_t> amax(quantizer.amax_words()), row_amax(quantizer.row_amax_words());
    float8::QuantizeArgs args;
    args.x.data = x.data();
    args.tensor.data = memory.get();
    args.amax = amax.empty() ? nullptr : amax.data();
    args.row_amax = row_amax.empty() ? nullptr : row_amax.data();
    ASSERT_TRUE(quantizer.find_amax(args, nullptr));
    ASSERT_TRUE(ranks.sync_amax(amax.data(), amax.size(), nullptr));
    ASSERT_TRUE(quantizer.run(with_workspace(args, nullptr), nullptr));
  }
  void gather(const Fp8& shard, const float8::Context& context,
              const float8::Communicator& ranks) const {
    Buffer workspace(float8_gather_workspace_bytes(&view, shard.view.rows, kRanks));
    float8::GatherArgs args;
    args.shard = &shard.view;
    args.whole = &view;
    args.shard_rows = shard.view.rows;
    const float8::Status status =
        ranks.gather_tensor(context, with_workspace(args, workspace.get()), nullptr);
    ASSERT_TRUE(status) << status.message();
  }

 private:
  static float8::Quantizer plan(const float8::Context& context, float8_operand operand,
                                int64_t rows, int64_t cols, bool over_ranks) {
    float8::QuantizerDesc desc;
    desc.operand = operand;
    desc.rows_max = rows;
    desc.cols = cols;
    desc.recipe = float8::Recipe::rowwise();
    desc.over_ranks = over_ranks;
    return float8::Quantizer::plan(context, desc).value();
  }
};

// One GEMM of a linear of this shape; d has `rows` rows and `cols` columns.
template <class T>
std::vector<T> gemm(const float8::Context& context, float8_gemm_kind kind, int64_t m, int64_t n,
                    int64_t k, const float8::Tensor& a, const float8::Tensor& b, int64_t elements) {
  float8::GemmDesc desc;
  desc.gemm = kind;
  desc.m_max = m;
  desc.n = n;
  desc.k = k;
  desc.recipe = float8::Recipe::rowwise();
  desc.d_dtype = sizeof(T) == 4 ? FLOAT8_F32 : FLOAT8_BF16;
  const float8::Gemm plan = float8::Gemm::plan(context, desc).value();
  Buffer workspace(plan.workspace_bytes());
  Buffer d(static_cast<size_t>(elements) * sizeof(T));
  float8::GemmArgs args;
  args.a = &a;
  args.b = &b;
  args.d.data = d.get();
  const float8::Status status = plan.run(with_workspace(args, workspace.get()), nullptr);
  EXPECT_TRUE(status) << status.message();
  std::vector<T> out(static_cast<size_t>(elements));
  std::memcpy(out.data(), d.get(), out.size() * sizeof(T));
  return out;
}

// All of the linear on one device.
struct OneDevice {
  Words x = random_bf16(kM, kK, 1), w = random_bf16(kN, kK, 2), dy = random_bf16(kM, kN, 3);
  Words y, dx;
  std::vector<float> dw;

  OneDevice() {
    const float8::Context context = emulated(0);
    Fp8 x8(context, FLOAT8_INPUT, kM, kK, false), w8(context, FLOAT8_WEIGHT, kN, kK, false),
        dy8(context, FLOAT8_GRAD_OUTPUT, kM, kN, false);
    x8.cast(x);
    w8.cast(w);
    dy8.cast(dy);
    y = gemm<uint16_t>(context, FLOAT8_OUTPUT, kM, kN, kK, x8.view, w8.view, kM * kN);
    dx = gemm<uint16_t>(context, FLOAT8_GRAD_INPUT, kM, kN, kK, dy8.view, w8.view, kM * kK);
    dw = gemm<float>(context, FLOAT8_GRAD_WEIGHT, kM, kN, kK, dy8.view, x8.view, kN * kK);
  }
};

void on_ranks(
    const std::function<void(int, const float8::Context&, const float8::Communicator&)>& body) {
  std::vector<float8::Context> contexts;
  std::vector<const float8::Context*> pointers;
  for (int rank = 0; rank < kRanks; ++rank) contexts.push_back(emulated(rank));
  for (const auto& context : contexts) pointers.push_back(&context);
  const auto communicators = float8::Communicator::create(pointers).value();
  std::vector<std::jthread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      body(rank, contexts[static_cast<size_t>(rank)], communicators[static_cast<size_t>(rank)]);
    });
  }
}

double relative_error(const Words& expected, const Words& got) {
  double error = 0, power = 0;
  for (size_t i = 0; i < expected.size(); ++i) {
    const double a = double{decode_bf16(expected[i])};
    error += (a - double{decode_bf16(got[i])}) * (a - double{decode_bf16(got[i])});
    power += a * a;
  }
  return std::sqrt(error / power);
}

// The rank's share of a sum over ranks.
Words scatter(const Words& partial, const float8::Communicator& ranks) {
  Words out(partial.size() / kRanks);
  EXPECT_TRUE(ranks.reduce_scatter(partial.data(), out.data(), out.size(), FLOAT8_BF16, nullptr));
  return out;
}

TEST(TensorParallel, ColumnWiseIsAPartOfOneDevice) {
  const OneDevice one;
  constexpr int64_t n = kN / kRanks, m = kM / kRanks;
  on_ranks([&](int rank, const float8::Context& context, const float8::Communicator& ranks) {
    // x is sharded by the sequence, w by rows.
    Fp8 x_shard(context, FLOAT8_INPUT, m, kK, true), x(context, FLOAT8_INPUT, kM, kK, false);
    x_shard.cast_shard(part(one.x, kK, rank * m, m, 0, kK), ranks);
    x.gather(x_shard, context, ranks);
    Fp8 w(context, FLOAT8_WEIGHT, n, kK, true);
    w.cast_shard(part(one.w, kK, rank * n, n, 0, kK), ranks);
    const Words y = gemm<uint16_t>(context, FLOAT8_OUTPUT, kM, n, kK, x.view, w.view, kM * n);
    EXPECT_EQ(y, part(one.y, kN, 0, kM, rank * n, n));

    Fp8 dy(context, FLOAT8_GRAD_OUTPUT, kM, n, false);
    dy.cast(part(one.dy, kN, 0, kM, rank * n, n));
    const auto dw = gemm<float>(context, FLOAT8_GRAD_WEIGHT, kM, n, kK, dy.view, x.view, n * kK);
    EXPECT_EQ(dw, part(one.dw, kK, rank * n, n, 0, kK));
    const Words dx = scatter(
        gemm<uint16_t>(context, FLOAT8_GRAD_INPUT, kM, n, kK, dy.view, w.view, kM * kK), ranks);
    const double error = relative_error(part(one.dx, kK, rank * m, m, 0, kK), dx);
    EXPECT_LT(error, 0.05);
    EXPECT_GT(error, 0) << "the parts of dy have scales of their own";
  });
}

TEST(TensorParallel, RowWiseIsAPartOfOneDevice) {
  const OneDevice one;
  constexpr int64_t k = kK / kRanks, m = kM / kRanks;
  on_ranks([&](int rank, const float8::Context& context, const float8::Communicator& ranks) {
    // x and w are sharded by columns, and y and dy by the sequence.
    Fp8 x(context, FLOAT8_INPUT, kM, k, false), w(context, FLOAT8_WEIGHT, kN, k, false);
    x.cast(part(one.x, kK, 0, kM, rank * k, k));
    w.cast(part(one.w, kK, 0, kN, rank * k, k));
    const Words y =
        scatter(gemm<uint16_t>(context, FLOAT8_OUTPUT, kM, kN, k, x.view, w.view, kM * kN), ranks);
    EXPECT_LT(relative_error(part(one.y, kN, rank * m, m, 0, kN), y), 0.05);

    Fp8 dy_shard(context, FLOAT8_GRAD_OUTPUT, m, kN, true),
        dy(context, FLOAT8_GRAD_OUTPUT, kM, kN, false);
    dy_shard.cast_shard(part(one.dy, kN, rank * m, m, 0, kN), ranks);
    dy.gather(dy_shard, context, ranks);
    const Words dx = gemm<uint16_t>(context, FLOAT8_GRAD_INPUT, kM, kN, k, dy.view, w.view, kM * k);
    EXPECT_EQ(dx, part(one.dx, kK, 0, kM, rank * k, k));
    const auto dw = gemm<float>(context, FLOAT8_GRAD_WEIGHT, kM, kN, k, dy.view, x.view, kN * k);
    EXPECT_EQ(dw, part(one.dw, kK, 0, kN, rank * k, k));
  });
}

}  // namespace
}  // namespace f8
