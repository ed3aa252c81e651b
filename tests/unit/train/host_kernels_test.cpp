// The kernels' counterparts on the host are compared with the formula in double (forward) and with
// that formula's finite differences (gradients). As bf16 a value loses 2^-9 of itself.
#include "examples/train/device/host_kernels.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <random>
#include <set>
#include <vector>

#include "examples/train/device/bf16.hpp"

namespace train {
namespace {

constexpr double kBf16 = 0x1p-8;

std::vector<u16> random_bf16(size_t count, double deviation, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal(0.0F, static_cast<float>(deviation));
  std::vector<u16> values(count);
  for (u16& value : values) value = encode_bf16(normal(generator));
  return values;
}

std::vector<double> to_double(const std::vector<u16>& values) {
  std::vector<double> out;
  for (const u16 value : values) out.push_back(double{decode_bf16(value)});
  return out;
}

// Gives the derivative of f in its argument's component i.
double slope(const std::function<double(const std::vector<double>&)>& f, std::vector<double> x,
             size_t i) {
  const double step = 1e-5;
  x[i] += step;
  const double above = f(x);
  x[i] -= 2 * step;
  return (above - f(x)) / (2 * step);
}

void expect_near(double expected, double actual, double tolerance, size_t i) {
  EXPECT_NEAR(expected, actual, tolerance * std::max(1.0, std::abs(expected))) << "element " << i;
}

double gelu(double u) {
  return 0.5 * u * (1 + std::tanh(std::sqrt(2 / M_PI) * (u + 0.044715 * u * u * u)));
}

TEST(HostKernels, GeluAndItsGradient) {
  auto u = random_bf16(512, 2, 1);
  for (const float edge : {0.0F, -0.0F, 30.0F, -30.0F, 1e30F, -1e30F})
    u.push_back(encode_bf16(edge));
  u.resize(520);
  const auto da = random_bf16(u.size(), 1, 2);
  std::vector<u16> a(u.size());
  std::vector<u16> du = da;  // in place, as the trainer has it
  const auto count = static_cast<i64>(u.size());
  host::run(GeluArgs{u.data(), a.data(), count});
  host::run(GeluGradArgs{u.data(), du.data(), du.data(), count});
  for (size_t i = 0; i < u.size(); ++i) {
    const double x = double{decode_bf16(u[i])};
    expect_near(gelu(x), double{decode_bf16(a[i])}, kBf16, i);
    if (std::abs(x) > 100) continue;  // differences of large numbers
    const double expected = slope([](const std::vector<double>& v) { return gelu(v[0]); }, {x}, 0) *
                            double{decode_bf16(da[i])};
    expect_near(expected, double{decode_bf16(du[i])}, kBf16, i);
  }
}

struct NormCase {
  static constexpr i32 kTokens = 16;
  static constexpr i32 kWidth = 64;
  static constexpr i32 kBlocks = 3;
  std::vector<u16> h = random_bf16(kTokens * kWidth, 2, 3);
  std::vector<u16> y = random_bf16(kTokens * kWidth, 1, 4);
  std::vector<float> gain = std::vector<float>(kWidth);
  std::vector<u16> sum = std::vector<u16>(h.size());
  std::vector<u16> n = std::vector<u16>(h.size());
  std::vector<float> inv_rms = std::vector<float>(kTokens);

  NormCase() {
    for (size_t c = 0; c < gain.size(); ++c) gain[c] = 0.5F + 0.02F * static_cast<float>(c);
  }
  void run(bool with_y) {
    host::run(NormArgs{h.data(), with_y ? y.data() : nullptr, with_y ? sum.data() : nullptr,
                       gain.data(), n.data(), inv_rms.data(), kTokens, kWidth});
  }
  // Gives element c of one row's norm, with the gain.
  static double normed(const std::vector<double>& row, const std::vector<double>& gains, size_t c) {
    double squares = 0;
    for (const double x : row) squares += x * x;
    return row[c] / std::sqrt(squares / kWidth + double{kNormEpsilon}) * gains[c];
  }
};

std::vector<double> row_of(const std::vector<u16>& matrix, size_t row) {
  const auto first = matrix.begin() + static_cast<std::ptrdiff_t>(row * NormCase::kWidth);
  return to_double({first, first + NormCase::kWidth});
}

TEST(HostKernels, NormAddsTheResidualFirst) {
  NormCase c;
  c.run(true);
  const std::vector<double> gains(c.gain.begin(), c.gain.end());
  for (size_t t = 0; t < NormCase::kTokens; ++t) {
    const auto row = row_of(c.sum, t);
    for (size_t i = 0; i < NormCase::kWidth; ++i) {
      const size_t at = t * NormCase::kWidth + i;
      expect_near(double{decode_bf16(c.h[at])} + double{decode_bf16(c.y[at])}, row[i], kBf16, at);
      expect_near(NormCase::normed(row, gains, i), double{decode_bf16(c.n[at])}, kBf16, at);
    }
  }
}

TEST(HostKernels, NormOfZeroIsZero) {
  NormCase c;
  std::fill(c.h.begin(), c.h.end(), u16{0});
  c.run(false);
  for (const u16 value : c.n) ASSERT_EQ(value, 0);
}

TEST(HostKernels, NormGradient) {
  NormCase c;
  c.run(false);
  const auto dn = random_bf16(c.h.size(), 1, 5);
  const auto residual = random_bf16(c.h.size(), 1, 6);
  std::vector<float> partials(NormCase::kBlocks * NormCase::kWidth);
  std::vector<float> d_gain(NormCase::kWidth);
  std::vector<u16> dh = residual;  // in place
  host::run(NormGradArgs{dn.data(), c.h.data(), c.gain.data(), c.inv_rms.data(), dh.data(),
                         dh.data(), partials.data(), NormCase::kBlocks, NormCase::kTokens,
                         NormCase::kWidth});
  host::run(SumRowsArgs{partials.data(), d_gain.data(), NormCase::kBlocks, NormCase::kWidth});

  const std::vector<double> gains(c.gain.begin(), c.gain.end());
  std::vector<double> expected_gain(NormCase::kWidth);
  for (size_t t = 0; t < NormCase::kTokens; ++t) {
    const auto row = row_of(c.h, t);
    const auto d = row_of(dn, t);
    const auto loss = [&](const std::vector<double>& x) {
      double sum = 0;
      for (size_t i = 0; i < x.size(); ++i) sum += NormCase::normed(x, gains, i) * d[i];
      return sum;
    };
    for (size_t i = 0; i < NormCase::kWidth; ++i) {
      const size_t at = t * NormCase::kWidth + i;
      const double expected = slope(loss, row, i) + double{decode_bf16(residual[at])};
      expect_near(expected, double{decode_bf16(dh[at])}, kBf16, at);
      expected_gain[i] += NormCase::normed(row, gains, i) / gains[i] * d[i];
    }
  }
  for (size_t i = 0; i < d_gain.size(); ++i) {
    expect_near(expected_gain[i], double{d_gain[i]}, 1e-5, i);
  }
}

TEST(HostKernels, CrossEntropyAndItsGradient) {
  constexpr i32 kTokens = 16;
  const auto logits = random_bf16(kTokens * kBytes, 3, 7);
  std::vector<u8> targets;
  for (i32 t = 0; t < kTokens; ++t) targets.push_back(static_cast<u8>(t * 17));
  std::vector<u16> dlogits(logits.size());
  std::vector<float> losses(kTokens);
  host::run(LossArgs{logits.data(), targets.data(), dlogits.data(), losses.data(), kTokens});
  for (size_t t = 0; t < kTokens; ++t) {
    const auto first = logits.begin() + static_cast<std::ptrdiff_t>(t * kBytes);
    const auto row = to_double({first, first + kBytes});
    const auto loss = [&](const std::vector<double>& x) {
      double sum = 0;
      for (const double logit : x) sum += std::exp(logit);
      return std::log(sum) - x[targets[t]];
    };
    expect_near(loss(row), double{losses[t]}, 1e-5, t);
    for (size_t i = 0; i < kBytes; ++i) {
      const double actual = double{decode_bf16(dlogits[t * kBytes + i])} * kTokens;
      EXPECT_NEAR(slope(loss, row, i), actual, kBf16 * std::abs(actual) + 1e-7);
    }
  }
}

// Embedding is linear in its table, so its gradient is its transpose.
TEST(HostKernels, EmbeddingsGradientIsItsTranspose) {
  constexpr i32 kTokens = 32;
  constexpr i32 kContext = 4;
  constexpr i32 kWidth = 64;
  const auto table = random_bf16(kBytes * kWidth, 1, 8);
  const auto dh = random_bf16(kTokens * kWidth, 1, 9);
  std::vector<u8> slots(kTokens * kContext);
  std::mt19937 generator(10);
  for (u8& slot : slots) slot = static_cast<u8>(generator() % 5);  // bytes meet often
  std::vector<u16> h(dh.size());
  std::vector<float> dtable(table.size(), 1e9F);
  host::run(EmbedArgs{table.data(), slots.data(), h.data(), kTokens, kContext, kWidth});
  host::run(EmbedGradArgs{dh.data(), slots.data(), dtable.data(), kTokens, kContext, kWidth});
  double forward = 0;
  double backward = 0;
  for (size_t i = 0; i < h.size(); ++i) {
    forward += double{decode_bf16(h[i])} * double{decode_bf16(dh[i])};
  }
  for (size_t i = 0; i < table.size(); ++i) {
    backward += double{decode_bf16(table[i])} * double{dtable[i]};
  }
  EXPECT_NEAR(forward, backward, 1e-4 * std::abs(forward));
  // The third token's second slot lies where it should.
  const size_t row = (size_t{1} * kBytes + slots[kTokens + 2]) * (kWidth / kContext);
  EXPECT_EQ(h[2 * kWidth + kWidth / kContext], table[row]);
}

TEST(HostKernels, SamplesAreTheTextBeforeTheirTargets) {
  constexpr i32 kTokens = 4096;
  constexpr i32 kContext = 8;
  // Each byte is the one before and 7 more, so that a sample shows whether it is in order; the text
  // is short, so that its ends must come up.
  std::vector<u8> text(64);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<u8>(i * 7);
  std::vector<u8> slots(kTokens * kContext);
  std::vector<u8> targets(kTokens);
  u32 step = 3;
  const SampleArgs args{
      text.data(), static_cast<u32>(text.size()), 1, &step, slots.data(), targets.data(), kTokens,
      kContext};
  host::run(args);
  std::set<u8> seen;
  for (size_t t = 0; t < kTokens; ++t) {
    seen.insert(targets[t]);
    for (size_t s = 0; s < kContext; ++s) {
      ASSERT_EQ(static_cast<u8>(slots[s * kTokens + t] + 7 * (s + 1)), targets[t]);
    }
  }
  EXPECT_EQ(seen.size(), text.size() - kContext);  // every place that has enough before it
  EXPECT_TRUE(seen.contains(text.back()));
  EXPECT_TRUE(seen.contains(text[kContext]));

  const auto first = targets;
  host::run(args);
  EXPECT_EQ(targets, first);
  ++step;
  host::run(args);
  EXPECT_NE(targets, first);
}

TEST(HostKernels, AdamWMatchesItsFormula) {
  constexpr i64 kCount = 16;
  constexpr i64 kDecayed = 8;
  std::vector<float> w(kCount, 0.5F), m(kCount, 0.1F), v(kCount, 0.2F), grad(kCount), partials(3);
  std::vector<u16> copy(kCount);
  for (size_t i = 0; i < grad.size(); ++i) grad[i] = static_cast<float>(i) - 7.0F;
  double norm = 0;
  for (const float g : grad) norm += double{g} * double{g};
  norm = std::sqrt(norm);
  host::run(SquareSumArgs{grad.data(), partials.data(), kCount, 3});
  const std::vector<StepScalars> schedule = {{}, {0.01F, 2.0F, 4.0F, 0.0F}};
  const u32 step = 1;
  host::run(AdamArgs{w.data(), m.data(), v.data(), grad.data(), copy.data(), kCount, kDecayed,
                     partials.data(), 3, schedule.data(), &step, 2.0F, 0.9F, 0.95F, 1e-8F, 0.1F});
  for (size_t i = 0; i < w.size(); ++i) {
    const double g = double{grad[i]} * 2 / norm;
    const double m1 = 0.9 * 0.1 + 0.1 * g;
    const double v1 = 0.95 * 0.2 + 0.05 * g * g;
    const double decay = i < kDecayed ? 0.1 * 0.5 : 0.0;
    expect_near(0.5 - 0.01 * (m1 * 2 / std::sqrt(v1 * 4) + decay), double{w[i]}, 1e-6, i);
    EXPECT_EQ(copy[i], encode_bf16(w[i]));
  }
}

TEST(HostKernels, ASmallGradientIsNotClipped) {
  std::vector<float> w(4), m(4), v(4), grad(4, 0.5F), partials(1);
  std::vector<u16> copy(4);
  host::run(SquareSumArgs{grad.data(), partials.data(), 4, 1});
  const StepScalars now{0.01F, 1.0F, 1.0F, 0.0F};
  const u32 step = 0;
  host::run(AdamArgs{w.data(), m.data(), v.data(), grad.data(), copy.data(), 4, 4, partials.data(),
                     1, &now, &step, 1.5F, 0.0F, 0.0F, 1e-8F, 0.0F});
  EXPECT_EQ(m[0], 0.5F);
}

// A rank's chunks are those of one device, at their places among all sums.
TEST(HostKernels, SquaresOfPartsAreThoseOfTheWhole) {
  std::vector<float> grad(64);
  for (size_t i = 0; i < grad.size(); ++i) grad[i] = 0.1F * static_cast<float>(i + 1);
  std::vector<float> whole(8), parts(8, -1.0F);
  host::run(SquareSumArgs{grad.data(), whole.data(), 64, 8});
  host::run(SquareSumArgs{grad.data(), parts.data(), 32, 4});
  host::run(SquareSumArgs{grad.data() + 32, parts.data() + 4, 32, 4});
  EXPECT_EQ(parts, whole);
}

TEST(HostKernels, AddAddsInPlace) {
  const std::vector<float> from = {1, 2, 3, 4};
  std::vector<float> to = {10, 20, 30, 40};
  host::run(AddArgs{from.data(), to.data(), 4});
  EXPECT_EQ(to, (std::vector<float>{11, 22, 33, 44}));
}

// Shares of a step take the samples of the whole step, and the gradient of its mean.
TEST(HostKernels, SharesOfAStepAreTheWhole) {
  constexpr i32 kTokens = 32, kContext = 2;
  std::vector<u8> text(1000);
  for (size_t i = 0; i < text.size(); ++i) text[i] = static_cast<u8>(i * 7 + i / 256);
  const u32 step = 3;
  const auto sample = [&](i32 tokens, i32 first) {
    std::vector<u8> slots(static_cast<size_t>(kContext * tokens));
    std::vector<u8> targets(static_cast<size_t>(tokens));
    host::run(SampleArgs{text.data(), 1000, 1, &step, slots.data(), targets.data(), tokens,
                         kContext, first, kTokens});
    return targets;
  };
  std::vector<u8> shares = sample(16, 0);
  const std::vector<u8> second = sample(16, 16);
  shares.insert(shares.end(), second.begin(), second.end());
  EXPECT_EQ(shares, sample(kTokens, 0));

  const std::vector<u16> logits(static_cast<size_t>(16 * kBytes), encode_bf16(0.5F));
  std::vector<u16> share(logits.size()), alone(logits.size());
  std::vector<float> losses(16);
  host::run(LossArgs{logits.data(), shares.data(), share.data(), losses.data(), 16, kTokens});
  host::run(LossArgs{logits.data(), shares.data(), alone.data(), losses.data(), 16});
  for (size_t i = 0; i < share.size(); ++i) {
    ASSERT_EQ(decode_bf16(share[i]) * 2, decode_bf16(alone[i])) << i;
  }
}

TEST(HostKernels, AStepEndsWithItsMeanLoss) {
  const std::vector<float> losses = {1, 2, 3, 6};
  std::vector<float> curve(3, -1.0F);
  u32 step = 1;
  host::run(FinishArgs{losses.data(), curve.data(), &step, 4});
  EXPECT_EQ(curve, (std::vector<float>{-1, 3, -1}));
  EXPECT_EQ(step, 2U);
}

}  // namespace
}  // namespace train
