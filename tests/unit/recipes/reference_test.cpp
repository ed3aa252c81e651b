// The reference against plain loops, and the recipes' quality against the unquantised linear.
#include "recipes/reference/reference.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <utility>

#include "recipes/scales/scale.hpp"
#include "tests/unit/recipes/infinities.hpp"

namespace f8::reference {
namespace {

constexpr AmaxOver kAll[] = {AmaxOver::kTensor, AmaxOver::kRow, AmaxOver::kColumn,
                             AmaxOver::kBlock1x128, AmaxOver::kBlock128x128};

Recipe recipe(std::string_view name) {
  return *find_recipe(name);
}

// The place of element (r, c)'s scale, straight from the header's words.
size_t scale_index(int64_t r, int64_t c, int64_t cols, AmaxOver over) {
  const int64_t blocks = (cols + 127) / 128;
  int64_t index = 0;
  if (over == AmaxOver::kRow) index = r;
  if (over == AmaxOver::kColumn) index = c;
  if (over == AmaxOver::kBlock1x128) index = r * blocks + c / 128;
  if (over == AmaxOver::kBlock128x128) index = r / 128 * blocks + c / 128;
  return static_cast<size_t>(index);
}

TEST(Amax, LayoutsOfAnOddMatrix) {
  const Matrix x = random_matrix(130, 257, 1, Distribution::kOutliers);
  EXPECT_EQ(amax(x, AmaxOver::kTensor).size(), 1U);
  EXPECT_EQ(amax(x, AmaxOver::kRow).size(), 130U);
  EXPECT_EQ(amax(x, AmaxOver::kColumn).size(), 257U);
  EXPECT_EQ(amax(x, AmaxOver::kBlock1x128).size(), 130U * 3);
  EXPECT_EQ(amax(x, AmaxOver::kBlock128x128).size(), 2U * 3);
  for (const AmaxOver over : kAll) {
    std::vector<float> expected(amax(x, over).size(), 0.0F);
    for (int64_t r = 0; r < x.rows; ++r) {
      for (int64_t c = 0; c < x.cols; ++c) {
        float& most = expected[scale_index(r, c, x.cols, over)];
        most = std::max(most, std::abs(x.at(r, c)));
      }
    }
    EXPECT_EQ(amax(x, over), expected) << static_cast<int>(over);
  }
}

TEST(Amax, WholeBlocksHaveNoEmptyOneBehindThem) {
  const Matrix x = random_matrix(128, 256, 1);
  EXPECT_EQ(amax(x, AmaxOver::kBlock1x128).size(), 128U * 2);
  EXPECT_EQ(amax(x, AmaxOver::kBlock128x128).size(), 2U);
}

TEST(Amax, NanPropagatesToItsOwnScaleOnly) {
  Matrix x = random_matrix(3, 200, 2);
  x.values[1 * 200 + 150] = -kNan;
  x.values[2 * 200 + 10] = -kInf;
  EXPECT_TRUE(std::isnan(amax(x, AmaxOver::kTensor)[0]));
  const std::vector<float> rows = amax(x, AmaxOver::kRow);
  EXPECT_TRUE(std::isfinite(rows[0]));
  EXPECT_TRUE(std::isnan(rows[1]));
  EXPECT_EQ(rows[2], kInf);
  const std::vector<float> blocks = amax(x, AmaxOver::kBlock1x128);
  EXPECT_TRUE(std::isfinite(blocks[2]));
  EXPECT_TRUE(std::isnan(blocks[3]));
  EXPECT_FALSE(std::signbit(blocks[3]));
}

TEST(Cast, EveryElementWithItsScale) {
  const Matrix x = random_matrix(130, 257, 3, Distribution::kOutliers);
  for (const AmaxOver over : kAll) {
    for (const Dtype dtype : {Dtype::kE4m3, Dtype::kE5m2}) {
      for (const bool pow2 : {false, true}) {
        const Fp8Matrix q = cast(x, over, dtype, pow2);
        const std::vector<float> maxima = amax(x, over);
        ASSERT_EQ(q.scales.size(), maxima.size());
        for (size_t i = 0; i < maxima.size(); ++i) {
          ASSERT_EQ(q.scales[i], scale_from_amax(maxima[i], dtype, pow2));
          ASSERT_EQ(q.inv_scales[i], 1.0F / q.scales[i]);
        }
        ASSERT_EQ(q.bits.size(), x.values.size());
        for (int64_t r = 0; r < x.rows; ++r) {
          for (int64_t c = 0; c < x.cols; ++c) {
            const float scaled = x.at(r, c) * q.scales[scale_index(r, c, x.cols, over)];
            ASSERT_EQ(q.bits[static_cast<size_t>(r * x.cols + c)], encode_fp8(scaled, dtype));
          }
        }
      }
    }
  }
}

TEST(Cast, TransposedSharesValuesForATensorAndReducesTheOtherWayForRows) {
  const Matrix x = random_matrix(33, 70, 4);
  const Fp8Matrix q = cast(x, AmaxOver::kTensor, Dtype::kE4m3, false);
  const Fp8Matrix qt = cast_transposed(x, AmaxOver::kTensor, Dtype::kE4m3, false);
  EXPECT_EQ(qt.rows, 70);
  EXPECT_EQ(qt.cols, 33);
  EXPECT_EQ(qt.scales, q.scales);
  for (size_t r = 0; r < 33; ++r) {
    for (size_t c = 0; c < 70; ++c) ASSERT_EQ(qt.bits[c * 33 + r], q.bits[r * 70 + c]);
  }
  // Rows of the result are columns of x.
  const Fp8Matrix by_row = cast_transposed(x, AmaxOver::kRow, Dtype::kE4m3, true);
  const Fp8Matrix by_column = cast(x, AmaxOver::kColumn, Dtype::kE4m3, true);
  EXPECT_EQ(by_row.scales, by_column.scales);
  for (size_t r = 0; r < 33; ++r) {
    for (size_t c = 0; c < 70; ++c) ASSERT_EQ(by_row.bits[c * 33 + r], by_column.bits[r * 70 + c]);
  }
}

TEST(Cast, AnAllZeroRowIsZeroAndFinite) {
  Matrix x = random_matrix(2, 16, 5);
  std::fill_n(x.values.begin(), 16, 0.0F);
  const Fp8Matrix q = cast(x, AmaxOver::kRow, Dtype::kE4m3, true);
  for (size_t c = 0; c < 16; ++c) EXPECT_EQ(q.bits[c], 0);
  for (const double d : matmul(q, q)) EXPECT_TRUE(std::isfinite(d));
}

TEST(Matmul, AgreesWithPlainLoopsForEveryScaleLayout) {
  // Odd everywhere, more than one panel of columns, more than one block.
  const Matrix a = random_matrix(6, 131, 6);
  const Matrix b = random_matrix(259, 131, 7);
  for (const AmaxOver over : kAll) {
    const Fp8Matrix qa = cast(a, over, Dtype::kE5m2, false);
    const Fp8Matrix qb = cast(b, over, Dtype::kE4m3, true);
    const std::vector<double> d = matmul(qa, qb);
    ASSERT_EQ(d.size(), 6U * 259);
    for (int64_t m = 0; m < 6; ++m) {
      for (int64_t n = 0; n < 259; ++n) {
        double sum = 0;
        double magnitude = 0;
        for (int64_t k = 0; k < 131; ++k) {
          const auto value = [k, over](const Fp8Matrix& q, int64_t row) {
            return static_cast<double>(
                       decode_fp8(q.bits[static_cast<size_t>(row * 131 + k)], q.dtype)) *
                   static_cast<double>(q.inv_scales[scale_index(row, k, 131, over)]);
          };
          sum += value(qa, m) * value(qb, n);
          magnitude += std::abs(value(qa, m) * value(qb, n));
        }
        ASSERT_NEAR(d[static_cast<size_t>(m * 259 + n)], sum, 1e-13 * magnitude);
      }
    }
  }
}

TEST(Matmul, HighPrecisionIsExactOnIntegers) {
  const Matrix a = {2, 3, {1, 2, 3, 4, 5, 6}};
  const Matrix b = {2, 3, {1, 0, -1, 2, 2, 2}};
  EXPECT_EQ(matmul(a, b), (std::vector<double>{-2, 12, -2, 30}));
}

TEST(Matmul, ANanPoisonsItsRowAlone) {
  Matrix a = random_matrix(3, 32, 8);
  const Matrix b = random_matrix(4, 32, 9);
  a.values[32 + 5] = kNan;
  const std::vector<double> d = matmul(cast(a, AmaxOver::kRow, Dtype::kE4m3, true),
                                       cast(b, AmaxOver::kRow, Dtype::kE4m3, true));
  for (size_t i = 0; i < 12; ++i) EXPECT_EQ(std::isnan(d[i]), i / 4 == 1) << i;
  a.values[32 + 5] = kInf;
  const std::vector<double> e = matmul(cast(a, AmaxOver::kTensor, Dtype::kE4m3, false),
                                       cast(b, AmaxOver::kTensor, Dtype::kE4m3, false));
  for (const double value : e) EXPECT_TRUE(std::isnan(value));
}

struct Operands {
  Matrix x, w, dy;
};

Operands operands(int64_t m, int64_t n, int64_t k, Distribution distribution) {
  return {random_matrix(m, k, 10, distribution), random_matrix(n, k, 11, distribution),
          random_matrix(m, n, 12, distribution)};
}

TEST(Linear, RowwiseScalesEachOperandOverTheContraction) {
  const auto [x, w, dy] = operands(20, 48, 32, Distribution::kNormal);
  const Recipe rowwise = recipe("rowwise");
  const auto row = [](const Matrix& a) { return cast(a, AmaxOver::kRow, Dtype::kE4m3, true); };
  const auto turned = [](const Matrix& a) {
    return cast_transposed(a, AmaxOver::kRow, Dtype::kE4m3, true);
  };
  const auto result = linear(rowwise, x, w, dy);
  ASSERT_TRUE(result) << result.error().message;
  EXPECT_EQ(result->y, matmul(row(x), row(w)));
  EXPECT_EQ(result->dx, matmul(row(dy), turned(w)));
  EXPECT_EQ(result->dw, matmul(turned(dy), turned(x)));
}

TEST(Linear, TheOtherRecipesFollowTheirTable) {
  const auto [x, w, dy] = operands(20, 144, 272, Distribution::kNormal);
  const auto q = [](const Matrix& a, AmaxOver over, bool pow2, Dtype t = Dtype::kE4m3) {
    return cast(a, over, t, pow2);
  };
  const auto qt = [](const Matrix& a, AmaxOver over, bool pow2, Dtype t = Dtype::kE4m3) {
    return cast_transposed(a, over, t, pow2);
  };
  constexpr auto kTensor = AmaxOver::kTensor;
  const auto tensorwise = linear(recipe("tensorwise"), x, w, dy);
  ASSERT_TRUE(tensorwise);
  EXPECT_EQ(tensorwise->y, matmul(q(x, kTensor, false), q(w, kTensor, false)));
  EXPECT_EQ(tensorwise->dx, matmul(q(dy, kTensor, false, Dtype::kE5m2), qt(w, kTensor, false)));
  EXPECT_EQ(tensorwise->dw, matmul(qt(dy, kTensor, false, Dtype::kE5m2), qt(x, kTensor, false)));

  const auto mixed = linear(recipe("rowwise_with_gw_hp"), x, w, dy);
  ASSERT_TRUE(mixed);
  EXPECT_EQ(mixed->y, matmul(q(x, AmaxOver::kRow, true), q(w, AmaxOver::kRow, true)));
  EXPECT_EQ(mixed->dx, matmul(q(dy, AmaxOver::kRow, true), qt(w, kTensor, true)));
  EXPECT_EQ(mixed->dw, matmul(transpose(dy), transpose(x)));

  constexpr auto kRow128 = AmaxOver::kBlock1x128;
  constexpr auto kSquare = AmaxOver::kBlock128x128;
  const auto blockwise = linear(recipe("blockwise"), x, w, dy);
  ASSERT_TRUE(blockwise);
  EXPECT_EQ(blockwise->y, matmul(q(x, kRow128, true), q(w, kSquare, true)));
  EXPECT_EQ(blockwise->dx, matmul(q(dy, kRow128, true), qt(w, kSquare, true)));
  EXPECT_EQ(blockwise->dw, matmul(qt(dy, kRow128, true), qt(x, kRow128, true)));
}

TEST(Linear, DelayedUsesTheGivenAmaxElseItsOwn) {
  const auto [x, w, dy] = operands(20, 48, 32, Distribution::kNormal);
  const Recipe delayed = recipe("delayed");
  const auto own = linear(delayed, x, w, dy);
  const auto dynamic = linear(recipe("tensorwise"), x, w, dy);
  ASSERT_TRUE(own && dynamic);
  EXPECT_EQ(own->y, dynamic->y);
  EXPECT_EQ(own->dw, dynamic->dw);

  const float previous = 0.5F;  // too small: what is larger saturates
  const auto given = linear(delayed, x, w, dy, {.x = previous, .w = {}, .dy = {}});
  ASSERT_TRUE(given);
  const Fp8Matrix qx =
      cast_with_amax(x, AmaxOver::kTensor, Dtype::kE4m3, false, std::span(&previous, 1));
  EXPECT_EQ(given->y, matmul(qx, cast(w, AmaxOver::kTensor, Dtype::kE4m3, false)));
  EXPECT_EQ(given->dx, own->dx);
  EXPECT_NE(given->dw, own->dw);
  EXPECT_TRUE(std::ranges::any_of(qx.bits, [](uint8_t b) { return b == 0x7e; }));
  // Only an operand whose setting is delayed takes it.
  EXPECT_EQ(linear(recipe("tensorwise"), x, w, dy, {.x = previous, .w = {}, .dy = {}})->y,
            dynamic->y);
}

TEST(Linear, QualityOfEveryRecipe) {
  const auto [x, w, dy] = operands(96, 160, 256, Distribution::kNormal);
  const std::vector<double> y = matmul(x, w);
  const std::vector<double> dx = matmul(dy, transpose(w));
  const std::vector<double> dw = matmul(transpose(dy), transpose(x));
  for (const Recipe& r : builtin_recipes()) {
    const auto result = linear(r, x, w, dy);
    ASSERT_TRUE(result) << r.name;
    EXPECT_GE(sqnr_db(y, result->y), 25.0) << r.name;
    EXPECT_GE(sqnr_db(dx, result->dx), 20.0) << r.name;
    EXPECT_GE(sqnr_db(dw, result->dw), 20.0) << r.name;
    if (r.name != "rowwise_with_gw_hp") {
      EXPECT_LE(sqnr_db(dw, result->dw), 40.0) << r.name << " did not cast";
    }
  }
}

TEST(Linear, AxisAndBlocksSurviveATokenThatFlushesTheTensor) {
  auto [x, w, dy] = operands(16, 32, 256, Distribution::kNormal);
  for (int64_t k = 0; k < 256; ++k) x.values[static_cast<size_t>(k)] *= 0x1p20F;
  const std::vector<double> y = matmul(x, w);
  // Without the huge token itself.
  const auto quality = [&](std::string_view name) {
    const auto got = linear_gemm(recipe(name), Gemm::kOutput, x, w, dy);
    return sqnr_db(std::span(y).subspan(32), std::span(*got).subspan(32));
  };
  EXPECT_LT(quality("tensorwise"), 5.0);
  EXPECT_GT(quality("rowwise"), 25.0);
  EXPECT_GT(quality("blockwise"), 25.0);
}

TEST(Linear, MatricesThatDoNotFitAreRefused) {
  const Recipe rowwise = recipe("rowwise");
  const auto [x, w, dy] = operands(4, 48, 32, Distribution::kUniform);
  const auto refused = [&](const Matrix& a, const Matrix& b, const Matrix& c, const char* part) {
    const auto result = linear(rowwise, a, b, c);
    ASSERT_FALSE(result);
    EXPECT_EQ(result.error().code, ErrorCode::kInvalidArgument);
    EXPECT_NE(result.error().message.find(part), std::string::npos) << result.error().message;
  };
  refused(x, random_matrix(48, 16, 1), dy, "matrix w is [48][16]");
  refused(x, w, random_matrix(4, 32, 1), "matrix dy is [4][32]");
  refused({4, 32, {}}, w, dy, "matrix x is [4][32] with 0 values");
  EXPECT_TRUE(linear_gemm(rowwise, Gemm::kOutput, x, w, Matrix{}));
  Recipe bad = rowwise;
  bad.gemms[2].a.dtype = Dtype::kF16;
  EXPECT_FALSE(linear_gemm(bad, Gemm::kOutput, x, w, dy));
}

TEST(Errors, RelativeErrorAndSqnr) {
  const std::vector<double> reference = {3, 4};
  EXPECT_EQ(relative_error(reference, std::vector<double>{3, 4}), 0.0);
  EXPECT_EQ(sqnr_db(reference, std::vector<double>{3, 4}), std::numeric_limits<double>::infinity());
  EXPECT_DOUBLE_EQ(relative_error(reference, std::vector<double>{3, 4.5}), 0.1);
  EXPECT_NEAR(sqnr_db(reference, std::vector<double>{3, 4.5}), 20.0, 1e-12);
  // An error that is NaN passes no bound.
  EXPECT_TRUE(std::isnan(relative_error(reference, std::vector<double>{3})));
  EXPECT_TRUE(std::isnan(sqnr_db(reference, std::vector<double>{3, kNan})));
  EXPECT_EQ(relative_error(std::vector<double>{0}, std::vector<double>{1}),
            std::numeric_limits<double>::infinity());
  EXPECT_EQ(relative_error(std::vector<double>{0}, std::vector<double>{0}), 0.0);
}

TEST(RandomMatrix, IsSeededBf16OfItsDistribution) {
  for (const auto distribution :
       {Distribution::kUniform, Distribution::kNormal, Distribution::kOutliers}) {
    const Matrix x = random_matrix(64, 1024, 5, distribution);
    EXPECT_EQ(x.values, random_matrix(64, 1024, 5, distribution).values);
    EXPECT_NE(x.values, random_matrix(64, 1024, 6, distribution).values);
    EXPECT_EQ(from_bf16_bits(64, 1024, to_bf16_bits(x)).values, x.values);
    double sum = 0;
    double squares = 0;
    float most = 0;
    for (const float v : x.values) {
      sum += v;
      squares += static_cast<double>(v) * v;
      most = std::max(most, std::abs(v));
    }
    const auto count = static_cast<double>(x.values.size());
    const double mean = sum / count;
    const double variance = squares / count - mean * mean;
    if (distribution == Distribution::kUniform) {
      EXPECT_NEAR(mean, 0.0, 0.02);
      EXPECT_NEAR(variance, 1.0 / 3.0, 0.01);
      EXPECT_LE(most, 1.0F);
    } else if (distribution == Distribution::kNormal) {
      EXPECT_NEAR(mean, 0.0, 0.02);
      EXPECT_NEAR(variance, 1.0, 0.03);
      EXPECT_LE(most, 6.0F);
    } else {
      EXPECT_NEAR(variance, 1.0 + 64.0 * 64.0 / 256.0, 6.0);
      EXPECT_GE(most, 64.0F);
    }
  }
}

// The order is the contract: large values cancel where they meet, and only there.
TEST(ReferenceColumnSums, AddUpInTheDocumentedOrder) {
  Matrix x{1500, 1, std::vector<float>(1500)};
  const auto sum = [&](std::initializer_list<std::pair<int64_t, float>> values) {
    std::ranges::fill(x.values, 0.0F);
    for (const auto& [row, value] : values) x.values[static_cast<size_t>(row)] = value;
    return column_sums(x)[0];
  };
  constexpr float kBig = 0x1p30F;
  EXPECT_EQ(sum({{0, kBig}, {1, 1}, {2, -kBig}}), 0.0F) << "one group of 8 rows, in order";
  EXPECT_EQ(sum({{0, kBig}, {1, -kBig}, {2, 1}}), 1.0F);
  EXPECT_EQ(sum({{0, kBig}, {8, 1}, {1, -kBig}}), 1.0F) << "groups are added whole";
  EXPECT_EQ(sum({{0, kBig}, {8, 1}, {16, -kBig}}), 0.0F) << "and in order";
  EXPECT_EQ(sum({{0, kBig}, {128, 1}, {1024, -kBig}}), 1.0F) << "every 8th block of 128";
  EXPECT_EQ(sum({{0, kBig}, {128, 1}, {256, -kBig}}), 0.0F) << "then the eight of them";
}

TEST(ReferenceColumnSums, AreTheSums) {
  const Matrix x = random_matrix(1171, 24, 3);
  const auto sums = column_sums(x);
  ASSERT_EQ(sums.size(), 24U);
  for (int64_t c = 0; c < 24; ++c) {
    double expected = 0;
    for (int64_t r = 0; r < x.rows; ++r) expected += static_cast<double>(x.at(r, c));
    EXPECT_NEAR(static_cast<double>(sums[static_cast<size_t>(c)]), expected, 1e-3);
  }
  EXPECT_EQ(column_sums(Matrix{0, 2, {}}), (std::vector<float>{0, 0}));
}

TEST(ReferenceCounts, BeginWhereRoundingLeavesTheFormat) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  // Scale 1: what is not finite is held.
  const auto counts = [&](std::vector<float> values, Dtype format) {
    values.push_back(kInfinity);
    const Matrix x{1, static_cast<int64_t>(values.size()), values};
    return count_cast(x, cast(x, AmaxOver::kTensor, format, false, NonFinite::kSaturate));
  };
  EXPECT_EQ(counts({448, 464, -464, 0, 0x1.8p-10F}, Dtype::kE4m3), (CastCounts{0, 0, 1}));
  EXPECT_EQ(counts({465, -1e30F, 0x1p-10F, -0x1p-30F}, Dtype::kE4m3), (CastCounts{2, 2, 1}));
  EXPECT_EQ(counts({57344, 61439, 0x1.8p-17F}, Dtype::kE5m2), (CastCounts{0, 0, 1}));
  EXPECT_EQ(counts({61440, -70000, 0x1p-17F}, Dtype::kE5m2), (CastCounts{2, 1, 1}));
  EXPECT_EQ(counts({std::numeric_limits<float>::quiet_NaN(), -kInfinity}, Dtype::kE4m3),
            (CastCounts{0, 0, 3}));
}

// A held copy is the value's own rounding; one that propagates is NaN or 0.
// Shards that begin and end inside blocks, one of them empty, have the bits of the whole's rows.
TEST(ReferenceCast, ShardsThatCutBlocksHaveTheBitsOfTheWhole) {
  Matrix x = random_matrix(300, 200, 21);
  x.values[127 * 200 + 3] = std::numeric_limits<float>::quiet_NaN();
  x.values[255 * 200 + 150] = -std::numeric_limits<float>::infinity();
  const Fp8Matrix whole = cast(x, AmaxOver::kBlock128x128, Dtype::kE4m3, true);
  const auto rows_of = [&](int64_t first, int64_t rows) {
    const auto at = x.values.begin() + first * x.cols;
    return Matrix{rows, x.cols, {at, at + rows * x.cols}};
  };
  const std::vector<std::pair<int64_t, int64_t>> shards = {
      {0, 100}, {100, 29}, {129, 0}, {129, 171}};
  std::vector<uint32_t> most(3 * 2);
  for (const auto& [first, rows] : shards) {
    const std::vector<float> own = shard_amax(rows_of(first, rows), first, x.rows);
    ASSERT_EQ(own.size(), most.size());
    for (size_t i = 0; i < most.size(); ++i) {
      most[i] = std::max(most[i], std::bit_cast<uint32_t>(own[i]));
    }
    const bool touches_last = first + rows > 256;
    EXPECT_EQ(own[4] == 0, !touches_last);
  }
  std::vector<float> amax;
  for (const uint32_t bits : most) amax.push_back(std::bit_cast<float>(bits));
  std::vector<uint8_t> all;
  for (const auto& [first, rows] : shards) {
    const Matrix shard = rows_of(first, rows);
    const Fp8Matrix q = cast_shard(shard, first, Dtype::kE4m3, true, amax);
    all.insert(all.end(), q.bits.begin(), q.bits.end());
    ASSERT_EQ(q.inv_scales.size(), whole.inv_scales.size());
    for (size_t i = 0; i < q.inv_scales.size(); ++i) {
      EXPECT_EQ(std::bit_cast<uint32_t>(q.inv_scales[i]),
                std::bit_cast<uint32_t>(whole.inv_scales[i]));
    }
    EXPECT_EQ(count_cast(shard, q).non_finite, (first <= 127 && first + rows > 127 ? 1U : 0U) +
                                                   (first <= 255 && first + rows > 255 ? 1U : 0U));
  }
  EXPECT_EQ(all, whole.bits);
}

TEST(ReferenceCast, HoldsOrPropagatesWhatIsNotFinite) {
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const Matrix x{2, 2, {2, kInfinity, 3, -1}};
  const auto held = cast(x, AmaxOver::kTensor, Dtype::kE4m3, false, NonFinite::kSaturate);
  EXPECT_EQ(held.scales[0], 1.0F);
  EXPECT_EQ(decode_fp8(held.bits[0], Dtype::kE4m3), 2.0F);
  EXPECT_EQ(decode_fp8(held.bits[1], Dtype::kE4m3), 448.0F);
  const auto poisoned = cast(x, AmaxOver::kTensor, Dtype::kE4m3, false);
  EXPECT_EQ(poisoned.scales[0], 0.0F);
  const auto rows = cast(x, AmaxOver::kRow, Dtype::kE4m3, true, NonFinite::kSaturate);
  EXPECT_EQ(rows.scales[0], 1.0F);
  EXPECT_EQ(rows.scales[1], 128.0F) << "the other row has its own";
}

}  // namespace
}  // namespace f8::reference
