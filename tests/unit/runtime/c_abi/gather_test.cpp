// Gathers of tensors in fp8 over emulated ranks, through the public header, give the bits of one
// device's cast.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <float8/float8.hpp>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include "tests/unit/runtime/c_abi/emulated_ranks.hpp"

namespace {

using f8::testing::Ranks;

struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Free>;
Memory memory(size_t bytes) {
  Memory out(std::aligned_alloc(256, (bytes + 256) / 256 * 256));
  std::memset(out.get(), 0xff, bytes);
  return out;
}

// Values of a bf16 matrix, each of its row's and its column's magnitude.
std::vector<uint16_t> random_bf16(int64_t rows, int64_t cols, unsigned seed) {
  std::vector<uint16_t> out;
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < rows * cols; ++i) {
    const float value = normal(generator) * static_cast<float>(1 + i / cols % 7 + i % cols % 5);
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    out.push_back(static_cast<uint16_t>(bits >> 16));
  }
  return out;
}

// A tensor's copies in one buffer, by a quantizer of its own.
struct Copies {
  float8::Quantizer quantizer;
  Memory buffer;
  float8::Tensor view;

  Copies(const float8::Context& context, const float8::QuantizerDesc& desc, int64_t rows)
      : quantizer(float8::Quantizer::plan(context, desc).value()),
        buffer(memory(quantizer.tensor_bytes())),
        view(quantizer.view(buffer.get(), rows).value()) {}
};

struct Case {
  std::string recipe;
  float8_operand operand;
  int64_t rows, cols, shard_rows;
};

std::vector<uint8_t> lines(const void* from, int64_t count, int64_t width, int64_t pitch) {
  std::vector<uint8_t> out;
  for (int64_t i = 0; i < count; ++i) {
    const auto* line = static_cast<const uint8_t*>(from) + i * pitch;
    out.insert(out.end(), line, line + width);
  }
  return out;
}

std::vector<uint8_t> scales(const float8_cast_setting& setting, const float* from, int64_t rows,
                            int64_t cols) {
  const auto blocks = [](int64_t count) { return (count + 127) / 128; };
  const auto in_4s = [](int64_t count) { return (count + 3) / 4 * 4; };
  int64_t count = 1;
  if (setting.granularity == FLOAT8_AXIS) count = rows;
  if (setting.granularity == FLOAT8_BLOCK_1X128) count = blocks(cols) * in_4s(rows);
  if (setting.granularity == FLOAT8_BLOCK_128X128) count = blocks(rows) * in_4s(blocks(cols));
  return lines(from, 1, count * 4, 0);
}

void expect_equal(const float8::Tensor& a, const float8::Tensor& b) {
  const auto in_16s = [](int64_t count) { return (count + 15) / 16 * 16; };
  EXPECT_EQ(a.q == nullptr, b.q == nullptr);
  EXPECT_EQ(a.qt == nullptr, b.qt == nullptr);
  if (a.q != nullptr) {
    EXPECT_TRUE(lines(a.q, a.rows, in_16s(a.cols), a.ld_q) ==
                lines(b.q, b.rows, in_16s(b.cols), b.ld_q))
        << "q";
    EXPECT_TRUE(scales(a.q_setting, a.q_inverse_scale, a.rows, a.cols) ==
                scales(b.q_setting, b.q_inverse_scale, b.rows, b.cols))
        << "scales of q";
  }
  if (a.qt == nullptr) return;
  EXPECT_TRUE(lines(a.qt, a.cols, in_16s(a.rows), a.ld_qt) ==
              lines(b.qt, b.cols, in_16s(b.rows), b.ld_qt))
      << "qt";
  EXPECT_TRUE(scales(a.qt_setting, a.qt_inverse_scale, a.cols, a.rows) ==
              scales(b.qt_setting, b.qt_inverse_scale, b.cols, b.rows))
      << "scales of qt";
}

float8::QuantizerDesc desc_of(const Case& c, int64_t rows, bool over_ranks) {
  float8::QuantizerDesc desc;
  desc.operand = c.operand;
  desc.rows_max = rows;
  desc.cols = c.cols;
  desc.recipe = float8::Recipe::named(c.recipe);
  desc.over_ranks = over_ranks;
  return desc;
}

// One rank's part of a sharded cast and gather: what a trainer does with a weight.
void cast_and_gather(Ranks& ranks, int rank, const Case& c, const uint16_t* x,
                     const float8::Tensor& whole, float8_stream stream = nullptr) {
  const float8::Communicator& communicator = ranks.communicator(rank);
  const int64_t first = std::min(c.rows, rank * c.shard_rows);
  const int64_t rows = std::min(c.shard_rows, c.rows - first);
  Copies shard(ranks.context(rank), desc_of(c, c.shard_rows, true), rows);
  std::vector<uint32_t> amax(shard.quantizer.amax_words());
  std::vector<uint32_t> row_amax(shard.quantizer.row_amax_words());
  float8::QuantizeArgs args;
  args.x = x + first * c.cols;
  args.tensor = shard.buffer.get();
  args.rows = rows;
  args.amax = amax.empty() ? nullptr : amax.data();
  args.row_amax = row_amax.empty() ? nullptr : row_amax.data();
  float8::Status status = shard.quantizer.find_amax(args, stream);
  ASSERT_TRUE(status) << status.message();
  if (!amax.empty()) status = communicator.sync_amax(amax.data(), amax.size(), stream);
  ASSERT_TRUE(status) << status.message();
  status = shard.quantizer.run(args, nullptr, stream);
  ASSERT_TRUE(status) << status.message();
  const size_t bytes = float8_gather_workspace_bytes(&whole, c.shard_rows,
                                                     static_cast<int32_t>(ranks.contexts.size()));
  const Memory workspace = memory(bytes);
  float8::GatherArgs gather;
  gather.shard = &shard.view;
  gather.whole = &whole;
  gather.shard_rows = c.shard_rows;
  gather.workspace_bytes = bytes;
  status = communicator.gather_tensor(ranks.context(rank), gather, workspace.get(), stream);
  ASSERT_TRUE(status) << status.message();
}

// All ranks get the copies of one device's cast.
void expect_the_whole(const Case& c, int count, const std::vector<uint16_t>& x) {
  SCOPED_TRACE(c.recipe + ", " + std::to_string(c.rows) + " rows in shards of " +
               std::to_string(c.shard_rows) + " over " + std::to_string(count));
  Ranks ranks(count);
  const Copies one(ranks.context(0), desc_of(c, c.rows, false), c.rows);
  const Memory workspace = memory(one.quantizer.workspace_bytes());
  std::memset(workspace.get(), 0, one.quantizer.workspace_bytes());
  float8::QuantizeArgs args;
  args.x = x.data();
  args.tensor = one.buffer.get();
  args.rows = c.rows;
  const float8::Status status = one.quantizer.run(args, workspace.get(), nullptr);
  ASSERT_TRUE(status) << status.message();
  for (const int copies : {3, 1, 2}) {  // q and qt, q, qt
    if (copies == 2 && one.view.qt == nullptr) continue;
    ranks.run([&](int rank) {
      Copies whole(ranks.context(rank), desc_of(c, c.rows, false), c.rows);
      float8::Tensor expected = one.view;
      if ((copies & 1) == 0) whole.view.q = expected.q = nullptr;
      if ((copies & 2) == 0) whole.view.qt = expected.qt = nullptr;
      cast_and_gather(ranks, rank, c, x.data(), whole.view);
      expect_equal(whole.view, expected);
    });
  }
}

class Gather : public ::testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Recipes, Gather,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp",
                                           "blockwise"),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(Gather, OfAWeightIsOneDevicesCast) {
  constexpr int64_t kCols = 144;
  const bool blocks = std::string_view(GetParam()) == "blockwise";
  for (const int count : {1, 2, 3, 4}) {
    const int64_t each = blocks ? 128 : 48;
    for (const int64_t rows : {each * count, each * count - 32, each * (count - 1) + 16}) {
      const Case c{GetParam(), FLOAT8_WEIGHT, rows, kCols, each};
      expect_the_whole(c, count, random_bf16(rows, kCols, 5));
    }
  }
}

TEST_P(Gather, LeavesOutEmptyShards) {
  const bool blocks = std::string_view(GetParam()) == "blockwise";
  const int64_t each = blocks ? 128 : 32;
  expect_the_whole({GetParam(), FLOAT8_WEIGHT, each + 16, 64, each}, 4,
                   random_bf16(each + 16, 64, 6));
}

TEST_P(Gather, OfActivationsTakesAnyRows) {
  const bool blocks = std::string_view(GetParam()) == "blockwise";
  for (const int64_t each : blocks ? std::vector<int64_t>{128} : std::vector<int64_t>{25, 40}) {
    for (const float8_operand operand : {FLOAT8_INPUT, FLOAT8_GRAD_OUTPUT}) {
      const int64_t rows = 3 * each - 7;
      expect_the_whole({GetParam(), operand, rows, 272, each}, 3, random_bf16(rows, 272, 7));
    }
  }
}

TEST_P(Gather, ANanOnOneRankHasItsEffectOnAll) {
  const bool blocks = std::string_view(GetParam()) == "blockwise";
  const int64_t each = blocks ? 128 : 32;
  std::vector<uint16_t> w = random_bf16(3 * each, 64, 8);
  w[static_cast<size_t>((2 * each + 1) * 64 + 3)] = 0x7fc0;  // NaN, on the last rank
  w[5] = 0x7f80;                                             // infinity, on the first
  expect_the_whole({GetParam(), FLOAT8_WEIGHT, 3 * each, 64, each}, 3, w);
}

TEST(Gathers, MisuseIsOneClearError) {
  Ranks ranks(1);
  const Case c{"rowwise", FLOAT8_WEIGHT, 32, 64, 32};
  const auto refused = [&](auto change, std::string_view words) {
    Copies shard(ranks.context(0), desc_of(c, 32, true), 32);
    Copies whole(ranks.context(0), desc_of(c, 32, false), 32);
    float8::GatherArgs args;
    args.shard = &shard.view;
    args.whole = &whole.view;
    args.shard_rows = 32;
    change(args, shard.view, whole.view);
    const Memory workspace = memory(1 << 16);
    const float8::Status status =
        ranks.communicator(0).gather_tensor(ranks.context(0), args, workspace.get(), nullptr);
    EXPECT_EQ(status.code(), FLOAT8_INVALID_ARGUMENT) << words;
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
  };
  using Args = float8::GatherArgs;
  using Tensor = float8::Tensor;
  refused([](Args& a, Tensor&, Tensor&) { a.shard = nullptr; }, "float8_gather_args.shard is NULL");
  refused([](Args& a, Tensor&, Tensor&) { a.shard_rows = 16; },
          "shard_rows is 16: 1 ranks have 16 rows at most, and whole has 32");
  refused([](Args& a, Tensor&, Tensor&) { a.shard_rows = -1; }, "shard_rows is -1");
  refused([](Args&, Tensor&, Tensor& w) { w.rows = int64_t{1} << 62; }, "whole.rows is 4611686");
  refused([](Args&, Tensor&, Tensor& w) { w.qt_setting.granularity = 4; },
          "whole.qt_setting.granularity is 4");
  refused([](Args&, Tensor& s, Tensor&) { s.rows = 16; },
          "shard has 16 rows; rank 0 of 1 has 32 of the 32 rows of whole");
  refused([](Args&, Tensor& s, Tensor&) { s.cols = 48; }, "shard has 48 columns, whole has 64");
  refused([](Args&, Tensor& s, Tensor&) { s.q = nullptr; },
          "float8_gather_args.shard.q is NULL; whole has this copy");
  refused([](Args&, Tensor&, Tensor& w) { w.q = w.qt = nullptr; }, "neither q nor qt");
  refused([](Args&, Tensor& s, Tensor&) { s.qt_setting.granularity = FLOAT8_TENSOR; },
          "the settings or the row strides of qt of shard and whole differ");
  refused([](Args&, Tensor& s, Tensor& w) { w.q = s.q; }, "overlap");
  refused(
      [](Args&, Tensor&, Tensor& w) {
        w.qt_shards = 2;
        w.ld_qt = 128;
      },
      "whole.qt_shards is 2; 1 ranks have 32 rows each, of 32");
  refused([](Args& a, Tensor&, Tensor&) { a.workspace_bytes = 1; }, "workspace_bytes is 1");
}

// A qt that stays as it arrives takes no workspace, and a linear reads it to the same bits.
TEST(Gathers, OfAQtInShardsTakesNoWorkspace) {
  const Case c{"rowwise", FLOAT8_WEIGHT, 256, 64, 128};
  constexpr int64_t kM = 32;
  const std::vector<uint16_t> w = random_bf16(c.rows, c.cols, 10);
  const std::vector<uint16_t> x = random_bf16(kM, c.cols, 11), dy = random_bf16(kM, c.rows, 12);
  Ranks ranks(2);
  // The dx of a linear with the weight's copies in this view.
  const auto dx_of = [&](int rank, const float8::Tensor& q, const float8::Tensor& qt) {
    float8::LinearDesc desc;
    desc.m_max = kM;
    desc.n = c.rows;
    desc.k = c.cols;
    desc.recipe = float8::Recipe::rowwise();
    desc.weight_shards = true;
    const auto linear = float8::Linear::plan(ranks.context(rank), desc).value();
    const Memory workspace = memory(linear.workspace_bytes());
    std::memset(workspace.get(), 0, linear.workspace_bytes());
    const Memory saved = memory(linear.saved_bytes());
    const Memory x_copy = memory(x.size() * 2), dy_copy = memory(dy.size() * 2);
    std::memcpy(x_copy.get(), x.data(), x.size() * 2);
    std::memcpy(dy_copy.get(), dy.data(), dy.size() * 2);
    const Memory y = memory(dy.size() * 2), dx = memory(x.size() * 2);
    float8::ForwardArgs forward;
    forward.x = x_copy.get();
    forward.y = y.get();
    forward.saved = saved.get();
    forward.w_tensor = &q;
    float8::Status status = linear.forward(forward, workspace.get(), nullptr);
    EXPECT_TRUE(status) << status.message();
    float8::BackwardArgs backward;
    backward.dy = dy_copy.get();
    backward.saved = saved.get();
    backward.w_tensor = &qt;
    backward.dx = dx.get();
    status = linear.backward(backward, workspace.get(), nullptr);
    EXPECT_TRUE(status) << status.message();
    return lines(dx.get(), 1, static_cast<int64_t>(x.size()) * 2, 0);
  };
  ranks.run([&](int rank) {
    Copies whole(ranks.context(rank), desc_of(c, c.rows, false), c.rows);
    cast_and_gather(ranks, rank, c, w.data(), whole.view);
    Copies in_shards(ranks.context(rank), desc_of(c, c.rows, false), c.rows);
    float8::Tensor view = in_shards.view;
    view.qt_shards = 2;
    view.ld_qt = c.shard_rows;
    EXPECT_EQ(float8_gather_workspace_bytes(&view, c.shard_rows, 2), 0U);
    cast_and_gather(ranks, rank, c, w.data(), view);
    EXPECT_EQ(dx_of(rank, whole.view, view), dx_of(rank, whole.view, whole.view));
    for (int64_t col = 0; col < c.cols; ++col) {
      for (int64_t row = 0; row < c.rows; ++row) {
        const int64_t at =
            row / c.shard_rows * c.shard_rows * c.cols + col * c.shard_rows + row % c.shard_rows;
        ASSERT_EQ(static_cast<const uint8_t*>(view.qt)[at],
                  static_cast<const uint8_t*>(whole.view.qt)[col * whole.view.ld_qt + row]);
      }
    }
  });
}

}  // namespace
