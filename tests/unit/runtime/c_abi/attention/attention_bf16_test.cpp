// What attention does in bf16, through the public header on an emulated device: recipe bf16 against sums in double, and
// the backward of fp8_forward, which is that of the values that its forward multiplied.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <string_view>
#include <vector>

#include "recipes/dtype.hpp"
#include "tests/unit/runtime/c_abi/wrapper_checks.hpp"

namespace float8::testing::in_bf16 {
namespace {

constexpr int64_t kHeadDim = 64, kHeads = 4, kHeadsOfKeys = 2, kBatch = 2, kQueries = 7, kKeys = 9;
constexpr float8_attention_sizes kSizes{.batch = kBatch, .tokens_q = kQueries, .tokens_kv = kKeys};

// Heads first, or tokens first.
float8_heads heads(const Memory& of, int64_t tokens, int64_t count, bool tokens_first) {
  return {.data = of.get(),
          .batch_stride = tokens * count * kHeadDim,
          .head_stride = tokens_first ? kHeadDim : tokens * kHeadDim,
          .token_stride = tokens_first ? count * kHeadDim : kHeadDim};
}

double element(const float8_heads& of, int64_t b, int64_t h, int64_t t, int64_t c) {
  return f8::decode_bf16(static_cast<const uint16_t*>(
      of.data)[b * of.batch_stride + h * of.head_stride + t * of.token_stride + c]);
}

// A call's tensors, and their gradients.
struct Tensors {
  static constexpr int64_t kQ = kBatch * kQueries * kHeads * kHeadDim;
  static constexpr int64_t kKv = kBatch * kKeys * kHeadsOfKeys * kHeadDim;

  explicit Tensors(bool tokens_first) : first(tokens_first) {}
  bool first;
  Memory q_ = random_bf16(kQ, 1), k_ = random_bf16(kKv, 2), v_ = random_bf16(kKv, 3);
  Memory dout_ = random_bf16(kQ, 4);
  Memory o_ = memory(kQ * 2), lse_ = memory(kBatch * kHeads * kQueries * 4);
  Memory dq_ = memory(kQ * 2), dk_ = memory(kKv * 2), dv_ = memory(kKv * 2);
  Memory saved_, workspace_;

  float8_heads q = heads(q_, kQueries, kHeads, first), dout = heads(dout_, kQueries, kHeads, first);
  float8_heads k = heads(k_, kKeys, kHeadsOfKeys, first);
  float8_heads v = heads(v_, kKeys, kHeadsOfKeys, first);
  float8_heads dq = heads(dq_, kQueries, kHeads, first);
  float8_heads dk = heads(dk_, kKeys, kHeadsOfKeys, first);
  float8_heads dv = heads(dv_, kKeys, kHeadsOfKeys, first);
  float8_heads o = heads(o_, kQueries, kHeads, true);

  [[nodiscard]] float* lse() const { return static_cast<float*>(lse_.get()); }
  [[nodiscard]] std::string gradients() const {
    return bytes_of(dq_, kQ * 2) + bytes_of(dk_, kKv * 2) + bytes_of(dv_, kKv * 2);
  }
  // Buffers of a plan, for both passes.
  void allocate(const float8_attention* plan) {
    saved_ = memory(float8_attention_saved_bytes(plan, &kSizes));
    workspace_ = memory(std::max(float8_attention_workspace_bytes(plan, &kSizes),
                                 float8_attention_backward_workspace_bytes(plan, &kSizes)));
  }
  [[nodiscard]] float8_attention_forward_args forward() const {
    return {.sizes = kSizes,
            .q = q,
            .k = k,
            .v = v,
            .o = o_.get(),
            .lse = lse(),
            .saved = {saved_.get()},
            .workspace = {workspace_.get()}};
  }
  [[nodiscard]] float8_attention_backward_args backward() const {
    return {.sizes = kSizes,
            .dout = dout,
            .o = o_.get(),
            .lse = lse(),
            .saved = {saved_.get()},
            .workspace = {workspace_.get()},
            .dq = dq,
            .dk = dk,
            .dv = dv,
            .q = q,
            .k = k,
            .v = v};
  }
};

struct Case {
  const char* name;
  bool causal;
  int64_t window;
  bool tokens_first;
};

class AttentionInBf16 : public ::testing::TestWithParam<Case> {
 protected:
  float8_attention* plan(float8_attention_recipe recipe, bool packed = false) {
    float8_attention_desc desc{};
    desc.struct_size = sizeof desc;
    desc.heads_q = kHeads;
    desc.heads_kv = kHeadsOfKeys;
    desc.head_dim = kHeadDim;
    desc.scale = 0.2F;
    desc.causal = GetParam().causal ? 1 : 0;
    desc.window = GetParam().window;
    desc.dtype = FLOAT8_BF16;
    desc.packed = packed ? 1 : 0;
    desc.recipe = recipe;
    float8_attention* out = nullptr;
    EXPECT_EQ(float8_attention_plan(context_.get(), &desc, &out), FLOAT8_OK) << float8_last_error();
    return out;
  }
  [[nodiscard]] static bool has_key(int64_t query, int64_t key) {
    const auto& [name, causal, window, first] = GetParam();
    return !causal || (key <= query && (window == 0 || key > query - window));
  }

  float8::Context context_ = emulated();
};
INSTANTIATE_TEST_SUITE_P(Cases, AttentionInBf16,
                         ::testing::Values(Case{"full", false, 0, false},
                                           Case{"causal", true, 0, true},
                                           Case{"window", true, 3, false}),
                         [](const auto& of) { return of.param.name; });

// Sums in double of the elements of `t`.
class Exact {
 public:
  Exact(const Tensors& t, bool (*has_key)(int64_t, int64_t))
      : dq(Tensors::kQ), dk(Tensors::kKv), dv(Tensors::kKv) {
    for (int64_t b = 0; b < kBatch; ++b) {
      for (int64_t h = 0; h < kHeads; ++h) {
        for (int64_t i = 0; i < kQueries; ++i) query(t, has_key, b, h, i);
      }
    }
  }
  std::vector<double> o, lse;  // in the order of b, h, i, c
  std::vector<double> dq, dk, dv;

 private:
  void query(const Tensors& t, bool (*has_key)(int64_t, int64_t), int64_t b, int64_t h, int64_t i) {
    const int64_t g = h / (kHeads / kHeadsOfKeys);
    double p[kKeys] = {}, dp[kKeys] = {}, sum = 0, delta = 0;
    for (int64_t j = 0; j < kKeys; ++j) {
      if (!has_key(i, j)) continue;
      for (int64_t c = 0; c < kHeadDim; ++c) {
        p[j] += 0.2 * element(t.q, b, h, i, c) * element(t.k, b, g, j, c);
        dp[j] += element(t.dout, b, h, i, c) * element(t.v, b, g, j, c);
      }
      p[j] = std::exp(p[j]);
      sum += p[j];
    }
    lse.push_back(std::log(sum));
    for (int64_t j = 0; j < kKeys; ++j) {
      p[j] /= sum;
      delta += p[j] * dp[j];
    }
    for (int64_t c = 0; c < kHeadDim; ++c) {
      double value = 0;
      for (int64_t j = 0; j < kKeys; ++j) {
        value += p[j] * element(t.v, b, g, j, c);
        const double ds = 0.2 * p[j] * (dp[j] - delta);
        const auto at_q = static_cast<size_t>(((b * kHeads + h) * kQueries + i) * kHeadDim + c);
        const auto at_k = static_cast<size_t>(((b * kHeadsOfKeys + g) * kKeys + j) * kHeadDim + c);
        dq[at_q] += ds * element(t.k, b, g, j, c);
        dk[at_k] += ds * element(t.q, b, h, i, c);
        dv[at_k] += p[j] * element(t.dout, b, h, i, c);
      }
      o.push_back(value);
    }
  }
};

// `expected` is in the order of b, h, t, c.
void expect_near(const float8_heads& got, const std::vector<double>& expected, int64_t count,
                 int64_t tokens, const char* name) {
  size_t at = 0;
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t h = 0; h < count; ++h) {
      for (int64_t t = 0; t < tokens; ++t) {
        for (int64_t c = 0; c < kHeadDim; ++c, ++at) {
          ASSERT_NEAR(element(got, b, h, t, c), expected[at], 0.04 + 0.01 * std::abs(expected[at]))
              << name << " " << b << " " << h << " " << t << " " << c;
        }
      }
    }
  }
}

TEST_P(AttentionInBf16, IsExactArithmeticRounded) {
  float8_attention* attention = plan(FLOAT8_ATTENTION_BF16);
  ASSERT_NE(attention, nullptr);
  EXPECT_EQ(float8_attention_saved_bytes(attention, &kSizes), 0U);
  Tensors t(GetParam().tokens_first);
  t.allocate(attention);
  const float8_attention_forward_args forward = t.forward();
  ASSERT_EQ(float8_attention_forward(attention, &forward, nullptr), FLOAT8_OK)
      << float8_last_error();
  const float8_attention_backward_args backward = t.backward();
  ASSERT_EQ(float8_attention_backward(attention, &backward, nullptr), FLOAT8_OK)
      << float8_last_error();
  const Exact exact(t, has_key);
  for (size_t i = 0; i < exact.lse.size(); ++i) EXPECT_NEAR(t.lse()[i], exact.lse[i], 1e-4);
  expect_near(t.o, exact.o, kHeads, kQueries, "o");
  expect_near(t.dq, exact.dq, kHeads, kQueries, "dq");
  expect_near(t.dk, exact.dk, kHeadsOfKeys, kKeys, "dk");
  expect_near(t.dv, exact.dv, kHeadsOfKeys, kKeys, "dv");
  float8_attention_destroy(attention);
}

// The backward in bf16 of what dequantize gives, beside the forward's o and lse, has the same bits.
TEST_P(AttentionInBf16, DifferentiatesTheForwardInFp8) {
  float8_attention* attention = plan(FLOAT8_ATTENTION_FP8_FORWARD);
  float8_attention* in_bf16 = plan(FLOAT8_ATTENTION_BF16);
  Tensors t(GetParam().tokens_first);
  t.allocate(attention);
  const float8_attention_forward_args forward = t.forward();
  ASSERT_EQ(float8_attention_forward(attention, &forward, nullptr), FLOAT8_OK)
      << float8_last_error();
  float8_attention_backward_args backward = t.backward();
  backward.q = backward.k = backward.v = {};  // `saved` has them
  ASSERT_EQ(float8_attention_backward(attention, &backward, nullptr), FLOAT8_OK)
      << float8_last_error();
  const std::string gradients = t.gradients();

  Tensors multiplied(GetParam().tokens_first);
  const float8_attention_dequantize_args dequantize{.sizes = kSizes,
                                                    .saved = {t.saved_.get()},
                                                    .q = multiplied.q,
                                                    .k = multiplied.k,
                                                    .v = multiplied.v};
  ASSERT_EQ(float8_attention_dequantize(attention, &dequantize, nullptr), FLOAT8_OK);
  EXPECT_NE(bytes_of(multiplied.k_, Tensors::kKv * 2), bytes_of(t.k_, Tensors::kKv * 2));
  float8_attention_backward_args own = t.backward();
  own.q = multiplied.q;
  own.k = multiplied.k;
  own.v = multiplied.v;
  ASSERT_EQ(float8_attention_backward(in_bf16, &own, nullptr), FLOAT8_OK) << float8_last_error();
  EXPECT_EQ(t.gradients(), gradients);
  EXPECT_NE(gradients, Tensors(true).gradients());
  float8_attention_destroy(attention);
  float8_attention_destroy(in_bf16);
}

// With tokens first the sequences of a batch lie as those of a pack.
TEST_P(AttentionInBf16, APackHasTheBitsOfItsBatch) {
  float8_attention* of_batch = plan(FLOAT8_ATTENTION_BF16);
  float8_attention* of_pack = plan(FLOAT8_ATTENTION_BF16, true);
  Tensors batch(true), pack(true);
  batch.allocate(of_batch);
  const float8_attention_forward_args forward = batch.forward();
  const float8_attention_backward_args backward = batch.backward();
  ASSERT_EQ(float8_attention_forward(of_batch, &forward, nullptr), FLOAT8_OK);
  ASSERT_EQ(float8_attention_backward(of_batch, &backward, nullptr), FLOAT8_OK);

  const float8_attention_sizes sizes{
      .batch = kBatch, .tokens_q = kBatch * kQueries, .tokens_kv = kBatch * kKeys};
  const int32_t of_queries[] = {0, kQueries, 2 * kQueries}, of_keys[] = {0, kKeys, 2 * kKeys};
  EXPECT_EQ(float8_attention_saved_bytes(of_pack, &sizes), sizeof of_queries + sizeof of_keys);
  pack.saved_ = memory(float8_attention_saved_bytes(of_pack, &sizes));
  pack.workspace_ = memory(std::max(float8_attention_workspace_bytes(of_pack, &sizes),
                                    float8_attention_backward_workspace_bytes(of_pack, &sizes)));
  float8_sequence_error error{};
  float8_attention_forward_args own = pack.forward();
  own.sizes = sizes;
  own.cu_seqlens_q = of_queries;
  own.cu_seqlens_kv = of_keys;
  own.sequence_error = &error;
  ASSERT_EQ(float8_attention_forward(of_pack, &own, nullptr), FLOAT8_OK) << float8_last_error();
  float8_attention_backward_args own_backward = pack.backward();
  own_backward.sizes = sizes;
  ASSERT_EQ(float8_attention_backward(of_pack, &own_backward, nullptr), FLOAT8_OK)
      << float8_last_error();
  EXPECT_EQ(bytes_of(pack.o_, Tensors::kQ * 2), bytes_of(batch.o_, Tensors::kQ * 2));
  EXPECT_EQ(pack.gradients(), batch.gradients());
  EXPECT_EQ(error.code, FLOAT8_NO_SEQUENCE_ERROR);
  for (int64_t b = 0; b < kBatch; ++b) {
    for (int64_t h = 0; h < kHeads; ++h) {
      const float* of_head = pack.lse() + h * kBatch * kQueries + b * kQueries;
      EXPECT_TRUE(
          std::equal(of_head, of_head + kQueries, batch.lse() + (b * kHeads + h) * kQueries));
    }
  }
  float8_attention_destroy(of_batch);
  float8_attention_destroy(of_pack);
}

TEST_P(AttentionInBf16, RefusesCalls) {
  float8_attention* attention = plan(FLOAT8_ATTENTION_BF16);
  Tensors t(GetParam().tokens_first);
  t.allocate(attention);
  const auto refuses = [&](const auto& change, std::string_view words) {
    float8_attention_backward_args args = t.backward();
    change(args);
    EXPECT_EQ(float8_attention_backward(attention, &args, nullptr), FLOAT8_INVALID_ARGUMENT);
    EXPECT_TRUE(says(words)) << float8_last_error();
  };
  refuses([](auto& a) { a.q = {}; }, "backward_args.q is NULL");
  refuses([](auto& a) { a.v.token_stride = 4; }, "v.token_stride is 4");
  refuses([](auto& a) { a.dk.data = a.k.data; }, "overlap");
  refuses([](auto& a) { a.lse = nullptr; }, "lse is NULL");
  float8_attention_backward_args older = t.backward();
  older.struct_size = offsetof(float8_attention_backward_args, q);
  EXPECT_EQ(float8_attention_backward(attention, &older, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("q is NULL")) << float8_last_error();
  float8_attention_forward_args packed = t.forward();
  const int32_t offsets[] = {0, 1, 2};
  packed.cu_seqlens_q = offsets;
  EXPECT_EQ(float8_attention_forward(attention, &packed, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("cu_seqlens_q is given to attention that is not packed"));
  const float8_attention_dequantize_args dequantize{.sizes = kSizes};
  EXPECT_EQ(float8_attention_dequantize(attention, &dequantize, nullptr), FLOAT8_INVALID_ARGUMENT);
  EXPECT_TRUE(says("recipe bf16, which has no copies"));
  float8_attention_destroy(attention);
}

// There may be one on this machine.
TEST(CudnnVersion, IsThatOfTheLibraryOrWhyThereIsNone) {
  int32_t version = 1;
  if (float8_cudnn_version(&version) == FLOAT8_OK) {
    EXPECT_GE(version, 90501);
  } else {
    EXPECT_EQ(version, 0);
    EXPECT_TRUE(says("cuDNN")) << float8_last_error();
  }
  EXPECT_EQ(float8_cudnn_version(nullptr), FLOAT8_INVALID_ARGUMENT);
}

}  // namespace
}  // namespace float8::testing::in_bf16
