// The casts of groups of equal size, as the weights of experts, against the reference of each alone, and those
// of a rank's part of them, which is given the maxima of the whole.
#include <bit>
#include <cmath>

#include "tests/gpu/experts/group_casts.hpp"

namespace f8::runtime::gpu {
namespace {

class EqualGroupsTest : public GroupCasts {};
INSTANTIATE_TEST_SUITE_P(Specs, EqualGroupsTest,
                         ::testing::Values("cast/bf16.e4m3/tensor/q+qt/group",
                                           "cast/bf16.e4m3/axis/q+qt/pow2/group",
                                           "cast/bf16.e4m3/axis+tensor/q+qt/pow2/group",
                                           "cast/f32.e4m3/axis/qt/pow2/group",
                                           "cast/f16.e4m3/axis/q/group",
                                           "cast/bf16.e5m2/tensor/qt/group",
                                           "cast/bf16.e4m3/block128x128/q+qt/pow2/group",
                                           "cast/bf16.e4m3/axis/q+qt/pow2/group/pair",
                                           "cast/bf16.e4m3/axis/q/pow2/group/pair",
                                           "cast/f32.e4m3/tensor/q+qt/group/pair",
                                           "cast/bf16.e4m3/block128x128/q+qt/pow2/group/pair"),
                         GroupCasts::spec_name);

// A pair has the first half of each weight's rows in one tensor and the others in a second one.
TEST_P(EqualGroupsTest, AreTheCastsOfEachWeight) {
  const codegen::CastSpec spec = spec_of(GetParam());
  constexpr int64_t kExperts = 5, kN = 144, kK = 272;
  const Matrix w = reference::rounded_to(
      reference::random_matrix(kExperts * kN, kK, 8, reference::Distribution::kOutliers), spec.in);
  const bool pair = spec.source == kernels::RowSource::kPair;
  const std::vector<uint8_t> bytes = reference::to_bytes(w, spec.in);
  const auto half = [&](int64_t which) {
    const auto size = static_cast<std::ptrdiff_t>(bytes.size()) / kExperts / 2;
    std::vector<uint8_t> out;
    for (int64_t e = 0; e < kExperts; ++e) {
      const auto from = bytes.begin() + (2 * e + which) * size;
      out.insert(out.end(), from, from + size);
    }
    return out;
  };
  const DeviceBuffer device_w(context(), pair ? half(0) : bytes);
  const DeviceBuffer second_w(context(), half(1));
  for (const int64_t rows : {kSmallGroups, kLargeGroups}) {
    const auto plan = GroupCastPlan::create(context_, spec, rows, kK);
    F8_ASSERT_OK(plan);
    const Copies to(context(), *plan, kExperts * kN, kK, kExperts, kExperts * kK, kN);
    const kernels::GroupsOf groups{.words = nullptr, .layout = {}, .count = kExperts, .rows = kN};
    GroupCastCall call = call_of(groups, kExperts * kN, to);
    call.x = device_w.as();
    if (pair) {
      call.source.up = second_w.as();
      call.source.ld_up = kK;
      call.source.half_rows = kN / 2;
    }
    F8_ASSERT_OK(plan->run(call, nullptr));
    const auto scale = to.scale.download<float>();
    const auto check = [&](bool transposed, const std::vector<uint8_t>& bits,
                           const std::vector<float>& inverses, codegen::ScaleMode mode) {
      for (int64_t e = 0; e < kExperts; ++e) {
        Matrix of = rows_of(w, e * kN, kN);
        if (transposed) of = transpose(of);
        const auto expected = reference::cast(of, over_of(mode), spec.out, spec.pow2);
        const int64_t pitch = row_pitch(of.cols);
        for (int64_t r = 0; r < of.rows; ++r) {
          const auto from = bits.begin() + (e * of.rows + r) * pitch;
          ASSERT_TRUE(std::equal(from, from + of.cols, expected.bits.begin() + r * of.cols))
              << "expert " << e << ", row " << r << " of " << (transposed ? "qt" : "q");
          if (mode == codegen::ScaleMode::kBlock128x128) {
            const int64_t blocks = ceil_div(of.cols, 128);
            for (int64_t b = 0; b < blocks; ++b) {
              ASSERT_EQ(inverses[static_cast<size_t>(e * kernels::scales_2d(of.rows, of.cols) +
                                                     r / 128 * kernels::padded_scales(blocks) + b)],
                        expected.inv_scales[static_cast<size_t>(r / 128 * blocks + b)]);
            }
          }
          if (mode == codegen::ScaleMode::kAxis) {
            ASSERT_EQ(inverses[static_cast<size_t>(e * of.rows + r)],
                      expected.inv_scales[static_cast<size_t>(r)]);
          }
        }
        if (mode == codegen::ScaleMode::kTensor) {
          ASSERT_EQ(scale[static_cast<size_t>(e * kernels::kScaleStride + kernels::kInverse)],
                    expected.inv_scales[0]);
        }
      }
    };
    if (spec.q) {
      check(false, to.q.download<uint8_t>(), to.inv_row.download<float>(), spec.scale_q);
    }
    if (spec.qt) {
      check(true, to.qt.download<uint8_t>(), to.inv_col.download<float>(), spec.scale_qt);
    }
    EXPECT_TRUE(to.guards_are_whole());
  }
}

class RaisedMaximaTest : public GroupCasts {
 protected:
  static constexpr int64_t kGroups = 3, kRows = 150, kCols = 272, kPart = 144;
  static Matrix last_columns(const Matrix& x) {
    Matrix out{x.rows, kPart, {}};
    for (int64_t r = 0; r < x.rows; ++r) {
      const auto end = x.values.begin() + (r + 1) * x.cols;
      out.values.insert(out.values.end(), end - kPart, end);
    }
    return out;
  }
  static std::vector<uint32_t> maxima_of(const Matrix& x, int64_t rows) {
    std::vector<uint32_t> words(static_cast<size_t>(x.rows / rows));
    for (int64_t i = 0; i < x.rows * x.cols; ++i) {
      uint32_t& word = words[static_cast<size_t>(i / x.cols / rows)];
      word = std::max(word, std::bit_cast<uint32_t>(std::abs(x.values[static_cast<size_t>(i)])));
    }
    return words;
  }
};
INSTANTIATE_TEST_SUITE_P(Specs, RaisedMaximaTest,
                         ::testing::Values("cast/bf16.e4m3/axis/q/group",
                                           "cast/bf16.e4m3/axis/q+qt/pow2/group",
                                           "cast/bf16.e4m3/tensor/q+qt/group",
                                           "cast/f32.e4m3/axis/q+qt/pow2/group",
                                           "cast/f32.e5m2/tensor/q/hold/group"),
                         GroupCasts::spec_name);

// A rank has these columns of a matrix that ranks share, with the maxima of the whole.
TEST_P(RaisedMaximaTest, GiveThePartOfTheWholesCast) {
  const codegen::CastSpec spec = spec_of(GetParam());
  const Matrix whole = reference::rounded_to(
      reference::random_matrix(kGroups * kRows, kCols, 8, reference::Distribution::kOutliers),
      spec.in);
  const Matrix part = last_columns(whole);
  const DeviceBuffer of_groups(context(), maxima_of(whole, kRows));
  const DeviceBuffer of_rows(context(), maxima_of(whole, 1));
  const kernels::GroupsOf groups{.words = nullptr, .layout = {}, .count = kGroups, .rows = kRows};
  const DeviceBuffer all(context(), reference::to_bytes(whole, spec.in));
  const DeviceBuffer some(context(), reference::to_bytes(part, spec.in));
  for (const int64_t rows : {kSmallGroups, kLargeGroups}) {
    const auto one = GroupCastPlan::create(context_, spec, rows, kCols);
    const auto own = GroupCastPlan::create(context_, spec, rows, kPart, Maxima::kRaised);
    F8_ASSERT_OK(one);
    F8_ASSERT_OK(own);
    const Copies expected(context(), *one, whole.rows, kCols, kGroups, kGroups * kCols, kRows);
    const Copies found(context(), *own, part.rows, kPart, kGroups, kGroups * kPart, kRows);
    GroupCastCall call = call_of(groups, whole.rows, expected);
    call.x = all.as();
    F8_ASSERT_OK(one->run(call, nullptr));
    call = call_of(groups, part.rows, found);
    call.x = some.as();
    call.group_maxima = of_groups.as<uint32_t>();
    call.row_maxima = of_rows.as<uint32_t>();
    F8_ASSERT_OK(own->run(call, nullptr));
    const auto same = [](const DeviceBuffer& of_whole, int64_t at, const DeviceBuffer& of_part,
                         int64_t first, int64_t count) {
      const auto a = of_whole.download<uint8_t>(), b = of_part.download<uint8_t>();
      return std::equal(b.begin() + first, b.begin() + first + count, a.begin() + at);
    };
    for (int64_t r = 0; spec.q && r < whole.rows; r += 7) {
      const int64_t at = r * row_pitch(kCols) + kCols - kPart;
      ASSERT_TRUE(same(expected.q, at, found.q, r * row_pitch(kPart), kPart)) << "row " << r;
    }
    for (int64_t c = 0; spec.qt && c < kGroups * kPart; c += 7) {
      const int64_t line = c / kPart * kCols + kCols - kPart + c % kPart;
      ASSERT_TRUE(same(expected.qt, line * row_pitch(kRows), found.qt, c * row_pitch(kRows), kRows))
          << "column " << c;
    }
    if (spec.q && spec.scale_q == codegen::ScaleMode::kAxis) {
      const auto bytes = whole.rows * static_cast<int64_t>(sizeof(float));
      EXPECT_TRUE(same(expected.inv_row, 0, found.inv_row, 0, bytes));
    }
    EXPECT_TRUE(found.guards_are_whole());
  }
}

}  // namespace
}  // namespace f8::runtime::gpu
