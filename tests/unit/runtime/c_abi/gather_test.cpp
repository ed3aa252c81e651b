// Gathers of tensors in fp8 over emulated ranks, through the public header, give the bits of one
// device's cast.
#include <gtest/gtest.h>

#include <cstring>
#include <float8/float8.hpp>
#include <random>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "tests/unit/runtime/c_abi/emulated_memory.hpp"
#include "tests/unit/runtime/c_abi/emulated_ranks.hpp"

namespace {

using f8::testing::Ranks;
using float8::testing::Memory;

Memory poisoned(size_t bytes) {
  Memory out = float8::testing::memory(bytes);
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
        buffer(poisoned(quantizer.tensor_bytes())),
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
  if (over_ranks) desc.whole_rows = c.rows;
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
  args.x.data = x + first * c.cols;
  args.tensor.data = shard.buffer.get();
  args.rows = rows;
  args.first_row = first;
  args.amax = amax.empty() ? nullptr : amax.data();
  args.row_amax = row_amax.empty() ? nullptr : row_amax.data();
  float8::Status status = shard.quantizer.find_amax(args, stream);
  ASSERT_TRUE(status) << status.message();
  if (!amax.empty()) status = communicator.sync_amax(amax.data(), amax.size(), stream);
  ASSERT_TRUE(status) << status.message();
  status = shard.quantizer.run(with_workspace(args, nullptr), stream);
  ASSERT_TRUE(status) << status.message();
  const size_t bytes = float8_gather_workspace_bytes(&whole, c.shard_rows,
                                                     static_cast<int32_t>(ranks.contexts.size()));
  const Memory workspace = poisoned(bytes);
  float8::GatherArgs gather;
  gather.shard = &shard.view;
  gather.whole = &whole;
  gather.shard_rows = c.shard_rows;
  gather.workspace.bytes = bytes;
  status = communicator.gather_tensor(ranks.context(rank), with_workspace(gather, workspace.get()),
                                      stream);
  ASSERT_TRUE(status) << status.message();
}

// All ranks get the copies of one device's cast.
void expect_the_whole(const Case& c, int count, const std::vector<uint16_t>& x) {
  SCOPED_TRACE(c.recipe + ", " + std::to_string(c.rows) + " rows in shards of " +
               std::to_string(c.shard_rows) + " over " + std::to_string(count));
  Ranks ranks(count);
  const Copies one(ranks.context(0), desc_of(c, c.rows, false), c.rows);
  const Memory workspace = poisoned(one.quantizer.workspace_bytes());
  std::memset(workspace.get(), 0, one.quantizer.workspace_bytes());
  float8::QuantizeArgs args;
  args.x.data = x.data();
  args.tensor.data = one.buffer.get();
  args.rows = c.rows;
  const float8::Status status = one.quantizer.run(with_workspace(args, workspace.get()), nullptr);
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

// Shards that begin and end inside blocks of 128 rows, also several in one block.
TEST_P(Gather, OfShardsThatCutBlocksIsOneDevicesCast) {
  struct Split {
    int count;
    int64_t rows, each;
  };
  const std::vector<Split> splits = {{2, 208, 104}, {2, 80, 40},    {2, 272, 200},
                                     {3, 112, 38},  {3, 1024, 342}, {4, 256, 64},
                                     {4, 400, 131}, {4, 240, 61},   {4, 528, 133}};
  for (const int64_t cols : {64, 144, 528}) {
    for (const auto& [count, rows, each] : splits) {
      expect_the_whole({GetParam(), FLOAT8_WEIGHT, rows, cols, each}, count,
                       random_bf16(rows, cols, 13));
    }
  }
}

TEST_P(Gather, LeavesOutEmptyShardsThatCutBlocks) {
  using Rows = std::pair<int64_t, int64_t>;  // of the whole and of a shard
  for (const auto& [rows, each] :
       {Rows{144, 65}, Rows{16, 7}, Rows{144, 143}, Rows{48, 48}, Rows{32, 77}}) {
    expect_the_whole({GetParam(), FLOAT8_WEIGHT, rows, 64, each}, 4, random_bf16(rows, 64, 14));
  }
}

// A NaN and an infinity in blocks of which other ranks have rows too.
TEST_P(Gather, ANanAtASeamHasItsEffectOnAllRanks) {
  constexpr int64_t kRows = 208, kEach = 70, kCols = 144;
  for (const int64_t row : {int64_t{69}, int64_t{70}, int64_t{128}, int64_t{207}}) {
    std::vector<uint16_t> w = random_bf16(kRows, kCols, 15);
    w[static_cast<size_t>(row * kCols + 130)] = 0xffc1;  // NaN with a sign
    w[static_cast<size_t>(kEach * kCols + 5)] = 0xff80;  // -infinity
    expect_the_whole({GetParam(), FLOAT8_WEIGHT, kRows, kCols, kEach}, 3, w);
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
    const Memory workspace = poisoned(1 << 16);
    const float8::Status status = ranks.communicator(0).gather_tensor(
        ranks.context(0), with_workspace(args, workspace.get()), nullptr);
    EXPECT_EQ(status.code(), FLOAT8_INVALID_ARGUMENT) << words;
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
  };
  using Args = float8::GatherArgs;
  using Tensor = float8::Tensor;
  refused([](Args& a, Tensor&, Tensor&) { a.shard = nullptr; }, "float8_gather_args.shard is NULL");
  refused([](Args& a, Tensor&, Tensor&) { a.shard_rows = 16; }, "shard_rows is 16");
  refused([](Args& a, Tensor&, Tensor&) { a.shard_rows = -1; }, "shard_rows is -1");
  refused([](Args&, Tensor&, Tensor& w) { w.rows = int64_t{1} << 62; }, "whole.rows is 4611686");
  refused([](Args&, Tensor&, Tensor& w) { w.qt_setting.granularity = 4; },
          "whole.qt_setting.granularity is 4");
  refused([](Args&, Tensor& s, Tensor&) { s.rows = 16; }, "shard has 16 rows");
  refused([](Args&, Tensor& s, Tensor&) { s.cols = 48; }, "shard has 48 columns");
  refused([](Args&, Tensor& s, Tensor&) { s.q = nullptr; }, "float8_gather_args.shard.q is NULL");
  refused([](Args&, Tensor&, Tensor& w) { w.q = w.qt = nullptr; }, "neither q nor qt");
  refused([](Args&, Tensor& s, Tensor&) { s.qt_setting.granularity = FLOAT8_TENSOR; },
          "row strides of qt");
  refused([](Args&, Tensor& s, Tensor& w) { w.q = s.q; }, "overlap");
  refused(
      [](Args&, Tensor&, Tensor& w) {
        w.qt_shards = 2;
        w.ld_qt = 128;
      },
      "whole.qt_shards is 2");
  refused([](Args& a, Tensor&, Tensor&) { a.workspace.bytes = 1; }, "workspace.bytes is 1");
}

// Shards that cut blocks need the rows of the whole, and are no operands of a GEMM.
TEST(Gathers, OfShardsThatCutBlocksNeedTheWhole) {
  Ranks ranks(2);
  const float8::Context& context = ranks.context(0);
  const Case c{"blockwise", FLOAT8_WEIGHT, 192, 64, 96};
  const auto refused = [](const auto& result, float8_status code, std::string_view words) {
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, code);
    EXPECT_NE(result.error().message.find(words), std::string::npos) << result.error().message;
  };
  float8::QuantizerDesc desc = desc_of(c, c.shard_rows, true);
  desc.whole_rows = 0;
  refused(float8::Quantizer::plan(context, desc), FLOAT8_UNSUPPORTED,
          "set float8_quantizer_desc.whole_rows, or give shards whole");
  desc.operand = FLOAT8_INPUT;
  desc.whole_rows = c.rows;
  refused(float8::Quantizer::plan(context, desc), FLOAT8_UNSUPPORTED, "; give shards whole");
  desc.over_ranks = false;
  refused(float8::Quantizer::plan(context, desc), FLOAT8_INVALID_ARGUMENT, "whole_rows is 192");
  desc.over_ranks = true;
  desc.whole_rows = -1;
  refused(float8::Quantizer::plan(context, desc), FLOAT8_INVALID_ARGUMENT, "whole_rows is -1");

  const Copies shard(context, desc_of(c, c.shard_rows, true), c.shard_rows);
  EXPECT_EQ(shard.quantizer.amax_words(), 2U);  // two rows of blocks, of one block
  EXPECT_EQ(shard.quantizer.row_amax_words(), 0U);
  EXPECT_EQ(shard.view.whole_rows, c.rows);
  const std::vector<uint16_t> x = random_bf16(c.rows, c.cols, 16);
  std::vector<uint32_t> amax(2);
  float8::QuantizeArgs args;
  args.x.data = x.data();
  args.tensor.data = shard.buffer.get();
  args.amax = amax.data();
  const auto expect_refused = [](const float8::Status& status, std::string_view words) {
    EXPECT_EQ(status.code(), FLOAT8_INVALID_ARGUMENT);
    EXPECT_NE(status.message().find(words), std::string::npos) << status.message();
  };
  for (const int64_t first : {-1, 97}) {
    args.first_row = first;
    const std::string words =
        "first_row is " + std::to_string(first) + "; a shard of 96 rows is a part of the 192 rows";
    expect_refused(shard.quantizer.find_amax(args, nullptr), words);
    expect_refused(shard.quantizer.run(with_workspace(args, nullptr), nullptr), words);
  }
  args.first_row = 96;
  EXPECT_TRUE(shard.quantizer.find_amax(args, nullptr));
  EXPECT_NE(amax[0], 0U);  // of rows 96 to 127
  EXPECT_NE(amax[1], 0U);
  args.first_row = 0;
  EXPECT_TRUE(shard.quantizer.find_amax(args, nullptr));
  EXPECT_EQ(amax[1], 0U);
  EXPECT_TRUE(shard.quantizer.run(with_workspace(args, nullptr), nullptr));

  float8::LinearDesc linear_desc;
  linear_desc.m_max = 16;
  linear_desc.n = c.shard_rows;
  linear_desc.k = c.cols;
  linear_desc.recipe = float8::Recipe::named("blockwise");
  const auto linear = float8::Linear::plan(context, linear_desc).value();
  const Memory y = poisoned(16 * 96 * 2), workspace = poisoned(linear.workspace_bytes());
  float8::ForwardArgs forward;
  forward.x.data = x.data();
  forward.w.fp8 = &shard.view;
  forward.y.data = y.get();
  expect_refused(linear.forward(with_workspace(forward, workspace.get()), nullptr),
                 "gather it with float8_gather_tensor");

  // Both ranks have shards with the scales of their own blocks, or a whole without them.
  ranks.run([&](int rank) {
    Copies own(ranks.context(rank), desc_of(c, c.shard_rows, true), c.shard_rows);
    Copies whole(ranks.context(rank), desc_of(c, c.rows, false), c.rows);
    own.view.whole_rows = 0;
    float8::GatherArgs gather;
    gather.shard = &own.view;
    gather.whole = &whole.view;
    gather.shard_rows = c.shard_rows;
    const Memory scratch = poisoned(1 << 16);
    expect_refused(ranks.communicator(rank).gather_tensor(
                       ranks.context(rank), with_workspace(gather, scratch.get()), nullptr),
                   "shard.whole_rows is 0");
  });
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
    const Memory workspace = poisoned(linear.workspace_bytes());
    std::memset(workspace.get(), 0, linear.workspace_bytes());
    const Memory saved = poisoned(linear.saved_bytes());
    const Memory x_copy = poisoned(x.size() * 2), dy_copy = poisoned(dy.size() * 2);
    std::memcpy(x_copy.get(), x.data(), x.size() * 2);
    std::memcpy(dy_copy.get(), dy.data(), dy.size() * 2);
    const Memory y = poisoned(dy.size() * 2), dx = poisoned(x.size() * 2);
    float8::ForwardArgs forward;
    forward.x.data = x_copy.get();
    forward.y.data = y.get();
    forward.saved.data = saved.get();
    forward.w.fp8 = &q;
    float8::Status status = linear.forward(with_workspace(forward, workspace.get()), nullptr);
    EXPECT_TRUE(status) << status.message();
    float8::BackwardArgs backward;
    backward.dy.data = dy_copy.get();
    backward.saved.data = saved.get();
    backward.w.fp8 = &qt;
    backward.dx.data = dx.get();
    status = linear.backward(with_workspace(backward, workspace.get()), nullptr);
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
