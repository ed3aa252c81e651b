// The C++ header over attention, on an emulated device: calls have the bits of the C interface, and refusals its words.
#include "tests/unit/runtime/c_abi/wrapper_checks.hpp"

namespace float8::testing {
namespace {

class AttentionWrapper : public ::testing::TestWithParam<bool> {
 protected:
  static constexpr int64_t kHeadDim = 64, kTokens = 6;
  [[nodiscard]] static bool packed() { return GetParam(); }
  static float8_attention_desc in_c() {
    float8_attention_desc out{};
    out.struct_size = sizeof out;
    out.heads_q = 2;
    out.heads_kv = 1;
    out.head_dim = kHeadDim;
    out.scale = 0.25F;
    out.causal = 1;
    out.packed = packed() ? 1 : 0;
    out.window = 3;
    out.recipe = FLOAT8_ATTENTION_FP8;
    return out;
  }
  static AttentionDesc in_cpp() {
    AttentionDesc out{.heads_q = 2, .heads_kv = 1, .head_dim = kHeadDim, .scale = 0.25F};
    out.causal = true;
    out.recipe = FLOAT8_ATTENTION_FP8;
    out.packed = packed();
    out.window = 3;
    return out;
  }
  static Heads heads(const Memory& of, int64_t count) {
    return {.data = of.get(),
            .batch_stride = kTokens * count * kHeadDim,
            .head_stride = kHeadDim,
            .token_stride = count * kHeadDim};
  }
  // What a forward, a dequantisation and a backward leave.
  struct Results {
    static constexpr size_t kQ = kTokens * 2 * kHeadDim * 2, kKv = kTokens * kHeadDim * 2;
    Memory o = memory(kQ), lse = memory(kTokens * 2 * 4), q = memory(kQ), k = memory(kKv),
           v = memory(kKv), dq = memory(kQ), dk = memory(kKv), dv = memory(kKv);
    [[nodiscard]] std::string all() const {
      return bytes_of(o, kQ) + bytes_of(lse, kTokens * 2 * 4) + bytes_of(q, kQ) + bytes_of(k, kKv) +
             bytes_of(v, kKv) + bytes_of(dq, kQ) + bytes_of(dk, kKv) + bytes_of(dv, kKv);
    }
  };
  AttentionForwardArgs forward_args(const Results& to) const {
    AttentionForwardArgs out{.sizes = sizes_,
                             .q = heads(q_, 2),
                             .k = heads(k_, 1),
                             .v = heads(v_, 1),
                             .o = to.o.get(),
                             .lse = static_cast<float*>(to.lse.get()),
                             .saved = {saved_.get()},
                             .workspace = {workspace_.get()}};
    if (packed()) out.cu_seqlens_q = out.cu_seqlens_kv = offsets_.data();
    return out;
  }
  AttentionDequantizeArgs dequantize_args(const Results& to) const {
    return {.sizes = sizes_,
            .saved = {saved_.get()},
            .q = heads(to.q, 2),
            .k = heads(to.k, 1),
            .v = heads(to.v, 1)};
  }
  AttentionBackwardArgs backward_args(const Results& to) const {
    return {.sizes = sizes_,
            .dout = heads(dout_, 2),
            .o = to.o.get(),
            .lse = static_cast<const float*>(to.lse.get()),
            .saved = {saved_.get()},
            .workspace = {workspace_.get()},
            .dq = heads(to.dq, 2),
            .dk = heads(to.dk, 1),
            .dv = heads(to.dv, 1)};
  }

  Context context_ = emulated();
  // Two packed sequences, or a batch of one.
  AttentionSizes sizes_{.batch = packed() ? 2 : 1, .tokens_q = kTokens, .tokens_kv = kTokens};
  std::vector<int32_t> offsets_ = {0, 4, kTokens};
  Memory q_ = random_bf16(kTokens * 2 * kHeadDim, 1), k_ = random_bf16(kTokens * kHeadDim, 2);
  Memory v_ = random_bf16(kTokens * kHeadDim, 3), dout_ = random_bf16(kTokens * 2 * kHeadDim, 4);
  Memory saved_, workspace_;
};
INSTANTIATE_TEST_SUITE_P(Cases, AttentionWrapper, ::testing::Bool(),
                         [](const auto& of) { return of.param ? "packed" : "batch"; });

TEST_P(AttentionWrapper, HasTheBitsOfC) {
  const float8_attention_desc desc = in_c();
  float8_attention* plan = nullptr;
  ASSERT_EQ(float8_attention_plan(context_.get(), &desc, &plan), FLOAT8_OK) << float8_last_error();
  const auto attention = Attention::plan(context_, in_cpp()).value();
  ASSERT_EQ(attention.saved_bytes(sizes_), float8_attention_saved_bytes(plan, &sizes_));
  ASSERT_EQ(attention.workspace_bytes(sizes_), float8_attention_workspace_bytes(plan, &sizes_));
  const size_t bytes = attention.backward_workspace_bytes(sizes_);
  ASSERT_EQ(bytes, float8_attention_backward_workspace_bytes(plan, &sizes_));
  saved_ = memory(attention.saved_bytes(sizes_));
  workspace_ = memory(std::max(bytes, attention.workspace_bytes(sizes_)));
  const Results expected, got;
  const AttentionForwardArgs forward = forward_args(expected);
  const AttentionDequantizeArgs dequantize = dequantize_args(expected);
  const AttentionBackwardArgs backward = backward_args(expected);
  ASSERT_EQ(float8_attention_forward(plan, &forward, nullptr), FLOAT8_OK) << float8_last_error();
  ASSERT_EQ(float8_attention_dequantize(plan, &dequantize, nullptr), FLOAT8_OK);
  ASSERT_EQ(float8_attention_backward(plan, &backward, nullptr), FLOAT8_OK) << float8_last_error();
  float8_attention_destroy(plan);
  ASSERT_TRUE(attention.forward(forward_args(got), nullptr)) << float8_last_error();
  ASSERT_TRUE(attention.dequantize(dequantize_args(got), nullptr)) << float8_last_error();
  ASSERT_TRUE(attention.backward(backward_args(got), nullptr)) << float8_last_error();
  EXPECT_EQ(got.all(), expected.all());
  EXPECT_NE(got.all(), Results().all());
}

TEST_P(AttentionWrapper, RefusesInTheWordsOfC) {
  const auto refuses = [&](const auto& change) {
    expect_refused_as_in_c<Attention>(context_, in_cpp(), in_c(), float8_attention_plan, change);
  };
  refuses([](auto& d) { d.heads_kv = 3; });
  refuses([](auto& d) { d.heads_q = 0; });
  refuses([](auto& d) { d.head_dim = 80; });
  refuses([](auto& d) { d.scale = -1; });
  refuses([](auto& d) { d.dtype = FLOAT8_F16; });
  refuses([](auto& d) { d.causal = false; });
  refuses([](auto& d) { d.window = -1; });
  const auto attention = Attention::plan(context_, in_cpp()).value();
  const AttentionForwardArgs forward;  // there is no key
  const AttentionDequantizeArgs dequantize;
  const AttentionBackwardArgs backward;
  expect_refused_as_in_c(attention.forward(forward, nullptr), float8_attention_forward,
                         attention.get(), forward);
  expect_refused_as_in_c(attention.dequantize(dequantize, nullptr), float8_attention_dequantize,
                         attention.get(), dequantize);
  expect_refused_as_in_c(attention.backward(backward, nullptr), float8_attention_backward,
                         attention.get(), backward);
}

}  // namespace
}  // namespace float8::testing
