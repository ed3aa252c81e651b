// Attention through the public header, on an emulated device: sizes, a forward whose values dequantize to what it
// multiplied, and what is refused in which words. tests/gpu/attention has the numerics.
#include <gtest/gtest.h>

#include <cmath>
#include <cstddef>
#include <string>
#include <string_view>
#include <vector>

#include "recipes/dtype.hpp"
#include "tests/unit/runtime/c_abi/emulated_memory.hpp"

namespace {

using float8::testing::emulated;
using float8::testing::Memory;
using float8::testing::memory;
using float8::testing::random_bf16;
using float8::testing::says;

constexpr int64_t kHeadDim = 128;

class AttentionAbi : public ::testing::Test {
 protected:
  float8_attention* plan(float8_attention_desc desc) {
    float8_attention* out = nullptr;
    status_ = float8_attention_plan(context_.get(), &desc, &out);
    return out;
  }
  static float8_attention_desc good() {
    return {.struct_size = sizeof(float8_attention_desc),
            .heads_q = 2,
            .heads_kv = 1,
            .head_dim = kHeadDim,
            .scale = 0,
            .causal = 1,
            .dtype = FLOAT8_BF16,
            .packed = 0,
            .window = 0,
            .recipe = FLOAT8_ATTENTION_FP8_FORWARD,
            .reserved = 0};
  }
  static float8_heads heads(const Memory& of, int64_t count) {
    return {.data = of.get(),
            .batch_stride = 3 * count * kHeadDim,
            .head_stride = kHeadDim,
            .token_stride = count * kHeadDim};
  }
  static float element(const Memory& of, int64_t index) {
    return f8::decode_bf16(static_cast<const uint16_t*>(of.get())[index]);
  }

  float8::Context context_ = emulated();
  float8_status status_ = FLOAT8_OK;
};

TEST_F(AttentionAbi, ForwardIsOfTheValuesThatDequantizeGives) {
  float8_attention* attention = plan(good());
  ASSERT_NE(attention, nullptr) << float8_last_error();
  const float8_attention_sizes sizes{.batch = 1, .tokens_q = 3, .tokens_kv = 3};
  const size_t saved_bytes = float8_attention_saved_bytes(attention, &sizes);
  EXPECT_EQ(saved_bytes, (2 + 1 + 1) * (128 * 128 + 4));
  const size_t workspace_bytes = float8_attention_workspace_bytes(attention, &sizes);
  EXPECT_EQ(workspace_bytes, kHeadDim * 4);
  const Memory q = random_bf16(3 * 2 * kHeadDim, 1), k = random_bf16(3 * kHeadDim, 2);
  const Memory v = random_bf16(3 * kHeadDim, 3);
  const Memory o = memory(3 * 2 * kHeadDim * 2), lse = memory(2 * 3 * 4);
  const Memory saved = memory(saved_bytes), workspace = memory(workspace_bytes);
  const float8_attention_forward_args args{.sizes = sizes,
                                           .q = heads(q, 2),
                                           .k = heads(k, 1),
                                           .v = heads(v, 1),
                                           .o = o.get(),
                                           .lse = static_cast<float*>(lse.get()),
                                           .saved = {saved.get(), saved_bytes},
                                           .workspace = {workspace.get(), workspace_bytes}};
  ASSERT_EQ(float8_attention_forward(attention, &args, nullptr), FLOAT8_OK) << float8_last_error();
  const Memory q2 = memory(3 * 2 * kHeadDim * 2), k2 = memory(3 * kHeadDim * 2);
  const Memory v2 = memory(3 * kHeadDim * 2);
  const float8_attention_dequantize_args back{.sizes = sizes,
                                              .saved = {saved.get(), saved_bytes},
                                              .q = heads(q2, 2),
                                              .k = heads(k2, 1),
                                              .v = heads(v2, 1)};
  ASSERT_EQ(float8_attention_dequantize(attention, &back, nullptr), FLOAT8_OK)
      << float8_last_error();
  // Query 1 of head 1 has two keys.
  double scores[2];
  for (int64_t j = 0; j < 2; ++j) {
    scores[j] = 0;
    for (int64_t c = 0; c < kHeadDim; ++c) {
      scores[j] += double{element(q2, 3 * kHeadDim + c)} * element(k2, j * kHeadDim + c);
    }
    scores[j] = std::exp(scores[j] / std::sqrt(double{kHeadDim}));
  }
  EXPECT_NEAR(static_cast<const float*>(lse.get())[3 + 1], std::log(scores[0] + scores[1]), 1e-4);
  for (int64_t c = 0; c < kHeadDim; ++c) {
    const double expected = (scores[0] * element(v2, c) + scores[1] * element(v2, kHeadDim + c)) /
                            (scores[0] + scores[1]);
    EXPECT_NEAR(element(o, 3 * kHeadDim + c), expected, 0.1);
    // A query with one key has its values.
    EXPECT_EQ(element(o, c), element(v2, c));
  }
  float8_attention_destroy(attention);
}

// A query with one key has no gradient, and its own is that of the key's value.
TEST_F(AttentionAbi, ABackwardInFp8IsThatOfTheForward) {
  float8_attention_desc desc = good();
  desc.recipe = FLOAT8_ATTENTION_FP8;
  float8_attention* attention = plan(desc);
  ASSERT_NE(attention, nullptr) << float8_last_error();
  const float8_attention_sizes sizes{.batch = 1, .tokens_q = 1, .tokens_kv = 1};
  const size_t saved_bytes = float8_attention_saved_bytes(attention, &sizes);
  EXPECT_EQ(saved_bytes, (2 + 1 + 1) * (128 * 128 + 4) + 2 * 4);
  const size_t bytes = float8_attention_backward_workspace_bytes(attention, &sizes);
  ASSERT_GT(bytes, float8_attention_workspace_bytes(attention, &sizes));
  const Memory q = random_bf16(2 * kHeadDim, 1), k = random_bf16(kHeadDim, 2);
  const Memory v = random_bf16(kHeadDim, 3), dout = random_bf16(2 * kHeadDim, 4);
  const Memory o = memory(2 * kHeadDim * 2), lse = memory(2 * 4);
  const Memory saved = memory(saved_bytes), workspace = memory(bytes);
  const float8_attention_forward_args forward{.sizes = sizes,
                                              .q = heads(q, 2),
                                              .k = heads(k, 1),
                                              .v = heads(v, 1),
                                              .o = o.get(),
                                              .lse = static_cast<float*>(lse.get()),
                                              .saved = {saved.get(), saved_bytes},
                                              .workspace = {workspace.get(), bytes}};
  ASSERT_EQ(float8_attention_forward(attention, &forward, nullptr), FLOAT8_OK)
      << float8_last_error();
  const Memory dq = memory(2 * kHeadDim * 2), dk = memory(kHeadDim * 2), dv = memory(kHeadDim * 2);
  float8_attention_backward_args args{.sizes = sizes,
                                      .dout = heads(dout, 2),
                                      .o = o.get(),
                                      .lse = static_cast<const float*>(lse.get()),
                                      .saved = {saved.get(), saved_bytes},
                                      .workspace = {workspace.get(), bytes},
                                      .dq = heads(dq, 2),
                                      .dk = heads(dk, 1),
                                      .dv = heads(dv, 1)};
  ASSERT_EQ(float8_attention_backward(attention, &args, nullptr), FLOAT8_OK) << float8_last_error();
  for (int64_t c = 0; c < kHeadDim; ++c) {
    const float expected = element(dout, c) + element(dout, kHeadDim + c);
    EXPECT_NEAR(element(dv, c), expected, 0.1 + 0.1 * std::abs(expected));
    EXPECT_NEAR(element(dq, c), 0, 0.2);
  }
  args.workspace.bytes = 16;
  EXPECT_EQ(float8_attention_backward(attention, &args, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("workspace.bytes is 16"));
  float8_attention_destroy(attention);
}

TEST_F(AttentionAbi, RefusesPlans) {
  const auto refuses = [&](const auto& change, float8_status status, std::string_view words) {
    float8_attention_desc desc = good();
    change(desc);
    EXPECT_EQ(plan(desc), nullptr);
    EXPECT_EQ(status_, status);
    EXPECT_TRUE(says(words)) << float8_last_error();
  };
  refuses([](auto& d) { d.head_dim = 96; }, FLOAT8_UNSUPPORTED, "heads of 96");
  refuses([](auto& d) { d.heads_q = 3, d.heads_kv = 2; }, FLOAT8_INVALID_ARGUMENT, "3 heads");
  refuses([](auto& d) { d.heads_kv = 0; }, FLOAT8_INVALID_ARGUMENT, "0 of keys");
  refuses([](auto& d) { d.scale = -1; }, FLOAT8_INVALID_ARGUMENT, "scale is -1");
  refuses([](auto& d) { d.dtype = FLOAT8_F16; }, FLOAT8_UNSUPPORTED, "dtype is f16");
  refuses([](auto& d) { d.dtype = 9; }, FLOAT8_INVALID_ARGUMENT, "dtype is 9");
  refuses([](auto& d) { d.window = -1; }, FLOAT8_INVALID_ARGUMENT, "window is -1");
  refuses([](auto& d) { d.window = 4, d.causal = 0; }, FLOAT8_INVALID_ARGUMENT, "window is 4");
  refuses([](auto& d) { d.head_dim = 96, d.recipe = FLOAT8_ATTENTION_FP8; }, FLOAT8_UNSUPPORTED,
          "heads of 96");
  refuses([](auto& d) { d.recipe = 3; }, FLOAT8_INVALID_ARGUMENT, "recipe is 3");
  refuses([](auto& d) { d.struct_size = 3; }, FLOAT8_INVALID_ARGUMENT, "struct_size is 3");
  refuses([](auto& d) { d.reserved = 1; }, FLOAT8_INVALID_ARGUMENT, "reserved is 1");
}

TEST_F(AttentionAbi, AnOlderCallerHasNoWindow) {
  float8_attention_desc desc = good();
  desc.struct_size = offsetof(float8_attention_desc, window);
  desc.window = -1;
  float8_attention* attention = plan(desc);
  EXPECT_NE(attention, nullptr) << float8_last_error();
  float8_attention_destroy(attention);
}

TEST_F(AttentionAbi, SavedEndsWithThePacksOffsets) {
  float8_attention_desc desc = good();
  desc.packed = 1;
  float8_attention* attention = plan(desc);
  ASSERT_NE(attention, nullptr) << float8_last_error();
  const float8_attention_sizes sizes{.batch = 2, .tokens_q = 3, .tokens_kv = 3};
  const size_t saved_bytes = float8_attention_saved_bytes(attention, &sizes);
  EXPECT_EQ(saved_bytes, 2 * ((2 + 1 + 1) * (128 * 128 + 4) + 2 * 32) + 2 * 3 * 4);
  const size_t workspace_bytes = float8_attention_workspace_bytes(attention, &sizes);
  const Memory q = random_bf16(3 * 2 * kHeadDim, 1), k = random_bf16(3 * kHeadDim, 2);
  const Memory v = random_bf16(3 * kHeadDim, 3);
  const Memory o = memory(3 * 2 * kHeadDim * 2), lse = memory(2 * 3 * 4);
  const Memory saved = memory(saved_bytes), workspace = memory(workspace_bytes);
  const int32_t offsets[] = {0, 1, 3}, bad[] = {0, 1, 9};
  float8_sequence_error error;
  float8_attention_forward_args args{.sizes = sizes,
                                     .q = heads(q, 2),
                                     .k = heads(k, 1),
                                     .v = heads(v, 1),
                                     .o = o.get(),
                                     .lse = static_cast<float*>(lse.get()),
                                     .saved = {saved.get(), saved_bytes},
                                     .workspace = {workspace.get(), workspace_bytes}};
  EXPECT_EQ(float8_attention_forward(attention, &args, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("cu_seqlens_q is NULL")) << float8_last_error();
  args.cu_seqlens_q = offsets;
  args.cu_seqlens_kv = bad;
  args.sequence_error = &error;
  ASSERT_EQ(float8_attention_forward(attention, &args, nullptr), FLOAT8_OK) << float8_last_error();
  EXPECT_EQ(error.code, FLOAT8_BAD_CU_SEQLENS_KV);
  EXPECT_EQ(error.index, 2);
  const auto* taken = reinterpret_cast<const int32_t*>(static_cast<const char*>(saved.get()) +
                                                       saved_bytes - 2 * sizeof offsets);
  EXPECT_EQ(std::vector<int32_t>(taken, taken + 6), (std::vector<int32_t>{0, 1, 3, 0, 1, 3}));
  float8_attention_destroy(attention);
}

// The bytes tell some sizes from the forward's, and of a pack the offsets that it left tell the others.
TEST_F(AttentionAbi, ABackwardOfOtherSizesThanTheForwardsIsRefused) {
  for (const float8_attention_recipe recipe :
       {FLOAT8_ATTENTION_FP8_FORWARD, FLOAT8_ATTENTION_FP8, FLOAT8_ATTENTION_BF16}) {
    float8_attention_desc desc = good();
    desc.packed = 1;
    desc.recipe = recipe;
    float8_attention* attention = plan(desc);
    ASSERT_NE(attention, nullptr) << float8_last_error();
    const float8_attention_sizes sizes{.batch = 2, .tokens_q = 3, .tokens_kv = 3};
    const size_t kept = float8_attention_saved_bytes(attention, &sizes);
    const Memory saved = memory(kept), workspace = memory(size_t{1} << 22);
    const Memory q = random_bf16(8 * kHeadDim, 1), k = random_bf16(4 * kHeadDim, 2);
    const Memory v = random_bf16(4 * kHeadDim, 3), dout = random_bf16(8 * kHeadDim, 4);
    const Memory o = random_bf16(8 * kHeadDim, 5), lse = memory(2 * 4 * 4);
    const Memory dq = memory(8 * kHeadDim * 2), dk = memory(4 * kHeadDim * 2);
    const Memory dv = memory(4 * kHeadDim * 2);
    const int32_t offsets[] = {0, 1, 3};
    const float8_attention_forward_args forward{.sizes = sizes,
                                                .q = heads(q, 2),
                                                .k = heads(k, 1),
                                                .v = heads(v, 1),
                                                .o = o.get(),
                                                .lse = static_cast<float*>(lse.get()),
                                                .saved = {saved.get(), kept},
                                                .workspace = {workspace.get()},
                                                .cu_seqlens_q = offsets,
                                                .cu_seqlens_kv = offsets};
    ASSERT_EQ(float8_attention_forward(attention, &forward, nullptr), FLOAT8_OK)
        << float8_last_error();
    const auto backward = [&](const float8_attention_sizes& of, size_t bytes) {
      const float8_attention_backward_args args{.sizes = of,
                                                .dout = heads(dout, 2),
                                                .o = o.get(),
                                                .lse = static_cast<const float*>(lse.get()),
                                                .saved = {saved.get(), bytes},
                                                .workspace = {workspace.get()},
                                                .dq = heads(dq, 2),
                                                .dk = heads(dk, 1),
                                                .dv = heads(dv, 1),
                                                .q = heads(q, 2),
                                                .k = heads(k, 1),
                                                .v = heads(v, 1)};
      return float8_attention_backward(attention, &args, nullptr);
    };
    EXPECT_EQ(backward(sizes, kept), FLOAT8_OK) << float8_last_error();
    EXPECT_EQ(backward(sizes, 0), FLOAT8_OK) << float8_last_error();
    const float8_attention_sizes one{.batch = 1, .tokens_q = 3, .tokens_kv = 3};
    EXPECT_EQ(backward(one, kept), FLOAT8_INVALID_ARGUMENT);
    EXPECT_TRUE(says("backward_args.saved.bytes is " + std::to_string(kept))) << recipe;
    for (const float8_attention_sizes& other : {one,
                                                {.batch = 2, .tokens_q = 2, .tokens_kv = 3},
                                                {.batch = 2, .tokens_q = 3, .tokens_kv = 4}}) {
      EXPECT_EQ(backward(other, 0), FLOAT8_CUDA) << recipe;
      EXPECT_TRUE(says("saved does not have")) << float8_last_error();
    }
    float8_attention_destroy(attention);
  }
}

TEST_F(AttentionAbi, RefusesCallsOfQueriesWithoutKeys) {
  float8_attention_desc desc = good();
  desc.window = 2;
  float8_attention* attention = plan(desc);
  ASSERT_NE(attention, nullptr) << float8_last_error();
  float8_attention_forward_args args{};
  args.sizes = {.batch = 1, .tokens_q = 3, .tokens_kv = 1};
  EXPECT_EQ(float8_attention_saved_bytes(attention, &args.sizes), 0U);
  EXPECT_EQ(float8_attention_forward(attention, &args, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("window of 2"));
  float8_attention_destroy(attention);
}

// Strides may repeat what is read, but each element of what is written has a place, in some memory.
TEST_F(AttentionAbi, StridesHoldWhatIsWritten) {
  float8_attention* attention = plan(good());
  const float8_attention_sizes sizes{.batch = 3, .tokens_q = 2, .tokens_kv = 2};
  const size_t bytes = float8_attention_saved_bytes(attention, &sizes);
  const Memory saved = memory(bytes), q = memory(18 * kHeadDim * 2), k = memory(9 * kHeadDim * 2);
  const Memory v = memory(9 * kHeadDim * 2);
  const float8_attention_dequantize_args good{.sizes = sizes,
                                              .saved = {saved.get(), bytes},
                                              .q = heads(q, 2),
                                              .k = heads(k, 1),
                                              .v = heads(v, 1)};
  EXPECT_EQ(float8_attention_dequantize(attention, &good, nullptr), FLOAT8_OK)
      << float8_last_error();
  const auto refuses = [&](const auto& change, std::string_view words) {
    float8_attention_dequantize_args args = good;
    change(args);
    EXPECT_EQ(float8_attention_dequantize(attention, &args, nullptr), FLOAT8_INVALID_ARGUMENT);
    EXPECT_TRUE(says(words)) << float8_last_error();
  };
  refuses([](auto& a) { a.q.token_stride = 0; }, "args.q.token_stride is 0");
  refuses([](auto& a) { a.k.batch_stride = kHeadDim; }, "k.batch_stride is 128");
  refuses([](auto& a) { a.v.batch_stride = INT64_MAX - 7; },
          "v.batch_stride is 9223372036854775800");
  float8_attention_dequantize_args one = good;  // a head of keys alone
  one.k.head_stride = 0;
  EXPECT_EQ(float8_attention_dequantize(attention, &one, nullptr), FLOAT8_OK);
  float8_attention_destroy(attention);
}

TEST_F(AttentionAbi, RefusesCalls) {
  float8_attention* attention = plan(good());
  const float8_attention_sizes sizes{.batch = 1, .tokens_q = 1, .tokens_kv = 0};
  EXPECT_EQ(float8_attention_saved_bytes(attention, &sizes), 0U);
  EXPECT_EQ(float8_attention_saved_bytes(nullptr, &sizes), 0U);
  EXPECT_EQ(float8_attention_workspace_bytes(attention, nullptr), 0U);
  float8_attention_forward_args args{};
  args.sizes = {.batch = 1, .tokens_q = 1, .tokens_kv = 1};
  EXPECT_EQ(float8_attention_forward(nullptr, &args, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("attention is NULL"));
  EXPECT_EQ(float8_attention_forward(attention, &args, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("q is NULL"));
  const Memory small = memory(16);
  args.saved = {small.get(), 16};
  EXPECT_EQ(float8_attention_forward(attention, &args, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("saved.bytes is 16"));
  float8_attention_dequantize_args back{};
  back.sizes = args.sizes;
  EXPECT_EQ(float8_attention_dequantize(attention, &back, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("q is NULL"));
  back.saved = args.saved;
  EXPECT_EQ(float8_attention_dequantize(attention, &back, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("saved.bytes is 16"));
  back.sizes.batch = 0;
  back.saved = {};
  EXPECT_EQ(float8_attention_dequantize(attention, &back, nullptr), FLOAT8_OK);
  float8_attention_destroy(attention);
  float8_attention_destroy(nullptr);
}

}  // namespace
