// The fp8 forward of attention next to attention in fp64 of the same rounded operands: what differs is the
// rounding of P. By heads, tokens and mask.
#include "runtime/attention/forward.hpp"

#include <cmath>
#include <random>

#include "codegen/kernels/attention/attention_args.cuh"
#include "recipes/dtype.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

constexpr int64_t kD = 128, kTile = 128;

struct AttentionCase {
  int64_t batch, heads_q, heads_kv, tokens;
  bool causal;
};

// An operand [heads][tokens][d] of normal numbers, in e4m3 with a scale for each 128 tokens.
struct Operand {
  Operand(int64_t heads, int64_t tokens, unsigned seed, bool transposed)
      : data(static_cast<size_t>(heads * tokens * kD)),
        inv_scale(static_cast<size_t>(heads * tokens / kTile)),
        values(data.size()) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (int64_t head = 0; head < heads; ++head) {
      for (int64_t token = 0; token < tokens; ++token) {
        float& inverse = inv_scale[static_cast<size_t>((head * tokens + token) / kTile)];
        if (token % kTile == 0) inverse = std::ldexp(1.0F, static_cast<int>(random() % 3) - 7);
        for (int64_t c = 0; c < kD; ++c) {
          const int64_t at = (head * tokens + token) * kD + c;
          const auto in_tile = static_cast<int32_t>(token % kTile);
          const int64_t place =
              (head * kD + c) * tokens + token - in_tile + kernels::fragment_place(in_tile);
          const uint8_t byte = encode_fp8(normal(random) / inverse, Dtype::kE4m3);
          data[static_cast<size_t>(transposed ? place : at)] = byte;
          values[static_cast<size_t>(at)] = decode_fp8(byte, Dtype::kE4m3) * inverse;
        }
      }
    }
  }

  std::vector<uint8_t> data;
  std::vector<float> inv_scale;
  std::vector<float> values;
};

class AttentionTest : public GpuTestWith<AttentionCase> {
 protected:
  AttentionTest()
      : q(heads_q(), GetParam().tokens, 1, false),
        k(heads_kv(), GetParam().tokens, 2, false),
        v(heads_kv(), GetParam().tokens, 3, true) {}

  [[nodiscard]] static int64_t heads_q() { return GetParam().batch * GetParam().heads_q; }
  [[nodiscard]] static int64_t heads_kv() { return GetParam().batch * GetParam().heads_kv; }
  [[nodiscard]] static AttentionDesc describe() {
    return {.heads_q = GetParam().heads_q,
            .heads_kv = GetParam().heads_kv,
            .causal = GetParam().causal};
  }

  struct Output {
    std::vector<uint16_t> o;
    std::vector<float> lse;
  };
  void run(Output& out) {
    const auto forward = AttentionForward::create(context_, describe());
    F8_ASSERT_OK(forward);
    const DeviceBuffer data[] = {{context(), q.data}, {context(), k.data}, {context(), v.data}};
    const DeviceBuffer scales[] = {
        {context(), q.inv_scale}, {context(), k.inv_scale}, {context(), v.inv_scale}};
    const DeviceBuffer o(context(), q.values.size() * 2);
    const DeviceBuffer lse(context(), q.values.size() / kD * 4);
    F8_ASSERT_OK(forward->run({.batch = GetParam().batch,
                               .tokens = GetParam().tokens,
                               .q = data[0].as(),
                               .k = data[1].as(),
                               .v_t = data[2].as(),
                               .inv_scale_q = scales[0].as<float>(),
                               .inv_scale_k = scales[1].as<float>(),
                               .inv_scale_v = scales[2].as<float>(),
                               .o = o.as(),
                               .lse = lse.as<float>()},
                              nullptr));
    out = {o.download<uint16_t>(), lse.download<float>()};
  }

  // O and LSE of a row of a head, in fp64.
  void exact(int64_t head, int64_t row, std::vector<double>& o, double& lse) const {
    const auto& [batch, heads, groups, tokens, causal] = GetParam();
    const int64_t kv = head / (heads / groups), count = causal ? row + 1 : tokens;
    std::vector<double> scores(static_cast<size_t>(count));
    double sum = 0;
    for (int64_t j = 0; j < count; ++j) {
      double dot = 0;
      for (int64_t c = 0; c < kD; ++c) {
        dot += double{q.values[static_cast<size_t>((head * tokens + row) * kD + c)]} *
               k.values[static_cast<size_t>((kv * tokens + j) * kD + c)];
      }
      scores[static_cast<size_t>(j)] = std::exp(dot / std::sqrt(double{kD}));
      sum += scores[static_cast<size_t>(j)];
    }
    lse = std::log(sum);
    o.assign(kD, 0);
    for (int64_t j = 0; j < count; ++j) {
      const double share = scores[static_cast<size_t>(j)] / sum;
      for (int64_t c = 0; c < kD; ++c) {
        o[static_cast<size_t>(c)] +=
            share * v.values[static_cast<size_t>((kv * tokens + j) * kD + c)];
      }
    }
  }

  Operand q, k, v;
};

INSTANTIATE_TEST_SUITE_P(
    Shapes, AttentionTest,
    testing::Values(AttentionCase{1, 1, 1, 128, true}, AttentionCase{1, 1, 1, 128, false},
                    AttentionCase{2, 2, 1, 384, true}, AttentionCase{1, 3, 3, 256, false},
                    AttentionCase{1, 4, 2, by_device<int64_t>(1152, 256), true},
                    AttentionCase{1, 8, 1, by_device<int64_t>(1024, 128), false}),
    [](const auto& test) {
      const AttentionCase& c = test.param;
      return f8::format("b{}h{}g{}s{}_{}", c.batch, c.heads_q, c.heads_kv, c.tokens,
                        c.causal ? "causal" : "full");
    });

TEST_P(AttentionTest, IsAttentionOfTheRoundedOperands) {
  Output actual;
  run(actual);
  const auto& [batch, heads, groups, tokens, causal] = GetParam();
  std::vector<double> o;
  double noise = 0, signal = 0;
  for (int64_t head = 0; head < heads_q(); ++head) {
    for (int64_t row = 0; row < tokens; row += 7) {
      double lse = 0;
      exact(head, row, o, lse);
      EXPECT_NEAR(actual.lse[static_cast<size_t>(head * tokens + row)], lse, 2e-3);
      const int64_t line = (head / heads * tokens + row) * heads + head % heads;
      for (int64_t c = 0; c < kD; ++c) {
        const double x = o[static_cast<size_t>(c)];
        const double y = decode_bf16(actual.o[static_cast<size_t>(line * kD + c)]);
        noise += (x - y) * (x - y);
        signal += x * x;
      }
    }
  }
  EXPECT_GT(10 * std::log10(signal / noise), 31) << "dB";
}

TEST_P(AttentionTest, HasTheSameBitsTwice) {
  Output first, second;
  run(first);
  run(second);
  EXPECT_EQ(first.o, second.o);
  EXPECT_EQ(first.lse, second.lse);
}

TEST_P(AttentionTest, ANanOfAHeadIsThatHeadsAlone) {
  if (GetParam().heads_kv == 1) GTEST_SKIP() << "all heads read the same keys";
  Output clean, dirty;
  run(clean);
  k.data[5 * kD] = 0x7F;  // NaN in the first head of keys
  run(dirty);
  const auto& [batch, heads, groups, tokens, causal] = GetParam();
  for (int64_t head = heads / groups; head < heads_q(); ++head) {
    for (int64_t row = 0; row < tokens; ++row) {
      const auto line =
          static_cast<size_t>((head / heads * tokens + row) * heads + head % heads) * kD;
      EXPECT_TRUE(std::equal(clean.o.begin() + static_cast<ptrdiff_t>(line),
                             clean.o.begin() + static_cast<ptrdiff_t>(line + kD),
                             dirty.o.begin() + static_cast<ptrdiff_t>(line)));
    }
  }
}

class AttentionMisuse : public GpuTest {};

TEST_F(AttentionMisuse, IsRefused) {
  const auto refuses = [&](AttentionDesc desc, std::string_view word) {
    const auto made = AttentionForward::create(context_, desc);
    ASSERT_FALSE(made.has_value());
    EXPECT_NE(made.error().message.find(word), std::string::npos) << made.error().message;
  };
  refuses({.head_dim = 64}, "heads of 64");
  refuses({.heads_q = 3, .heads_kv = 2}, "3 heads of queries");
  refuses({.scale = -1}, "scale");
  const auto forward = AttentionForward::create(context_, {});
  F8_ASSERT_OK(forward);
  EXPECT_TRUE(forward->run({.tokens = 0}, nullptr).has_value());
  const Status status = forward->run({.tokens = 100}, nullptr);
  ASSERT_FALSE(status.has_value());
  EXPECT_NE(status.error().message.find("multiple of 128"), std::string::npos);
}

}  // namespace
}  // namespace f8::runtime::gpu
