// Activations and their slopes, as kernels and the emulated device compute them: close to fp64.
#include "runtime/emulation/activations.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

namespace f8::runtime {
namespace {

using kernels::Activation;
constexpr Activation kActivations[] = {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh,
                                       Activation::kRelu2};

// An activation and its slope in fp64, and the largest term of which the slope is a sum: next to its zero the
// terms cancel.
struct Exact {
  double value, slope, term;
};
Exact exact(Activation activation, float of) {
  const double x = static_cast<double>(of);
  const auto sigmoid_of = [x](double z, double grown) {
    const double sigmoid = 1 / (1 + std::exp(-z));
    const double rest = grown / (1 + std::exp(z));
    return Exact{x * sigmoid, sigmoid * (1 + rest), sigmoid * (1 + std::abs(rest))};
  };
  switch (activation) {
    case Activation::kSilu:
      return sigmoid_of(x, x);
    case Activation::kGelu: {
      const double normal = std::erfc(-x / std::sqrt(2.0)) / 2;
      const double rest = x * std::exp(-x * x / 2) / std::sqrt(2 * M_PI);
      return {x * normal, normal + rest, normal + std::abs(rest)};
    }
    case Activation::kGeluTanh: {
      const double line = 2 * std::sqrt(2 / M_PI), cube = line * 0.044715;
      return sigmoid_of(x * (line + cube * x * x), x * (line + 3 * cube * x * x));
    }
    case Activation::kRelu2:
      break;
  }
  return x > 0 ? Exact{x * x, 2 * x, 2 * x} : Exact{0, 0, 1};
}

// The inputs are those where exp(-|z|) is an ordinary number; the rounding of z alone is |z| ulp of it.
TEST(Activations, AreCloseToFp64) {
  for (const Activation activation : kActivations) {
    const bool of_line = activation == Activation::kSilu;
    const int least = of_line ? -87'000 : -10'000;
    for (const auto& [type, ulp] : {std::pair{Dtype::kF32, 0x1p-23}, {Dtype::kBf16, 0x1p-19}}) {
      double worst = 0, worst_slope = 0;
      for (int i = least; i <= 110'000; ++i) {
        const float x = static_cast<float>(i) * 1.00009e-3F;
        if (x == 0) continue;
        const kernels::Activated got = emulation::activated(activation, x, type);
        const Exact want = exact(activation, x);
        const double rounding = activation == Activation::kGeluTanh && type == Dtype::kF32
                                    ? 1 + std::abs(x * x * x) / 14
                                    : 1;
        const double off = std::abs(static_cast<double>(got.value) - want.value);
        if (want.value != 0) worst = std::max(worst, off / std::abs(want.value) / ulp / rounding);
        worst_slope = std::max(worst_slope, std::abs(static_cast<double>(got.slope) - want.slope) /
                                                want.term / ulp / rounding);
      }
      EXPECT_LT(worst, type == Dtype::kF32 || of_line ? 4 : 8)
          << static_cast<int>(activation) << to_string(type);
      EXPECT_LT(worst_slope, 8) << static_cast<int>(activation) << to_string(type);
    }
  }
}

TEST(Activations, KeepWhatIsNotFinite) {
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const Dtype type : {Dtype::kF32, Dtype::kF16}) {
    for (const Activation activation : kActivations) {
      SCOPED_TRACE(static_cast<int>(activation));
      const auto product = [&](float gate, float up) {
        return emulation::glu(activation, gate, up, type);
      };
      EXPECT_TRUE(std::isnan(product(NAN, 1)));
      EXPECT_TRUE(std::isnan(product(1, NAN)));
      if (activation == Activation::kRelu2) {
        EXPECT_EQ(product(-kInf, 1), 0);
      } else {
        EXPECT_TRUE(std::isnan(product(-kInf, 1)));  // as -inf / (1 + inf)
        EXPECT_FLOAT_EQ(product(1e30F, 2), 2e30F);
      }
      EXPECT_EQ(product(kInf, 2), kInf);
      EXPECT_EQ(product(3, -kInf), -kInf);
      EXPECT_EQ(product(-1e30F, 1), 0);
      EXPECT_EQ(product(0, 5), 0);
      const auto slope = [&](float x) {
        return emulation::activation_backward(activation, x, 1, type);
      };
      EXPECT_TRUE(std::isnan(slope(NAN)));
      EXPECT_EQ(slope(-1e30F), 0);
      EXPECT_FLOAT_EQ(slope(1e30F), activation == Activation::kRelu2 ? 2e30F : 1);
    }
  }
}

}  // namespace
}  // namespace f8::runtime
