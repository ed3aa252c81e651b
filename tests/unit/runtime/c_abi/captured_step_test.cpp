// A sharded step over emulated ranks in a CUDA graph, through the public header: captured once on each
// rank, and replayed with other inputs in the same memory, it gives the bits of the step without a graph.
//
//   step := maxima of all shards in a list, one all-reduce of them, casts of all shards in a list
//           for each linear: gather of q, forward, gather of qt, backward, reduce-scatter of dw
//           with delayed scaling: the sync of scales over ranks
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "runtime/device/emulated_driver.hpp"
#include "tests/unit/runtime/c_abi/emulated_memory.hpp"
#include "tests/unit/runtime/c_abi/emulated_ranks.hpp"

namespace f8::testing {
namespace {

using float8::testing::Memory;
using float8::testing::memory;

constexpr int kRanks = 2;
constexpr int64_t kTokens = 48;
constexpr int64_t kK = 128;

void expect_ok(const float8::Status& status, const char* what) {
  ASSERT_TRUE(status) << what << ": " << status.message();
}

struct Bytes {
  explicit Bytes(size_t bytes) : size(bytes), memory(float8::testing::memory(bytes)) { poison(); }
  void poison() const { std::memset(memory.get(), 0xee, size); }
  void fill(unsigned seed) const {
    const auto count = static_cast<int64_t>(size / 2);
    const Memory values = float8::testing::random_bf16(count, seed);
    std::memcpy(memory.get(), values.get(), size);
  }
  [[nodiscard]] std::vector<uint8_t> bits() const {
    const auto* from = static_cast<const uint8_t*>(memory.get());
    return {from, from + size};
  }
  [[nodiscard]] void* get() const { return memory.get(); }
  size_t size;
  Memory memory;
};
Bytes bf16(int64_t count) {
  return Bytes(static_cast<size_t>(count) * 2);
}
Bytes words(size_t count) {
  return Bytes(count * 4);
}

// A linear whose weight ranks share by rows: its qt is read as it arrives, or in one piece.
struct ShardedLinear {
  ShardedLinear(const float8::Context& context, const std::string& recipe, int64_t out,
                bool in_shards)
      : n(out),
        rows(out / kRanks),
        linear(float8::Linear::plan(context, linear_desc(recipe, out, in_shards)).value()),
        shard(float8::Quantizer::plan(context, desc(recipe, rows, recipe != "delayed")).value()),
        whole(float8::Quantizer::plan(context, desc(recipe, n, false)).value()),
        tensor(shard.tensor_bytes()),
        q_memory(whole.tensor_bytes()),
        qt_memory(whole.transposed_bytes()),
        saved(linear.saved_bytes_with_tensors(false, true)),
        w(bf16(rows * kK)),
        x(bf16(kTokens * kK)),
        dy(bf16(kTokens * n)),
        y(bf16(kTokens * n)),
        dx(bf16(kTokens * kK)),
        dw(words(static_cast<size_t>(n * kK))),
        dw_shard(words(static_cast<size_t>(rows * kK))),
        amax(words(shard.amax_words())),
        row_amax(words(shard.row_amax_words())),
        own(shard.view(tensor.get(), rows).value()),
        q(whole.view(q_memory.get(), n, qt_memory.get()).value()),
        qt(q) {
    q.qt = qt.q = nullptr;
    if (!in_shards) return;
    qt.qt_shards = kRanks;
    qt.ld_qt = rows;
  }
  static float8::LinearDesc linear_desc(const std::string& recipe, int64_t n, bool in_shards) {
    float8::LinearDesc out;
    out.m_max = kTokens;
    out.n = n;
    out.k = kK;
    out.recipe = float8::Recipe::named(recipe);
    out.grad_weight_dtype = FLOAT8_F32;
    out.weight_shards = in_shards;
    return out;
  }
  static float8::QuantizerDesc desc(const std::string& recipe, int64_t rows, bool over_ranks) {
    float8::QuantizerDesc out;
    out.operand = FLOAT8_WEIGHT;
    out.rows_max = rows;
    out.cols = kK;
    out.recipe = float8::Recipe::named(recipe);
    out.over_ranks = over_ranks;
    return out;
  }

  int64_t n, rows;
  float8::Linear linear;
  float8::Quantizer shard, whole;
  Bytes tensor, q_memory, qt_memory, saved;
  Bytes w, x, dy, y, dx, dw, dw_shard, amax, row_amax;
  float8::Tensor own, q, qt;
};

// What a rank has, and its step.
class Trainer {
 public:
  Trainer(const float8::Context& context, const float8::Communicator& ranks, int rank,
          const std::string& recipe)
      : context_(context),
        ranks_(ranks),
        rank_(rank),
        delayed_(recipe == "delayed"),
        linears_(plan(context, recipe)),
        casts_(
            float8::QuantizerList::plan(context, {linears_[0].shard, linears_[1].shard}).value()),
        scales_(float8::Scales::plan(context, {linears_[0].linear.get(), linears_[1].linear.get()})
                    .value()),
        state_(scales_.bytes()),
        words_(words(linears_[0].shard.amax_words() + linears_[1].shard.amax_words())),
        workspace_(std::max({casts_.workspace_bytes(), linears_[0].linear.workspace_bytes(),
                             linears_[1].linear.workspace_bytes()})),
        gather_workspace_(gather_bytes()) {
    expect_ok(scales_.init(state_.get(), nullptr), "init");
  }

  // Other inputs in the same memory; what the step writes is poisoned.
  void take_inputs(unsigned step) const {
    for (size_t i = 0; i < linears_.size(); ++i) {
      const unsigned seed =
          step * 100 + static_cast<unsigned>(rank_) * 10 + static_cast<unsigned>(i);
      linears_[i].w.fill(seed);
      linears_[i].x.fill(seed + 3);
      linears_[i].dy.fill(seed + 6);
      for (const Bytes* out : {&linears_[i].y, &linears_[i].dx, &linears_[i].dw_shard}) {
        out->poison();
      }
    }
  }
  void step(bool first, float8_stream stream) {
    cast(first, stream);
    for (size_t i = 0; i < linears_.size(); ++i) {
      forward(i, first, stream);
      backward(i, first, stream);
    }
    expect_ok(scales_.sync(state_.get(), ranks_.get(), stream), "scales");
  }
  [[nodiscard]] std::vector<std::vector<uint8_t>> results() const {
    std::vector<std::vector<uint8_t>> out;
    for (const ShardedLinear& one : linears_) {
      for (const Bytes* bytes : {&one.y, &one.dx, &one.dw_shard}) out.push_back(bytes->bits());
    }
    out.push_back(state_.bits());
    return out;
  }

 private:
  static std::vector<ShardedLinear> plan(const float8::Context& context,
                                         const std::string& recipe) {
    std::vector<ShardedLinear> out;
    out.emplace_back(context, recipe, 256, true);
    out.emplace_back(context, recipe, recipe == "blockwise" ? 256 : 96, false);
    return out;
  }
  size_t gather_bytes() const {
    size_t out = 0;
    for (const ShardedLinear& one : linears_) {
      for (const float8::Tensor* whole : {&one.q, &one.qt}) {
        out = std::max(out, float8_gather_workspace_bytes(whole, one.rows, kRanks));
      }
    }
    return out;
  }
  [[nodiscard]] float8::ScaleSlots slots(size_t i) const {
    return scales_.slots(state_.get(), i).value();
  }

  void cast(bool first, float8_stream stream) {
    const float8::Step step{.first_step = first, .ranks = ranks_.get()};
    std::vector<float8::QuantizeArgs> all(linears_.size());
    auto* word = static_cast<uint32_t*>(words_.get());
    for (size_t i = 0; i < linears_.size(); ++i) {
      const ShardedLinear& one = linears_[i];
      all[i].x.data = one.w.get();
      all[i].tensor.data = one.tensor.get();
      if (one.amax.size > 0) all[i].amax = word;
      word += one.shard.amax_words();
      if (one.row_amax.size > 0) all[i].row_amax = static_cast<uint32_t*>(one.row_amax.get());
      all[i].scales = slots(i);
    }
    // Delayed scales are known.
    if (!delayed_) expect_ok(casts_.find_amax({}, all, stream), "maxima");
    if (words_.size > 0) {
      expect_ok(ranks_.sync_amax(static_cast<uint32_t*>(words_.get()), words_.size / 4, stream),
                "all-reduce");
    }
    expect_ok(casts_.run({.workspace = {workspace_.get()}, .step = &step}, all, stream), "casts");
  }
  void gather(const ShardedLinear& one, const float8::Tensor& whole, float8_stream stream) const {
    float8::GatherArgs args;
    args.shard = &one.own;
    args.whole = &whole;
    args.shard_rows = one.rows;
    expect_ok(ranks_.gather_tensor(context_, with_workspace(args, gather_workspace_.get()), stream),
              "gather");
  }
  void forward(size_t i, bool first, float8_stream stream) {
    const ShardedLinear& one = linears_[i];
    gather(one, one.q, stream);
    float8::ForwardArgs args;
    args.x.data = one.x.get();
    args.w.fp8 = &one.q;
    args.y.data = one.y.get();
    args.saved.data = one.saved.get();
    args.scales = slots(i);
    const float8::Step step{.first_step = first, .ranks = ranks_.get()};
    args.step = &step;
    expect_ok(one.linear.forward(with_workspace(args, workspace_.get()), stream), "forward");
  }
  void backward(size_t i, bool first, float8_stream stream) {
    const ShardedLinear& one = linears_[i];
    gather(one, one.qt, stream);
    float8::BackwardArgs args;
    args.dy.data = one.dy.get();
    args.saved.data = one.saved.get();
    args.w.fp8 = &one.qt;
    args.dx.data = one.dx.get();
    args.dw.data = one.dw.get();
    args.x.data = one.x.get();  // of a GEMM in high precision
    args.scales = slots(i);
    const float8::Step step{.first_step = first, .ranks = ranks_.get()};
    args.step = &step;
    expect_ok(one.linear.backward(with_workspace(args, workspace_.get()), stream), "backward");
    expect_ok(ranks_.reduce_scatter(one.dw.get(), one.dw_shard.get(), one.dw_shard.size / 4,
                                    FLOAT8_F32, stream),
              "reduce-scatter");
  }

  const float8::Context& context_;
  const float8::Communicator& ranks_;
  int rank_;
  bool delayed_;
  std::vector<ShardedLinear> linears_;
  float8::QuantizerList casts_;
  float8::Scales scales_;
  Bytes state_, words_, workspace_, gather_workspace_;
};

class Graph {
 public:
  explicit Graph(const std::function<void(float8_stream)>& calls) {
    EXPECT_EQ(driver_.stream_create(&stream_, 0), CUDA_SUCCESS);
    EXPECT_EQ(driver_.stream_begin_capture(stream_, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL),
              CUDA_SUCCESS);
    calls(stream_);
    EXPECT_EQ(driver_.stream_end_capture(stream_, &graph_), CUDA_SUCCESS);
    EXPECT_EQ(driver_.graph_instantiate(&exec_, graph_, 0), CUDA_SUCCESS);
  }
  ~Graph() {
    driver_.graph_exec_destroy(exec_);
    driver_.graph_destroy(graph_);
    driver_.stream_destroy(stream_);
  }
  Graph(const Graph&) = delete;
  Graph& operator=(const Graph&) = delete;
  void replay() { ASSERT_EQ(driver_.graph_launch(exec_, stream_), CUDA_SUCCESS); }

 private:
  const runtime::Driver& driver_ = runtime::emulation::driver();
  CUstream stream_ = nullptr;
  CUgraph graph_ = nullptr;
  CUgraphExec exec_ = nullptr;
};

class CapturedStep : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Recipes, CapturedStep,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp", "delayed",
                                           "blockwise"),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(CapturedStep, IsTheStepWithoutAGraph) {
  using Results = std::vector<std::vector<uint8_t>>;
  constexpr unsigned kSteps = 4;
  std::array<std::array<Results, kSteps>, kRanks> expected;
  {
    Ranks ranks(kRanks);
    ranks.run([&](int rank) {
      Trainer trainer(ranks.context(rank), ranks.communicator(rank), rank, GetParam());
      for (unsigned step = 0; step < kSteps; ++step) {
        trainer.take_inputs(step);
        trainer.step(step == 0, nullptr);
        expected[static_cast<size_t>(rank)][step] = trainer.results();
      }
    });
  }
  EXPECT_NE(expected[0][1], expected[0][2]);
  EXPECT_NE(expected[0][1], expected[1][1]);
  Ranks ranks(kRanks);
  ranks.run([&](int rank) {
    const auto& of_rank = expected[static_cast<size_t>(rank)];
    Trainer trainer(ranks.context(rank), ranks.communicator(rank), rank, GetParam());
    trainer.take_inputs(0);
    trainer.step(true, nullptr);
    EXPECT_EQ(trainer.results(), of_rank[0]);
    trainer.take_inputs(1);
    const Results before = trainer.results();
    Graph graph([&](float8_stream stream) { trainer.step(false, stream); });
    EXPECT_EQ(trainer.results(), before) << "a capture runs nothing";
    for (unsigned step = 1; step < kSteps; ++step) {
      trainer.take_inputs(step);
      graph.replay();
      EXPECT_EQ(trainer.results(), of_rank[step]) << "rank " << rank << ", step " << step;
    }
  });
}

}  // namespace
}  // namespace f8::testing
