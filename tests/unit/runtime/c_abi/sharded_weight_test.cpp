// A weight that ranks hold by rows, through the public header, on an emulated device: every rank's
// shard is cast to the bits of the whole weight's.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "tests/unit/runtime/c_abi/emulated_memory.hpp"

namespace {

using float8::testing::emulated;
using float8::testing::Memory;
using float8::testing::memory;
using float8::testing::random_bf16;
using float8::testing::says;

class ShardedWeight : public ::testing::TestWithParam<const char*> {
 protected:
  // The last blocks are cut.
  static constexpr int64_t kRows = 304, kCols = 144;

  float8::Quantizer of_rows(int64_t rows, bool over_ranks) const {
    return float8::Quantizer::plan(context_, {.operand = FLOAT8_WEIGHT,
                                              .rows_max = rows,
                                              .cols = kCols,
                                              .recipe = float8::Recipe::named(GetParam()),
                                              .over_ranks = over_ranks})
        .value();
  }
  static bool has_blocks() { return std::string_view(GetParam()) == "blockwise"; }

  // One rank: its quantizer, its rows of the weight, and what a call needs.
  struct Rank {
    Rank(float8::Quantizer plan, const void* rows_of_weight, int64_t first_row, int64_t count)
        : quantizer(std::move(plan)),
          x(rows_of_weight),
          first(first_row),
          rows(count),
          tensor(memory(quantizer.tensor_bytes())),
          amax(quantizer.amax_words(), 0xdeadbeef),
          row_amax(quantizer.row_amax_words(), 0xdeadbeef) {}
    [[nodiscard]] float8::QuantizeArgs args() {
      return {.rows = rows,
              .x = {x},
              .tensor = {tensor.get()},
              .amax = amax.empty() ? nullptr : amax.data(),
              .row_amax = row_amax.empty() ? nullptr : row_amax.data()};
    }

    float8::Quantizer quantizer;
    const void* x;
    int64_t first, rows;
    Memory tensor;
    std::vector<uint32_t> amax, row_amax;
  };

  std::vector<Rank> ranks(const void* w, const std::vector<int64_t>& rows) const {
    std::vector<Rank> out;
    int64_t first = 0;
    for (const int64_t count : rows) {
      out.emplace_back(of_rows(has_blocks() ? rows.front() : std::max<int64_t>(count, 1), true),
                       static_cast<const uint16_t*>(w) + first * kCols, first, count);
      first += count;
    }
    EXPECT_EQ(first, kRows);
    return out;
  }

  // It does what float8_amax_sync does between ranks of several processes.
  static void reduce(std::vector<Rank>& ranks) {
    std::vector<uint32_t> most(ranks.front().amax.size());
    for (const Rank& rank : ranks) {
      for (size_t i = 0; i < most.size(); ++i) most[i] = std::max(most[i], rank.amax[i]);
    }
    for (Rank& rank : ranks) rank.amax = most;
  }

  // Compares the scales of q of the whole weight, from the row `first` on, with a shard's.
  static void expect_scales_of_q(const float8_cast_setting& setting, const float* whole,
                                 int64_t cols, const float* shard, int64_t rows, int64_t first) {
    switch (setting.granularity) {
      case FLOAT8_TENSOR:
        EXPECT_EQ(std::memcmp(whole, shard, sizeof(float)), 0);
        return;
      case FLOAT8_AXIS:
        EXPECT_EQ(std::memcmp(whole + first, shard, static_cast<size_t>(rows) * sizeof(float)), 0);
        return;
      default: {
        const int64_t pitch = ((cols + 127) / 128 + 3) / 4 * 4;
        for (int64_t row = 0; row * 128 < rows; ++row) {
          EXPECT_EQ(std::memcmp(whole + (first / 128 + row) * pitch, shard + row * pitch,
                                static_cast<size_t>((cols + 127) / 128) * sizeof(float)),
                    0);
        }
      }
    }
  }
  static void expect_scales_of_qt(const float8::Tensor& whole, const float8::Tensor& shard,
                                  int64_t first) {
    if (shard.qt_setting.granularity != FLOAT8_BLOCK_128X128) {
      const int64_t scales = shard.qt_setting.granularity == FLOAT8_TENSOR ? 1 : shard.cols;
      EXPECT_EQ(std::memcmp(whole.qt_inverse_scale, shard.qt_inverse_scale,
                            static_cast<size_t>(scales) * sizeof(float)),
                0);
      return;
    }
    const auto pitch = [](int64_t rows) { return ((rows + 127) / 128 + 3) / 4 * 4; };
    for (int64_t row = 0; row * 128 < shard.cols; ++row) {
      EXPECT_EQ(std::memcmp(whole.qt_inverse_scale + row * pitch(whole.rows) + first / 128,
                            shard.qt_inverse_scale + row * pitch(shard.rows),
                            static_cast<size_t>((shard.rows + 127) / 128) * sizeof(float)),
                0);
    }
  }

  void expect_the_whole(const void* w, const std::vector<int64_t>& rows) {
    SCOPED_TRACE(::testing::PrintToString(rows));
    const float8::Quantizer plain = of_rows(kRows, false);
    const Memory copies = memory(plain.tensor_bytes()), workspace = memory(plain.workspace_bytes());
    std::memset(workspace.get(), 0, plain.workspace_bytes());
    ASSERT_TRUE(
        plain.run({.x = {w}, .tensor = {copies.get()}, .workspace = {workspace.get()}}, nullptr));
    const float8::Tensor whole = plain.view(copies.get(), kRows).value();

    std::vector<Rank> all = ranks(w, rows);
    for (Rank& rank : all) {
      EXPECT_EQ(rank.quantizer.workspace_bytes(), 0U);
      ASSERT_TRUE(rank.quantizer.find_amax(rank.args(), nullptr)) << float8_last_error();
    }
    reduce(all);
    for (Rank& rank : all) {
      SCOPED_TRACE(rank.first);
      ASSERT_TRUE(rank.quantizer.run(with_workspace(rank.args(), nullptr), nullptr))
          << float8_last_error();
      if (rank.rows == 0) continue;
      const float8::Tensor shard = rank.quantizer.view(rank.tensor.get(), rank.rows).value();
      for (int64_t row = 0; row < rank.rows; ++row) {
        ASSERT_EQ(std::memcmp(static_cast<const char*>(whole.q) + (rank.first + row) * whole.ld_q,
                              static_cast<const char*>(shard.q) + row * shard.ld_q, kCols),
                  0)
            << row;
      }
      for (int64_t col = 0; col < kCols; ++col) {
        ASSERT_EQ(std::memcmp(static_cast<const char*>(whole.qt) + col * whole.ld_qt + rank.first,
                              static_cast<const char*>(shard.qt) + col * shard.ld_qt,
                              static_cast<size_t>(rank.rows)),
                  0)
            << col;
      }
      expect_scales_of_q(shard.q_setting, whole.q_inverse_scale, kCols, shard.q_inverse_scale,
                         rank.rows, rank.first);
      expect_scales_of_qt(whole, shard, rank.first);
    }
  }

  float8::Context context_ = emulated();
  Memory whole_ = random_bf16(kRows * kCols, 7);
};
INSTANTIATE_TEST_SUITE_P(Recipes, ShardedWeight,
                         ::testing::Values("tensorwise", "rowwise", "rowwise_with_gw_hp",
                                           "blockwise"),
                         [](const auto& suite) { return std::string(suite.param); });

TEST_P(ShardedWeight, ItsShardsHaveTheBitsOfTheWhole) {
  const std::vector<std::vector<int64_t>> blocks = {{256, 48}, {128, 128, 48}, {128, 128, 48, 0}};
  const std::vector<std::vector<int64_t>> rows = {
      {160, 144}, {112, 112, 80}, {96, 80, 64, 64}, {101, 102, 101}, {152, 152, 0}};
  for (const std::vector<int64_t>& cut : has_blocks() ? blocks : rows) {
    expect_the_whole(whole_.get(), cut);
  }
}

TEST_P(ShardedWeight, WhatIsNotFiniteReachesTheShardsThatItReachesUnsharded) {
  for (const int bits : {0x7fc1, 0xff80}) {  // a NaN and an infinity, in the last shard
    Memory w = random_bf16(kRows * kCols, 8);
    static_cast<uint16_t*>(w.get())[290 * kCols + 5] = static_cast<uint16_t>(bits);
    expect_the_whole(w.get(),
                     has_blocks() ? std::vector<int64_t>{256, 48} : std::vector<int64_t>{160, 144});
  }
}

TEST_P(ShardedWeight, MayBeOfAnyType) {
  for (const float8_dtype dtype : {FLOAT8_F32, FLOAT8_F16}) {
    for (const bool over_ranks : {false, true}) {
      EXPECT_TRUE(float8::Quantizer::plan(context_, {.operand = FLOAT8_WEIGHT,
                                                     .rows_max = 128,
                                                     .cols = kCols,
                                                     .recipe = float8::Recipe::named(GetParam()),
                                                     .dtype = dtype,
                                                     .over_ranks = over_ranks}))
          << float8_last_error();
    }
  }
}

TEST_P(ShardedWeight, ItsWordsAreThoseThatSpanRanks) {
  const float8::Quantizer quantizer = of_rows(128, true);
  const std::string_view recipe = GetParam();
  EXPECT_EQ(quantizer.amax_words(), recipe == "blockwise" ? 0U : recipe == "rowwise" ? kCols : 1U);
  EXPECT_EQ(quantizer.row_amax_words(), recipe == "blockwise" ? 0U : 128U);
  EXPECT_EQ(of_rows(128, false).amax_words(), 0U);
}

TEST_P(ShardedWeight, RefusesWhatItCannotDo) {
  const auto plan = [&](float8::Recipe recipe, int64_t rows) {
    return float8::Quantizer::plan(context_, {.operand = FLOAT8_WEIGHT,
                                              .rows_max = rows,
                                              .cols = kCols,
                                              .recipe = std::move(recipe),
                                              .over_ranks = true});
  };
  EXPECT_FALSE(plan(float8::Recipe::named("delayed"), 128));
  EXPECT_TRUE(says("over_ranks is for dynamic scaling")) << float8_last_error();
  if (has_blocks()) {
    EXPECT_FALSE(plan(float8::Recipe::named("blockwise"), 96));
    EXPECT_TRUE(says("shards of 96 rows")) << float8_last_error();
    return;
  }
  Rank rank(of_rows(128, true), whole_.get(), 0, 128);
  float8::QuantizeArgs args = rank.args();
  args.amax = nullptr;
  EXPECT_FALSE(rank.quantizer.run(with_workspace(args, nullptr), nullptr));
  EXPECT_TRUE(says("float8_quantize_args.amax is NULL")) << float8_last_error();
  EXPECT_FALSE(rank.quantizer.find_amax(args, nullptr));
  EXPECT_TRUE(says("float8_quantize_args.amax is NULL")) << float8_last_error();
  args = rank.args();
  args.row_amax = nullptr;
  EXPECT_FALSE(rank.quantizer.run(with_workspace(args, nullptr), nullptr));
  EXPECT_TRUE(says("float8_quantize_args.row_amax is NULL")) << float8_last_error();
  args = rank.args();
  args.rows = 129;
  EXPECT_FALSE(rank.quantizer.find_amax(args, nullptr));
  EXPECT_TRUE(says("rows is 129")) << float8_last_error();
  args = rank.args();
  args.x.data = nullptr;
  EXPECT_FALSE(rank.quantizer.find_amax(args, nullptr));
  EXPECT_TRUE(says("float8_quantize_args.x.data is NULL")) << float8_last_error();
  args = rank.args();
  args.row_amax = static_cast<uint32_t*>(rank.tensor.get());
  EXPECT_FALSE(rank.quantizer.run(with_workspace(args, nullptr), nullptr));
  EXPECT_TRUE(says("overlap")) << float8_last_error();
  const float8::Quantizer plain = of_rows(128, false);
  const Memory workspace = memory(plain.workspace_bytes());
  EXPECT_FALSE(plain.find_amax(rank.args(), nullptr));
  EXPECT_TRUE(says("set float8_quantizer_desc.over_ranks")) << float8_last_error();
  EXPECT_FALSE(plain.run(with_workspace(rank.args(), workspace.get()), nullptr));
  EXPECT_TRUE(says("set float8_quantizer_desc.over_ranks")) << float8_last_error();
}

}  // namespace
