// Tensors in fp8 through the public header, on an emulated device: what a caller quantizes serves
// linears and GEMMs, and what does not fit is refused in the words of float8.h.
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

constexpr int64_t kM = 48, kN = 64, kK = 32;

class TensorAbi : public ::testing::Test {
 protected:
  float8::Quantizer quantizer(float8_operand operand, int64_t rows, int64_t cols) const {
    return float8::Quantizer::plan(context_, {.operand = operand,
                                              .rows_max = rows,
                                              .cols = cols,
                                              .recipe = float8::Recipe::rowwise()})
        .value();
  }
  static bool says(std::string_view words) {
    return std::string_view(float8_last_error()).find(words) != std::string_view::npos;
  }

  float8::Context context_ = emulated();
  Memory x_ = random_bf16(kM * kK, 1), w_ = random_bf16(kN * kK, 2);
};

TEST_F(TensorAbi, OneTensorServesALinearAndAGemm) {
  const float8::Quantizer of_x = quantizer(FLOAT8_INPUT, kM, kK);
  const float8::Quantizer of_w = quantizer(FLOAT8_WEIGHT, kN, kK);
  const Memory x = memory(of_x.tensor_bytes()), w = memory(of_w.tensor_bytes());
  const Memory workspace = memory(std::max(of_x.workspace_bytes(), of_w.workspace_bytes()));
  ASSERT_TRUE(of_x.run({.x = x_.get(), .tensor = x.get(), .rows = kM}, workspace.get(), nullptr));
  ASSERT_TRUE(of_w.run({.x = w_.get(), .tensor = w.get()}, workspace.get(), nullptr));
  const float8::Tensor x_view = of_x.view(x.get(), kM).value();
  const float8::Tensor w_view = of_w.view(w.get(), kN).value();
  EXPECT_EQ(x_view.rows, kM);
  EXPECT_EQ(x_view.cols, kK);
  EXPECT_EQ(x_view.q_setting.granularity, FLOAT8_AXIS);

  const auto linear = float8::Linear::plan(
      context_, {.m_max = kM, .n = kN, .k = kK, .recipe = float8::Recipe::rowwise()});
  ASSERT_TRUE(linear);
  EXPECT_EQ(linear.value().saved_bytes_with_tensors(true, true), 0U);
  EXPECT_LT(linear.value().saved_bytes_with_tensors(true, false), linear.value().saved_bytes());
  const Memory scratch = memory(linear.value().workspace_bytes());
  const Memory plain = memory(kM * kN * 2), given = memory(kM * kN * 2),
               alone = memory(kM * kN * 2);
  ASSERT_TRUE(linear.value().forward({.x = x_.get(), .w = w_.get(), .y = plain.get(), .m = kM},
                                     scratch.get(), nullptr));
  ASSERT_TRUE(
      linear.value().forward({.y = given.get(), .m = kM, .x_tensor = &x_view, .w_tensor = &w_view},
                             scratch.get(), nullptr));
  EXPECT_EQ(std::memcmp(plain.get(), given.get(), kM * kN * 2), 0);

  const auto gemm = float8::Gemm::plan(
      context_, {.m_max = kM, .n = kN, .k = kK, .recipe = float8::Recipe::rowwise()});
  ASSERT_TRUE(gemm);
  ASSERT_TRUE(
      gemm.value().run({.a = &x_view, .b = &w_view, .d = alone.get()}, scratch.get(), nullptr));
  EXPECT_EQ(std::memcmp(plain.get(), alone.get(), kM * kN * 2), 0);
}

// Linears that recompute share x's q, which may be gone in backward: its scale alone is kept.
TEST_F(TensorAbi, AnInputIsCastAgainWithItsScale) {
  const Memory dy = random_bf16(kM * kN, 3);
  for (const auto& recipe : {float8::Recipe::tensorwise(), float8::Recipe::rowwise()}) {
    const float8::Quantizer of_x =
        float8::Quantizer::plan(
            context_,
            {.rows_max = kM, .cols = kK, .recipe = recipe, .copies = FLOAT8_Q_FOR_RECOMPUTE})
            .value();
    const size_t apart = of_x.transposed_bytes();
    EXPECT_LT(apart, 512U);
    const Memory kept = memory(apart + 16);
    std::vector<std::vector<char>> results;
    for (const bool recompute : {false, true}) {
      const auto linear = float8::Linear::plan(
          context_, {.m_max = kM, .n = kN, .k = kK, .recipe = recipe, .recompute = recompute});
      ASSERT_TRUE(linear);
      const Memory scratch =
          memory(std::max(linear.value().workspace_bytes(), of_x.workspace_bytes()));
      const Memory saved = memory(linear.value().saved_bytes() + 16);
      const Memory y = memory(kM * kN * 2), dx = memory(kM * kK * 2), dw = memory(kN * kK * 2);
      float8::Tensor given;
      {
        const Memory q = memory(of_x.tensor_bytes());
        if (recompute) {
          ASSERT_TRUE(
              of_x.run({.x = x_.get(), .tensor = q.get(), .rows = kM, .transposed = kept.get()},
                       scratch.get(), nullptr));
          given = of_x.view(q.get(), kM, kept.get()).value();
        }
        ASSERT_TRUE(linear.value().forward({.x = x_.get(),
                                            .w = w_.get(),
                                            .y = y.get(),
                                            .saved = saved.get(),
                                            .m = kM,
                                            .x_tensor = recompute ? &given : nullptr},
                                           scratch.get(), nullptr));
        if (recompute) given = of_x.view(nullptr, kM, kept.get()).value();
      }
      ASSERT_TRUE(linear.value().backward({.dy = dy.get(),
                                           .saved = saved.get(),
                                           .dx = dx.get(),
                                           .dw = dw.get(),
                                           .m = kM,
                                           .x = x_.get(),
                                           .w = w_.get(),
                                           .x_tensor = recompute ? &given : nullptr},
                                          scratch.get(), nullptr))
          << float8_last_error();
      for (const auto& [at, size] :
           {std::pair{y.get(), kM * kN * 2}, {dx.get(), kM * kK * 2}, {dw.get(), kN * kK * 2}}) {
        results.emplace_back(static_cast<char*>(at), static_cast<char*>(at) + size);
      }
    }
    for (size_t i = 0; i < 3; ++i) EXPECT_EQ(results[i], results[i + 3]) << i;
  }
}

TEST_F(TensorAbi, TheTransposedCopyMayLieApart) {
  const float8::Quantizer of_x = quantizer(FLOAT8_INPUT, kM, kK);
  const size_t apart = of_x.transposed_bytes();
  ASSERT_GT(apart, 0U);
  const Memory together = memory(of_x.tensor_bytes()), q = memory(of_x.tensor_bytes() - apart),
               qt = memory(apart), workspace = memory(of_x.workspace_bytes());
  ASSERT_TRUE(
      of_x.run({.x = x_.get(), .tensor = together.get(), .rows = kM}, workspace.get(), nullptr));
  ASSERT_TRUE(of_x.run({.x = x_.get(),
                        .tensor = q.get(),
                        .rows = kM,
                        .tensor_bytes = of_x.tensor_bytes() - apart,
                        .transposed = qt.get()},
                       workspace.get(), nullptr));
  const float8::Tensor one = of_x.view(together.get(), kM).value();
  const float8::Tensor two = of_x.view(q.get(), kM, qt.get()).value();
  EXPECT_EQ(two.q, q.get());
  EXPECT_EQ(two.qt, qt.get());
  for (int64_t row = 0; row < kM; ++row) {
    EXPECT_EQ(std::memcmp(static_cast<const char*>(one.q) + row * one.ld_q,
                          static_cast<const char*>(two.q) + row * two.ld_q, kK),
              0);
    EXPECT_EQ(one.q_inverse_scale[row], two.q_inverse_scale[row]);
  }
  for (int64_t col = 0; col < kK; ++col) {
    EXPECT_EQ(std::memcmp(static_cast<const char*>(one.qt) + col * one.ld_qt,
                          static_cast<const char*>(two.qt) + col * two.ld_qt, kM),
              0);
    EXPECT_EQ(one.qt_inverse_scale[col], two.qt_inverse_scale[col]);
  }
  EXPECT_FALSE(of_x.run(
      {.x = x_.get(), .tensor = q.get(), .rows = kM, .tensor_bytes = 7, .transposed = qt.get()},
      workspace.get(), nullptr));
  EXPECT_TRUE(says("float8_quantize_args.tensor_bytes is 7")) << float8_last_error();
  EXPECT_FALSE(of_x.run(
      {.x = x_.get(), .tensor = q.get(), .rows = kM, .transposed = const_cast<void*>(two.q)},
      workspace.get(), nullptr));
  EXPECT_TRUE(says("overlap")) << float8_last_error();
}

TEST_F(TensorAbi, OneCopyAloneHasTheBitsOfBoth) {
  constexpr size_t kWorkspace = 1 << 23;
  const Memory workspace = memory(kWorkspace);  // its front is the library's between calls
  for (const bool axis : {false, true}) {
    const auto plan = [&](float8_copies copies) {
      auto made = float8::Quantizer::plan(
          context_, {.rows_max = kM,
                     .cols = kK,
                     .recipe = axis ? float8::Recipe::rowwise() : float8::Recipe::tensorwise(),
                     .copies = copies});
      EXPECT_TRUE(made);
      return std::move(made).value();
    };
    const float8::Quantizer both = plan(FLOAT8_BOTH_COPIES), q = plan(FLOAT8_Q_ALONE),
                            qt = plan(FLOAT8_QT_ALONE);
    EXPECT_EQ(q.transposed_bytes(), 0U);
    EXPECT_EQ(qt.transposed_bytes(), qt.tensor_bytes());
    std::vector<Memory> copies;
    std::vector<float8::Tensor> views;
    for (const float8::Quantizer* each : {&both, &q, &qt}) {
      ASSERT_LE(each->workspace_bytes(), kWorkspace);
      const Memory& copy = copies.emplace_back(memory(each->tensor_bytes()));
      ASSERT_TRUE(
          each->run({.x = x_.get(), .tensor = copy.get(), .rows = kM}, workspace.get(), nullptr))
          << float8_last_error();
      views.push_back(each->view(copy.get(), kM).value());
    }
    for (int64_t row = 0; row < kM; ++row) {
      EXPECT_EQ(std::memcmp(static_cast<const char*>(views[0].q) + row * views[0].ld_q,
                            static_cast<const char*>(views[1].q) + row * views[1].ld_q, kK),
                0);
    }
    for (int64_t col = 0; col < kK; ++col) {
      EXPECT_EQ(std::memcmp(static_cast<const char*>(views[0].qt) + col * views[0].ld_qt,
                            static_cast<const char*>(views[2].qt) + col * views[2].ld_qt, kM),
                0);
    }
    for (int64_t i = 0; i < (axis ? kM : 1); ++i) {
      EXPECT_EQ(views[0].q_inverse_scale[i], views[1].q_inverse_scale[i]);
    }
    for (int64_t i = 0; i < (axis ? kK : 1); ++i) {
      EXPECT_EQ(views[0].qt_inverse_scale[i], views[2].qt_inverse_scale[i]);
    }
    EXPECT_EQ(views[1].qt, nullptr);
    EXPECT_EQ(views[2].q, nullptr);
  }
}

TEST_F(TensorAbi, RefusesWhatItCannotDo) {
  float8_quantizer* out = nullptr;
  float8_quantizer_desc desc{};
  desc.struct_size = sizeof desc;
  desc.rows_max = kM;
  desc.cols = kK;
  desc.recipe = "bf16";
  EXPECT_EQ(float8_quantizer_plan(context_.get(), &desc, &out), FLOAT8_UNSUPPORTED);
  EXPECT_TRUE(says("makes no fp8 copy of this operand")) << float8_last_error();
  desc.recipe = "rowwise";
  desc.cols = 40;
  EXPECT_EQ(float8_quantizer_plan(context_.get(), &desc, &out), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("16")) << float8_last_error();
  desc.cols = kK;
  desc.operand = 3;
  EXPECT_EQ(float8_quantizer_plan(context_.get(), &desc, &out), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("float8_quantizer_desc.operand is 3")) << float8_last_error();
  desc.operand = FLOAT8_INPUT;
  desc.copies = 4;
  EXPECT_EQ(float8_quantizer_plan(context_.get(), &desc, &out), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("float8_quantizer_desc.copies is 4")) << float8_last_error();
  desc.copies = FLOAT8_Q_FOR_RECOMPUTE;
  desc.operand = FLOAT8_WEIGHT;
  EXPECT_EQ(float8_quantizer_plan(context_.get(), &desc, &out), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("FLOAT8_Q_FOR_RECOMPUTE; it is for FLOAT8_INPUT")) << float8_last_error();
  EXPECT_EQ(out, nullptr);

  float8_gemm_plan* gemm = nullptr;
  float8_gemm_desc of_gemm{};
  of_gemm.struct_size = sizeof of_gemm;
  of_gemm.m_max = kM;
  of_gemm.n = kN;
  of_gemm.k = kK;
  of_gemm.recipe = "rowwise_with_gw_hp";
  of_gemm.gemm = FLOAT8_GRAD_WEIGHT;
  EXPECT_EQ(float8_gemm_plan_create(context_.get(), &of_gemm, &gemm), FLOAT8_UNSUPPORTED);
  EXPECT_TRUE(says("grad_weight in high precision")) << float8_last_error();
  of_gemm.recipe = "rowwise";
  of_gemm.bias = 1;
  EXPECT_EQ(float8_gemm_plan_create(context_.get(), &of_gemm, &gemm), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("FLOAT8_OUTPUT alone adds a bias")) << float8_last_error();
  of_gemm.bias = 0;
  of_gemm.sm_limit = -1;
  EXPECT_EQ(float8_gemm_plan_create(context_.get(), &of_gemm, &gemm), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("float8_gemm_desc.sm_limit is -1")) << float8_last_error();

  const float8::Quantizer of_x = quantizer(FLOAT8_INPUT, kM, kK);
  const Memory x = memory(of_x.tensor_bytes()), workspace = memory(of_x.workspace_bytes());
  EXPECT_FALSE(of_x.run({.tensor = x.get(), .rows = kM}, workspace.get(), nullptr));
  EXPECT_TRUE(says("float8_quantize_args.x is NULL")) << float8_last_error();
  EXPECT_FALSE(of_x.run({.x = x_.get(), .tensor = x.get(), .rows = kM, .tensor_bytes = 7},
                        workspace.get(), nullptr));
  EXPECT_TRUE(says("float8_quantize_args.tensor_bytes is 7")) << float8_last_error();
  EXPECT_FALSE(of_x.run({.x = x_.get(), .tensor = x_.get(), .rows = kM}, workspace.get(), nullptr));
  EXPECT_TRUE(says("overlap")) << float8_last_error();
}

// A weight that ranks hold by rows: every rank's shard is cast to the bits of the whole weight's.
class ShardedWeight : public TensorAbi, public ::testing::WithParamInterface<const char*> {
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
      return {.x = x,
              .tensor = tensor.get(),
              .rows = rows,
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
    ASSERT_TRUE(plain.run({.x = w, .tensor = copies.get()}, workspace.get(), nullptr));
    const float8::Tensor whole = plain.view(copies.get(), kRows).value();

    std::vector<Rank> all = ranks(w, rows);
    for (Rank& rank : all) {
      EXPECT_EQ(rank.quantizer.workspace_bytes(), 0U);
      ASSERT_TRUE(rank.quantizer.find_amax(rank.args(), nullptr)) << float8_last_error();
    }
    reduce(all);
    for (Rank& rank : all) {
      SCOPED_TRACE(rank.first);
      ASSERT_TRUE(rank.quantizer.run(rank.args(), nullptr, nullptr)) << float8_last_error();
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
    EXPECT_TRUE(says("shards of 96 rows cut the blocks of 128 rows")) << float8_last_error();
    return;
  }
  Rank rank(of_rows(128, true), whole_.get(), 0, 128);
  float8::QuantizeArgs args = rank.args();
  args.amax = nullptr;
  EXPECT_FALSE(rank.quantizer.run(args, nullptr, nullptr));
  EXPECT_TRUE(says("float8_quantize_args.amax is NULL")) << float8_last_error();
  EXPECT_FALSE(rank.quantizer.find_amax(args, nullptr));
  EXPECT_TRUE(says("float8_quantize_args.amax is NULL")) << float8_last_error();
  args = rank.args();
  args.row_amax = nullptr;
  EXPECT_FALSE(rank.quantizer.run(args, nullptr, nullptr));
  EXPECT_TRUE(says("float8_quantize_args.row_amax is NULL")) << float8_last_error();
  args = rank.args();
  args.rows = 129;
  EXPECT_FALSE(rank.quantizer.find_amax(args, nullptr));
  EXPECT_TRUE(says("rows is 129")) << float8_last_error();
  args = rank.args();
  args.x = nullptr;
  EXPECT_FALSE(rank.quantizer.find_amax(args, nullptr));
  EXPECT_TRUE(says("float8_quantize_args.x is NULL")) << float8_last_error();
  args = rank.args();
  args.row_amax = static_cast<uint32_t*>(rank.tensor.get());
  EXPECT_FALSE(rank.quantizer.run(args, nullptr, nullptr));
  EXPECT_TRUE(says("overlap")) << float8_last_error();
  const float8::Quantizer plain = of_rows(128, false);
  const Memory workspace = memory(plain.workspace_bytes());
  EXPECT_FALSE(plain.find_amax(rank.args(), nullptr));
  EXPECT_TRUE(says("set float8_quantizer_desc.over_ranks")) << float8_last_error();
  EXPECT_FALSE(plain.run(rank.args(), workspace.get(), nullptr));
  EXPECT_TRUE(says("set float8_quantizer_desc.over_ranks")) << float8_last_error();
}

// A kept copy of a weight: micro-batches compare and cast, and only what changed is cast.
TEST_F(TensorAbi, AWeightIsCastWhereItsFingerprintChanged) {
  for (const auto& recipe : {float8::Recipe::tensorwise(), float8::Recipe::rowwise(),
                             float8::Recipe::rowwise_with_gw_hp(), float8::Recipe::blockwise()}) {
    float8::QuantizerDesc desc{
        .operand = FLOAT8_WEIGHT, .rows_max = kN, .cols = kK, .recipe = recipe};
    const auto plain = float8::Quantizer::plan(context_, desc).value();
    desc.weight_flag = true;
    const auto flagged = float8::Quantizer::plan(context_, desc).value();
    const size_t bytes = flagged.tensor_bytes();
    ASSERT_EQ(bytes, plain.tensor_bytes());
    const Memory workspace = memory(std::max(flagged.workspace_bytes(), plain.workspace_bytes()));
    std::memset(workspace.get(), 0, context_.workspace_reserved_bytes());
    const Memory kept = memory(bytes), fresh = memory(bytes);
    std::memset(kept.get(), 0, bytes);
    std::memset(fresh.get(), 0, bytes);
    const Memory state = memory(FLOAT8_FINGERPRINT_BYTES);
    std::memset(state.get(), 0, FLOAT8_FINGERPRINT_BYTES);
    uint32_t valid = 0;
    const auto micro_batch = [&] {
      const float8::FingerprintArgs compare{
          .w = w_.get(), .n = kN, .k = kK, .fingerprint = state.get(), .valid = &valid};
      ASSERT_TRUE(context_.compare_weights(&compare, 1, nullptr)) << float8_last_error();
      ASSERT_TRUE(flagged.run({.x = w_.get(), .tensor = kept.get(), .valid = &valid},
                              workspace.get(), nullptr))
          << float8_last_error();
      EXPECT_EQ(valid, 1U);
    };
    const auto is_fresh = [&] {
      EXPECT_TRUE(plain.run({.x = w_.get(), .tensor = fresh.get()}, workspace.get(), nullptr));
      return std::memcmp(kept.get(), fresh.get(), bytes) == 0;
    };
    micro_batch();
    EXPECT_TRUE(is_fresh());
    auto* const copy = static_cast<uint8_t*>(kept.get());
    copy[1] ^= 1U;  // the next one casts nothing, so it stays
    micro_batch();
    EXPECT_FALSE(is_fresh());
    static_cast<uint16_t*>(w_.get())[kN * kK - 1] ^= 0x3fU;
    micro_batch();
    EXPECT_TRUE(is_fresh());
  }
}

TEST_F(TensorAbi, AFlagIsOfAWeight) {
  float8::QuantizerDesc desc{.operand = FLOAT8_INPUT, .rows_max = kM, .cols = kK};
  desc.weight_flag = true;
  EXPECT_FALSE(float8::Quantizer::plan(context_, desc));
  EXPECT_TRUE(says("float8_quantizer_desc.weight_flag is set; it is for FLOAT8_WEIGHT"));
  desc.operand = FLOAT8_WEIGHT;
  desc.rows_max = kN;
  const auto flagged = float8::Quantizer::plan(context_, desc).value();
  EXPECT_TRUE(float8::QuantizerList::plan(context_, {flagged})) << float8_last_error();
  desc.weight_flag = false;
  const auto plain = float8::Quantizer::plan(context_, desc).value();
  const Memory tensor = memory(plain.tensor_bytes()), workspace = memory(plain.workspace_bytes());
  uint32_t valid = 0;
  EXPECT_FALSE(plain.run({.x = w_.get(), .tensor = tensor.get(), .valid = &valid}, workspace.get(),
                         nullptr));
  EXPECT_TRUE(says("set float8_quantizer_desc.weight_flag")) << float8_last_error();
}

}  // namespace
