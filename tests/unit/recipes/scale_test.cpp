#include "recipes/scales/scale.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>

#include "tests/unit/recipes/infinities.hpp"

namespace f8 {
namespace {

constexpr Dtype kFormats[] = {Dtype::kE4m3, Dtype::kE5m2};

bool is_power_of_two(float x) {
  int exponent = 0;
  return std::frexp(x, &exponent) == 0.5F;
}

// Positive finite floats of every size, by their bits.
float random_amax(std::mt19937& random) {
  return std::bit_cast<float>(static_cast<uint32_t>(random()) % 0x7f800000U);
}

TEST(Scale, GoldenValues) {
  EXPECT_EQ(scale_from_amax(448.0F, Dtype::kE4m3, false), 1.0F);
  EXPECT_EQ(scale_from_amax(1.0F, Dtype::kE4m3, false), 448.0F);
  EXPECT_EQ(scale_from_amax(3.0F, Dtype::kE4m3, false), 149.33333F);
  EXPECT_EQ(scale_from_amax(57344.0F, Dtype::kE5m2, false), 1.0F);
  EXPECT_EQ(scale_from_amax(1.0F, Dtype::kE4m3, true), 256.0F);
  EXPECT_EQ(scale_from_amax(448.0F, Dtype::kE4m3, true), 1.0F);
  EXPECT_EQ(scale_from_amax(449.0F, Dtype::kE4m3, true), 0.5F);
  EXPECT_EQ(scale_from_amax(447.0F, Dtype::kE4m3, true), 1.0F);
  EXPECT_EQ(scale_from_amax(1.0F, Dtype::kE5m2, true), 32768.0F);
}

TEST(Scale, TinyAmaxIsClampedInFp64) {
  const auto clamped = static_cast<float>(448.0 / 1e-12);
  EXPECT_EQ(scale_from_amax(0.0F, Dtype::kE4m3, false), clamped);
  EXPECT_EQ(scale_from_amax(1e-20F, Dtype::kE4m3, false), clamped);
  EXPECT_EQ(scale_from_amax(std::numeric_limits<float>::denorm_min(), Dtype::kE4m3, false),
            clamped);
  EXPECT_EQ(scale_from_amax(0.0F, Dtype::kE5m2, false), static_cast<float>(57344.0 / 1e-12));
  // The clamp compares in fp64: the fp32 number nearest to 1e-12 lies below 1e-12 and is clamped.
  EXPECT_LT(static_cast<double>(1e-12F), 1e-12);
  EXPECT_EQ(scale_from_amax(1e-12F, Dtype::kE4m3, false), clamped);
  const float above = std::nextafter(1e-12F, 1.0F);
  EXPECT_EQ(scale_from_amax(above, Dtype::kE4m3, false),
            static_cast<float>(448.0 / static_cast<double>(above)));
  EXPECT_EQ(cast_to_fp8(0.0F, clamped, Dtype::kE4m3), 0);
}

TEST(Scale, Pow2IsTheLargestPowerOfTwoNotAbove) {
  std::mt19937 random(2);
  for (const Dtype format : kFormats) {
    for (int i = 0; i < 100'000; ++i) {
      const float amax = random_amax(random);
      const float exact = scale_from_amax(amax, format, false);
      const float pow2 = scale_from_amax(amax, format, true);
      ASSERT_TRUE(is_power_of_two(pow2)) << amax;
      ASSERT_LE(pow2, exact) << amax;
      ASSERT_GT(pow2 * 2, exact) << amax;
      ASSERT_EQ(inverse_scale(pow2) * pow2, 1.0F) << amax;
    }
  }
}

TEST(Scale, AmaxItselfLandsOnTheLargestCode) {
  std::mt19937 random(3);
  for (const Dtype format : kFormats) {
    for (int i = 0; i < 100'000; ++i) {
      const float amax = random_amax(random);
      if (amax < 1e-12F) continue;
      const float q =
          decode_fp8(cast_to_fp8(amax, scale_from_amax(amax, format, false), format), format);
      ASSERT_EQ(q, max_finite(format)) << amax;
      const float q2 =
          decode_fp8(cast_to_fp8(-amax, scale_from_amax(amax, format, true), format), format);
      ASSERT_LE(q2, -max_finite(format) / 2) << amax;
    }
  }
}

TEST(Scale, LargestAmaxStillHasANormalScale) {
  for (const Dtype format : kFormats) {
    for (const bool pow2 : {false, true}) {
      const float scale = scale_from_amax(std::numeric_limits<float>::max(), format, pow2);
      EXPECT_TRUE(std::isnormal(scale));
      EXPECT_TRUE(std::isfinite(inverse_scale(scale)));
    }
  }
}

TEST(Scale, NonFiniteAmaxPoisonsWhatIsCastWithIt) {
  for (const Dtype format : kFormats) {
    for (const bool pow2 : {false, true}) {
      const float of_nan = scale_from_amax(kNan, format, pow2);
      EXPECT_TRUE(std::isnan(of_nan));
      EXPECT_TRUE(std::isnan(inverse_scale(of_nan)));
      EXPECT_EQ(cast_to_fp8(1.0F, of_nan, format), 0x7f);

      const float of_inf = scale_from_amax(kInf, format, pow2);
      EXPECT_EQ(of_inf, 0.0F);
      EXPECT_EQ(inverse_scale(of_inf), kInf);
      EXPECT_EQ(cast_to_fp8(kInf, of_inf, format), 0x7f);
      EXPECT_EQ(cast_to_fp8(1.0F, of_inf, format), 0x00);
      EXPECT_TRUE(std::isnan(decode_fp8(0, format) * inverse_scale(of_inf)));
    }
  }
}

TEST(Scale, CastSaturatesAndKeepsTheSign) {
  EXPECT_EQ(cast_to_fp8(2.0F, 448.0F, Dtype::kE4m3), 0x7e);
  EXPECT_EQ(cast_to_fp8(-2.0F, 448.0F, Dtype::kE4m3), 0xfe);
  EXPECT_EQ(cast_to_fp8(3e38F, 448.0F, Dtype::kE4m3), 0x7e);  // the product overflows fp32
  EXPECT_EQ(cast_to_fp8(-0.0F, 448.0F, Dtype::kE4m3), 0x80);
}

}  // namespace
}  // namespace f8
