// Tensors in fp8 through the public header, on an emulated device: what a caller quantizes serves
// linears and GEMMs, and what does not fit is refused in the words of float8.h.
#include <gtest/gtest.h>

#include <cstdlib>
#include <cstring>
#include <float8/float8.hpp>
#include <memory>
#include <random>
#include <string_view>

namespace {

constexpr int64_t kM = 48, kN = 64, kK = 32;

// Memory for an emulated device, which takes the host's.
struct Free {
  void operator()(void* memory) const { std::free(memory); }
};
using Memory = std::unique_ptr<void, Free>;
Memory memory(size_t bytes) {
  return Memory(std::aligned_alloc(256, (bytes + 256) / 256 * 256));
}
Memory random_bf16(int64_t count, unsigned seed) {
  Memory out = memory(static_cast<size_t>(count) * 2);
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  for (int64_t i = 0; i < count; ++i) {
    const float value = normal(generator);
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    static_cast<uint16_t*>(out.get())[i] = static_cast<uint16_t>(bits >> 16);
  }
  return out;
}

class TensorAbi : public ::testing::Test {
 protected:
  static float8::Context emulated() {
    float8::ContextOptions options;
    options.emulate = true;
    return float8::Context::create(0, options).value();
  }
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
  desc.reserved = 1;
  EXPECT_EQ(float8_quantizer_plan(context_.get(), &desc, &out), FLOAT8_INVALID_ARGUMENT);
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

}  // namespace
