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
using float8::testing::rowwise_quantizer;
using float8::testing::says;

constexpr int64_t kM = 48, kN = 64, kK = 32;

class TensorAbi : public ::testing::Test {
 protected:
  float8::Context context_ = emulated();
  Memory x_ = random_bf16(kM * kK, 1), w_ = random_bf16(kN * kK, 2);
};

TEST_F(TensorAbi, OneTensorServesALinearAndAGemm) {
  const float8::Quantizer of_x = rowwise_quantizer(context_, FLOAT8_INPUT, kM, kK);
  const float8::Quantizer of_w = rowwise_quantizer(context_, FLOAT8_WEIGHT, kN, kK);
  const Memory x = memory(of_x.tensor_bytes()), w = memory(of_w.tensor_bytes());
  const Memory workspace = memory(std::max(of_x.workspace_bytes(), of_w.workspace_bytes()));
  ASSERT_TRUE(of_x.run(
      {.rows = kM, .x = {x_.get()}, .tensor = {x.get()}, .workspace = {workspace.get()}}, nullptr));
  ASSERT_TRUE(
      of_w.run({.x = {w_.get()}, .tensor = {w.get()}, .workspace = {workspace.get()}}, nullptr));
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
  ASSERT_TRUE(linear.value().forward(
      {.m = kM, .x = {x_.get()}, .w = {w_.get()}, .y = {plain.get()}, .workspace = {scratch.get()}},
      nullptr));
  ASSERT_TRUE(linear.value().forward({.m = kM,
                                      .x = {.fp8 = &x_view},
                                      .w = {.fp8 = &w_view},
                                      .y = {given.get()},
                                      .workspace = {scratch.get()}},
                                     nullptr));
  EXPECT_EQ(std::memcmp(plain.get(), given.get(), kM * kN * 2), 0);

  const auto gemm = float8::Gemm::plan(
      context_, {.m_max = kM, .n = kN, .k = kK, .recipe = float8::Recipe::rowwise()});
  ASSERT_TRUE(gemm);
  ASSERT_TRUE(gemm.value().run(
      {.a = &x_view, .b = &w_view, .d = {alone.get()}, .workspace = {scratch.get()}}, nullptr));
  EXPECT_EQ(std::memcmp(plain.get(), alone.get(), kM * kN * 2), 0);
}

// Linears that recompute share x's q, which may be gone in backward: its scale alone is kept. Backward
// casts x again, or takes the qt that was cast for several linears.
TEST_F(TensorAbi, AnInputIsCastAgainWithItsScale) {
  const Memory dy = random_bf16(kM * kN, 3);
  enum Way { kSaved, kCastByBackward, kCastApart };
  for (const char* name : {"tensorwise", "rowwise", "blockwise"}) {
    SCOPED_TRACE(name);
    const float8::Recipe recipe = float8::Recipe::named(name);
    const float8::Quantizer of_x =
        float8::Quantizer::plan(
            context_,
            {.rows_max = kM, .cols = kK, .recipe = recipe, .copies = FLOAT8_Q_FOR_RECOMPUTE})
            .value();
    const size_t apart = of_x.transposed_bytes();
    EXPECT_LT(apart, 512U);
    const float8::Quantizer again =
        float8::Quantizer::plan(
            context_,
            {.rows_max = kM, .cols = kK, .recipe = recipe, .copies = FLOAT8_QT_FOR_RECOMPUTE})
            .value();
    EXPECT_EQ(again.transposed_bytes(), again.tensor_bytes());
    const Memory kept = memory(apart + 16), qt = memory(again.tensor_bytes());
    std::vector<std::vector<char>> results;
    for (const Way way : {kSaved, kCastByBackward, kCastApart}) {
      const bool recompute = way != kSaved;
      const auto linear = float8::Linear::plan(
          context_, {.m_max = kM, .n = kN, .k = kK, .recipe = recipe, .recompute = recompute});
      ASSERT_TRUE(linear);
      const Memory scratch = memory(std::max(
          {linear.value().workspace_bytes(), of_x.workspace_bytes(), again.workspace_bytes()}));
      const Memory saved = memory(linear.value().saved_bytes() + 16);
      const Memory y = memory(kM * kN * 2), dx = memory(kM * kK * 2), dw = memory(kN * kK * 2);
      float8::Tensor given;
      {
        const Memory q = memory(of_x.tensor_bytes());
        if (recompute) {
          ASSERT_TRUE(of_x.run({.rows = kM,
                                .x = {x_.get()},
                                .tensor = {q.get()},
                                .transposed = {kept.get()},
                                .workspace = {scratch.get()}},
                               nullptr));
          given = of_x.view(q.get(), kM, kept.get()).value();
        }
        ASSERT_TRUE(
            linear.value().forward({.m = kM,
                                    .x = {.data = x_.get(), .fp8 = recompute ? &given : nullptr},
                                    .w = {w_.get()},
                                    .y = {y.get()},
                                    .saved = {saved.get()},
                                    .workspace = {scratch.get()}},
                                   nullptr));
        if (recompute) given = of_x.view(nullptr, kM, kept.get()).value();
      }
      if (way == kCastApart) {
        ASSERT_TRUE(again.run({.rows = kM,
                               .x = {.data = x_.get(), .fp8 = &given},
                               .tensor = {qt.get()},
                               .workspace = {scratch.get()}},
                              nullptr))
            << float8_last_error();
        given = again.view(nullptr, kM, qt.get()).value();
      }
      ASSERT_TRUE(
          linear.value().backward({.m = kM,
                                   .dy = {dy.get()},
                                   .x = {.data = way == kCastByBackward ? x_.get() : nullptr,
                                         .fp8 = recompute ? &given : nullptr},
                                   .w = {w_.get()},
                                   .dx = {dx.get()},
                                   .dw = {dw.get()},
                                   .saved = {saved.get()},
                                   .workspace = {scratch.get()}},
                                  nullptr))
          << float8_last_error();
      for (const auto& [at, size] :
           {std::pair{y.get(), kM * kN * 2}, {dx.get(), kM * kK * 2}, {dw.get(), kN * kK * 2}}) {
        results.emplace_back(static_cast<char*>(at), static_cast<char*>(at) + size);
      }
    }
    for (size_t i = 0; i < 3; ++i) {
      EXPECT_EQ(results[i], results[i + 3]) << i;
      EXPECT_EQ(results[i], results[i + 6]) << i;
    }
  }
}

TEST_F(TensorAbi, ACastForRecomputingNeedsTheScale) {
  const auto of = [&](float8::Recipe recipe) {
    return float8::Quantizer::plan(
               context_,
               {.rows_max = kM, .cols = kK, .recipe = recipe, .copies = FLOAT8_QT_FOR_RECOMPUTE})
        .value();
  };
  const float8::Quantizer again = of(float8::Recipe::tensorwise());
  const Memory qt = memory(again.tensor_bytes()), scratch = memory(again.workspace_bytes() + 16);
  EXPECT_FALSE(again.run(
      {.rows = kM, .x = {x_.get()}, .tensor = {qt.get()}, .workspace = {scratch.get()}}, nullptr));
  EXPECT_TRUE(says("float8_quantize_args.x.fp8 has no q_inverse_scale")) << float8_last_error();
  const float8::Quantizer plain = rowwise_quantizer(context_, FLOAT8_INPUT, kM, kK);
  const Memory both = memory(plain.tensor_bytes());
  const float8::Tensor view = plain.view(both.get(), kM).value();
  EXPECT_FALSE(plain.run({.rows = kM,
                          .x = {.data = x_.get(), .fp8 = &view},
                          .tensor = {both.get()},
                          .workspace = {scratch.get()}},
                         nullptr));
  EXPECT_TRUE(says("float8_quantize_args.x.fp8 is given")) << float8_last_error();
  const float8_quantizer* const listed[] = {again.get()};
  float8_quantizer_list* list = nullptr;
  EXPECT_EQ(float8_quantizer_list_plan(context_.get(), listed, 1, &list), FLOAT8_UNSUPPORTED);
  EXPECT_TRUE(says("FLOAT8_QT_FOR_RECOMPUTE")) << float8_last_error();
}

TEST_F(TensorAbi, TheTransposedCopyMayLieApart) {
  const float8::Quantizer of_x = rowwise_quantizer(context_, FLOAT8_INPUT, kM, kK);
  const size_t apart = of_x.transposed_bytes();
  ASSERT_GT(apart, 0U);
  const Memory together = memory(of_x.tensor_bytes()), q = memory(of_x.tensor_bytes() - apart),
               qt = memory(apart), workspace = memory(of_x.workspace_bytes());
  ASSERT_TRUE(of_x.run(
      {.rows = kM, .x = {x_.get()}, .tensor = {together.get()}, .workspace = {workspace.get()}},
      nullptr));
  ASSERT_TRUE(of_x.run({.rows = kM,
                        .x = {x_.get()},
                        .tensor = {q.get(), of_x.tensor_bytes() - apart},
                        .transposed = {qt.get()},
                        .workspace = {workspace.get()}},
                       nullptr));
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
  EXPECT_FALSE(of_x.run({.rows = kM,
                         .x = {x_.get()},
                         .tensor = {q.get(), 7},
                         .transposed = {qt.get()},
                         .workspace = {workspace.get()}},
                        nullptr));
  EXPECT_TRUE(says("float8_quantize_args.tensor.bytes is 7")) << float8_last_error();
  EXPECT_FALSE(of_x.run({.rows = kM,
                         .x = {x_.get()},
                         .tensor = {q.get()},
                         .transposed = {const_cast<void*>(two.q)},
                         .workspace = {workspace.get()}},
                        nullptr));
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
      ASSERT_TRUE(each->run(
          {.rows = kM, .x = {x_.get()}, .tensor = {copy.get()}, .workspace = {workspace.get()}},
          nullptr))
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
  EXPECT_TRUE(says("makes no fp8 copy")) << float8_last_error();
  desc.recipe = "rowwise";
  desc.cols = 40;
  EXPECT_EQ(float8_quantizer_plan(context_.get(), &desc, &out), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("16")) << float8_last_error();
  desc.cols = kK;
  desc.operand = 3;
  EXPECT_EQ(float8_quantizer_plan(context_.get(), &desc, &out), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("float8_quantizer_desc.operand is 3")) << float8_last_error();
  desc.operand = FLOAT8_INPUT;
  desc.copies = 5;
  EXPECT_EQ(float8_quantizer_plan(context_.get(), &desc, &out), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("float8_quantizer_desc.copies is 5")) << float8_last_error();
  desc.operand = FLOAT8_WEIGHT;
  for (const auto& [copies, words] :
       {std::pair{FLOAT8_Q_FOR_RECOMPUTE, "FLOAT8_Q_FOR_RECOMPUTE; it is for FLOAT8_INPUT"},
        {FLOAT8_QT_FOR_RECOMPUTE, "FLOAT8_QT_FOR_RECOMPUTE; it is for FLOAT8_INPUT"}}) {
    desc.copies = copies;
    EXPECT_EQ(float8_quantizer_plan(context_.get(), &desc, &out), FLOAT8_INVALID_ARGUMENT);
    EXPECT_TRUE(says(words)) << float8_last_error();
  }
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

  const float8::Quantizer of_x = rowwise_quantizer(context_, FLOAT8_INPUT, kM, kK);
  const Memory x = memory(of_x.tensor_bytes()), workspace = memory(of_x.workspace_bytes());
  EXPECT_FALSE(
      of_x.run({.rows = kM, .tensor = {x.get()}, .workspace = {workspace.get()}}, nullptr));
  EXPECT_TRUE(says("float8_quantize_args.x.data is NULL")) << float8_last_error();
  EXPECT_FALSE(of_x.run(
      {.rows = kM, .x = {x_.get()}, .tensor = {x.get(), 7}, .workspace = {workspace.get()}},
      nullptr));
  EXPECT_TRUE(says("float8_quantize_args.tensor.bytes is 7")) << float8_last_error();
  EXPECT_FALSE(
      of_x.run({.rows = kM, .x = {x_.get()}, .tensor = {x_.get()}, .workspace = {workspace.get()}},
               nullptr));
  EXPECT_TRUE(says("overlap")) << float8_last_error();
}

// A kept copy of a weight: micro-batches compare and cast, and only what changed is cast.
TEST_F(TensorAbi, AWeightIsCastWhereItsFingerprintChanged) {
  for (const auto& recipe : {float8::Recipe::tensorwise(), float8::Recipe::rowwise(),
                             float8::Recipe::rowwise_with_gw_hp(), float8::Recipe::blockwise()}) {
    float8::QuantizerDesc desc{
        .operand = FLOAT8_WEIGHT, .rows_max = kN, .cols = kK, .recipe = recipe};
    const auto plain = float8::Quantizer::plan(context_, desc).value();
    desc.noop_flag = true;
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
    uint32_t noop_flag = 0;
    const auto micro_batch = [&] {
      const float8::FingerprintArgs compare{
          .w = {w_.get()}, .n = kN, .k = kK, .fingerprint = state.get(), .noop_flag = &noop_flag};
      ASSERT_TRUE(context_.compare_weights(&compare, 1, nullptr)) << float8_last_error();
      ASSERT_TRUE(flagged.run({.x = {w_.get()},
                               .tensor = {kept.get()},
                               .workspace = {workspace.get()},
                               .noop_flag = &noop_flag},
                              nullptr))
          << float8_last_error();
      EXPECT_EQ(noop_flag, 1U);
    };
    const auto is_fresh = [&] {
      EXPECT_TRUE(plain.run(
          {.x = {w_.get()}, .tensor = {fresh.get()}, .workspace = {workspace.get()}}, nullptr));
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
  desc.noop_flag = true;
  EXPECT_FALSE(float8::Quantizer::plan(context_, desc));
  EXPECT_TRUE(says("float8_quantizer_desc.noop_flag is set"));
  desc.operand = FLOAT8_WEIGHT;
  desc.rows_max = kN;
  const auto flagged = float8::Quantizer::plan(context_, desc).value();
  EXPECT_TRUE(float8::QuantizerList::plan(context_, {flagged})) << float8_last_error();
  desc.noop_flag = false;
  const auto plain = float8::Quantizer::plan(context_, desc).value();
  const Memory tensor = memory(plain.tensor_bytes()), workspace = memory(plain.workspace_bytes());
  uint32_t noop_flag = 0;
  EXPECT_FALSE(plain.run({.x = {w_.get()},
                          .tensor = {tensor.get()},
                          .workspace = {workspace.get()},
                          .noop_flag = &noop_flag},
                         nullptr));
  EXPECT_TRUE(says("set float8_quantizer_desc.noop_flag")) << float8_last_error();
}

}  // namespace
