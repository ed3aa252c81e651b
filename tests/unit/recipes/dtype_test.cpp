// Conversions against a second, slow definition that shares no code with the first: a code's value
// by ldexp, encoding by searching the nearest value.
#include "recipes/dtype.hpp"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

#include "tests/unit/recipes/infinities.hpp"

namespace f8 {
namespace {

struct Layout {
  Dtype dtype;
  int exponent_bits;
  int mantissa_bits;
  int bias;
};
constexpr Layout kLayouts[] = {{Dtype::kE4m3, 4, 3, 7}, {Dtype::kE5m2, 5, 2, 15}};

double value_of(int magnitude_code, int mantissa_bits, int bias) {
  const int exponent = magnitude_code >> mantissa_bits;
  const int mantissa = magnitude_code & ((1 << mantissa_bits) - 1);
  return exponent == 0
             ? std::ldexp(mantissa, 1 - bias - mantissa_bits)
             : std::ldexp(mantissa + (1 << mantissa_bits), exponent - bias - mantissa_bits);
}

// All finite magnitudes in order: code i has value [i].
std::vector<double> finite_values(const Layout& f) {
  const int count = f.dtype == Dtype::kE4m3 ? 0x7f : 0x7c;
  std::vector<double> values;
  for (int code = 0; code < count; ++code) {
    values.push_back(value_of(code, f.mantissa_bits, f.bias));
  }
  return values;
}

int search_nearest(double magnitude, const std::vector<double>& values) {
  if (magnitude > values.back()) return static_cast<int>(values.size()) - 1;
  int best = 0;
  for (int code = 1; code < static_cast<int>(values.size()); ++code) {
    const double distance = std::abs(values[static_cast<size_t>(code)] - magnitude);
    const double least = std::abs(values[static_cast<size_t>(best)] - magnitude);
    if (distance < least || (distance == least && code % 2 == 0)) best = code;
  }
  return best;
}

uint8_t slow_encode(float x, const std::vector<double>& values) {
  if (std::isnan(x)) return 0x7f;
  const int sign = std::signbit(x) ? 0x80 : 0;
  const int code = std::isinf(x) ? static_cast<int>(values.size()) - 1
                                 : search_nearest(std::abs(static_cast<double>(x)), values);
  return static_cast<uint8_t>(sign | code);
}

TEST(Fp8, DecodesEveryCode) {
  for (const Layout& f : kLayouts) {
    const std::vector<double> finite = finite_values(f);
    for (int code = 0; code < 256; ++code) {
      const auto magnitude = static_cast<size_t>(code & 0x7f);
      const float decoded = decode_fp8(static_cast<uint8_t>(code), f.dtype);
      SCOPED_TRACE(::testing::Message() << to_string(f.dtype) << " code " << code);
      if (magnitude < finite.size()) {
        EXPECT_EQ(std::abs(decoded), finite[magnitude]);
      } else if (f.dtype == Dtype::kE5m2 && magnitude == 0x7c) {
        EXPECT_TRUE(std::isinf(decoded));
      } else {
        EXPECT_TRUE(std::isnan(decoded));
      }
      EXPECT_EQ(std::signbit(decoded), code >= 128);
    }
    EXPECT_EQ(finite.back(), max_finite(f.dtype));
  }
}

TEST(Fp8, EncodesEveryBf16AsTheNearestCode) {
  for (const Layout& f : kLayouts) {
    const std::vector<double> finite = finite_values(f);
    for (uint32_t bits = 0; bits < 0x10000; ++bits) {
      const float x = decode_bf16(static_cast<uint16_t>(bits));
      ASSERT_EQ(encode_fp8(x, f.dtype), slow_encode(x, finite))
          << to_string(f.dtype) << " of " << x << ", bf16 bits " << bits;
    }
  }
}

TEST(Fp8, RoundsTiesToEvenAndTheirNeighboursApart) {
  for (const Layout& f : kLayouts) {
    const std::vector<double> finite = finite_values(f);
    for (size_t code = 0; code + 1 < finite.size(); ++code) {
      const auto tie = static_cast<float>((finite[code] + finite[code + 1]) / 2);
      const auto below = static_cast<uint8_t>(code);
      const auto above = static_cast<uint8_t>(code + 1);
      EXPECT_EQ(encode_fp8(tie, f.dtype), code % 2 == 0 ? below : above) << tie;
      EXPECT_EQ(encode_fp8(std::nextafter(tie, 0.0F), f.dtype), below) << tie;
      EXPECT_EQ(encode_fp8(std::nextafter(tie, kInf), f.dtype), above) << tie;
      EXPECT_EQ(encode_fp8(-tie, f.dtype), 0x80 | (code % 2 == 0 ? below : above)) << tie;
    }
  }
}

TEST(Fp8, EncodesRandomFloatsAsTheNearestCode) {
  std::mt19937 random(1);
  for (const Layout& f : kLayouts) {
    const std::vector<double> finite = finite_values(f);
    for (int i = 0; i < 50'000; ++i) {
      // Any bits, and exponents where the formats live.
      const auto bits = static_cast<uint32_t>(random());
      const float x = i % 2 == 0 ? std::bit_cast<float>(bits)
                                 : std::ldexp(static_cast<float>(bits) * 0x1p-32F, i / 2 % 40 - 20);
      ASSERT_EQ(encode_fp8(x, f.dtype), slow_encode(x, finite)) << x;
    }
  }
}

TEST(Fp8, GoldenCodes) {
  const Dtype e4m3 = Dtype::kE4m3;
  EXPECT_EQ(encode_fp8(0.0F, e4m3), 0x00);
  EXPECT_EQ(encode_fp8(-0.0F, e4m3), 0x80);
  EXPECT_EQ(encode_fp8(1.0F, e4m3), 0x38);
  EXPECT_EQ(encode_fp8(-1.5F, e4m3), 0xbc);
  EXPECT_EQ(encode_fp8(448.0F, e4m3), 0x7e);
  EXPECT_EQ(encode_fp8(464.0F, e4m3), 0x7e);  // the tie towards what would be 480
  EXPECT_EQ(encode_fp8(465.0F, e4m3), 0x7e);
  EXPECT_EQ(encode_fp8(-465.0F, e4m3), 0xfe);
  EXPECT_EQ(encode_fp8(3e38F, e4m3), 0x7e);
  EXPECT_EQ(encode_fp8(kInf, e4m3), 0x7e);
  EXPECT_EQ(encode_fp8(-kInf, e4m3), 0xfe);
  EXPECT_EQ(encode_fp8(kNan, e4m3), 0x7f);
  EXPECT_EQ(encode_fp8(-kNan, e4m3), 0x7f);
  EXPECT_EQ(encode_fp8(0x1p-9F, e4m3), 0x01);    // smallest subnormal
  EXPECT_EQ(encode_fp8(0x1p-10F, e4m3), 0x00);   // half of it: tie to even
  EXPECT_EQ(encode_fp8(0x1.8p-9F, e4m3), 0x02);  // one and a half: tie to even
  EXPECT_EQ(encode_fp8(0x1.cp-7F, e4m3), 0x07);  // largest subnormal
  EXPECT_EQ(encode_fp8(0x1.ep-7F, e4m3), 0x08);  // rounds into the normals
  EXPECT_EQ(encode_fp8(0x1p-149F, e4m3), 0x00);  // an fp32 subnormal
  const Dtype e5m2 = Dtype::kE5m2;
  EXPECT_EQ(encode_fp8(1.0F, e5m2), 0x3c);
  EXPECT_EQ(encode_fp8(57344.0F, e5m2), 0x7b);
  EXPECT_EQ(encode_fp8(61440.0F, e5m2), 0x7b);  // the tie towards what would be 65536
  EXPECT_EQ(encode_fp8(61441.0F, e5m2), 0x7b);
  EXPECT_EQ(encode_fp8(kInf, e5m2), 0x7b);
  EXPECT_EQ(encode_fp8(-kInf, e5m2), 0xfb);
  EXPECT_EQ(encode_fp8(kNan, e5m2), 0x7f);
  EXPECT_EQ(encode_fp8(0x1p-16F, e5m2), 0x01);
  EXPECT_EQ(encode_fp8(0x1p-17F, e5m2), 0x00);
  EXPECT_EQ(encode_fp8(0x1.8p-16F, e5m2), 0x02);
}

TEST(Bf16, RoundsToNearestEven) {
  for (uint32_t high = 0; high < 0x10000; ++high) {
    const float exact = decode_bf16(static_cast<uint16_t>(high));
    if (std::isnan(exact)) {
      EXPECT_EQ(encode_bf16(exact), 0x7fff);
      continue;
    }
    ASSERT_EQ(encode_bf16(exact), high);
    if (std::isinf(exact)) continue;
    const auto with_low = [high](uint32_t low) {
      return encode_bf16(std::bit_cast<float>(high << 16 | low));
    };
    ASSERT_EQ(with_low(0x0001), high);
    ASSERT_EQ(with_low(0x7fff), high);
    ASSERT_EQ(with_low(0x8000), high % 2 == 0 ? high : high + 1);
    ASSERT_EQ(with_low(0x8001), high + 1);
    ASSERT_EQ(with_low(0xffff), high + 1);
  }
  EXPECT_EQ(encode_bf16(std::numeric_limits<float>::max()), 0x7f80);  // overflow is infinite
  EXPECT_EQ(encode_bf16(kNan), 0x7fff);
  EXPECT_EQ(encode_bf16(-kNan), 0x7fff);
  EXPECT_EQ(encode_bf16(1.0F), 0x3f80);
}

TEST(F16, DecodesEveryCodeAndEncodesItBack) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const auto code = static_cast<uint16_t>(bits);
    const int magnitude = code & 0x7fff;
    const float decoded = decode_f16(code);
    ASSERT_EQ(std::signbit(decoded), bits >= 0x8000) << bits;
    if (magnitude < 0x7c00) {
      ASSERT_EQ(std::abs(decoded), value_of(magnitude, 10, 15)) << bits;
      ASSERT_EQ(encode_f16(decoded), code);
    } else if (magnitude == 0x7c00) {
      ASSERT_TRUE(std::isinf(decoded));
      ASSERT_EQ(encode_f16(decoded), code);
    } else {
      ASSERT_TRUE(std::isnan(decoded)) << bits;
      ASSERT_EQ(encode_f16(decoded), 0x7fff);
    }
  }
}

TEST(F16, RoundsTiesToEvenAndOverflowsToInfinity) {
  for (int code = 0; code < 0x7bff; ++code) {
    const auto tie = static_cast<float>((value_of(code, 10, 15) + value_of(code + 1, 10, 15)) / 2);
    ASSERT_EQ(encode_f16(tie), code + code % 2) << tie;
    ASSERT_EQ(encode_f16(std::nextafter(tie, 0.0F)), code) << tie;
    ASSERT_EQ(encode_f16(std::nextafter(tie, kInf)), code + 1) << tie;
  }
  EXPECT_EQ(encode_f16(65519.996F), 0x7bff);
  EXPECT_EQ(encode_f16(65520.0F), 0x7c00);
  EXPECT_EQ(encode_f16(-1e30F), 0xfc00);
  EXPECT_EQ(encode_f16(0x1p-25F), 0x0000);
  EXPECT_EQ(encode_f16(0x1.000002p-25F), 0x0001);
}

TEST(Dtype, NamesRoundTripAndOthersAreRefused) {
  for (const Dtype t : {Dtype::kE4m3, Dtype::kE5m2, Dtype::kBf16, Dtype::kF16, Dtype::kF32}) {
    const auto parsed = parse_dtype(to_string(t));
    ASSERT_TRUE(parsed);
    EXPECT_EQ(*parsed, t);
  }
  for (const char* text : {"", "E4M3", "e4m3 ", "fp8", "float", "bf1"}) {
    const auto parsed = parse_dtype(text);
    ASSERT_FALSE(parsed) << text;
    EXPECT_EQ(parsed.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(parsed.error().message.find("one of e4m3, e5m2, bf16, f16, f32"), std::string::npos);
  }
  EXPECT_EQ(size_bytes(Dtype::kE5m2), 1U);
  EXPECT_EQ(size_bytes(Dtype::kF16), 2U);
  EXPECT_EQ(size_bytes(Dtype::kF32), 4U);
}

}  // namespace
}  // namespace f8
