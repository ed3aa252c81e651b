// Attention in fp8 from bf16 operands: the casts next to what they are of, and o and lse next to attention in fp64
// of the values that the forward multiplied, so that what differs is the rounding of P. By heads, tokens, mask and
// strides.
#include "runtime/attention/attention.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "recipes/dtype.hpp"
#include "tests/gpu/attention/elements.hpp"
#include "tests/gpu/gpu_test.hpp"

namespace f8::runtime::gpu {
namespace {

constexpr int64_t kBlockOfTokens = 128;

struct AttentionCase {
  int64_t batch, heads_q, heads_kv, queries, keys;
  bool causal;
  int64_t window = 0;
  int64_t d = 128;
};

class AttentionTest : public GpuTestWith<AttentionCase> {
 protected:
  static constexpr float kMeanOfKeys = 5;

  [[nodiscard]] static int64_t rows_q() { return GetParam().batch * GetParam().heads_q; }
  [[nodiscard]] static Elements operand(bool is_query, unsigned seed, float mean = 0) {
    const AttentionCase& of = GetParam();
    return {of.batch,
            is_query ? of.heads_q : of.heads_kv,
            is_query ? of.queries : of.keys,
            8,
            seed,
            mean,
            of.d};
  }

  struct Output {
    std::vector<uint16_t> o;
    std::vector<float> lse, inv_scales;
    std::vector<uint8_t> saved;
    Elements q = operand(true, 0), k = operand(false, 0), v = operand(false, 0);  // dequantised
  };
  void run(Output& out) { run(out, GetParam().window); }
  void run(Output& out, int64_t window) {
    const AttentionCase& of = GetParam();
    const auto plan = Attention::plan(context_, {.heads_q = of.heads_q,
                                                 .heads_kv = of.heads_kv,
                                                 .head_dim = of.d,
                                                 .causal = of.causal,
                                                 .window = window});
    F8_ASSERT_OK(plan);
    const AttentionSizes sizes{of.batch, of.queries, of.keys};
    const DeviceBuffer data[] = {{context(), q.bits}, {context(), k.bits}, {context(), v.bits}};
    const auto elements = static_cast<size_t>(rows_q() * of.queries * of.d);
    const DeviceBuffer o(context(), elements * 2),
        lse(context(), elements / static_cast<size_t>(of.d) * 4);
    const DeviceBuffer saved(context(), (*plan)->saved_bytes(sizes));
    const DeviceBuffer workspace(context(), (*plan)->workspace_bytes(sizes));
    F8_ASSERT_OK((*plan)->forward({.sizes = sizes,
                                   .q = q.on(data[0]),
                                   .k = k.on(data[1]),
                                   .v = v.on(data[2]),
                                   .o = o.as(),
                                   .lse = lse.as<float>(),
                                   .saved = {saved.as()},
                                   .workspace = {workspace.as()}},
                                  nullptr));
    const DeviceBuffer back[] = {
        {context(), out.q.bits}, {context(), out.k.bits}, {context(), out.v.bits}};
    F8_ASSERT_OK((*plan)->dequantize({.sizes = sizes,
                                      .saved = {saved.as()},
                                      .q = out.q.on(back[0]),
                                      .k = out.k.on(back[1]),
                                      .v = out.v.on(back[2])},
                                     nullptr));
    out.q.bits = back[0].download<uint16_t>();
    out.k.bits = back[1].download<uint16_t>();
    out.v.bits = back[2].download<uint16_t>();
    out.o = o.download<uint16_t>();
    out.lse = lse.download<float>();
    out.saved = saved.download<uint8_t>();
  }

  // o and lse of a query of a head, in fp64.
  static void exact(const Output& of, int64_t row, int64_t query, std::vector<double>& o,
                    double& lse) {
    const AttentionCase& c = GetParam();
    const int64_t kv = row / (c.heads_q / c.heads_kv);
    const int64_t first = c.window > 0 ? std::max<int64_t>(query + 1 - c.window, 0) : 0;
    const int64_t end = c.causal ? std::min(query + 1, c.keys) : c.keys;
    std::vector<double> p(static_cast<size_t>(end));
    double sum = 0;
    for (int64_t j = first; j < end; ++j) {
      double dot = 0;
      for (int64_t i = 0; i < c.d; ++i) dot += of.q.value(row, query, i) * of.k.value(kv, j, i);
      sum += p[static_cast<size_t>(j)] = std::exp(dot / std::sqrt(static_cast<double>(c.d)));
    }
    lse = std::log(sum);
    o.assign(static_cast<size_t>(c.d), 0);
    for (int64_t j = first; j < end; ++j) {
      for (int64_t i = 0; i < c.d; ++i) {
        o[static_cast<size_t>(i)] += p[static_cast<size_t>(j)] / sum * of.v.value(kv, j, i);
      }
    }
  }

  // Checks a copy: each block of a head has the largest scale that fits it, and its elements are the nearest ones.
  static void expect_cast(const Elements& x, const Elements& y, bool centered) {
    for (int64_t row = 0; row < x.batch * x.heads; ++row) {
      std::vector<double> mean(static_cast<size_t>(x.d));
      for (int64_t c = 0; c < x.d && centered; ++c) {
        double& of_column = mean[static_cast<size_t>(c)];
        for (int64_t t = 0; t < x.tokens; ++t) of_column += x.value(row, t, c);
        of_column /= static_cast<double>(x.tokens);
      }
      for (int64_t first = 0; first < x.tokens; first += kBlockOfTokens) {
        const int64_t end = std::min(first + kBlockOfTokens, x.tokens);
        double amax = 0;
        for (int64_t t = first; t < end; ++t) {
          for (int64_t c = 0; c < x.d; ++c) {
            amax = std::max(amax, std::abs(x.value(row, t, c) - mean[static_cast<size_t>(c)]));
          }
        }
        const double inverse = amax == 0 ? 1 : std::exp2(std::ceil(std::log2(amax / 448)));
        for (int64_t t = first; t < end; ++t) {
          for (int64_t c = 0; c < x.d; ++c) {
            const double exact = x.value(row, t, c) - mean[static_cast<size_t>(c)];
            const double actual = y.value(row, t, c);
            const double step =
                std::exp2(std::max(std::floor(std::log2(std::abs(exact / inverse))), -6.0) - 3);
            // A mean in fp32 differs from that in fp64 by little.
            ASSERT_LE(std::abs(actual - exact), (0.5 * step + (centered ? 1e-3 : 0)) * inverse);
            if (!centered) {
              ASSERT_EQ(actual, inverse * decode_fp8(encode_fp8(static_cast<float>(exact / inverse),
                                                                Dtype::kE4m3),
                                                     Dtype::kE4m3));
            }
          }
        }
      }
    }
  }

  Elements q = operand(true, 1), k = operand(false, 2, kMeanOfKeys), v = operand(false, 3);
};

INSTANTIATE_TEST_SUITE_P(
    Shapes, AttentionTest,
    testing::Values(
        AttentionCase{1, 1, 1, 128, 128, true}, AttentionCase{1, 1, 1, 1, 1, false},
        AttentionCase{2, 2, 1, 300, 300, true}, AttentionCase{1, 3, 3, 129, 257, false},
        AttentionCase{1, 2, 2, 257, 130, true},
        AttentionCase{2, 4, 2, by_device<int64_t>(1152, 200), 127, false},
        AttentionCase{1, 8, 1, by_device<int64_t>(1025, 140), by_device<int64_t>(1025, 140), true},
        AttentionCase{1, 2, 1, 257, 257, true, 1}, AttentionCase{1, 2, 1, 257, 257, true, 100},
        AttentionCase{2, 2, 1, 270, 270, true, 128}, AttentionCase{1, 2, 2, 300, 300, true, 129},
        AttentionCase{1, 1, 1, 200, 200, true, 1000}, AttentionCase{1, 1, 1, 300, 150, true, 151},
        AttentionCase{1, 1, 1, 130, 300, true, 40},
        AttentionCase{1, 8, 1, by_device<int64_t>(2049, 140), by_device<int64_t>(2049, 140), true,
                      by_device<int64_t>(1000, 70)},
        AttentionCase{2, 2, 1, 300, 300, true, 0, 64},
        AttentionCase{1, 3, 3, 129, 257, false, 0, 64},
        AttentionCase{1, 2, 2, 300, 300, true, 129, 64},
        AttentionCase{2, 8, 2, by_device<int64_t>(2049, 140), by_device<int64_t>(2049, 140), true,
                      0, 64},
        AttentionCase{2, 2, 1, 300, 300, true, 0, 256},
        AttentionCase{1, 3, 3, 129, 257, false, 0, 256},
        AttentionCase{1, 2, 2, 300, 300, true, 129, 256},
        AttentionCase{2, 8, 2, by_device<int64_t>(2049, 140), by_device<int64_t>(2049, 140), true,
                      0, 256}),
    [](const auto& test) {
      const AttentionCase& c = test.param;
      const std::string mask = c.window > 0 ? f8::format("window{}", c.window)
                               : c.causal   ? "causal"
                                            : "full";
      return f8::format("b{}h{}g{}d{}q{}k{}_{}", c.batch, c.heads_q, c.heads_kv, c.d, c.queries,
                        c.keys, mask);
    });

TEST_P(AttentionTest, IsAttentionOfTheRoundedOperands) {
  Output actual;
  run(actual);
  const AttentionCase& c = GetParam();
  std::vector<double> o;
  double noise = 0, signal = 0;
  for (int64_t row = 0; row < rows_q(); ++row) {
    for (int64_t query = 0; query < c.queries; query += query + 9 < c.queries ? 7 : 1) {
      double lse = 0;
      exact(actual, row, query, o, lse);
      EXPECT_NEAR(actual.lse[static_cast<size_t>(row * c.queries + query)], lse, 2e-3);
      const int64_t line = (row / c.heads_q * c.queries + query) * c.heads_q + row % c.heads_q;
      for (int64_t i = 0; i < c.d; ++i) {
        const double x = o[static_cast<size_t>(i)];
        const double y = decode_bf16(actual.o[static_cast<size_t>(line * c.d + i)]);
        noise += (x - y) * (x - y);
        signal += x * x;
      }
    }
  }
  EXPECT_GT(10 * std::log10(signal / noise), 31) << "dB";
}

TEST_P(AttentionTest, CastsBlocksOfAHead) {
  Output actual;
  run(actual);
  expect_cast(q, actual.q, false);
  expect_cast(k, actual.k, true);
  expect_cast(v, actual.v, false);
}

TEST_P(AttentionTest, WritesNothingBetweenHeads) {
  Output actual;
  const std::vector<uint16_t> before = actual.q.bits;
  run(actual);
  for (size_t i = 0; i < before.size(); ++i) {
    const auto stride = static_cast<size_t>(actual.q.token_stride());
    if (i % stride >= stride - static_cast<size_t>(actual.q.gap)) {
      ASSERT_EQ(actual.q.bits[i], before[i]);
    }
  }
}

TEST_P(AttentionTest, HasTheSameBitsTwice) {
  Output first, second;
  run(first);
  run(second);
  EXPECT_EQ(first.o, second.o);
  EXPECT_EQ(first.lse, second.lse);
  EXPECT_EQ(first.saved, second.saved);
}

TEST_P(AttentionTest, AWindowOfAllQueriesIsTheCausalMask) {
  if (!GetParam().causal) GTEST_SKIP() << "a window is causal";
  Output causal, window;
  run(causal, 0);
  run(window, GetParam().queries);
  EXPECT_EQ(causal.o, window.o);
  EXPECT_EQ(causal.lse, window.lse);
}

TEST_P(AttentionTest, ANanIsThatHeadsAlone) {
  const AttentionCase& c = GetParam();
  for (Elements* operand : {&k, &v}) {
    Output clean, dirty;
    run(clean);
    const uint16_t kept = operand->bits[5];
    operand->bits[5] = 0x7FC0;  // the first head of the first sequence
    run(dirty);
    operand->bits[5] = kept;
    const int64_t poisoned = c.heads_q / c.heads_kv;
    EXPECT_TRUE(std::isnan(decode_bf16(dirty.o[5])));
    for (int64_t row = poisoned; row < rows_q(); ++row) {
      for (int64_t query = 0; query < c.queries; ++query) {
        const auto line = static_cast<ptrdiff_t>(
            ((row / c.heads_q * c.queries + query) * c.heads_q + row % c.heads_q) * c.d);
        EXPECT_TRUE(std::equal(clean.o.begin() + line, clean.o.begin() + line + c.d,
                               dirty.o.begin() + line));
      }
    }
  }
}

class AttentionMisuse : public GpuTest {
 protected:
  static constexpr int64_t kHead = 128;
};

TEST_F(AttentionMisuse, OfAWindowWithoutKeysIsRefused) {
  const auto plan = Attention::plan(context_, {.causal = true, .window = 4});
  F8_ASSERT_OK(plan);
  EXPECT_TRUE((*plan)->check({1, 6, 3}));
  const Status status = (*plan)->check({1, 7, 3});
  ASSERT_FALSE(status.has_value());
  EXPECT_NE(status.error().message.find("window of 4"), std::string::npos)
      << status.error().message;
}

TEST_F(AttentionMisuse, IsRefused) {
  const auto refuses = [&](AttentionDesc desc, std::string_view word) {
    const auto made = Attention::plan(context_, desc);
    ASSERT_FALSE(made.has_value());
    EXPECT_NE(made.error().message.find(word), std::string::npos) << made.error().message;
  };
  refuses({.head_dim = 96}, "heads of 96");
  refuses({.heads_q = 3, .heads_kv = 2}, "3 heads of queries");
  refuses({.heads_q = 0}, "0 heads of queries");
  refuses({.causal = true, .window = -1}, "window is -1");
  refuses({.window = 64}, "window is 64");
  refuses({.scale = -1}, "scale");
  refuses({.scale = std::numeric_limits<float>::infinity()}, "scale");
}

TEST_F(AttentionMisuse, OfACallIsRefused) {
  const auto plan = Attention::plan(context_, {});
  F8_ASSERT_OK(plan);
  const AttentionSizes sizes{1, 2, 2};
  const std::vector<uint16_t> elements(4 * kHead);
  const DeviceBuffer q(context(), elements), k(context(), elements), v(context(), elements);
  const DeviceBuffer o(context(), elements), lse(context(), size_t{64});
  const DeviceBuffer saved(context(), (*plan)->saved_bytes(sizes));
  const DeviceBuffer workspace(context(), (*plan)->workspace_bytes(sizes));
  const auto heads = [](const DeviceBuffer& buffer) {
    return float8_heads{.data = buffer.as(), .batch_stride = 2 * kHead, .token_stride = kHead};
  };
  const float8_attention_forward_args good{.sizes = sizes,
                                           .q = heads(q),
                                           .k = heads(k),
                                           .v = heads(v),
                                           .o = o.as(),
                                           .lse = lse.as<float>(),
                                           .saved = {saved.as()},
                                           .workspace = {workspace.as()}};
  F8_ASSERT_OK((*plan)->forward(good, nullptr));
  const auto refuses = [&](const auto& change, std::string_view word) {
    float8_attention_forward_args args = good;
    change(args);
    const Status status = (*plan)->forward(args, nullptr);
    ASSERT_FALSE(status.has_value()) << word;
    EXPECT_NE(status.error().message.find(word), std::string::npos) << status.error().message;
  };
  refuses([](auto& args) { args.sizes.tokens_kv = 0; }, "0 keys");
  refuses([](auto& args) { args.sizes.tokens_q = -1; }, "-1 queries");
  refuses([](auto& args) { args.sizes.tokens_q = int64_t{1} << 31; }, "2^31");
  refuses([](auto& args) { args.q.data = nullptr; }, "q is NULL");
  refuses([](auto& args) { args.k.token_stride = 4; }, "k.token_stride is 4");
  refuses([](auto& args) { args.v.head_stride = -8; }, "v.head_stride is -8");
  refuses([](auto& args) { args.q.data = static_cast<char*>(args.q.data) + 2; }, "aligned");
  refuses([](auto& args) { args.o = args.v.data; }, "overlap");
  refuses([](auto& args) { args.lse = nullptr; }, "lse is NULL");
  refuses([](auto& args) { args.saved = {}; }, "saved.data is NULL");
  refuses([](auto& args) { args.workspace = {}; }, "workspace.data is NULL");
  float8_attention_forward_args nothing{};
  nothing.sizes.tokens_kv = 1;
  F8_ASSERT_OK((*plan)->forward(nothing, nullptr));
}

}  // namespace
}  // namespace f8::runtime::gpu
